"""The only place that asks which backend runs.

A backend is a module with the functions of `Backend`. Each takes arguments that the op's door has
checked already. Choice: CUDA or Metal when MLX's default device is such a GPU, else the native
CPU kernels of `qrun._ext`, else MLX's own products in float32 (right, and slow on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import mlx.core as mx

from qrun.errors import UsageError

if TYPE_CHECKING:
    from qrun.ops.matrix import QuantizedMatrix

Norm = tuple[
    mx.array, float
]  # RMS-norm weight (K,) and epsilon, applied to x in front of a product


Arrays = list[mx.array]
# (inputs, state) -> (outputs, state): state is what ops write in place, in the backends that do so.
Step = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]


class Backend(Protocol):
    """What a backend provides. See the op files for shapes and meaning."""

    NAME: str
    # Products of more rows than this are qmm's.
    QMV_ROWS: int
    # Rows of a prompt fed at a time: enough to be bound by arithmetic, few enough to stay small.
    PREFILL_ROWS: int
    # Whether gather_qmm is a kernel of its own, or a slower right way.
    GATHERS: bool

    # A step whose arrays always have the same shapes, traced once and replayed. What it returns is
    # under way; a result may be no more than something with `item()` that the next step takes.
    traced: Callable[[Step], Step]
    # The same for a step that runs a single time.
    once: Callable[[Step], Step]
    # Zeros of these shapes for ops to write in place: a cache.
    blank: Callable[[Sequence[tuple[int, ...]], mx.Dtype], Arrays]
    # In the kernels' own layout, as so many matrices below each other; None if there is none.
    pack: Callable[[QuantizedMatrix, int], mx.array | None]
    qmv: Callable[..., mx.array]
    qmm: Callable[..., mx.array]
    gemm: Callable[..., mx.array]
    gather_qmm: Callable[..., mx.array]
    route: Callable[[mx.array, int, bool], tuple[mx.array, mx.array, mx.array, mx.array]]
    combine: Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]
    sdpa: Callable[..., mx.array]
    rope: Callable[..., tuple[mx.array, mx.array, mx.array]]
    # rope and sdpa of one new token as one kernel, which may answer None; None: there is none.
    attend: Callable[..., tuple[mx.array, mx.array, mx.array] | None] | None
    rms_norm: Callable[[mx.array, mx.array, float, mx.array | None, bool], mx.array]
    rms_norm_parts: Callable[[mx.array, Sequence[mx.array], float], mx.array] | None
    embedding: Callable[..., mx.array]
    swiglu: Callable[[mx.array], mx.array]
    softcap: Callable[[mx.array, float], mx.array]
    argmax: Callable[[mx.array, int], mx.array]
    sample: Callable[..., mx.array]


def _nobody(line: str) -> None: ...


_show = _nobody


def show_by(shower: Callable[[str], None]) -> None:
    """Who is told what a backend does that takes long, such as compiling; "" when it is over."""
    global _show
    _show = shower


def show(line: str) -> None:
    """Tell them."""
    _show(line)


def enqueued(step: Step) -> Step:
    """The step, with all that it returns under way."""

    def run(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        outputs, state = step(inputs, state)
        mx.async_eval(outputs, state)
        return outputs, state

    return run


def zeros(shapes: Sequence[tuple[int, ...]], dtype: mx.Dtype) -> Arrays:
    """`blank` where memory is memory."""
    return [mx.zeros(shape, dtype) for shape in shapes]


def backend() -> Backend:
    """The backend for MLX's current default device."""
    return _backend(mx.default_device().type == mx.cpu)


@cache
def _backend(on_cpu: bool) -> Backend:
    if on_cpu:
        return _load("_cpu" if native_problem() is None else "_mlx")
    return _load("_metal_backend" if mx.metal.is_available() else "_cuda")


def tune(step: Callable[[int], object], *, again: bool, show: Callable[[str], None]) -> list[str]:
    """Have the backend time its kernels for the products that step(rows) asks for -> notes.

    Where there is nothing to choose from, none. What is known from another day is not timed again,
    unless `again`. show: a line of progress, "" when done.
    """
    run = getattr(backend(), "tune", None)
    return [] if run is None else run(step, again=again, show=show)


def can_tune() -> bool:
    """Whether the backend has kernels to choose from."""
    return hasattr(backend(), "tune")


def _load(name: str) -> Backend:
    return cast(Backend, import_module(f"qrun.ops.{name}"))


@cache
def native_problem() -> str | None:
    """Why the native CPU kernels cannot run, in one line; None if they can.

    Raises UsageError for a QRUN_ISA that this machine has not.
    """
    if not find_spec("qrun._ext"):
        return (
            f"no native CPU kernels lie in {Path(__file__).parent.parent} (a C++ compiler makes "
            "them while qrun is installed)"
        )
    try:
        ext: Any = import_module("qrun._ext")
    except ImportError as error:
        return f"qrun's native CPU kernels do not load ({str(error).splitlines()[0]})"
    installed = cast(Any, mx).__version__
    if ext.mlx_version != installed:
        return (
            f"qrun's native CPU kernels were built for mlx {ext.mlx_version}, "
            f"but mlx {installed} is installed"
        )
    try:
        ext.isa()
    except ValueError as error:
        raise UsageError(str(error)) from None
    return None

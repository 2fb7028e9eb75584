"""Which kernel multiplies: ours in one of a few geometries, or MLX's own. Timed once per device.

Nobody has promised that a kernel reasoned at a desk is fast on a chip it has not met. So the first
load of a model times, per shape, our candidates against MLX's op, within a budget, and keeps the
winner in a file per device, version and shape. A candidate that does not compile, or whose result
is not MLX's, is out, and said so. Without timings the geometry table decides.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from qrun.ops import _metal
from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_call import header
from qrun.ops._metal_product import Packed

Product = Callable[..., mx.array]  # (x, m, *, norm, bias, residual, activation, scale) -> y

ROUNDS = 5  # of all candidates in turn, so that a throttling chip slows all of them alike
BATCH = 4  # calls evaluated together: one alone is mostly the time to reach the GPU
BUDGET = 2.0  # seconds for all shapes of a model


def mlx_product(
    x: mx.array,
    m: Packed,
    *,
    norm: tuple[mx.array, float] | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
    activation: str | None = None,
    scale: float = 1,
) -> mx.array:
    """The same product of MLX's own ops: what ours have to beat."""
    dtype = x.dtype
    if norm is not None:
        x = mx.fast.rms_norm(x, norm[0], norm[1])
    y = mx.quantized_matmul(
        x, m.w, m.scales, m.biases, True, group_size=m.group_size, bits=m.bits, mode=m.mode
    )
    if scale != 1:
        y = y * scale
    if bias is not None:
        y = y + bias
    if activation is not None:
        gate, up = y[:, 0::2], y[:, 1::2]
        y = up * (gate * mx.sigmoid(gate) if activation == "swiglu" else _gelu(gate))
    if residual is not None:
        y = y + residual
    return y.astype(dtype)


def _gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def candidates(rows: int, m: Packed, x_bytes: int) -> dict[str, Product]:
    """What may multiply `rows` rows of x with m, by name; the table's choice comes first."""
    chip = geometry.here()
    found: dict[str, Product] = {}

    def add_qmv(shape: geometry.Rows | geometry.Wide) -> None:
        numbers = " ".join(f"{name} {value}" for name, value in shape._asdict().items())
        name = f"{'fragments' if isinstance(shape, geometry.Wide) else 'lanes'}: {numbers}"
        found[name] = partial(_metal.qmv, shape=shape)

    def add_qmm(shape: geometry.Tile) -> None:
        name = "tiles: " + " ".join(f"{name} {value}" for name, value in shape._asdict().items())
        if shape.threadgroup_bytes(x_bytes) <= 32768:
            found[name] = partial(_metal.qmm, tile=shape)

    if rows <= geometry.MAX_ROWS:
        best = geometry.qmv(chip, rows, m.n, m.k, m.bits)
        add_qmv(best)
        if isinstance(best, geometry.Wide):
            add_qmv(best._replace(tn=4 if best.tm == 1 else 1))
        else:
            add_qmv(best._replace(rows=2 if best.rows == 4 else 4))
        more = best.split * 2
        add_qmv(best._replace(simdgroups=max(2, more), split=more))
        if best.split > 1:
            add_qmv(best._replace(simdgroups=2, split=1))
    if rows > 8:
        add_qmm(geometry.tile(chip, rows, x_bytes))
    if rows > 32:
        for tile in geometry.LADDER.values():
            add_qmm(tile)
    if chip.matrix_units and rows > geometry.MAX_ROWS:
        return {"mlx": mlx_product} | found
    return found | {"mlx": mlx_product}


def cache_file() -> Path:
    """In the user's cache folder, as the platform has it."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "qrun" / "metal.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qrun" / "metal.json"


def owner() -> str:
    """Whose timings: this device, this MLX, these kernels."""
    texts = "".join(
        header(file) for file in ("qmv/qmv.metal", "qmv/qmv_wide.metal", "qmm/qmm.metal")
    )
    name = mx.device_info()["device_name"]
    return f"{name}, mlx {version('mlx')}, kernels {zlib.crc32(texts.encode()):08x}"


@dataclass
class Choices:
    """The winners for one device and version, kept in a file shared by all of them."""

    path: Path
    owner: str  # device and versions
    best: dict[str, str] = field(default_factory=dict[str, str])  # shape -> candidate

    @staticmethod
    def load(path: Path, owner: str) -> Choices:
        return Choices(path, owner, dict(_read(path).get(owner, {})))

    def save(self) -> None:
        """Written beside and renamed, so that a reader never meets half a file."""
        everything = _read(self.path) | {self.owner: self.best}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        draft.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
        draft.replace(self.path)


def _read(path: Path) -> dict[str, dict[str, str]]:
    """An absent or damaged file is an empty one: everything in it can be timed again."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
        return {}


def key(rows: int, m: Packed, dtype: mx.Dtype, norm: bool, behind: str) -> str:
    """A shape as the file names it. Rows beyond 32 are alike: prefill runs in chunks."""
    rows = rows if rows <= 32 else 64
    name = f"{rows}x{m.n}x{m.k} {m.mode} {m.bits} bits group {m.group_size} {dtype}"
    return name + (" norm" if norm else "") + (f" {behind}" if behind else "")


def fastest(
    jobs: Mapping[str, Callable[[], mx.array]],
    reference: str,
    until: float,
    clock: Callable[[], float],
    evaluate: Callable[..., None],
    say: Callable[[str], None],
) -> str | None:
    """The job whose best round is shortest; None if `until` comes before a full round."""
    sound: dict[str, Callable[[], mx.array]] = {}
    expected = jobs[reference]()
    evaluate(expected)
    for name, job in jobs.items():
        if clock() > until:
            return None
        try:
            y = job()  # the first call compiles
            evaluate(y)
        except (RuntimeError, ValueError) as error:
            say(f"{name} does not run here: {str(error).splitlines()[0]}")
            continue
        if _close(y, expected):
            sound[name] = job
        else:
            say(f"{name} does not agree with {reference} here: please report this")
    best = dict.fromkeys(sound, float("inf"))
    for _ in range(ROUNDS):
        if clock() > until:
            break
        for name, job in sound.items():
            start = clock()
            evaluate([job() for _ in range(BATCH)])
            best[name] = min(best[name], clock() - start)
    winner = min(best, key=lambda name: best[name])
    return winner if best[winner] < float("inf") else None


def _close(y: mx.array, expected: mx.array) -> bool:
    """Within what rounding at other places explains; a wrong index gives an error of about 1."""
    y, expected = y.astype(mx.float32), expected.astype(mx.float32)
    error = mx.sqrt(mx.sum(mx.square(y - expected)))
    return bool((error <= 0.05 * mx.sqrt(mx.sum(mx.square(expected))) + 1e-6).item())


@dataclass(frozen=True)
class Shape:
    """One product of a model: what multiplies what, and what is fused to it."""

    rows: int
    m: Packed
    dtype: mx.Dtype
    norm: bool = False
    bias: bool = False
    residual: bool = False
    activation: str | None = None

    @property
    def key(self) -> str:
        parts = ("bias" * self.bias, self.activation or "", "residual" * self.residual)
        return key(self.rows, self.m, self.dtype, self.norm, " ".join(filter(None, parts)))

    def jobs(self) -> dict[str, Callable[[], mx.array]]:
        """Every candidate, on arrays of this shape."""
        n, m = self.m.n, self.m
        columns = n if self.activation is None else n // 2
        x = mx.random.normal((self.rows, m.k)).astype(self.dtype)
        weight = mx.ones((m.k,), self.dtype)
        kwargs: dict[str, object] = {"activation": self.activation}
        kwargs["norm"] = (weight, 1e-5) if self.norm else None
        kwargs["bias"] = mx.zeros((n,), self.dtype) if self.bias else None
        kwargs["residual"] = mx.zeros((self.rows, columns), self.dtype) if self.residual else None

        def job(product: Product) -> Callable[[], mx.array]:
            return lambda: product(x, m, **kwargs)

        named = candidates(self.rows, m, self.dtype.size)
        return {name: job(product) for name, product in named.items()}


def tune(
    shapes: Iterable[Shape],
    choices: Choices,
    *,
    again: bool = False,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
    evaluate: Callable[..., None] = mx.eval,  # pyright: ignore[reportUnknownMemberType]
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> None:
    """Times what `choices` does not know yet (again: everything) until the budget is spent."""
    open_shapes = {shape.key: shape for shape in shapes if again or shape.key not in choices.best}
    until = clock() + budget
    for number, (name, shape) in enumerate(open_shapes.items(), 1):
        winner = fastest(shape.jobs(), "mlx", until, clock, evaluate, say)
        if winner is None:
            left = len(open_shapes) - number + 1
            say(f"tuning: {budget:g} s are over, {left} shapes go by the table until the next load")
            break
        choices.best[name] = winner
        say(f"tuning {number}/{len(open_shapes)}: {name}: {winner}")
    if open_shapes:
        try:
            choices.save()
        except OSError as error:  # a read-only home: this run has its choices all the same
            say(f"tuning is not kept: {error}")


def chosen(shape: Shape, choices: Choices | None) -> Product:
    """The product to use: the file's winner, else the table's (the first candidate)."""
    named = candidates(shape.rows, shape.m, shape.dtype.size)
    default = next(iter(named))
    name = default if choices is None else choices.best.get(shape.key, default)
    return named.get(name, named[default])

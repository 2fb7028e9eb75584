"""Which kernel multiplies: ours in one of a few geometries, or MLX's own. Timed once per device.

Nobody has promised that a kernel reasoned at a desk is fast on a chip it has not met. So the first
load of a model times, per product of the model, our candidates against MLX's op, within a budget,
and keeps the seconds in a file per device, version and shape (`_metal_timings`). A candidate that
does not compile, or whose result is not MLX's, is out, and said so.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from qrun.ops._metal_candidates import MLX, Product, Shape
from qrun.ops._metal_product import Behind
from qrun.ops._metal_timings import Seconds, Timings

ROUNDS = 5  # of all candidates in turn, so that a throttling chip slows all of them alike
# Calls evaluated together: one alone is mostly the time to reach the GPU. Each takes another
# layer's matrix, as far as there are any: decode never finds its weights in a cache.
FEW_ROWS, BATCH_FEW, BATCH_MANY = 32, 8, 2
BUDGET = 1.5  # seconds for all products of a model; the last compilation may reach past it


@dataclass(frozen=True)
class Job:
    """A candidate on one product's arrays."""

    once: Callable[[], mx.array]
    batch: Callable[[], mx.array]  # what is timed


def tune(
    wanted: Mapping[str, Sequence[Shape]],
    known: Timings,
    *,
    again: bool = False,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
    evaluate: Callable[..., None] = mx.eval,  # pyright: ignore[reportUnknownMemberType]
    traced: Callable[[Any], Any] = mx.compile,
    show: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Times what is not known yet (again: everything) until the budget is spent; returns notes.

    First, for every product, the default against MLX's own: what we run must not be slower. Then
    the other geometries against the better of the two. What the budget leaves, the next load times;
    who asks for it again waits for all of it.
    """
    if again:
        budget = float("inf")
        for key in wanted:
            known.seconds.pop(key, None)
    todo = _unknown(wanted, known)
    if not todo:
        return []
    start = clock()
    left = len(todo)
    for number, (key, names) in enumerate(todo, 1):
        show(f"timing kernels on this device, once: {number} of {len(todo)}")
        products = wanted[key][0].candidates()
        # The best so far runs along: only what ran at the same time can be compared.
        met = [n for n in products if n in names or n == known.fastest(key)]
        found = jobs(wanted[key], {n: products[n] for n in {MLX, *met}}, traced)
        expected = found[MLX].once()
        evaluate(expected)
        fair = clock() + (start + budget - clock()) / left
        until = start + budget
        seconds = measure({n: found[n] for n in met}, expected, fair, until, clock, evaluate)
        if not seconds:
            break
        known.seconds[key] = known.seconds.get(key, {}) | seconds
        left -= 1
    show("")
    notes = [f"kernels: {len(wanted)} products timed for {clock() - start:.1f} s"]
    if left:
        notes[0] += f", {left} of {len(todo)} timings left to the next load"
    try:
        known.save()
    except OSError as error:  # a read-only home: this process has its timings all the same
        notes.append(f"the timings of kernels are not kept: {error}")
    return notes


def _unknown(
    wanted: Mapping[str, Sequence[Shape]], known: Timings
) -> list[tuple[str, tuple[str, ...]]]:
    """(key, candidates to time): decode in front, what takes longest in front."""

    def weight(key: str) -> tuple[bool, int]:
        shape = wanted[key][0]
        return shape.rows > FEW_ROWS, -len(wanted[key]) * shape.m.n * shape.m.k

    first: list[tuple[str, tuple[str, ...]]] = []
    second: list[tuple[str, tuple[str, ...]]] = []
    for key in sorted(wanted, key=weight):
        names = [n for n in wanted[key][0].candidates() if n not in known.seconds.get(key, {})]
        ours = next((n for n in wanted[key][0].candidates() if n != MLX), MLX)
        front = tuple(name for name in names if name in (ours, MLX))
        rest = tuple(name for name in names if name not in front)
        first += [(key, front)] if front else []
        second += [(key, rest)] if rest else []
    return first + second


def jobs(
    shapes: Sequence[Shape],
    products: Mapping[str, Product],
    traced: Callable[[Any], Any],
    count: int | None = None,
) -> dict[str, Job]:
    """Those products on the arrays of `shapes`, which are alike: the occurrences in a model.

    count: of calls in a batch.
    """
    shape = shapes[0]
    few = shape.rows <= FEW_ROWS
    count = count or (BATCH_FEW if few else BATCH_MANY)
    matrices = [shapes[i % len(shapes)].m for i in range(count)]
    x = mx.random.normal((shape.rows, shape.m.k), key=mx.random.key(0)).astype(shape.dtype)
    columns = Behind(activation=shape.activation).columns(shape.m.n)
    fused: dict[str, Any] = {
        "norm": shape.norm,
        "bias": shape.bias,
        "residual": mx.zeros((shape.rows, columns), shape.dtype) if shape.residual else None,
        "activation": shape.activation,
        "scale": shape.scale,
    }

    def job(product: Product) -> Job:
        def chain(x: mx.array) -> mx.array:
            for m in matrices:
                # The next waits for this one, as in a model: side by side short ones look quick.
                x = x + 0 * product(x, m, **fused)[:1, :1]
            return x

        run = traced(chain) if few else chain  # as generation does it
        return Job(lambda: product(x, shape.m, **fused), lambda: run(x))

    return {name: job(product) for name, product in products.items()}


def measure(
    met: Mapping[str, Job],
    expected: mx.array,
    fair: float,
    until: float,
    clock: Callable[[], float],
    evaluate: Callable[..., None],
) -> Seconds:
    """Seconds of each job's best round, None for those that are out; {} if `until` comes first.

    Two rounds are timed at least (the first one may trace), ROUNDS at most, until `fair`.
    """
    seconds: Seconds = {}
    for name, job in met.items():
        if clock() > until:
            return {}
        try:
            y = job.once()  # the first call compiles
            evaluate(y)
        except (RuntimeError, ValueError) as error:
            warnings.warn(f"{name} does not run here: {str(error).splitlines()[0]}", stacklevel=2)
            seconds[name] = None
            continue
        if not _close(y, expected):
            text = f"{name} does not agree with MLX's product here: please report this"
            warnings.warn(text, stacklevel=2)
            seconds[name] = None
    sound = [name for name in met if name not in seconds]
    for number in range(ROUNDS):
        if number > 1 and clock() > fair:
            break
        for name in sound:
            start = clock()
            evaluate(met[name].batch())
            taken = clock() - start
            best = seconds.get(name)
            seconds[name] = taken if best is None else min(best, taken)
    return seconds


def _close(y: mx.array, expected: mx.array) -> bool:
    """Within what rounding at other places explains; a wrong index gives an error of about 1."""
    y, expected = y.astype(mx.float32), expected.astype(mx.float32)
    error = mx.sqrt(mx.sum(mx.square(y - expected)))
    return bool((error <= 0.05 * mx.sqrt(mx.sum(mx.square(expected))) + 1e-6).item())

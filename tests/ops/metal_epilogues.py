"""What stands behind a product, in float64, and the cases in which every Metal product is tried.

`Behind` and `ACTIVATIONS` make the cases: a field or an activation that has no entry here fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from qrun.ops._metal_product import ACTIVATIONS, Behind
from tests.ops.metal_support import DTYPES, normal, numbers, ulp


def sigmoid(x: np.ndarray) -> np.ndarray:
    """To all its digits, however small; nothing overflows."""
    return np.exp(-np.logaddexp(0, -x))


def gelu(x: np.ndarray) -> np.ndarray:
    """In its tanh form: (1 + tanh(z)) / 2 = sigmoid(2z)."""
    return x * sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


# Functions of the columns of the sums, or of every other column, gates and ups.
CURVES: dict[str | None, Callable[..., np.ndarray]] = {
    None: lambda y: y,
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
}


def behind64(
    y: np.ndarray,
    *,
    scale: float | np.ndarray = 1,
    bias: float | np.ndarray = 0,
    activation: str | None = None,
    residual: float | np.ndarray = 0,
) -> np.ndarray:
    """`Behind` in float64, for sums y (M, N)."""
    y = y * scale + bias
    columns = (y[:, 0::2], y[:, 1::2]) if ACTIVATIONS[activation] else (y,)
    return CURVES[activation](*columns) + residual


class Sizes(NamedTuple):
    """Of a product: y is (rows, columns), its sums are (rows, n)."""

    rows: int
    n: int
    columns: int
    dtype: mx.Dtype  # of x and y


# What a field of `Behind` is in a test. It has to change the result.
TERMS: dict[str, Callable[[np.random.Generator, Sizes], mx.array | float]] = {
    "scale": lambda rng, s: 0.375,
    "bias": lambda rng, s: normal(rng, (s.n,), mx.float32),
    "residual": lambda rng, s: normal(rng, (s.rows, s.columns), s.dtype),
}

ALL = tuple(f.name for f in fields(Behind) if f.name != "activation")


@dataclass(frozen=True)
class Case:
    activation: str | None
    terms: tuple[str, ...]
    dtype: mx.Dtype = mx.float16

    def __str__(self) -> str:
        terms = "all" if self.terms == ALL else " ".join(self.terms) or "alone"
        return f"{self.activation}, {terms}, {str(self.dtype).removeprefix('mlx.core.')}"


# Each term by itself; each activation by itself, and in every type with all there is.
CASES = [Case(None, (term,)) for term in ALL]
CASES += [Case(name, ()) for name in ACTIVATIONS]
CASES += [Case(name, ALL, dtype) for name in ACTIVATIONS for dtype in DTYPES]

FLOAT32 = 2.0**-20  # what a sum of 64 products in float32 may be off, relative to their sizes

NOTHING = 2.0**-100  # no number of a model: a GPU need not tell it from 0


def check(product: Callable[..., mx.array], case: Case, x: mx.array, w: np.ndarray) -> None:
    """product(fields of `Behind`) is x (M, K) @ w.T (K, N) with the case's terms behind it."""
    rng, (rows, n) = np.random.default_rng(3), (x.shape[0], w.shape[0])
    sizes = Sizes(rows, n, Behind(activation=case.activation).columns(n), x.dtype)
    given = {name: TERMS[name](rng, sizes) for name in case.terms}
    terms = {k: numbers(v) if isinstance(v, mx.array) else v for k, v in given.items()}
    sums, size = numbers(x) @ w.T, np.abs(numbers(x)) @ np.abs(w).T
    reference = partial(behind64, activation=case.activation)
    exact = reference(sums, **terms)
    for name in terms if exact.size > 32 else ():  # a few numbers may be no case for all terms
        others = {k: v for k, v in terms.items() if k != name}
        assert np.any(reference(sums, **others) != exact), f"the test's {name} changes nothing"
    y = product(activation=case.activation, **given)
    assert y.dtype == x.dtype
    assert_each(y, reference, {"y": sums, **terms}, {"y": size})


def assert_each(
    y: mx.array,
    reference: Callable[..., np.ndarray],
    values: Mapping[str, np.ndarray | float],
    sizes: Mapping[str, np.ndarray] | None = None,
) -> None:
    """y is reference(**values): every number on its own, large or small.

    To its own ulp, and to what float32 makes of the values, which is tried: all of them are moved
    by as much as float32 may move them, relative to sizes or else to themselves.
    """
    rng, sizes, exact = np.random.default_rng(4), sizes or {}, reference(**values)
    allowed = np.zeros(exact.shape)
    for _ in range(8):
        near = {
            k: v + FLOAT32 * sizes.get(k, np.abs(v)) * rng.choice([-1, 1], np.shape(v))
            for k, v in values.items()
        }
        allowed = np.maximum(allowed, np.abs(reference(**near) - exact))
    allowed += ulp(exact, y.dtype) + NOTHING
    assert y.shape == exact.shape
    error = np.abs(numbers(y) - exact)
    wrong = np.argwhere(~(error <= allowed))
    assert not len(wrong), "; ".join(
        f"y[{i}, {j}] is {numbers(y)[i, j]:.7g}, expected {exact[i, j]:.7g} to {allowed[i, j]:.2g}"
        for i, j in wrong[:3]
    )

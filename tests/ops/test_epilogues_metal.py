"""What stands behind a product, in every Metal kernel that multiplies, run by the emulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _metal, _metal_call
from qrun.ops._metal_geometry import LADDER, Rows, Wide
from qrun.ops._metal_product import ACTIVATIONS, Behind
from tests.ops import metal_support as support
from tests.ops.metal_epilogues import ALL, CASES, CURVES, TERMS, Case, behind64, check
from tests.ops.metal_support import run

K = 64


class Product(NamedTuple):
    op: Callable[..., mx.array]
    rows: int  # of x
    n: int


PRODUCTS = {
    "qmv in lanes": Product(partial(_metal.qmv, shape=Rows(4, 16, 2, 1)), 3, 22),
    "qmv in fragments": Product(partial(_metal.qmv, shape=Wide(1, 2, 16, 2, 1)), 3, 22),
    "qmm": Product(partial(_metal.qmm, tile=LADDER["2x2"]), 35, 42),
    "gemm": Product(partial(_metal.gemm, tile=LADDER["2x2"]), 35, 42),
}


def operands(
    product: Product, case: Case, n: int
) -> tuple[Callable[..., mx.array], mx.array, np.ndarray]:
    """The product, waiting for what is behind it, its x (rows, K) and its w (n, K) in float64."""
    rng = np.random.default_rng(1)
    x = support.normal(rng, (product.rows, K), case.dtype)
    if product is PRODUCTS["gemm"]:
        w = support.normal(rng, (n, K), mx.bfloat16) * 0.25
        return partial(product.op, x, w, run=run), x, support.numbers(w)
    m = support.matrix(n, K, dtype=mx.bfloat16)
    return partial(product.op, x, m, run=run), x, m.values


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_epilogue(name: str, case: Case) -> None:
    n = PRODUCTS[name].n + (not ACTIVATIONS[case.activation])  # without pairs N may be odd
    product, x, w = operands(PRODUCTS[name], case, n)
    check(product, case, x, w)


@pytest.mark.parametrize("n", [2, 6, 14])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_few_columns(name: str, activation: str | None, n: int) -> None:
    """N < 16 is filled up and cut again, and every term with it."""
    case = Case(activation, ALL)
    product, x, w = operands(PRODUCTS[name], case, n)
    check(product, case, x, w)


def test_every_field_and_activation_has_a_reference() -> None:
    assert set(TERMS) == set(ALL)
    assert set(CURVES) == set(ACTIVATIONS)


@pytest.mark.parametrize("term", ALL)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_forgotten_term_is_noticed(name: str, term: str) -> None:
    case = Case(None, (term,))
    product, x, w = operands(PRODUCTS[name], case, PRODUCTS[name].n)
    with pytest.raises(AssertionError):
        check(lambda activation, **_: product(activation=activation), case, x, w)


# Wrong in small numbers only, or in few: text of common/epilogue.metal, and what it becomes.
FAULTS = {
    "leaks": ("return times_sigmoid(x, x);", "return times_sigmoid(x, x) + 0.01f * min(x, 0.0f);"),
    "a last digit": ("return times_sigmoid(x, x);", "return 1.001f * times_sigmoid(x, x);"),
    "rounded on the way": ("y += float(residual[at]);", "y = float(T(y)) + float(residual[at]);"),
    "the bias of one": ("y.y += float(bias[col + 1]);", "y.y += float(bias[col]);"),
    "the residual of a neighbour": ("residual[at]", "residual[at - second]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = FAULTS[fault]
    text = _metal_call.header

    def changed(file: str) -> str:
        assert right in text(file)
        return text(file).replace(right, wrong)

    monkeypatch.setattr(_metal_call, "header", changed)
    case = Case("swiglu", (), mx.float32) if "sigmoid" in right else Case(None, ALL)
    product, x, w = operands(PRODUCTS["gemm"], case, 42)
    with pytest.raises(AssertionError):
        check(product, case, x, w)


def test_a_term_of_no_number_is_refused() -> None:
    """inf would be no literal, and fast math counts on finite numbers."""
    for value in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="finite"):
            Behind(scale=value).text("N")


def test_an_unknown_activation_is_refused() -> None:
    m, x = support.matrix(16, K), mx.zeros((1, K))
    for refuse in (Behind(activation="relu").columns, partial(behind64, activation="relu")):
        with pytest.raises(KeyError):
            refuse(np.zeros((1, 2)))
    with pytest.raises(KeyError):
        _metal.qmv(x, m, activation="relu", run=run)

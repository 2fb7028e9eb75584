"""qmv, and by the same contract qmm (test_qmm.py runs the tests that matter for many rows)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import QuantizedMatrix, qmm, qmv
from qrun.ops.qmv import Activation, qmv_bytes, qmv_ref
from qrun.quantization import Quantization
from tests.ops.matrices import (
    COLUMNS,
    DTYPES,
    PAIRS,
    WIDTHS,
    assert_sums,
    error_of,
    f64,
    inputs,
    plain_product,
    products,
    sample,
    ulp,
)

FORMATS = [(bits, group) for group in WIDTHS for bits in (2, 3, 4, 5, 6, 8)]
MAIN = [(bits, group) for bits, group in FORMATS if bits in (4, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), FORMATS)
def test_one_hot_rows_give_back_the_matrix(backend: Any, bits: int, group: int, dtype: str) -> None:
    k = WIDTHS[group][1]
    truth = sample(33, k, bits, group)
    m = truth.matrix(33)
    want = f64(mx.array(truth.rounded).astype(DTYPES[dtype]))
    x = mx.eye(k).astype(DTYPES[dtype])
    few = mx.concatenate([qmv(x[i : i + 8], m) for i in range(0, k, 8)])
    assert few.dtype == DTYPES[dtype]
    assert np.array_equal(f64(few).T, want)
    assert np.array_equal(f64(qmm(x, m)).T, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), MAIN)
def test_case_01_02_03_sums_in_float32_for_every_shape(
    backend: Any, bits: int, group: int, dtype: str
) -> None:
    for k in WIDTHS[group]:
        truth = sample(max(COLUMNS), k, bits, group)
        x, exact, error = products(33, max(COLUMNS), k, bits, group, dtype)
        for rows, columns in PAIRS:
            y = qmv(x[:rows], truth.matrix(columns))
            label = f"M {rows} N {columns} K {k}"
            assert y.dtype == x.dtype
            assert_sums(y, exact[:rows, :columns], error, label)


@pytest.mark.parametrize("scales", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_04_output_has_the_type_of_x_whatever_the_scales_have(
    backend: Any, dtype: str, scales: str
) -> None:
    truth = sample(97, 576, 4, 64, scales)
    x = inputs(8, 576, dtype)
    y = qmv(x, truth.matrix(97))
    assert y.dtype == DTYPES[dtype]
    exact = qmv_ref(f64(x), truth.exact)
    error = error_of(plain_product(f64(x), truth.rounded), exact, x.dtype)
    assert_sums(y, exact, error, f"{dtype} x, {scales} scales")


@pytest.mark.parametrize("activation", [None, "swiglu", "geglu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_epilogue_runs_in_float32_in_front_of_one_rounding(
    backend: Any, rows: int, dtype: str, activation: Activation | None
) -> None:
    k, n = 576, 66
    truth = sample(n, k, 4, 64)
    out = n if activation is None else n // 2
    x, bias = inputs(rows, k, dtype), inputs(1, n, dtype, 1)[0]
    residual, weight = inputs(rows, out, dtype, 2), inputs(1, k, "float32", 3)[0]
    y = qmv(
        x,
        truth.matrix(n),
        norm=(weight, 1e-5),
        bias=bias,
        residual=residual,
        activation=activation,
        scale=0.25,
    )

    options: dict[str, Any] = {"norm": (f64(weight), 1e-5), "bias": f64(bias), "scale": 0.25}
    exact = qmv_ref(f64(x), truth.exact, residual=f64(residual), activation=activation, **options)
    # The plain float32 route in front of the activation, step by step.
    h = f64(x).astype(np.float32)
    h = h / np.sqrt(np.square(h).mean(-1, keepdims=True) + np.float32(1e-5)) * np.array(weight)
    if backend.NAME == "cuda":  # tensor cores: what is multiplied has x's type
        h = f64(mx.array(h).astype(x.dtype)).astype(np.float32)
    plain = plain_product(h, truth.rounded) * np.float32(0.25) + f64(bias).astype(np.float32)
    if activation is None:
        error = error_of(plain + f64(residual).astype(np.float32), exact, x.dtype)
        assert_sums(y, exact, error, "epilogue")
        return
    # An error e of gate and up moves act(gate) * up by at most e * (1.13 |up| + |gate|): the slopes
    # of silu and gelu stay below 1.1 and 1.13, and neither exceeds |gate|.
    inner = qmv_ref(f64(x), truth.exact, **options)
    e = 2 * np.abs(plain - inner).max() + ulp(np.abs(inner).max(), "float32")
    allowed = e * (1.13 * np.abs(inner[:, 1::2]) + np.abs(inner[:, 0::2]))
    assert y.shape == exact.shape
    assert y.dtype == x.dtype
    assert (np.abs(f64(y) - exact) <= allowed + ulp(np.abs(exact).max(), dtype)).all()


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
def test_activation_of_large_values_stays_finite(backend: Any, activation: Activation) -> None:
    truth = sample(66, 64, 4, 64)
    x = inputs(1, 64, "float32") * 1e4
    y = f64(qmv(x, truth.matrix(66), activation=activation))
    with np.errstate(over="ignore"):
        want = qmv_ref(f64(x), truth.exact, activation=activation)
    assert np.isfinite(y).all()
    assert np.abs(y - want).max() <= 1e-5 * np.abs(want).max()


def test_case_20_strided_inputs_are_copied_not_misread(backend: Any) -> None:
    truth = sample(33, 192, 4, 64)
    m = truth.matrix(33)
    x = inputs(8, 192, "float32")
    straight = f64(qmv(x, m))
    transposed = mx.contiguous(x.T).T
    every_second = mx.repeat(x, 2, axis=0)[::2]
    broadcast = mx.broadcast_to(x[:1], (4, 192))
    assert np.array_equal(f64(qmv(transposed, m)), straight)
    assert np.array_equal(f64(qmv(every_second, m)), straight)
    assert np.array_equal(f64(qmv(broadcast, m)), np.repeat(f64(qmv(x[:1], m)), 4, 0))


def test_case_20_strided_weights_are_copied_not_misread(backend: Any) -> None:
    truth = sample(33, 192, 4, 64)
    plain = QuantizedMatrix.of(mx.array(truth.w), truth.scales, truth.biases, truth.spec)
    strided = QuantizedMatrix.of(
        mx.contiguous(mx.array(truth.w).T).T,
        mx.repeat(truth.scales, 2, axis=0)[::2],
        mx.contiguous(truth.biases.T).T,
        truth.spec,
    )
    x = inputs(3, 192, "float32")
    assert np.array_equal(f64(qmv(x, strided.pack())), f64(qmv(x, plain.pack())))


@pytest.mark.native
@pytest.mark.parametrize(("bits", "group"), MAIN)
def test_case_02_nothing_is_read_behind_the_weights(bits: int, group: int) -> None:
    from dataclasses import replace

    from qrun import _ext

    for k in WIDTHS[group]:
        for n in (1, 3, 8, 33):
            truth = sample(max(COLUMNS), k, bits, group)
            m = truth.matrix(n)
            assert m.packed is not None
            fenced = replace(m, packed=_ext.guarded(m.packed))
            x = inputs(3, k, "float32")
            got = qmv(_ext.guarded(x), fenced)  # a read outside ends the process
            assert np.array_equal(f64(got), f64(qmv(x, m))), f"N {n} K {k}"


def test_batched_rows_equal_single_rows(backend: Any) -> None:
    """Case 6 begins here: a row's result must not depend on how many rows there are."""
    truth = sample(97, 576, 4, 32)
    m = truth.matrix(97)
    x = inputs(8, 576, "float32")
    together = f64(qmv(x, m))
    apart = np.concatenate([f64(qmv(x[i : i + 1], m)) for i in range(8)])
    assert np.abs(together - apart).max() <= 4 * ulp(np.abs(apart).max(), "float32")


@pytest.mark.parametrize(("bits", "group"), [(1, 64), (7, 32), (4, 16), (4, 48), (16, 64), (0, 64)])
def test_case_21_unsupported_formats_are_named_not_zero(bits: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"{bits} bits|group size {group}"):
        Quantization(bits, group)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": mx.zeros((1, 63))}, "axis K of x is 63, must be 64"),
        ({"x": mx.zeros((0, 64))}, "axis M of x is 0"),
        ({"x": mx.zeros((64,))}, r"x must have axes \(M, K\)"),
        ({"x": mx.zeros((1, 64), mx.int32)}, "x has dtype int32"),
        ({"bias": mx.zeros((32,))}, "axis N of bias is 32, must be 33"),
        ({"residual": mx.zeros((2, 33))}, "axis M of residual is 2, must be 1"),
        ({"residual": mx.zeros((1, 33), mx.float16)}, "residual has dtype float16"),
        ({"norm": (mx.zeros((65,)), 1e-5)}, "axis K of norm is 65, must be 64"),
        ({"activation": "swiglu"}, "axis N of w is 33, must be even"),
        ({"activation": "relu"}, "activation is relu, must be swiglu or geglu"),
    ],
)
def test_broken_contract_names_axis_tensor_and_both_numbers(
    change: dict[str, Any], message: str
) -> None:
    arguments = {"x": mx.zeros((1, 64)), "m": sample(33, 64, 4, 64).matrix(33), **change}
    with pytest.raises(ValueError, match=message):
        qmv(**arguments)


def test_bytes_count_matrix_input_and_output_once() -> None:
    truth = sample(33, 64, 4, 64)
    m = QuantizedMatrix.of(mx.array(truth.w), truth.scales, truth.biases, truth.spec)
    packed, sides = 33 * 64 // 2, 2 * 33 * 2
    assert qmv_bytes(mx.zeros((2, 64)), m) == packed + sides + 2 * 64 * 4 + 2 * 33 * 4

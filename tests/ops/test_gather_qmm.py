"""gather_qmm: decode exactly, sum in float32, in any order of experts, in every format."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import QuantizedMatrix, gather_qmm
from qrun.ops.gather_qmm import gather_qmm_bytes, gather_qmm_ref
from qrun.quantization import Quantization, dequantize_ref
from tests import tiny
from tests.conftest import NATIVE
from tests.ops.matrices import DTYPES, assert_sums, error_of, f64, inputs, plain_product

E, N, K = 5, 18, 96
FORMATS = [(bits, 32, "affine") for bits in (2, 3, 4, 5, 6, 8)]
FORMATS += [(4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")]


def instruction_sets() -> list[str]:
    """Those that run on this machine."""
    if not NATIVE:
        return []
    from tests.ops.test_cpu_products import ISAS

    return ISAS


def experts(bits: int, group: int, mode: str) -> tuple[QuantizedMatrix, Any]:
    """E matrices N x K in one, and their values (E, N, K)."""
    return some(bits, group, mode, E, N, K)


def some(
    bits: int, group: int, mode: str, count: int, n: int, k: int, dtype: str = "F16"
) -> tuple[QuantizedMatrix, Any]:
    """count matrices n x k in one, and their values (count, n, k)."""
    rng = np.random.default_rng((bits, group))
    parts = tiny.quantized(
        rng, "x", count * n, k, bits=bits, group_size=group, mode=mode, dtype=dtype
    )
    w, scales = parts["x.weight"][1], parts["x.scales"][1]
    biases = parts["x.biases"][1] if mode == "affine" else None
    spec = Quantization(bits, group, mode)
    exact = dequantize_ref(w, scales, biases, spec).reshape(count, n, k)
    arrays = [None if a is None else mx.array(a) for a in (w, scales, biases)]
    assert arrays[0] is not None
    assert arrays[1] is not None
    return QuantizedMatrix.of(arrays[0], arrays[1], arrays[2], spec), exact


@pytest.mark.parametrize(("bits", "group", "mode"), FORMATS)
def test_decodes_exactly(bits: int, group: int, mode: str, backend: Any) -> None:
    """Unit rows give back every expert's columns, to one rounding."""
    m, exact = experts(bits, group, mode)
    row = mx.array(np.tile(np.arange(K), E), mx.int32)
    expert = mx.array(np.repeat(np.arange(E), K), mx.int32)
    got = f64(gather_qmm(mx.eye(K), m, row, expert, count=E, grouped=True))
    want = exact.swapaxes(1, 2).reshape(-1, N)
    np.testing.assert_array_equal(got, want.astype(np.float32))


@pytest.mark.parametrize(("bits", "group", "mode"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "swiglu", "geglu"])
@pytest.mark.parametrize("grouped", [True, False])
def test_sums_in_float32(
    bits: int, group: int, mode: str, dtype: str, activation: Any, grouped: bool, backend: Any
) -> None:
    m, exact = experts(bits, group, mode)
    rng = np.random.default_rng(2)
    x = mx.array(rng.normal(size=(7, K)).astype(np.float32)).astype(DTYPES[dtype])
    expert = rng.integers(0, E, 33).astype(np.int32)
    row = rng.integers(0, 7, 33).astype(np.int32)
    if grouped:
        expert.sort()
    got = gather_qmm(
        x, m, mx.array(row), mx.array(expert), count=E, activation=activation, grouped=grouped
    )
    assert got.dtype == x.dtype
    want = gather_qmm_ref(f64(x), exact, row, expert, activation=activation)
    once = f64(mx.array(want.astype(np.float32)).astype(x.dtype))
    allowed = 2 * np.abs(once - want).max() + 1e-6 * np.abs(want).max()
    assert np.abs(f64(got) - want).max() <= allowed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": mx.zeros((2, K + 1))}, "axis K of x is 97, must be 96"),
        ({"row": mx.zeros((3,), mx.int32)}, "axis R of expert is 2, must be 3"),
        ({"row": mx.zeros((2,))}, "row has dtype float32"),
        ({"count": 4}, "no multiple of 4 experts"),
        ({"count": 10, "activation": "swiglu"}, "axis N of w is 9, must be even"),
    ],
)
def test_the_door(change: dict[str, Any], message: str) -> None:
    m, _ = experts(4, 32, "affine")
    zeros = mx.zeros((2,), mx.int32)
    arguments = {"x": mx.zeros((2, K)), "row": zeros, "expert": zeros, "count": E} | change
    with pytest.raises(ValueError, match=message):
        gather_qmm(arguments.pop("x"), m, **arguments)


def test_without_rows_each_row_is_its_own_pair(backend: Any) -> None:
    m, exact = experts(4, 32, "affine")
    x = inputs(6, K, "float32")
    expert = np.array([4, 0, 0, 3, 3, 1], np.int32)
    got = gather_qmm(x, m, None, mx.array(expert), count=E)
    np.testing.assert_allclose(
        f64(got), gather_qmm_ref(f64(x), exact, np.arange(6), expert), atol=1e-5
    )


# bits, group, count, n, k, and how many rows go to each expert
ODD = [
    (4, 32, 3, 1, 32, [1, 0, 1]),
    (4, 64, 2, 34, 576, [9, 17]),
    (3, 128, 4, 16, 896, [1, 2, 0, 33]),
    (8, 32, 5, 50, 96, [0, 0, 4, 0, 0]),
    (4, 32, 8, 48, 4864, [1] * 8),
    (6, 64, 2, 8, 64, [100, 60]),
]


@pytest.mark.native
@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ODD, ids=str)
def test_odd_shapes_on_every_instruction_set(
    case: tuple[int, int, int, int, int, list[int]], dtype: str, instructions: str
) -> None:
    """Within the contract's bound, and never past the end of an array."""
    from qrun import _ext

    bits, group, count, n, k, shares = case
    m, exact = some(bits, group, "affine", count, n, k)
    expert = np.repeat(np.arange(count), shares).astype(np.int32)
    x = inputs(len(expert), k, dtype)
    row = np.random.default_rng(3).permutation(len(expert)).astype(np.int32)
    best = _ext.isa()
    _ext.force_isa(instructions)
    try:
        packed = _ext.pack(m.w, m.scales, m.biases, bits, group, count=count)
        got = _ext.gather_qmm(
            *(_ext.guarded(a) for a in (x, packed, mx.array(expert), mx.array(row))),
            count, n, k, bits, group, scale_dtype=mx.float16,
        )  # fmt: skip
        mx.eval(got)
    finally:
        _ext.force_isa(best)
    want = gather_qmm_ref(f64(x), exact, row, expert)
    plain = np.stack([
        plain_product(f64(x)[r : r + 1], exact[e].astype(np.float32))[0]
        for r, e in zip(row, expert, strict=True)
    ])  # fmt: skip
    # 16-bit x of many rows is cut to 16 bits in each group, which its result cannot show.
    assert_sums(got, want, error_of(plain, want, x.dtype), str(case))


@pytest.mark.native
@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("activation", ["none", "swiglu"])
@pytest.mark.parametrize("mode", ["affine", "mxfp8"])
def test_a_run_is_its_experts_product(mode: str, activation: str, instructions: str) -> None:
    """Bit for bit, with few rows and with many, whichever kernel takes them."""
    from qrun import _ext

    bits, n, k = 8 if mode == "mxfp8" else 4, 82, 576
    m, _ = some(bits, 32, mode, 3, n, k)
    expert = np.repeat(np.arange(3), [2, 17, 40]).astype(np.int32)
    x = inputs(len(expert), k, "float32")
    options = {"scale_dtype": mx.float16, "mode": mode, "activation": activation}
    best = _ext.isa()
    _ext.force_isa(instructions)
    try:
        packed = _ext.pack(m.w, m.scales, m.biases, bits, 32, count=3, mode=mode)
        got = _ext.gather_qmm(x, packed, mx.array(expert), None, 3, n, k, bits, 32, **options)
        for e in range(3):
            rows = slice(e * n, (e + 1) * n)
            biases = None if m.biases is None else m.biases[rows]
            own = _ext.pack(m.w[rows], m.scales[rows], biases, bits, 32, mode=mode)
            here = mx.array(np.flatnonzero(expert == e))
            want = _ext.qmv(x[here], own, n, k, bits, 32, **options)
            np.testing.assert_array_equal(f64(got[here]), f64(want))
    finally:
        _ext.force_isa(best)


@pytest.mark.alone
@pytest.mark.native
@pytest.mark.parametrize(("row", "expert"), [(2, 0), (-1, 0), (0, 5), (0, -1)])
def test_an_index_outside_is_an_error(row: int, expert: int) -> None:
    m, _ = experts(4, 32, "affine")
    with pytest.raises(RuntimeError, match=f"row {row} of 2 to expert {expert} of 5"):
        mx.eval(
            gather_qmm(
                mx.zeros((2, K)),
                m,
                mx.array([row], mx.int32),
                mx.array([expert], mx.int32),
                count=E,
            )
        )


@pytest.mark.native
def test_a_token_has_the_same_bits_in_any_company() -> None:
    """One token alone, and among as many as are still promised to be alike (sixteen)."""
    m, _ = experts(4, 32, "affine")
    x = inputs(16, K, "bfloat16")
    expert = np.sort(np.random.default_rng(5).integers(0, E, 16)).astype(np.int32)
    whole = f64(gather_qmm(x, m, None, mx.array(expert), count=E))
    for r in range(16):
        one = gather_qmm(x[r : r + 1], m, None, mx.array(expert[r : r + 1]), count=E)
        np.testing.assert_array_equal(f64(one)[0], whole[r])


def test_bytes() -> None:
    """Only the experts that are used are read."""
    m, _ = experts(4, 32, "affine")
    x = mx.zeros((1, K))
    assert gather_qmm_bytes(x, m, 2, E, 2) == m.nbytes // E * 2 + 2 * (K + N) * 4

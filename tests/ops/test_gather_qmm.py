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
from tests.ops.matrices import DTYPES, f64

E, N, K = 5, 18, 96
FORMATS = [(2, 32, "affine"), (3, 32, "affine"), (4, 32, "affine"), (8, 32, "affine")]
FORMATS += [(4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")]


def experts(bits: int, group: int, mode: str) -> tuple[QuantizedMatrix, Any]:
    """E matrices N x K in one, and their values (E, N, K)."""
    rng = np.random.default_rng((bits, group))
    parts = tiny.quantized(rng, "x", E * N, K, bits=bits, group_size=group, mode=mode, dtype="F16")
    w, scales = parts["x.weight"][1], parts["x.scales"][1]
    biases = parts["x.biases"][1] if mode == "affine" else None
    spec = Quantization(bits, group, mode)
    exact = dequantize_ref(w, scales, biases, spec).reshape(E, N, K)
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


def test_bytes() -> None:
    """Only the experts that are used are read."""
    m, _ = experts(4, 32, "affine")
    x = mx.zeros((1, K))
    assert gather_qmm_bytes(x, m, 2, E, 2) == m.nbytes // E * 2 + 2 * (K + N) * 4

"""Every mode, width and group size, at odd shapes, on each backend: a product, and an embedding.

The kernels' own tests go deeper for the common formats; here each one passes through the ops' doors
and whatever way the backend has for it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from qrun.ops import QuantizedMatrix, embedding, qmm, qmv
from qrun.ops.qmv import qmv_ref
from qrun.quantization import Quantization, dequantize_ref
from tests import tiny
from tests.ops.matrices import f64, inputs

AFFINE = [(bits, group, "affine") for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [*AFFINE, (4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")]
SHAPES = [(1, 1, 1), (1, 7, 3), (3, 33, 5), (9, 31, 3), (17, 9, 1), (33, 65, 7)]  # M, N, groups


def matrix(
    bits: int, group: int, mode: str, n: int, groups: int
) -> tuple[QuantizedMatrix, npt.NDArray[np.float64]]:
    """n rows of `groups` groups, packed for the backend, and their values."""
    k = group * groups
    rng = np.random.default_rng((bits, group, n, groups))
    parts = tiny.quantized(rng, "x", n, k, bits=bits, group_size=group, mode=mode, dtype="F16")
    w, scales = parts["x.weight"][1], parts["x.scales"][1]
    biases = parts["x.biases"][1] if mode == "affine" else None
    spec = Quantization(bits, group, mode)
    offset = None if biases is None else mx.array(biases)
    m = QuantizedMatrix.of(mx.array(w), mx.array(scales), offset, spec).pack()
    return m, dequantize_ref(w, scales, biases, spec)


@pytest.mark.parametrize(("bits", "group", "mode"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(
    bits: int, group: int, mode: str, shape: tuple[int, int, int], backend: Any
) -> None:
    """Off float64 by no more than the rounding of as many float32 sums as there are terms."""
    rows, n, groups = shape
    m, exact = matrix(bits, group, mode, n, groups)
    for dtype in ("float32", "bfloat16"):
        x = inputs(rows, m.k, dtype)
        want = qmv_ref(f64(x), exact)
        # The sum of magnitudes bounds what any order of float32 sums can lose.
        size = (np.abs(f64(x)) @ np.abs(exact).T).max()
        last = {"float32": 2.0**-23, "bfloat16": 2.0**-8}[dtype] * np.abs(want).max()
        for product in (qmv, qmm):
            got = product(x, m)
            assert got.dtype == x.dtype
            assert np.abs(f64(got) - want).max() <= last + 2.0**-22 * size * np.sqrt(m.k)


@pytest.mark.parametrize(("bits", "group", "mode"), FORMATS)
def test_rows_come_back_exactly(bits: int, group: int, mode: str, backend: Any) -> None:
    """An embedding decodes: float32 holds each value as near as one fused rounding can."""
    m, exact = matrix(bits, group, mode, 37, 3)
    ids = mx.array([36, 0, 7, 7], mx.int32)
    got = f64(embedding(ids, m))
    np.testing.assert_allclose(got, exact[np.array(ids)], rtol=2.0**-23, atol=2.0**-24)


@pytest.mark.parametrize(("bits", "group", "mode"), FORMATS)
@pytest.mark.parametrize("rows", [1, 17])
def test_everything_fused(bits: int, group: int, mode: str, rows: int, backend: Any) -> None:
    """Norm in front; scale, bias, activation and residual behind."""
    m, exact = matrix(bits, group, mode, 34, 3)
    x, residual = inputs(rows, m.k, "float32"), inputs(rows, 17, "float32", seed=1)
    weight, bias = inputs(1, m.k, "float32", seed=2)[0], inputs(1, 34, "float32", seed=3)[0]
    options: dict[str, Any] = {"activation": "swiglu", "scale": 0.5}
    got = (qmv if rows < 8 else qmm)(
        x, m, norm=(weight, 1e-5), bias=bias, residual=residual, **options
    )
    want = qmv_ref(
        f64(x),
        exact,
        norm=(f64(weight), 1e-5),
        bias=f64(bias),
        residual=f64(residual),
        **options,
    )
    np.testing.assert_allclose(f64(got), want, rtol=0, atol=2e-5 * np.abs(want).max())

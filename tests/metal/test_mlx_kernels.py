"""MLX's own kernels, unmodified, from its wheel: the shim understands text it was not written for.

They are large, they are known to be right on Macs, and they must give right numbers here with
nothing found. (The lint is off: they keep other rules.)
"""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from tests.metal import metal_kernel, settings
from tests.metal.mlx_text import INCLUDE, KERNELS, inlined


@pytest.fixture(scope="module")
def header() -> str:
    if not (INCLUDE / KERNELS / "quantized.h").exists():
        pytest.skip("this MLX ships no kernel sources")
    # bf16_math and logging need more of Apple's compiler.
    files = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
    text = inlined(*files, without=["bf16_math.h", "logging.h"])
    # Already in the prelude, as MLX's own is on a Mac.
    text = re.sub(r"typedef (half float16_t|bfloat bfloat16_t);", "", text)
    text = re.sub(
        r"template <typename IdxT = int64_t>\s*METAL_FUNC IdxT elem_to_loc\(\s*IdxT elem,.*?\n}\n",
        "", text, count=1, flags=re.S,
    )  # fmt: skip
    return (
        "#include <metal_quadgroup>\n#include <metal_simdgroup>\n"
        "#include <metal_simdgroup_matrix>\n" + text
    )


def quantized(n: int, k: int, m: int, dtype: mx.Dtype):
    mx.random.seed(n)
    w, scales, biases = mx.quantize(mx.random.normal((n, k)).astype(dtype), 64, 4)
    x = mx.random.normal((m, k)).astype(dtype)
    wide = [np.array(a.astype(mx.float32)).astype(np.float64) for a in (x, scales, biases)]
    q = (np.array(w)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(n, k)
    values = q * wide[1].repeat(64, axis=1) + wide[2].repeat(64, axis=1)
    return (w, scales, biases, x), wide[0] @ values.T


def error(got: mx.array, expected: np.ndarray) -> float:
    return float(np.abs(np.array(got.astype(mx.float32)) - expected).max() / np.abs(expected).max())


LIMITS = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_qmm(header: str, dtype: mx.Dtype) -> None:
    m, n, k = 33, 64, 128
    arrays, expected = quantized(n, k, m, dtype)
    kernel = metal_kernel(
        "qmm", ["w", "scales", "biases", "x", "dims"], ["y"],
        "threadgroup T Xs[32 * (32 + 16 / sizeof(T))], Ws[32 * (32 + 16 / sizeof(T))];\n"
        "qmm_t_impl<T, 64, 4, false>(w, scales, biases, x, y, Xs, Ws, dims[0], dims[1], dims[2],\n"
        "  dims[0], threadgroup_position_in_grid, thread_index_in_threadgroup,\n"
        "  simdgroup_index_in_threadgroup, thread_index_in_simdgroup);",
        header, lint=False,
    )  # fmt: skip
    with settings.use(order="random", seed=2):
        out = kernel(
            inputs=[*arrays, mx.array([k, n, m])], template=[("T", dtype)],
            grid=(32 * 2, 2 * 2, 2), threadgroup=(32, 2, 2),
            output_shapes=[(m, n)], output_dtypes=[dtype],
        )  # fmt: skip
    assert error(out[0], expected) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_qmv(header: str, dtype: mx.Dtype) -> None:
    n, k = 16, 512
    arrays, expected = quantized(n, k, 1, dtype)
    kernel = metal_kernel(
        "qmv", ["w", "scales", "biases", "x", "dims"], ["y"],
        "qmv_fast_impl<T, 64, 4>(w, scales, biases, x, y, dims[0], dims[1],\n"
        "  threadgroup_position_in_grid, simdgroup_index_in_threadgroup,\n"
        "  thread_index_in_simdgroup);",
        header, lint=False,
    )  # fmt: skip
    out = kernel(
        inputs=[*arrays, mx.array([k, n])], template=[("T", dtype)],
        grid=(32, 2 * n // 8, 1), threadgroup=(32, 2, 1),
        output_shapes=[(1, n)], output_dtypes=[dtype],
    )  # fmt: skip
    assert error(out[0], expected) < LIMITS[dtype]

"""Every CUDA kernel that the backend can ask for, as source: what MLX would compile, without MLX.

`record()` runs the backend's own functions with a stand-in for `mx.fast.cuda_kernel`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from qrun.ops import _cuda, _cuda_launch
from qrun.ops.matrix import QuantizedMatrix
from qrun.quantization import MODES, Quantization

TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.uint32: "unsigned",
    mx.int32: "int",
    mx.uint8: "unsigned char",
}
# MLX gives shapes as arrays by value.
PRELUDE = "struct Shape { int at[10]; __device__ int operator[](int i) const { return at[i]; } };\n"


class Recorder:
    """Takes the place of `mx.fast.cuda_kernel`: keeps a translation unit for each distinct call."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}  # a readable name -> source

    def kernel(
        self,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        **rest: Any,
    ) -> Callable[..., list[mx.array]]:
        header = str(rest["header"])

        def call(
            *,
            inputs: list[mx.array],
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
            template: list[tuple[str, Any]],
            **_: Any,
        ) -> list[mx.array]:
            arguments: list[str] = []
            for n, array in zip(input_names, inputs, strict=True):
                arguments.append(f"const {TYPES[array.dtype]}* {n}")
                if f"{n}_shape" in source:
                    arguments.append(f"const __grid_constant__ Shape {n}_shape")
            for n, dtype in zip(output_names, output_dtypes, strict=True):
                arguments.append(f"{TYPES[dtype]}* {n}")
            constants = "".join(
                f"using {n} = {TYPES[v]};\n"
                if isinstance(v, mx.Dtype)
                else f"constexpr int {n} = {v};\n"
                for n, v in template
            )
            label = " ".join([name, *(f"{n}={TYPES.get(v, v)}" for n, v in template), *input_names])
            self.sources[label] = (
                f'{PRELUDE}{header}extern "C" __global__ void kernel({", ".join(arguments)}) {{\n'
                f"{constants}{source}\n}}\n"
            )
            return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

        return call


def record() -> dict[str, str]:
    """All instantiations that differ in registers or code; not every mix of scale types."""
    recorder = Recorder()
    real = mx.fast.cuda_kernel
    mx.fast.cuda_kernel = recorder.kernel  # type: ignore[assignment]
    _cuda_launch._kernel.cache_clear()
    try:
        _products()
        _rest()
    finally:
        mx.fast.cuda_kernel = real
        _cuda_launch._kernel.cache_clear()
    return recorder.sources


def _matrix(spec: Quantization, dtype: mx.Dtype, n: int = 8, k: int = 4096) -> QuantizedMatrix:
    scales = mx.zeros((n, k // spec.group_size), dtype)
    w = mx.zeros((n, k * spec.bits // 32), mx.uint32)
    return QuantizedMatrix.of(w, scales, scales if spec.mode == "affine" else None, spec)


def _products() -> None:
    none: dict[str, Any] = {
        "norm": None,
        "bias": None,
        "residual": None,
        "activation": None,
        "scale": 1.0,
    }
    bf16, f16, f32 = mx.bfloat16, mx.float16, mx.float32

    def all_behind(x: mx.array) -> dict[str, Any]:
        return {
            "norm": (mx.zeros(x.shape[1], x.dtype), 1e-5),
            "bias": mx.zeros(8, x.dtype),
            "residual": mx.zeros((x.shape[0], 4), x.dtype),
            "activation": "swiglu",
            "scale": 0.5,
        }

    for group in (32, 64, 128):
        for dtype, scales in ((bf16, bf16), (f16, f16), (bf16, f32)):
            m = _matrix(Quantization(4, group), scales)
            for rows in (1, 4, 8, 12, 16):  # one for each number of passes
                x = mx.zeros((rows, m.k), dtype)
                _cuda.qmv(x, m, **(none if dtype == f16 else all_behind(x)))
            for rows in (17, 64, 128):
                x = mx.zeros((rows, m.k), dtype)
                _cuda.qmm(x, m, **(none if dtype == f16 else all_behind(x)))
            _cuda.qmm(
                mx.zeros((40, m.k), dtype), _matrix(m.spec, scales, 32 * 4 * 132, 128), **none
            )
    for spec in (
        *(Quantization(bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
        *(Quantization(bits, group, mode) for mode, (group, bits) in MODES.items()),
    ):
        scales = f16 if spec.mode == "affine" else mx.uint8
        for rows in (1, 3):
            _cuda.qmv(mx.zeros((rows, 4096), f32), _matrix(spec, scales), **none)
        _cuda.embedding(mx.zeros(1, mx.int32), _matrix(spec, scales), dtype=bf16, scale=1.0)


def _rest() -> None:
    offset = mx.zeros(1, mx.int32)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        _cuda.rms_norm(mx.zeros((1, 64), dtype), mx.zeros(64, dtype), 1e-5)
        _cuda.rms_norm(mx.zeros((1, 63), dtype), mx.zeros(63, dtype), 1e-5)
        _cuda.swiglu(mx.zeros((1, 64), dtype))
        for d in (20, 64, 80, 96, 128, 256):
            cache = mx.zeros((1, 2, 256, d), dtype)
            weight = mx.zeros(d, dtype)
            _cuda.rope(
                mx.zeros((1, 12 * d), dtype),
                cache,
                cache,
                offset,
                mx.zeros((256, d // 2, 2)),
                heads=8,
                q_norm=weight,
                k_norm=weight,
                eps=1e-6,
            )
            for heads, length in ((2, 1), (6, 1), (8, 1), (2, 64)):
                _cuda.sdpa(
                    mx.zeros((1, heads, length, d), dtype),
                    cache,
                    cache,
                    offset,
                    scale=0.125,
                    window=0,
                    softcap=0,
                )

"""Every CUDA kernel that the backend can ask for, as source.

`record()` runs the backend's own functions with a runner that only takes notes.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.ops import _cuda, _cuda_product, _cuda_qmm, _cuda_tiles
from qrun.ops._cuda_launch import Kernel, Plan, run_by
from qrun.ops.matrix import QuantizedMatrix
from qrun.quantization import MODES, Quantization


def record(generation: int) -> list[Kernel]:
    """All instantiations that differ in registers or code; not every mix of scale types.

    generation: the first number of the compute capability.
    """
    found: dict[str, Kernel] = {}

    def note(plan: Plan, inputs: list[mx.array]) -> list[mx.array]:
        found[plan.kernel.name] = plan.kernel
        return [mx.zeros(shape, dtype) for shape, dtype in plan.outputs]

    real = _cuda_product.generation
    _cuda_product.generation = lambda: generation
    try:
        with run_by(note):
            _products(generation)
            _rest()
            _mixture()
    finally:
        _cuda_product.generation = real
    return list(found.values())


def _matrix(spec: Quantization, dtype: mx.Dtype, n: int = 8, k: int = 4096) -> QuantizedMatrix:
    scales = mx.zeros((n, k // spec.group_size), dtype)
    w = mx.zeros((n, k * spec.bits // 32), mx.uint32)
    return QuantizedMatrix.of(w, scales, scales if spec.mode == "affine" else None, spec)


def _products(generation: int) -> None:
    none: dict[str, Any] = {
        "norm": None,
        "bias": None,
        "residual": None,
        "activation": None,
        "scale": 1.0,
    }
    bf16, f16, f32 = mx.bfloat16, mx.float16, mx.float32

    def all_behind(x: mx.array, n: int = 8) -> dict[str, Any]:
        return {
            "norm": (mx.zeros(x.shape[1], x.dtype), 1e-5),
            "bias": mx.zeros(n, x.dtype),
            "residual": mx.zeros((x.shape[0], n // 2), x.dtype),
            "activation": "swiglu",
            "scale": 0.5,
        }

    for group in (32, 64, 128):
        for dtype, scales in ((bf16, bf16), (f16, f16), (bf16, f32)):
            m = _matrix(Quantization(4, group), scales)
            # One for each number of passes and each kind of tile: few, some or many rows of w.
            for n in (8, 3000, 9000) if dtype == scales == bf16 else (9000,):
                for rows in (1, 2, 4, 8, 16) if dtype == scales else (1, 2, 4, 8):
                    x = mx.zeros((rows, m.k), dtype)
                    wide = _matrix(m.spec, scales, n)
                    _cuda.qmv(x, wide, **(none if dtype == f16 else all_behind(x, n)))
            if dtype == scales == bf16:  # behind a norm one row has tiles of its own
                for n, k in ((3000, 2048), (9000, 2048), (9000, 2560)):
                    x = mx.zeros((1, k), dtype)
                    _cuda.qmv(x, _matrix(m.spec, scales, n, k), **all_behind(x, n))
            # One for each number of steps a take, and of warps.
            for k in (640, 1024, 2048, 9728, 14336) if dtype == bf16 else ():
                for n in (8, 3000, 9000) if group == 64 else (3000,):
                    for rows in (1, 4, 8, 16) if n == 3000 and dtype == scales else (1, 4):
                        x = mx.zeros((rows, k), dtype)
                        _cuda.qmv(x, _matrix(m.spec, scales, n, k), **none)
            for rows in (16, 17, 33, 64, 128):  # one for each tile of mma
                x = mx.zeros((rows, m.k), dtype)
                tile = _cuda_tiles.mma_tile(rows, m.n, group)
                _cuda_qmm.by_tile(x, m, tile, **(none if dtype == f16 else all_behind(x)))
            _cuda_qmm.by_tile(
                mx.zeros((40, m.k), dtype),
                _matrix(m.spec, scales, 32 * 4 * 132, 128),
                _cuda_tiles.mma_tile(40, 32 * 4 * 132, group),
                **none,
            )
            for tile in _cuda_tiles.WGMMA_TILES if dtype == scales and generation == 9 else ():
                x = mx.zeros((40, m.k), dtype)
                _cuda_qmm.by_tile(x, m, tile, **(none if dtype == f16 else all_behind(x)))
                if group == 64:
                    _cuda_qmm.by_tile(x, m, tile._replace(splits=4), **none)
    for spec in (
        *(Quantization(bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
        *(Quantization(bits, group, mode) for mode, (group, bits) in MODES.items()),
    ):
        scales = f16 if spec.mode == "affine" else mx.uint8
        for rows in (1, 3):
            _cuda.qmv(mx.zeros((rows, 4096), f32), _matrix(spec, scales), **none)
        _cuda.embedding(mx.zeros(1, mx.int32), _matrix(spec, scales), dtype=bf16, scale=1.0)


def _rest() -> None:
    bf16, f16 = mx.bfloat16, mx.float16
    offset = mx.zeros(1, mx.int32)
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        for k in (64, 63):
            _cuda.rms_norm(mx.zeros((1, k), dtype), mx.zeros(k, dtype), 1e-5)
            _cuda.rms_norm(mx.zeros((1, k), dtype), mx.zeros(k, dtype), 1e-5, centered=True)
        _cuda.swiglu(mx.zeros((1, 64), dtype))
        _cuda.argmax(mx.zeros((1, 64), dtype), 64)
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
    for d, dtype in ((64, f16), (64, bf16), (80, bf16), (128, bf16), (256, bf16)):
        weight = mx.zeros(d, dtype)
        for heads, capacity, norm, half in (
            (2, 256, weight, d // 2),  # rows of a block: 1
            (6, 64, None, d // 4),  # 3
            (16, 256, weight, d // 2),  # 4, and 2 at 256
        ):
            held = mx.zeros((1, 2, capacity, d), dtype)
            _cuda.attend(
                mx.zeros((1, (heads + 4) * d), dtype),
                held,
                held,
                offset,
                mx.zeros((256, half, 2)),
                heads=heads,
                q_norm=norm,
                k_norm=norm,
                eps=1e-6,
                scale=0.125,
                window=0,
                softcap=0.0,
            )


def _mixture() -> None:
    """What only a mixture of experts launches."""
    for dtype in (mx.bfloat16, mx.float16):
        for tokens, top, count in ((1, 2, 8), (8, 8, 128)):
            logits = mx.zeros((tokens, count), dtype)
            expert, row, place, share = _cuda.route(logits, top, tokens == 1)
            m = _matrix(Quantization(4, 64), dtype, count * 8, 2048)
            x = mx.zeros((tokens, 2048), dtype)
            y = _cuda.gather_qmm(
                x, m, row, expert, count=count, activation="swiglu", grouped=tokens > 1
            )
            _cuda.combine(y, place, share, mx.zeros((tokens, y.shape[1]), dtype))
        for pairs in (100, 2000):
            _cuda.gather_qmm(
                mx.zeros((pairs, 2048), dtype),
                _matrix(Quantization(4, 64), dtype, 64, 2048),
                None,
                mx.zeros(pairs, mx.int32),
                count=8,
                activation=None,
                grouped=True,
            )
        x = mx.zeros((3, 64), dtype)
        _cuda.rms_norm(x, x[0], 1e-5, x)
        _cuda.rms_norm_parts(x, [x[0, :16], x[0, :32]], 1e-5)
        _cuda.softcap(x, 1.0)
        _cuda.gemm(x, x, bias=None, residual=None, activation=None, scale=1.0)

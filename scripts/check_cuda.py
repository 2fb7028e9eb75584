"""Runs every CUDA op on this GPU at odd shapes against float64; prints what is wrong.

python scripts/check_cuda.py [TEXT]          only the cases whose label contains TEXT
python scripts/check_cuda.py --against-mlx   errors of bfloat16 products beside those of MLX's own
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from qrun.ops import _cuda, _cuda_product, _cuda_qmm
from qrun.ops._cuda_launch import alone
from qrun.ops._cuda_tiles import SMS, WGMMA_TILES, QmvTile, WgmmaTile
from qrun.ops._launch import Arrays
from qrun.ops.argmax import argmax_ref
from qrun.ops.combine import combine_ref
from qrun.ops.gather_qmm import gather_qmm_ref
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.qmv import gated_ref, qmv_ref
from qrun.ops.rms_norm import rms_norm_ref
from qrun.ops.rope import rope_ref
from qrun.ops.route import route_ref
from qrun.ops.sdpa import sdpa_ref
from qrun.ops.softcap import softcap_ref
from qrun.quantization import Quantization, dequantize_ref, pack

Array = npt.NDArray[np.float64]
Case = tuple[str, Callable[[], list[tuple[mx.array, Array]]]]
BF, HF, FL, U8 = mx.bfloat16, mx.float16, mx.float32, mx.uint8
# Of the largest result: one rounding of the result and one of x or of the probabilities.
ALLOWED = {BF: 2.0**-7, HF: 2.0**-10, FL: 2.0**-20}
# Of qmv.cuh, by group: what the choice of tiles takes only where w has thousands of rows.
TILES = (
    (64, QmvTile(1, take=4, warps=1, teams=1, blocks=1, ahead=True)),
    (64, QmvTile(2, take=2, warps=2, teams=2, blocks=1, ahead=True)),
    (32, QmvTile(1, take=2, warps=1, teams=1, blocks=2, ahead=True)),
    (128, QmvTile(3, take=2, warps=1, teams=4, blocks=1, ahead=True)),
    (64, QmvTile(4, take=1, warps=2, teams=2, blocks=1, ahead=True)),
    (64, QmvTile(8, take=4, warps=1, teams=2, blocks=1, dequantized=True)),
    (64, QmvTile(16, take=2, warps=2, teams=4, blocks=1, dequantized=True)),
    (128, QmvTile(16, take=1, warps=2, teams=2, blocks=1, dequantized=True)),
    (32, QmvTile(4, take=2, warps=1, teams=1, blocks=1, ahead=True, dequantized=True)),
    (64, QmvTile(8, take=2, warps=1, teams=2, blocks=1, dequantized=True, splits=2)),
    (32, QmvTile(16, take=1, warps=1, teams=1, blocks=1, ahead=True, dequantized=True, splits=4)),
    (64, QmvTile(4, take=2, warps=1, teams=1, blocks=1, ahead=True, splits=2)),
)
# With the end of K within a take, and a warp whose last round is empty.
UNEVEN = (
    (576, QmvTile(8, take=1, warps=5, teams=4, blocks=1)),
    (576, QmvTile(16, take=1, warps=3, teams=1, blocks=1, dequantized=True)),
    (672, QmvTile(8, take=1, warps=2, teams=3, blocks=1, dequantized=True, splits=2)),
    (288, QmvTile(8, take=1, warps=1, teams=1, blocks=1, dequantized=True, splits=4)),
    (640, QmvTile(3, take=1, warps=2, teams=2, blocks=1)),
)
rng = np.random.default_rng(0)


def f64(a: mx.array) -> Array:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def normal(shape: tuple[int, ...], dtype: mx.Dtype, size: float = 1) -> mx.array:
    return mx.array((rng.normal(size=shape) * size).astype(np.float32)).astype(dtype)


def matrix(n: int, k: int, spec: Quantization, dtype: mx.Dtype) -> QuantizedMatrix:
    q = rng.integers(0, 1 << spec.bits, (n, k)).astype(np.uint8)
    if spec.mode == "mxfp8":
        q &= 0xBF  # no NaN
    groups = (n, k // spec.group_size)
    w = mx.array(pack(q, spec.bits))
    if spec.mode == "affine":
        return QuantizedMatrix.of(w, normal(groups, dtype, 0.1), normal(groups, dtype), spec)
    low = 50 if spec.mode == "nvfp4" else 120
    return QuantizedMatrix.of(
        w, mx.array(rng.integers(low, low + 10, groups).astype(np.uint8)), None, spec
    )


def dense(m: QuantizedMatrix) -> Array:
    scales = np.array(m.scales) if m.biases is None else f64(m.scales)
    return dequantize_ref(
        np.array(m.w), scales, None if m.biases is None else f64(m.biases), m.spec
    )


def product(
    op: Any,
    sizes: tuple[int, int, int],
    spec: Quantization,
    dtype: mx.Dtype,
    scales: mx.Dtype,
    extras: str = "",
    activation: str | None = None,
    scale: float = 1.0,
) -> Case:
    """extras: any of n (norm), b (bias), r (residual)."""
    rows, n, k = sizes

    def run() -> list[tuple[mx.array, Array]]:
        m, x = matrix(n, k, spec, scales), normal((rows, k), dtype)
        norm = (normal((k,), dtype), 1e-5) if "n" in extras else None
        bias = normal((n,), dtype) if "b" in extras else None
        residual = (
            normal((rows, n if activation is None else n // 2), dtype) if "r" in extras else None
        )
        y = op(x, m, norm=norm, bias=bias, residual=residual, activation=activation, scale=scale)
        ref = qmv_ref(
            f64(x),
            dense(m),
            norm=None if norm is None else (f64(norm[0]), norm[1]),
            bias=None if bias is None else f64(bias),
            residual=None if residual is None else f64(residual),
            activation=activation,  # type: ignore[arg-type]
            scale=scale,
        )
        return [(y, ref)]

    what = (
        f"{op.__name__} M {rows} N {n} K {k} {spec} x {dtype} scales {scales} {extras} {activation}"
    )
    return what.replace("mlx.core.", ""), run


def _by(tile: QmvTile | WgmmaTile) -> Any:
    """The product by this tile, which its name tells."""

    def by_tile(x: mx.array, m: QuantizedMatrix, **behind: Any) -> mx.array:
        def multiply(x: mx.array) -> mx.array:
            if isinstance(tile, QmvTile):
                return _cuda_product._qmv(x, m, tile, **behind)  # pyright: ignore[reportPrivateUsage]
            return _cuda_qmm.by_tile(x, m, tile, **behind)

        if tile.splits == 1:
            return multiply(x)

        def step(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
            if not alone():  # MLX's own launches know no clusters
                raise AssertionError("not a cluster")
            return [multiply(inputs[0])], state

        mx.eval(x, m.w, m.scales, m.biases, behind)
        return _cuda.traced(step)([x], [])[0][0]

    by_tile.__name__ = f"{'qmm' if isinstance(tile, WgmmaTile) else 'qmv'} by {tuple(tile)}"
    return by_tile


def products() -> Iterator[Case]:
    q4, qmv, qmm = (lambda group: Quantization(4, group)), _cuda.qmv, _cuda.qmm
    yield product(qmv, (1, 37, 576), q4(64), BF, BF)
    yield product(qmv, (1, 37, 576), q4(64), HF, HF)
    yield product(qmv, (1, 1, 32), q4(32), BF, BF)
    yield product(qmv, (3, 5, 96), q4(32), HF, HF, "b")
    yield product(qmv, (4, 64, 256), q4(128), BF, HF, "n", "swiglu", 0.5)
    yield product(qmv, (8, 33, 4160), q4(64), BF, BF, "nr")
    yield product(qmv, (8, 17, 1056), q4(32), HF, FL, "br")
    yield product(qmv, (16, 20, 2304), q4(64), BF, HF, "br", "geglu")
    yield product(qmv, (2, 40, 14336), q4(64), BF, BF, "n")
    yield product(qmv, (8, 16, 14336), q4(64), BF, BF)
    yield product(qmv, (13, 9, 160), q4(32), BF, BF)
    yield product(qmv, (1, 7, 96), Quantization(3, 32), FL, HF)
    yield product(qmv, (5, 6, 128), Quantization(5, 64), FL, BF, "n", "swiglu")
    yield product(qmv, (2, 9, 192), Quantization(6, 64), BF, BF, "r")
    yield product(qmv, (3, 4, 256), Quantization(8, 128), HF, HF)
    yield product(qmv, (1, 5, 64), Quantization(2, 32), FL, FL, "b")
    yield product(qmv, (6, 8, 576), q4(64), FL, HF)
    yield product(qmv, (2, 5, 96), Quantization(4, 32, "mxfp4"), FL, U8)
    yield product(qmv, (2, 5, 96), Quantization(4, 16, "nvfp4"), BF, U8)
    yield product(qmv, (1, 6, 96), Quantization(8, 32, "mxfp8"), HF, U8, "", "swiglu")
    for group, tile in TILES:
        extras = "nr" if tile.splits == 1 else "br"
        yield product(_by(tile), (tile.rows, 6406, 512), q4(group), BF, BF, extras, "swiglu")
        yield product(_by(tile), (tile.rows, 6403, 512), q4(group), HF, HF)
    for k, tile in UNEVEN:
        extras = "n" if tile.splits == 1 else "b"
        shape, group = (max(1, tile.rows - 1), 6406, k), 32 if k % 64 else 64
        yield product(_by(tile), shape, q4(group), BF, BF, extras)
    if _cuda_product.generation() == 9:
        yield from wgmma_products()
    yield product(qmv, (5, 33, 672), q4(32), BF, BF, "nbr")
    yield product(qmm, (9, 34, 4096), q4(64), HF, HF, "nr", "swiglu")
    yield product(qmm, (16, 6401, 576), q4(64), BF, BF, "br")
    yield product(qmm, (13, 70, 14336), q4(128), BF, BF)
    yield product(qmm, (17, 37, 576), q4(64), BF, BF)
    yield product(qmm, (33, 6, 96), q4(32), HF, HF, "b")
    yield product(qmm, (65, 64, 256), q4(128), BF, HF, "n", "swiglu", 0.5)
    yield product(qmm, (140, 136, 192), q4(64), BF, BF, "nr")
    yield product(qmm, (20, 40, 1056), q4(32), HF, FL, "br")
    yield product(qmm, (129, 130, 288), q4(32), HF, BF, "nbr", "geglu")
    yield product(qmm, (1000, 1001, 1024), q4(64), BF, BF)
    yield product(qmm, (300, 64, 4864), q4(64), HF, HF)


def wgmma_products() -> Iterator[Case]:
    """Every tile, where a block has two of them or three, and shared by clusters."""
    q4 = Quantization(4, 64)
    for tile in WGMMA_TILES:
        along = tile.blocks * SMS * 5 // (2 * 3)  # with three along m: 2.5 tiles a block
        m, n = tile.bm * 3 - 5, tile.bn * along
        yield product(_by(tile), (m, n - 2, 1088), q4, BF, BF, "br")
        yield product(_by(tile), (m, n - 10, 1024), q4, HF, HF, "n", "swiglu")
        for splits in (2, 3, 8):
            clusters = _by(tile._replace(splits=splits))
            yield product(clusters, (tile.bm + 3, tile.bn + 5, 2112), q4, BF, BF, "r")
    odd = WgmmaTile(64, 2, 6, 1, 3)
    yield product(_by(odd), (150, 128 * 90 + 7, 1024), q4, BF, BF, "br")
    yield product(_by(odd), (150, 128 * 90, 640), q4, BF, BF)  # fewer runs than stages


def rows() -> Iterator[Case]:
    for m, k, dtype, weight in ((3, 576, BF, BF), (2, 77, HF, FL), (1, 9000, FL, FL)):

        def norm(m: int = m, k: int = k, dtype: Any = dtype, weight: Any = weight) -> Any:
            x, w = normal((m, k), dtype, 3), normal((k,), weight)
            beside = x + 100
            return [
                (_cuda.rms_norm(x, w, 1e-5), rms_norm_ref(f64(x), f64(w), 1e-5)),
                (
                    _cuda.rms_norm(beside, w, 1e-5, centered=True),
                    rms_norm_ref(f64(beside), f64(w), 1e-5, centered=True),
                ),
            ]

        yield f"rms_norm and layer norm M {m} K {k} {dtype}", norm

    def swiglu() -> Any:
        x = normal((3, 74), HF)
        return [(_cuda.swiglu(x), gated_ref(f64(x), "swiglu"))]

    yield "swiglu", swiglu

    def argmax() -> Any:
        x = np.array(normal((4, 151936), FL))
        x[2, 77] = np.nan
        limit = x.shape[1] - 100
        return [(_cuda.argmax(mx.array(x), limit), argmax_ref(x, limit).astype(np.float64))]

    yield "argmax", argmax
    for spec, k, scales, dtype in (
        (Quantization(4, 64), 576, BF, BF),
        (Quantization(6, 32), 96, HF, FL),
        (Quantization(4, 16, "nvfp4"), 48, U8, HF),
    ):

        def embed(spec: Any = spec, k: int = k, scales: Any = scales, dtype: Any = dtype) -> Any:
            m, ids = matrix(11, k, spec, scales), np.array([3, 10, 0, 3, 5])
            y = _cuda.embedding(mx.array(ids.astype(np.int32)), m, dtype=dtype, scale=2.0)
            return [(y, dense(m)[ids] * 2)]

        yield f"embedding {spec}", embed


def mixtures() -> Iterator[Case]:
    for tokens, top, count, n, k, group, dtype, activation in (
        (1, 2, 5, 48, 256, 64, BF, "swiglu"),
        (5, 4, 8, 37, 96, 32, HF, None),
        (8, 8, 128, 64, 1024, 64, BF, "swiglu"),
        (40, 2, 8, 130, 256, 64, BF, "swiglu"),
        (300, 4, 6, 96, 576, 64, HF, None),
        (130, 8, 40, 70, 128, 128, BF, None),
    ):

        def run(
            tokens: int = tokens, top: int = top, count: int = count, n: int = n, k: int = k,
            group: int = group, dtype: Any = dtype, activation: Any = activation,
        ) -> Any:  # fmt: skip
            logits, x = normal((tokens, count), dtype, 3), normal((tokens, k), dtype)
            m = matrix(count * n, k, Quantization(4, group), dtype)
            expert, row, place, share = _cuda.route(logits, top, True)
            chosen, share_ref = route_ref(f64(logits), top, renormalize=True)
            e, r, p = (np.array(a) for a in (expert, row, place))
            order = np.argsort(-np.take_along_axis(f64(logits), e[p], 1), axis=1, kind="stable")
            mine = np.take_along_axis(e[p], order, 1)
            values, best = (np.take_along_axis(f64(logits), c, 1) for c in (mine, chosen))
            if (
                (values != best).any()
                or np.diff(e).min() < 0
                or (r[p] != np.arange(tokens)[:, None]).any()
            ):
                raise AssertionError("route chose smaller logits, or not in the order of experts")
            shares = np.take_along_axis(f64(share), order, 1)
            y = _cuda.gather_qmm(
                x, m, row, expert, count=count, activation=activation, grouped=tokens > 1
            )
            w = dense(m).reshape(count, n, k)
            pairs = normal((tokens * top, k), dtype)
            back = _cuda.gather_qmm(
                pairs, m, None, expert, count=count, activation=None, grouped=tokens > 1
            )
            every = np.arange(len(e))
            residual = normal((tokens, y.shape[1]), dtype)
            return [
                (mx.array(shares.astype(np.float32)), share_ref),
                (y, gather_qmm_ref(f64(x), w, r, e, activation=activation)),
                (back, gather_qmm_ref(f64(pairs), w, every, e)),
                (
                    _cuda.combine(y, place, share, residual),
                    combine_ref(f64(y), p, f64(share), f64(residual)),
                ),
            ]

        yield f"mixture M {tokens} top {top} of {count} N {n} K {k} {dtype}", run

    def dense_few() -> Any:
        x, w, bias = normal((3, 96), BF), normal((37, 96), HF), normal((37,), BF)
        y = _cuda.gemm(x, w, bias=bias, residual=None, activation=None, scale=0.5)
        return [(y, f64(x) @ f64(w).T * 0.5 + f64(bias))]

    yield "gemm of few rows", dense_few

    def parts() -> Any:
        x, a, b = normal((3, 200), BF, 3), normal((64,), BF), normal((48,), BF)
        ref = f64(x)
        ref[:, :64] = rms_norm_ref(ref[:, :64], f64(a), 1e-5)
        ref[:, 64:112] = rms_norm_ref(ref[:, 64:112], f64(b), 1e-5)
        rest = normal((3, 200), BF)
        w = normal((200,), HF)
        behind = _cuda.rms_norm(x, w, 1e-5, rest)
        return [
            (_cuda.rms_norm_parts(x, [a, b], 1e-5), ref),
            (behind, rms_norm_ref(f64(x), f64(w), 1e-5, f64(rest))),
            (_cuda.softcap(x, 2.0), softcap_ref(f64(x), 2.0)),
        ]

    yield "rms_norm of parts, with a residual; softcap", parts


def ropes() -> Iterator[Case]:
    for b, l, h, hkv, d, r, c, offset, dtype, kept, norm in (
        (1, 1, 9, 3, 64, 64, 32, 5, BF, BF, False),
        (2, 3, 4, 2, 48, 32, 16, 7, HF, HF, True),
        (1, 5, 2, 1, 128, 128, 8, 0, FL, FL, True),
    ):

        def run(
            b: int = b, l: int = l, h: int = h, hkv: int = hkv, d: int = d, r: int = r, c: int = c,
            offset: int = offset, dtype: Any = dtype, kept: Any = kept, norm: bool = norm,
        ) -> Any:  # fmt: skip
            qkv = normal((b * l, (h + 2 * hkv) * d), dtype)
            k, v = (normal((b, hkv, c, d), kept) for _ in range(2))
            mx.eval(k, v)
            k_ref, v_ref = f64(k), f64(v)
            inverse = 1 / 10000 ** (np.arange(r // 2) / (r / 2))
            angle = np.arange(c)[:, None] * inverse
            table = mx.array(np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32))
            qn, kn = (normal((d,), dtype), normal((d,), dtype)) if norm else (None, None)
            q, k, v = _cuda.rope(
                qkv,
                k,
                v,
                mx.array([offset], mx.int32),
                table,
                heads=h,
                q_norm=qn,
                k_norm=kn,
                eps=1e-6,
            )
            x = f64(qkv).reshape(b, l, -1, d).transpose(0, 2, 1, 3)
            xq, xk, xv = x[:, :h], x[:, h : h + hkv], x[:, h + hkv :]
            if qn is not None and kn is not None:
                xq, xk = rms_norm_ref(xq, f64(qn), 1e-6), rms_norm_ref(xk, f64(kn), 1e-6)
            at = np.arange(offset, offset + l)
            k_ref[:, :, at], v_ref[:, :, at] = rope_ref(xk, at, inverse), xv
            return [(q, rope_ref(xq, at, inverse)), (k, k_ref), (v, v_ref)]

        yield f"rope B {b} L {l} D {d} {dtype} norm {norm}", run


def sdpas() -> Iterator[Case]:
    for b, h, hkv, l, d, c, offset, dtype, window, cap in (
        (1, 9, 3, 1, 64, 256, 100, BF, 0, 0),
        (1, 32, 8, 1, 128, 4096, 3000, BF, 0, 0),
        (2, 4, 1, 2, 128, 512, 301, HF, 0, 0),
        (1, 2, 2, 1, 80, 64, 0, FL, 0, 0),
        (1, 6, 2, 3, 20, 128, 90, BF, 33, 0),
        (1, 2, 1, 1, 256, 320, 315, HF, 0, 5.0),
        (1, 2, 1, 12, 33, 70, 50, FL, 9, 0),
        (1, 4, 2, 70, 64, 256, 50, BF, 0, 0),
        (2, 2, 1, 65, 128, 130, 0, HF, 0, 0),
        (1, 2, 1, 130, 80, 320, 100, BF, 40, 0),
        (1, 1, 1, 33, 256, 64, 20, HF, 0, 7.0),
        (1, 4, 2, 600, 128, 700, 90, BF, 0, 0),
        (2, 6, 2, 333, 64, 500, 100, BF, 70, 0),
        (1, 3, 3, 129, 128, 129, 0, HF, 0, 20.0),
        (1, 2, 1, 9, 64, 40, 30, HF, 0, 0),
    ):

        def run(
            b: int = b, h: int = h, hkv: int = hkv, l: int = l, d: int = d, c: int = c,
            offset: int = offset, dtype: Any = dtype, window: int = window, cap: float = cap,
        ) -> Any:  # fmt: skip
            q = normal((b, h, l, d), dtype)
            held = [np.array(normal((b, hkv, c, d), FL)) for _ in range(2)]
            for a in held:
                a[:, :, offset + l :] = np.nan  # never written: must not matter
            k, v = (mx.array(a).astype(dtype) for a in held)
            settings: Any = {"scale": d**-0.5, "window": window, "softcap": cap}
            y = _cuda.sdpa(q, k, v, mx.array([offset], mx.int32), **settings)
            return [(y, sdpa_ref(f64(q), f64(k), f64(v), offset, **settings))]

        yield (
            f"sdpa B {b} H {h}/{hkv} L {l} D {d} C {c} at {offset} {dtype} w {window} cap {cap}",
            run,
        )


def attends() -> Iterator[Case]:
    for b, h, hkv, d, r, c, offset, dtype, norm, window, cap in (
        (1, 9, 3, 64, 64, 256, 100, BF, False, 0, 0),
        (1, 32, 8, 128, 128, 1024, 700, BF, False, 0, 0),
        (2, 16, 2, 128, 64, 512, 301, HF, True, 0, 0),
        (1, 2, 2, 80, 80, 64, 0, BF, True, 0, 0),
        (1, 6, 2, 24, 8, 32, 31, BF, False, 20, 0),
        (1, 4, 1, 256, 256, 320, 315, HF, True, 0, 5.0),
        (1, 8, 2, 128, 0, 4096, 3000, BF, False, 513, 0),
    ):

        def run(
            b: int = b, h: int = h, hkv: int = hkv, d: int = d, r: int = r, c: int = c,
            offset: int = offset, dtype: Any = dtype, norm: bool = norm, window: int = window,
            cap: float = cap,
        ) -> Any:  # fmt: skip
            qkv = normal((b, (h + 2 * hkv) * d), dtype)
            held = [np.array(normal((b, hkv, c, d), FL)) for _ in range(2)]
            for a in held:
                a[:, :, offset:] = np.nan  # not written yet: must not matter
            k, v = (mx.array(a).astype(dtype) for a in held)
            mx.eval(k, v)
            k_ref, v_ref = f64(k), f64(v)
            inverse = 1 / 10000 ** (np.arange(r // 2) / max(r / 2, 1))
            angle = np.arange(c)[:, None] * inverse
            table = mx.array(np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32))
            qn, kn = (normal((d,), dtype), normal((d,), dtype)) if norm else (None, None)
            settings: Any = {"scale": d**-0.5, "window": window, "softcap": cap}

            def step(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
                fused = _cuda.attend(
                    inputs[0], *state, inputs[1], table, heads=h, q_norm=qn, k_norm=kn, eps=1e-6,
                    **settings,
                )  # fmt: skip
                if fused is None:
                    raise AssertionError("attend has no kernel for this")
                return [fused[0]], list(fused[1:])

            offsets = mx.array([offset] * 4, mx.int32)
            (y,), (k, v) = _cuda.traced(step)([qkv, offsets], [k, v])
            x = f64(qkv).reshape(b, 1, -1, d).transpose(0, 2, 1, 3)
            xq, xk, xv = x[:, :h], x[:, h : h + hkv], x[:, h + hkv :]
            if qn is not None and kn is not None:
                xq, xk = rms_norm_ref(xq, f64(qn), 1e-6), rms_norm_ref(xk, f64(kn), 1e-6)
            at = np.arange(offset, offset + 1)
            k_ref[:, :, at], v_ref[:, :, at] = rope_ref(xk, at, inverse), xv
            y_ref = sdpa_ref(rope_ref(xq, at, inverse), k_ref, v_ref, offset, **settings)
            end = offset + 1
            return [
                (y, y_ref),
                (k[:, :, :end], k_ref[:, :, :end]),
                (v[:, :, :end], v_ref[:, :, :end]),
            ]

        yield f"attend B {b} H {h}/{hkv} D {d} R {r} C {c} at {offset} {dtype} w {window}", run


def chain() -> Iterator[Case]:
    def run() -> Any:
        """A decode step, traced: rope appends, sdpa reads, twice."""
        d, c = 64, 256
        table = mx.stack([mx.ones((c, d // 2)), mx.zeros((c, d // 2))], axis=-1)

        def step(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
            (qkv, offset), (k, v) = inputs, state
            q, k, v = _cuda.rope(qkv, k, v, offset, table, heads=4, q_norm=None, k_norm=None, eps=0)
            return [_cuda.sdpa(q, k, v, offset, scale=0.125, window=0, softcap=0)], [k, v]

        traced = _cuda.traced(step)
        k, v = (mx.zeros((1, 2, c, d), BF) for _ in range(2))
        kept: list[Array] = []
        out: list[tuple[mx.array, Array]] = []
        for t in range(5):
            qkv = normal((1, 8 * d), BF)
            (y,), (k, v) = traced([qkv, mx.array([t], mx.int32)], [k, v])
            kept.append(f64(qkv).reshape(8, d))
            q = kept[-1][None, :4, None]
            keys, values = (np.stack([a[i : i + 2] for a in kept], 1)[None] for i in (4, 6))
            out.append((y, sdpa_ref(q, keys, values, t, scale=0.125)))
        return out

    yield "chain of traced steps", run


def against_mlx() -> Iterator[str]:
    """How far a bfloat16 product is from float64, ours and MLX's own, relative to the result.

    Root mean squares over the first columns of the result, as many as make a quick reference.
    """
    some = 1024
    for n, k in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (1024, 1024)):
        m = matrix(n, k, Quantization(4, 64), BF)
        w, scales, biases = _arrays(m)
        top = QuantizedMatrix.of(w[:some], scales[:some], biases[:some], m.spec)
        known = dense(top)
        for rows in (1, 4, 8, 64, 512):
            x = normal((rows, k), BF)
            ref = f64(x) @ known.T
            op = _cuda.qmv if rows <= _cuda.QMV_ROWS else _cuda.qmm
            ours = op(x, m, norm=None, bias=None, residual=None, activation=None, scale=1.0)
            mlx = mx.quantized_matmul(x, w, scales, biases, group_size=64, bits=4)
            rounded = mx.array(ref.astype(np.float32)).astype(BF)  # what no kernel can avoid
            off = (_rms(f64(y[:, :some]) - ref) / _rms(ref) for y in (ours, mlx, rounded))
            ours, mlx, least = off
            yield f"{n}x{k} M {rows}: ours {ours:.2e}, MLX {mlx:.2e}, rounding alone {least:.2e}"


def _arrays(m: QuantizedMatrix) -> tuple[mx.array, mx.array, mx.array]:
    assert m.w is not None and m.scales is not None and m.biases is not None
    return m.w, m.scales, m.biases


def _rms(a: Array) -> float:
    return float(np.sqrt((a**2).mean()))


def main() -> int:
    if sys.argv[1:] == ["--against-mlx"]:
        for line in against_mlx():
            print(line, flush=True)
        return 0
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    bad = 0
    for label, run in [*products(), *rows(), *mixtures(), *ropes(), *sdpas(), *attends(), *chain()]:
        if wanted not in label:
            continue
        started, worst, problem = time.perf_counter(), 0.0, ""
        try:
            for got, ref in run():
                if got.shape != ref.shape:
                    problem = f"shape {got.shape}, not {ref.shape}"
                    break
                error = np.abs(f64(got) - ref).max() / max(float(np.abs(ref).max()), 1e-30)
                limit = ALLOWED.get(got.dtype, 0.0)
                worst = max(worst, float(error)) if np.isfinite(error) else float("inf")
                if not error <= limit:
                    problem = f"error {error:.1e} > {limit:.1e}"
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error)[:1500]}"
            traceback.print_exc()
        bad += bool(problem)
        took = time.perf_counter() - started
        print(
            f"{'BAD' if problem else 'ok '} {took:5.1f}s {worst:8.1e} {label} {problem}", flush=True
        )
    print(f"{bad} wrong")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())

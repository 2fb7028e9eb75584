"""The fallback: MLX's own ops, the products in float32. Right everywhere, slow on a CPU.

MLX's quantized product sums in the type of x on some devices, so x and scales go in as float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from qrun.ops._launch import Norm, Step, enqueued, zeros
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.sample import on_device

NAME = "mlx"
QMV_ROWS = 8
PREFILL_ROWS = 512
GATHERS = False

sample = on_device
once = enqueued
blank = zeros
attend = None


def traced(step: Step) -> Step:
    return enqueued(step)  # mx.compile would need a C++ compiler at run time on a CPU


def pack(m: QuantizedMatrix, count: int) -> mx.array | None:
    return None


def qmv(
    x: mx.array,
    m: QuantizedMatrix,
    *,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    h = x.astype(mx.float32)
    if norm is not None:
        h = mx.fast.rms_norm(h, norm[0].astype(mx.float32), norm[1])
    y = _product(h, m)
    if scale != 1.0:
        y = y * scale
    return epilogue(y, bias, residual, activation).astype(x.dtype)


qmm = qmv


def gemm(
    x: mx.array,
    w: mx.array,
    *,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    if mx.default_device().type == mx.cpu or w.dtype != x.dtype:
        # MLX's CPU backend sums 16-bit products in 16 bits; float32 is right and faster there.
        y = x.astype(mx.float32) @ w.astype(mx.float32).T
    else:
        y = (x @ w.T).astype(mx.float32)
    return epilogue(y if scale == 1.0 else y * scale, bias, residual, activation).astype(x.dtype)


def gather_qmm(
    x: mx.array,
    m: QuantizedMatrix,
    row: mx.array | None,
    expert: mx.array,
    *,
    count: int,
    activation: str | None,
    grouped: bool,
) -> mx.array:
    def each(a: mx.array) -> mx.array:
        """(E*N, ...) -> (E, N, ...)."""
        return a.reshape(count, -1, a.shape[1])

    w, scales, biases = _arrays(m)
    y = mx.gather_qmm(
        x.astype(mx.float32)[:, None],
        each(w),
        each(scales),
        None if biases is None else each(biases),
        lhs_indices=mx.arange(x.shape[0]) if row is None else row,
        rhs_indices=expert,
        transpose=True,
        sorted_indices=grouped,
        **_spec(m),
    )
    return epilogue(y[:, 0], None, None, activation).astype(x.dtype)


def route(
    logits: mx.array, top: int, renormalize: bool
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    rows, logits = logits.shape[0], logits.astype(mx.float32)
    ranks = mx.where(mx.isnan(logits), float("inf"), logits)
    chosen = mx.argpartition(ranks, kth=-top, axis=-1)[:, -top:]
    if renormalize:
        share = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1)
    else:
        share = mx.take_along_axis(mx.softmax(logits, axis=-1), chosen, axis=-1)
    expert = chosen.reshape(-1).astype(mx.int32)
    if rows == 1:
        return expert, mx.zeros((top,), mx.int32), mx.arange(top, dtype=mx.int32)[None], share
    order = mx.argsort(expert)
    place = mx.argsort(order).astype(mx.int32).reshape(rows, top)
    return expert[order], (order // top).astype(mx.int32), place, share


def combine(x: mx.array, place: mx.array, share: mx.array, residual: mx.array) -> mx.array:
    y = share[:, None] @ x.astype(mx.float32)[place]  # (M, 1, N)
    return (y[:, 0] + residual.astype(mx.float32)).astype(x.dtype)


def _product(h: mx.array, m: QuantizedMatrix) -> mx.array:
    w, scales, biases = _arrays(m)
    return mx.quantized_matmul(h, w, scales, biases, transpose=True, **_spec(m))


def _arrays(m: QuantizedMatrix) -> tuple[mx.array, mx.array, mx.array | None]:
    if m.w is None or m.scales is None:
        raise ValueError("this matrix was packed for another backend")
    if m.biases is None:
        return m.w, m.scales, None
    return m.w, m.scales.astype(mx.float32), m.biases.astype(mx.float32)


def _spec(m: QuantizedMatrix) -> dict[str, Any]:
    return {"bits": m.spec.bits, "group_size": m.spec.group_size, "mode": m.spec.mode}


def epilogue(
    y: mx.array, bias: mx.array | None, residual: mx.array | None, activation: str | None
) -> mx.array:
    """bias, activation and residual behind a float32 product y (M, N)."""
    if bias is not None:
        y = y + bias.astype(mx.float32)
    if activation is not None:
        gate, up = y[:, 0::2], y[:, 1::2]
        y = gate * GATES[activation](gate) * up
    if residual is not None:
        y = y + residual.astype(mx.float32)
    return y


def _gelu(gate: mx.array) -> mx.array:
    """What the gate is multiplied by in the tanh form of GELU. Plain ops: nothing is compiled."""
    return 0.5 * (1 + mx.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)))


GATES: dict[str, Callable[[mx.array], mx.array]] = {"swiglu": mx.sigmoid, "geglu": _gelu}


def rms_norm(
    x: mx.array,
    weight: mx.array,
    eps: float,
    residual: mx.array | None = None,
    centered: bool = False,
) -> mx.array:
    h = x.astype(mx.float32)
    if centered:
        h = h - h.mean(axis=-1, keepdims=True)
    y = mx.fast.rms_norm(h, weight.astype(mx.float32), eps)
    return (y if residual is None else y + residual).astype(x.dtype)


rms_norm_parts = None


def softcap(x: mx.array, limit: float) -> mx.array:
    return (mx.tanh(x.astype(mx.float32) / limit) * limit).astype(x.dtype)


def swiglu(gate_up: mx.array) -> mx.array:
    return epilogue(gate_up.astype(mx.float32), None, None, "swiglu").astype(gate_up.dtype)


def argmax(logits: mx.array, limit: int) -> mx.array:
    logits = logits[:, :limit]
    # A sum is finite only if every term is: one pass, and no wait for the device.
    finite = mx.isfinite(mx.sum(logits.astype(mx.float32), axis=-1))
    return mx.where(finite, mx.argmax(logits, axis=-1).astype(mx.int32), -1)


def embedding(ids: mx.array, m: QuantizedMatrix, *, dtype: mx.Dtype, scale: float) -> mx.array:
    w, scales, biases = _arrays(m)
    rows = mx.dequantize(
        w[ids], scales[ids], None if biases is None else biases[ids], **_spec(m), dtype=mx.float32
    )
    return (rows * scale).astype(dtype)


def rope(
    qkv: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    table: mx.array,
    *,
    heads: int,
    q_norm: mx.array | None,
    k_norm: mx.array | None,
    eps: float,
) -> tuple[mx.array, mx.array, mx.array]:
    batch, kv_heads, _, d = k_cache.shape
    length = qkv.shape[0] // batch
    x = qkv.reshape(batch, length, -1, d).swapaxes(1, 2).astype(mx.float32)
    q, k, v = mx.split(x, [heads, heads + kv_heads], axis=1)
    if q_norm is not None:
        q = mx.fast.rms_norm(q, q_norm.astype(mx.float32), eps)
    if k_norm is not None:
        k = mx.fast.rms_norm(k, k_norm.astype(mx.float32), eps)
    offset = offset[:1]
    angles = mx.take(table, mx.arange(length) + offset, axis=0)
    k = _rotate(k, angles).astype(k_cache.dtype)
    k_cache = mx.slice_update(k_cache, k, offset, axes=(2,))
    v_cache = mx.slice_update(v_cache, v.astype(v_cache.dtype), offset, axes=(2,))
    return _rotate(q, angles).astype(qkv.dtype), k_cache, v_cache


def _rotate(x: mx.array, angles: mx.array) -> mx.array:
    """x (B, H, L, D) by angles (L, R/2, 2)."""
    half = angles.shape[1]
    cos, sin = angles[:, :, 0], angles[:, :, 1]
    a, b = x[..., :half], x[..., half : 2 * half]
    parts = [a * cos - b * sin, b * cos + a * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return mx.concatenate(parts, axis=-1)


def sdpa(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> mx.array:
    batch, heads, length, d = q.shape
    group = heads // k_cache.shape[1]
    keys = mx.arange(k_cache.shape[2])
    offset = offset[:1]
    i = (mx.arange(length) + offset)[:, None]
    seen = (keys <= i) & (keys > i - window) if window else keys <= i
    # Positions behind the newest token were never written: they must not reach the sum as 0 * NaN.
    held = (keys < offset + length)[:, None]
    k = mx.where(held, k_cache, 0).astype(mx.float32)
    v = mx.where(held, v_cache, 0).astype(mx.float32)
    grouped = q.astype(mx.float32).reshape(batch, -1, group * length, d)
    scores = (grouped @ k.swapaxes(-1, -2) * scale).reshape(batch, heads, length, -1)
    if softcap:
        scores = softcap * mx.tanh(scores / softcap)
    p = mx.softmax(mx.where(seen, scores, -float("inf")), axis=-1)
    out = p.reshape(batch, -1, group * length, p.shape[-1]) @ v
    out = out.reshape(batch, heads, length, d).swapaxes(1, 2).reshape(batch * length, heads * d)
    return out.astype(q.dtype)

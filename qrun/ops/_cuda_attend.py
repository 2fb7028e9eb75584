"""attend as a CUDA kernel. Shapes and meaning: attend.py."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops import _cuda_product
from qrun.ops._cuda_launch import (
    Constant,
    Recipe,
    Shape,
    after,
    alone,
    ceil_div,
    launch,
    literal,
    pointer,
)

THREADS, CHUNK, STAGES = 256, 64, 2  # of attend.cuh
LONGEST = 8192  # positions of a cache


def attend(
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
    scale: float,
    window: int,
    softcap: float,
) -> tuple[mx.array, mx.array, mx.array] | None:
    """None where rope and sdpa have to do it: clusters of blocks need Hopper and launches of our
    own, and long contexts want more blocks than a cluster has.
    """
    capacity, d = k_cache.shape[2:]
    alike = qkv.dtype == k_cache.dtype == v_cache.dtype != mx.float32
    if not alone() or _cuda_product.generation() != 9 or not alike:
        return None
    if d % 8 or d > 256 or capacity > LONGEST:
        return None
    arrays = {"qkv": qkv, "k_cache": k_cache, "v_cache": v_cache, "offset": offset, "table": table}
    inputs = {**arrays, "q_norm": q_norm, "k_norm": k_norm}
    y = launch(_attend_recipe, inputs, heads, eps, scale, window, softcap)[0]
    k_cache, v_cache = after([k_cache, v_cache], y)
    return y, k_cache, v_cache


def _attend_recipe(
    heads: int,
    eps: float,
    scale: float,
    window: int,
    softcap: float,
    *,
    qkv: mx.array,
    k_cache: mx.array,
    table: mx.array,
    q_norm: mx.array | None,
    k_norm: mx.array | None,
    **_: object,
) -> Recipe:
    batch, kv_heads, capacity, d = k_cache.shape
    group, half = heads // kv_heads, table.shape[1]
    rows = min(group, 8)
    splits = next(s for s in (8, 4, 2, 1) if s == 1 or capacity >= 32 * s)
    constants: dict[str, Constant] = {"T": qkv.dtype, "D": d, "HALF": half, "ROWS": rows}
    constants |= {"STAGES": STAGES, "SPLITS": splits}
    constants["QN"] = mx.float32 if q_norm is None else q_norm.dtype
    constants["KN"] = mx.float32 if k_norm is None else k_norm.dtype
    return Recipe(
        "attend/attend.cuh",
        "qrun::Attend<T, QN, KN, D, HALF, ROWS, STAGES, SPLITS>{qkv, offset, table, "
        f"{pointer('q_norm', q_norm, 'QN')}, {pointer('k_norm', k_norm, 'KN')}, {literal(eps)}, "
        f"{literal(scale)}, {literal(softcap)}, {window}, y, const_cast<T*>(k_cache), "
        f"const_cast<T*>(v_cache), {heads}, {kv_heads}, k_cache_shape[2]}}.run();",
        {"y": ((batch, heads * d), qkv.dtype)},
        constants,
        (splits, batch * kv_heads, ceil_div(group, rows)),
        Shape(THREADS, 1, _shared(d, rows, splits), splits),
    )


def _shared(d: int, rows: int, splits: int) -> int:
    """Bytes of shared memory: `SHARED` of the kernel."""
    heads = (8 + STAGES * 2 * CHUNK) * (ceil_div(d, 32) * 32 + 8) * 2
    sums = CHUNK // 16 * rows * (d + 2) + splits * (rows * 2 + ceil_div(rows * d, splits))
    return heads + sums * 4

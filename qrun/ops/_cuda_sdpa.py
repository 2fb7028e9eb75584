"""Attention over a cache, as CUDA kernels. Shapes and meaning: sdpa.py."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops import _cuda_product
from qrun.ops._cuda_launch import Output, Recipe, Shape, ceil_div, launch, literal


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
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "offset": offset}
    d, same = q.shape[3], q.dtype == k_cache.dtype == v_cache.dtype != mx.float32
    if q.shape[2] > 8 and same and d % 16 == 0 and d <= 256:
        wide = d in (64, 128) and _cuda_product.generation() == 9
        recipe = _wgmma_recipe if wide else _prefill_recipe
        return launch(recipe, {**arrays}, scale, softcap, window)[0]
    out = launch(_decode_recipe, {**arrays}, scale, softcap, window)
    if len(out) == 1:
        return out[0]
    inputs: dict[str, mx.array | None] = {"values": out[0], "stats": out[1]}
    return launch(_merge_recipe, inputs, q.shape[0], q.shape[1], q.dtype)[0]


def _sizes(scale: float, softcap: float, window: int) -> str:
    return (
        f"{literal(scale)}, {literal(softcap)}, {window}, q_shape[1], k_cache_shape[1], "
        "q_shape[2], k_cache_shape[2]"
    )


def _prefill_recipe(
    scale: float, softcap: float, window: int, *, q: mx.array, **_: object
) -> Recipe:
    batch, heads, length, d = q.shape
    keys, sizes = 64 if d <= 128 else 32, _sizes(scale, softcap, window)
    return Recipe(
        "sdpa/sdpa_prefill.cuh",
        f"qrun::SdpaPrefill<T, D, BK>{{q, k_cache, v_cache, offset, y, {sizes}}}.run();",
        {"y": ((batch * length, heads * d), q.dtype)},
        {"T": q.dtype, "D": d, "BK": keys},
        (heads, ceil_div(length, 64), batch),
        Shape(128, 1, 2 * 2 * keys * (d + 8) * 2),
    )


def _wgmma_recipe(scale: float, softcap: float, window: int, *, q: mx.array, **_: object) -> Recipe:
    batch, heads, length, d = q.shape
    return Recipe(
        "sdpa/sdpa_wgmma.cuh",
        "qrun::SdpaWgmma<T, D>{q, k_cache, v_cache, offset, y, "
        f"{_sizes(scale, softcap, window)}}}.run();",
        {"y": ((batch * length, heads * d), q.dtype)},
        {"T": q.dtype, "D": d},
        (heads, ceil_div(length, 128), batch),
        Shape(256, 2 if d == 64 else 1, 3 * 2 * 64 * d * 2 + 1024),
    )


def _decode_recipe(
    scale: float, softcap: float, window: int, *, q: mx.array, k_cache: mx.array, **_: object
) -> Recipe:
    """One output, or, where several blocks share the keys of a query, parts for `_merge_recipe`."""
    batch, heads, length, d = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    alike = heads // kv_heads * length  # queries that share a key
    rows, warps = min(alike, 4 if d <= 128 else 2 if d <= 256 else 1), 4
    vec = next(v for v in (8, 4, 2, 1) if d % v == 0)
    blocks = batch * kv_heads * ceil_div(alike, rows)
    # Enough blocks for every SM twice, but at least 64 keys in each.
    splits = max(1, min(32, ceil_div(264, blocks), capacity // 64))
    one: dict[str, Output] = {"y": ((batch * length, heads * d), q.dtype)}
    parts: dict[str, Output] = {
        "values": ((batch * heads * length, splits, d), mx.float32),
        "stats": ((batch * heads * length, splits, 2), mx.float32),
    }
    where = "y, nullptr, nullptr" if splits == 1 else "nullptr, values, stats"
    return Recipe(
        "sdpa/sdpa_decode.cuh",
        "qrun::SdpaDecode<T, C, D, VEC, ROWS, WARPS>{q, k_cache, v_cache, offset, "
        f"{_sizes(scale, softcap, window)}, {splits}}}.run({where});",
        one if splits == 1 else parts,
        {"T": q.dtype, "C": k_cache.dtype, "D": d, "VEC": vec, "ROWS": rows, "WARPS": warps},
        (splits, batch * kv_heads, ceil_div(alike, rows)),
        Shape(32 * warps, 1, warps * rows * (d + 2) * 4),
    )


def _merge_recipe(
    batch: int, heads: int, dtype: mx.Dtype, *, values: mx.array, stats: mx.array
) -> Recipe:
    queries, _, d = values.shape
    return Recipe(
        "sdpa/sdpa_decode.cuh",
        f"qrun::sdpa_merge<D>(values, stats, y, values_shape[1], {heads}, "
        f"values_shape[0] / {batch * heads});",
        {"y": ((queries // heads, heads * d), dtype)},
        {"D": d},
        (queries, 1, 1),
        Shape(ceil_div(d, 32) * 32),
    )

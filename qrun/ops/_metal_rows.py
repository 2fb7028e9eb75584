"""Attention and the ops between products as Metal calls."""

from __future__ import annotations

import mlx.core as mx

from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_call import Call, call, ceil_div, literal
from qrun.ops._metal_product import (
    Packed,
    constant,
    matrix_inputs,
    packed,
    scheme,
    scheme_template,
)


def sdpa_decode_call(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0,
    splits: int | None = None,
) -> Call:
    """q (B, H, L, D), few L. One split: the result (B, L, H * D). Else values and stats."""
    b, h, length, d = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    splits = splits or geometry.decode_splits(capacity)
    alike = h // kv_heads * length  # queries that share a key
    chunks = ceil_div(alike, geometry.decode_queries(d))
    simdgroups = geometry.DECODE_SIMDGROUPS
    where = "y, nullptr, nullptr" if splits == 1 else "nullptr, values, stats"
    source = f"""
using Kernel = SdpaDecode<T, D, QUERIES, SIMDGROUPS, SPLITS>;
threadgroup float shared[Kernel::SHARED];
Kernel::run(q, k_cache, v_cache, offset, {where}, {literal(scale)}, {window}, {literal(softcap)},
    q_shape[1], k_cache_shape[1], q_shape[2], k_cache_shape[2], shared,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {"y": ((b, length, h * d), q.dtype)}
    if splits > 1:
        outputs = {
            "values": ((b, h, length, splits, d), mx.float32),
            "stats": ((b, h, length, splits, 2), mx.float32),
        }
    return call(
        "sdpa_decode",
        "sdpa/sdpa_decode.metal",
        source,
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "offset": offset},
        outputs,
        {
            "T": q.dtype,
            "D": d,
            "QUERIES": ceil_div(alike, chunks),
            "SIMDGROUPS": simdgroups,
            "SPLITS": splits,
        },
        (chunks * 32 * simdgroups, splits, b * kv_heads),
        32 * simdgroups,
    )


def sdpa_merge_call(values: mx.array, stats: mx.array, dtype: mx.Dtype) -> Call:
    """What a split sdpa_decode left, to (B, L, H * D)."""
    b, h, length, splits, d = values.shape
    source = """
sdpa_merge<D, SPLITS>(values, stats, y, values_shape[1], values_shape[2],
    threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, threadgroup_position_in_grid.z,
    thread_index_in_simdgroup);
"""
    return call(
        "sdpa_merge",
        "sdpa/sdpa_decode.metal",
        source,
        {"values": values, "stats": stats},
        {"y": ((b, length, h * d), dtype)},
        {"D": d, "SPLITS": splits},
        (length * 32, h, b),
        32,
    )


def sdpa_prefill_call(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0,
) -> Call:
    """q (B, H, L, D), D a multiple of 8."""
    b, h, length, d = q.shape
    shape = geometry.prefill(d, q.dtype.size)
    source = f"""
using Kernel = SdpaPrefill<T, D, BK, SIMDGROUPS>;
threadgroup uint4 tiles[Kernel::TILES];
Kernel::run(q, k_cache, v_cache, offset, y, {literal(scale)}, {window}, {literal(softcap)},
    q_shape[1], k_cache_shape[1], q_shape[2], k_cache_shape[2], tiles,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
    return call(
        "sdpa_prefill",
        "sdpa/sdpa_prefill.metal",
        source,
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "offset": offset},
        {"y": ((b, length, h * d), q.dtype)},
        {"T": q.dtype, "D": d, "BK": shape.bk, "SIMDGROUPS": shape.simdgroups},
        (ceil_div(length, 8 * shape.simdgroups) * 32 * shape.simdgroups, h, b),
        32 * shape.simdgroups,
    )


def rope_call(
    qkv: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: mx.array,
    table: mx.array,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: mx.array | None = None,
    k_norm: mx.array | None = None,
    eps: float = 0,
) -> Call:
    """Writes into the caches: inputs by name, outputs by use."""
    b, length = qkv.shape[:2]
    norms = {} if q_norm is None or k_norm is None else {"q_norm": q_norm, "k_norm": k_norm}
    source = f"""
rope<T, W, D, R, NORM>(qkv, k_cache, v_cache, offset, table, {
        "q_norm, k_norm" if norms else "nullptr, nullptr"
    }, {literal(eps)}, q, qkv_shape[1], {heads}, k_cache_shape[1],
    k_cache_shape[2], threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
    threadgroup_position_in_grid.z, thread_index_in_simdgroup);
"""
    return call(
        "rope",
        "rope/rope.metal",
        source,
        {"qkv": qkv, "k_cache": k_cache, "v_cache": v_cache, "offset": offset, "table": table}
        | norms,
        {"q": ((b, heads, length, head_dim), qkv.dtype)},
        {
            "T": qkv.dtype,
            "W": qkv.dtype if q_norm is None else q_norm.dtype,
            "D": head_dim,
            "R": 2 * table.shape[1],
            "NORM": bool(norms),
        },
        ((heads + 2 * kv_heads) * 32, length, b),
        32,
        in_place=("k_cache", "v_cache"),
    )


def rms_norm_call(x: mx.array, weight: mx.array, eps: float, centered: bool) -> Call:
    """x (M, K), K >= 8."""
    count, k = x.shape
    wide = 4 if k % 4 == 0 else 1
    threads = min(geometry.NORM_THREADS, 32 * ceil_div(k, 32 * wide))
    source = f"""
threadgroup float shared[2 * (THREADS / 32)];
rms_norm<THREADS, WIDE, CENTERED>(x, weight, {literal(eps)}, y, x_shape[1], shared,
    threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
    return call(
        "rms_norm",
        "rms_norm/rms_norm.metal",
        source,
        {"x": x, "weight": weight},
        {"y": ((count, k), x.dtype)},
        {"THREADS": threads, "WIDE": wide, "CENTERED": centered},
        (count * threads, 1, 1),
        threads,
    )


def embedding_call(ids: mx.array, m: Packed, dtype: mx.Dtype) -> Call:
    """ids int32 (L,) to (L, K); N >= 8."""
    (length,) = ids.shape
    run = 32 if m.bits in (3, 5) else 16
    source = f"""
using Scheme = {scheme(m)};
embedding<T, RUN>(ids, {packed(m, f"{m.k}")}, y, w_shape[0], thread_position_in_grid.x,
    thread_position_in_grid.y);
"""
    return call(
        "embedding",
        "embedding/embedding.metal",
        source,
        {"ids": ids} | matrix_inputs(m),
        {"y": ((length, m.k), dtype)},
        {"T": dtype, "RUN": run} | scheme_template(m),
        (m.k // run, length, 1),
        min(256, m.k // run),
    )


def gated_call(gate_up: mx.array, activation: str) -> Call:
    """(M, 2N) interleaved, at least 8 elements, to (M, N)."""
    count, n = gate_up.shape[0], gate_up.shape[1] // 2
    threads = min(256, count * n)
    return call(
        "gated",
        "swiglu/swiglu.metal",
        f"gated<{constant(activation)}, T>(gate_up, y, thread_position_in_grid.x);",
        {"gate_up": gate_up},
        {"y": ((count, n), gate_up.dtype)},
        {"T": gate_up.dtype},
        (count * n, 1, 1),
        threads,
    )

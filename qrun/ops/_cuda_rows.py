"""The ops on rows, the rotation and attention as CUDA kernels. Shapes and meaning: the op files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import mlx.core as mx

from qrun.ops._cuda_launch import (
    Constant,
    Recipe,
    Shape,
    after,
    ceil_div,
    launch,
    literal,
    matrix,
    pointer,
    scheme_of,
)
from qrun.ops.matrix import QuantizedMatrix
from qrun.quantization import Quantization


def rms_norm(
    x: mx.array,
    weight: mx.array,
    eps: float,
    residual: mx.array | None = None,
    centered: bool = False,
) -> mx.array:
    inputs = {"x": x, "weight": weight, "residual": residual}
    return launch(_rms_norm_recipe, inputs, eps, centered)[0]


def _rms_norm_recipe(
    eps: float, centered: bool, *, x: mx.array, residual: mx.array | None, **_: object
) -> Recipe:
    rows, k = x.shape
    vec = 8 if k % 8 == 0 else 1
    return Recipe(
        "rms_norm/rms_norm.cuh",
        f"qrun::rms_norm<VEC, CENTERED>(x, weight, {pointer('residual', residual, 'T')}, y, "
        f"{literal(eps)}, x_shape[1], 0, x_shape[1]);",
        {"y": (x.shape, x.dtype)},
        {"T": x.dtype, "VEC": vec, "CENTERED": centered},
        (rows, 1, 1),
        Shape(min(1024, ceil_div(ceil_div(k, vec), 32) * 32)),
    )


def rms_norm_parts(x: mx.array, weights: Sequence[mx.array], eps: float) -> mx.array:
    """Part y of the grid norms its columns; the last one copies what is left."""
    inputs: dict[str, mx.array | None] = {f"weight_{i}": w for i, w in enumerate(weights)}
    return launch(_rms_norm_parts_recipe, {"x": x, **inputs}, eps)[0]


def _rms_norm_parts_recipe(eps: float, *, x: mx.array, **weights: mx.array) -> Recipe:
    rows, k = x.shape
    ends = [0, *accumulate(w.size for w in weights.values()), k]
    vec = 8 if all(end % 8 == 0 for end in ends) else 1
    parts = "".join(
        f"if (blockIdx.y == {i}) qrun::rms_norm<VEC, false>(x, {weight}, "
        f"static_cast<const T*>(nullptr), y, {literal(eps)}, {k}, {ends[i]}, {ends[i + 1]});\n  "
        for i, weight in enumerate([*weights, "static_cast<const float*>(nullptr)"])
    )
    widest = max(b - a for a, b in pairwise(ends))
    return Recipe(
        "rms_norm/rms_norm.cuh",
        parts,
        {"y": (x.shape, x.dtype)},
        {"T": x.dtype, "VEC": vec},
        (rows, len(ends) - 1, 1),
        Shape(min(1024, ceil_div(ceil_div(widest, vec), 32) * 32)),
    )


def softcap(x: mx.array, limit: float) -> mx.array:
    return launch(_softcap_recipe, {"x": x}, limit)[0]


def _softcap_recipe(limit: float, *, x: mx.array) -> Recipe:
    return Recipe(
        "softcap/softcap.cuh",
        f"qrun::softcap(x, y, {literal(limit)}, x_shape[0] * (x_shape[1] * 1LL));",
        {"y": (x.shape, x.dtype)},
        {},
        (ceil_div(x.size, 256), 1, 1),
        Shape(256),
    )


def swiglu(gate_up: mx.array) -> mx.array:
    return launch(_swiglu_recipe, {"gate_up": gate_up})[0]


def _swiglu_recipe(*, gate_up: mx.array) -> Recipe:
    rows, columns = gate_up.shape
    return Recipe(
        "swiglu/swiglu.cuh",
        "qrun::swiglu(gate_up, y, gate_up_shape[0] * (gate_up_shape[1] / 2LL));",
        {"y": ((rows, columns // 2), gate_up.dtype)},
        {},
        (ceil_div(rows * columns // 2, 256), 1, 1),
        Shape(256),
    )


def argmax(logits: mx.array, limit: int) -> mx.array:
    values, indices = launch(_argmax_part_recipe, {"logits": logits}, limit)
    return launch(_argmax_merge_recipe, {"values": values, "indices": indices}, limit)[0]


def _argmax_part_recipe(limit: int, *, logits: mx.array) -> Recipe:
    rows, threads = logits.shape[0], 256
    parts = min(128, ceil_div(limit, 4 * threads))
    return Recipe(
        "argmax/argmax.cuh",
        f"qrun::argmax_part(logits, values, indices, logits_shape[1], {limit});",
        {"values": ((rows, parts), mx.float32), "indices": ((rows, parts), mx.int32)},
        {},
        (parts, rows, 1),
        Shape(threads),
    )


def _argmax_merge_recipe(limit: int, *, values: mx.array, indices: mx.array) -> Recipe:
    rows, parts = values.shape
    return Recipe(
        "argmax/argmax.cuh",
        f"qrun::argmax_merge(values, indices, out, values_shape[1], {limit});",
        {"out": ((rows,), indices.dtype)},
        {},
        (rows, 1, 1),
        Shape(min(128, ceil_div(parts, 32) * 32)),
    )


def embedding(ids: mx.array, m: QuantizedMatrix, *, dtype: mx.Dtype, scale: float) -> mx.array:
    return launch(_embedding_recipe, {"ids": ids, **matrix(m)}, m.spec, m.k, dtype, scale)[0]


def _embedding_recipe(
    spec: Quantization,
    k: int,
    dtype: mx.Dtype,
    scale: float,
    *,
    ids: mx.array,
    scales: mx.array,
    **_: object,
) -> Recipe:
    scheme, constants = scheme_of(spec, scales.dtype, str(k))
    return Recipe(
        "embedding/embedding.cuh",
        f"qrun::embedding(ids, {scheme}, y, {literal(scale)}, w_shape[0], {k});",
        {"y": ((ids.size, k), dtype)},
        constants,
        (ceil_div(k, 8 * 64), ids.size, 1),
        Shape(64),
    )


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
    """The caches are written in place: they must be contiguous, as `Cache` makes them.

    MLX runs kernels of one evaluation in any order that their inputs and outputs allow, and a
    write into an input does not count. q does: what reads the caches for these tokens takes q too.
    Between two calls that append to the same cache the first one's results must be evaluated.
    """
    arrays = {"qkv": qkv, "k_cache": k_cache, "v_cache": v_cache, "offset": offset, "table": table}
    q = launch(_rope_recipe, {**arrays, "q_norm": q_norm, "k_norm": k_norm}, heads, eps)[0]
    k_cache, v_cache = after([k_cache, v_cache], q)
    return q, k_cache, v_cache


def _rope_recipe(
    heads: int,
    eps: float,
    *,
    qkv: mx.array,
    k_cache: mx.array,
    table: mx.array,
    q_norm: mx.array | None,
    k_norm: mx.array | None,
    **_: object,
) -> Recipe:
    (batch, kv_heads), d = k_cache.shape[:2], k_cache.shape[3]
    length = qkv.shape[0] // batch
    constants: dict[str, Constant] = {"T": qkv.dtype, "C": k_cache.dtype}
    constants["QN"] = mx.float32 if q_norm is None else q_norm.dtype
    constants["KN"] = mx.float32 if k_norm is None else k_norm.dtype
    return Recipe(
        "rope/rope.cuh",
        f"qrun::Rope<T, C, QN, KN>{{qkv, offset, table, {pointer('q_norm', q_norm, 'QN')}, "
        f"{pointer('k_norm', k_norm, 'KN')}, {literal(eps)}, q, const_cast<C*>(k_cache), "
        f"const_cast<C*>(v_cache), {heads}, {kv_heads}, qkv_shape[0] / {batch}, {d}, "
        f"{table.shape[1]}, k_cache_shape[2]}}.run();",
        {"q": ((batch, heads, length, d), qkv.dtype)},
        constants,
        (ceil_div(heads + 2 * kv_heads, 4), batch * length, 1),
        Shape(128),
    )

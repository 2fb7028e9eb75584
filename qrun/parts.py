"""Linears over the same x as one, and rows in another order: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from qrun.layers import AnyLinear, Linear, QuantizedLinear, Stacked
from qrun.ops import QuantizedMatrix


def join(parts: Sequence[QuantizedLinear | Linear], interleave: bool) -> AnyLinear:
    """The parts' rows below each other, or interleaved; `Stacked` where their formats differ."""
    bias = None
    biases = [p.bias for p in parts if p.bias is not None]
    if biases:
        bias = mx.stack(biases, 1).reshape(-1) if interleave else mx.concatenate(biases)
    matrices = [p.matrix for p in parts if isinstance(p, QuantizedLinear)]
    same = len({(m.spec, m.k, m.scale_dtype) for m in matrices}) == 1
    if len(matrices) == len(parts) and same:
        return QuantizedLinear(matrices[0].stacked(*matrices[1:], interleave=interleave), bias)
    dense = [p.weight for p in parts if isinstance(p, Linear)]
    if len(dense) == len(parts) and len({(w.dtype, w.shape[1]) for w in dense}) == 1:
        if interleave:
            return Linear(mx.stack(dense, axis=1).reshape(-1, dense[0].shape[1]), bias)
        return Linear(mx.concatenate(dense), bias)
    return Stacked(tuple(parts), interleave)


def pairs_apart(rows: int, d: int) -> mx.array:
    """Row numbers that bring dims 2i and 2i+1 of each head of D to i and i + D/2."""
    return mx.arange(rows, dtype=mx.int32).reshape(-1, d // 2, 2).swapaxes(1, 2).reshape(-1)


def take_rows(part: QuantizedLinear | Linear, rows: slice | mx.array) -> QuantizedLinear | Linear:
    """Some rows of a linear, or all in another order. Packed rows move whole."""

    def take(a: mx.array | None) -> mx.array | None:
        return None if a is None else a[rows]

    bias = take(part.bias)
    if isinstance(part, Linear):
        return Linear(part.weight[rows], bias)
    w, scales, biases = (take(a) for a in (part.matrix.w, part.matrix.scales, part.matrix.biases))
    assert w is not None
    matrix = replace(part.matrix, n=w.shape[0], w=w, scales=scales, biases=biases)
    return QuantizedLinear(matrix, bias)


def float_scales(m: QuantizedMatrix) -> QuantizedMatrix:
    """The same with scales and biases in float32."""
    if m.scales is None or m.biases is None:
        return m
    return replace(m, scales=m.scales.astype(mx.float32), biases=m.biases.astype(mx.float32))

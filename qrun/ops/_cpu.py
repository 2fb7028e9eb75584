"""The CPU backend: the native kernels of `qrun._ext`, one MLX primitive an op.

Matrices are repacked once into the stream that the kernels read (kernels/qmv/README.md).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from qrun import _ext
from qrun.ops import _mlx
from qrun.ops._launch import Arrays, Norm, Step, enqueued
from qrun.ops.matrix import QuantizedMatrix
from qrun.ops.qmv import Activation
from qrun.ops.sample import on_host

NAME = "cpu"
QMV_ROWS = 8
PREFILL_ROWS = 128
GATHERS = True

rms_norm = _ext.rms_norm
rms_norm_parts = _ext.rms_norm_parts
swiglu = _ext.swiglu
softcap = _ext.softcap
argmax = _ext.argmax
route = _ext.route
combine = _ext.combine
sample = on_host
blank = _ext.blank
attend = None


def traced(step: Step) -> Step:
    """The graph of the first call as one primitive, where all its ops are ours.

    State is written in place, so the program keeps the arrays of the first call
    (kernels/common/program.cpp).
    """
    program: _ext.Program | None = None
    bound: Arrays = []
    last: Arrays = []  # what is written in place makes no edge in the graph: steps need one
    foreign = False

    def run(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        nonlocal program, bound, last, foreign
        if foreign:
            return enqueued(step)(inputs, state)
        if program is None or any(a is not b for a, b in zip(state, bound, strict=True)):
            mx.eval(state)  # what is still to be computed must not become part of the program
            outputs, after = step(inputs, state)
            try:
                program, bound, last = _ext.Program(inputs, outputs), state, []
            except ValueError:  # an op of MLX among them
                foreign = True
                mx.async_eval(outputs, after)
                return outputs, after
        last = program(inputs, last)
        mx.async_eval(last)
        return last, bound

    return run


def once(step: Step) -> Step:
    """The step, with all that it returns under way; a long prompt takes memory for one layer only.

    MLX allocates what an op returns when it puts the op on the stream: the whole graph at once, if
    asked for the end of it. So it is asked for the state in order, a layer at a time. Of few tokens
    several layers at a time, and not waiting for the last: no gap between them.
    """

    def run(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        outputs, after = step(inputs, state)
        layers = max(1, PREFILL_ROWS // (2 * inputs[0].size))
        for i in range(0, len(after), layers):
            mx.async_eval(after[i : i + layers])
            mx.eval(after[i])
        mx.async_eval(outputs)
        return outputs, after

    return run


def pack(m: QuantizedMatrix, count: int = 1) -> mx.array:
    """The stream of uint8 bytes; m's own arrays are no longer needed then."""
    assert m.w is not None
    assert m.scales is not None
    spec = m.spec
    return _ext.pack(m.w, m.scales, m.biases, spec.bits, spec.group_size, spec.mode, count)


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
    return _product(_ext.qmv, x, m, norm, bias, residual, activation, scale)


def qmm(
    x: mx.array,
    m: QuantizedMatrix,
    *,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    return _product(_ext.qmm, x, m, norm, bias, residual, activation, scale)


def _product(
    kernel: Callable[..., mx.array],
    x: mx.array,
    m: QuantizedMatrix,
    norm: Norm | None,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    return kernel(
        x,
        _stream(m),
        m.n,
        m.k,
        m.spec.bits,
        m.spec.group_size,
        scale_dtype=_scales(m),
        mode=m.spec.mode,
        norm_weight=None if norm is None else norm[0],
        eps=0.0 if norm is None else norm[1],
        bias=bias,
        residual=residual,
        activation=activation or "none",
        activations=m.activations,
        scale=scale,
    )


def gemm(
    x: mx.array,
    w: mx.array,
    *,
    bias: mx.array | None,
    residual: mx.array | None,
    activation: str | None,
    scale: float,
) -> mx.array:
    """Many rows, and activations: MLX's float32 product, which no program can hold."""
    if x.shape[0] > QMV_ROWS or activation is not None:
        return _mlx.gemm(x, w, bias=bias, residual=residual, activation=activation, scale=scale)
    return _ext.gemm(x, w, bias=bias, residual=residual, scale=scale)


def gather_qmm(
    x: mx.array,
    m: QuantizedMatrix,
    row: mx.array | None,
    expert: mx.array,
    *,
    count: int,
    activation: Activation | None,
    grouped: bool,
) -> mx.array:
    return _ext.gather_qmm(
        x,
        _stream(m, count),
        expert,
        row,
        count,
        m.n // count,
        m.k,
        m.spec.bits,
        m.spec.group_size,
        scale_dtype=_scales(m),
        activation=activation or "none",
        activations=m.activations,
        mode=m.spec.mode,
    )


def _scales(m: QuantizedMatrix) -> mx.Dtype:
    """The type of affine scales. A microscaling format has bytes, and what is said is not used."""
    return m.scale_dtype if m.spec.mode == "affine" else mx.float32


def _stream(m: QuantizedMatrix, count: int = 1) -> mx.array:
    """m's packed bytes; a matrix that was never packed is packed for this one call."""
    return m.packed if m.packed is not None else pack(m, count)


def embedding(ids: mx.array, m: QuantizedMatrix, *, dtype: mx.Dtype, scale: float) -> mx.array:
    return _ext.embedding(
        ids,
        _stream(m),
        m.n,
        m.k,
        m.spec.bits,
        m.spec.group_size,
        _scales(m),
        dtype,
        scale,
        m.spec.mode,
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
    batch, kv_heads, _, head_dim = k_cache.shape
    return _ext.rope(
        qkv.reshape(batch, qkv.shape[0] // batch, qkv.shape[1]),
        k_cache,
        v_cache,
        offset,
        table,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
    )


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
    y = _ext.sdpa(q, k_cache, v_cache, offset, scale=scale, window=window, softcap=softcap)
    return y.reshape(-1, y.shape[-1])

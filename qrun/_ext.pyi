"""The CPU kernels (kernels/), each call one MLX primitive on the CPU stream.

Inputs that are not row contiguous are copied; the caches of rope and sdpa are refused instead.
A violated shape or dtype raises ValueError at the call; an offset that does not fit its cache
raises RuntimeError at evaluation. Results have x's dtype.
"""

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

mlx_version: str
"""The MLX release whose C++ ABI this extension was built against."""

Activation = Literal["none", "swiglu", "geglu"]
Activations = Literal["default", "exact", "int8"]

def pack(
    w: mx.array,  # (N, K*bits/32) uint32
    scales: mx.array,  # (N, K/group_size); uint8 for mxfp4, nvfp4, mxfp8
    biases: mx.array | None,
    bits: int,
    group_size: int,
    mode: str = "affine",
    count: int = 1,  # so many matrices of N/count rows: each begins a block of 16 rows
) -> mx.array:  # (bytes,) uint8
    """Repack into the stream that the products read. Bits 2 to 8 except 7, groups 32, 64, 128.

    The other ops must be told the dtype of affine `scales`, and the same mode.
    """

def qmv(
    x: mx.array,  # (..., K)
    packed: mx.array,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    *,
    scale_dtype: mx.Dtype,
    norm_weight: mx.array | None = None,  # (K,): x is RMS-normalized first, with eps
    eps: float = 0.0,
    bias: mx.array | None = None,  # (N,)
    residual: mx.array | None = None,  # the shape of the result
    activation: Activation = "none",  # gated: rows of w alternate gate, up
    scale: float = 1.0,
    activations: Activations = "default",
    mode: str = "affine",
) -> mx.array:  # (..., N), or (..., N/2) when gated
    """act(scale * x @ w.T + bias) + residual, summed in whole numbers and float32."""

qmm = qmv

def gather_qmm(
    x: mx.array,  # (M, K)
    packed: mx.array,  # of `count` matrices
    expert: mx.array,  # (R,) int32
    row: mx.array | None,  # (R,) int32; None: row r of x
    count: int,
    n: int,  # of one matrix
    k: int,
    bits: int,
    group_size: int,
    *,
    scale_dtype: mx.Dtype,
    activation: Activation = "none",
    activations: Activations = "default",
    mode: str = "affine",
) -> mx.array:  # (R, N), or (R, N/2) when gated
    """RuntimeError at evaluation where an index is outside."""

def route(
    logits: mx.array,  # (M, E)
    top: int,
    renormalize: bool,
) -> tuple[mx.array, mx.array, mx.array, mx.array]: ...  # expert, row, place, share: ops/route.py
def combine(
    x: mx.array,  # (R, N)
    place: mx.array,  # (M, top) int32
    share: mx.array,  # (M, top) float32
    residual: mx.array,  # (M, N)
) -> mx.array: ...
def gemm(
    x: mx.array,  # (M, K)
    w: mx.array,  # (N, K)
    *,
    bias: mx.array | None = None,  # (N,)
    residual: mx.array | None = None,  # (M, N)
    scale: float = 1.0,
) -> mx.array: ...
def rms_norm(
    x: mx.array,  # (..., K)
    weight: mx.array,  # (K,)
    eps: float,
    residual: mx.array | None = None,  # as x
    centered: bool = False,
) -> mx.array: ...
def rms_norm_parts(
    x: mx.array,  # (M, K)
    weights: Sequence[mx.array],  # of the first columns, of the next
    eps: float,
) -> mx.array: ...
def swiglu(gate_up: mx.array) -> mx.array: ...  # (..., 2N) interleaved -> (..., N)
def softcap(x: mx.array, limit: float) -> mx.array: ...
def argmax(
    logits: mx.array, limit: int
) -> mx.array:  # (..., V) -> (...) int32; -1: not all are finite
    """The first largest index; 2**32 - 1 where a row holds a NaN or an infinity."""

def embedding(
    ids: mx.array,  # int32, uint32 or int64; outside the matrix: NaN rows
    packed: mx.array,
    n: int,
    k: int,
    bits: int,
    group_size: int,
    scale_dtype: mx.Dtype,
    dtype: mx.Dtype,
    scale: float = 1.0,
    mode: str = "affine",
) -> mx.array: ...
def rope(
    qkv: mx.array,  # (B, L, (H + 2*Hkv) * D)
    k_cache: mx.array,  # (B, Hkv, C, D), updated in place
    v_cache: mx.array,
    offset: mx.array,  # int32 (P,), the first counts
    table: mx.array,  # float32 (C, R/2, 2): cos, sin
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: mx.array | None = None,  # (D,)
    k_norm: mx.array | None = None,
    eps: float = 0.0,
) -> tuple[mx.array, mx.array, mx.array]: ...  # q (B, H, L, D), k_cache, v_cache
def sdpa(
    q: mx.array,  # (B, H, L, D)
    k_cache: mx.array,  # (B, Hkv, C, D)
    v_cache: mx.array,
    offset: mx.array,  # int32 (P,), the first counts
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> mx.array: ...  # (B, L, H*D)

class Program:
    """A traced function as one primitive."""

    def __init__(self, inputs: list[mx.array], outputs: list[mx.array]) -> None:
        """outputs were computed from inputs and not evaluated; all else they use is constant."""

    def __call__(self, inputs: list[mx.array], after: list[mx.array]) -> list[mx.array]:
        """The same function of other inputs of the same shapes, not before `after` is computed."""

def isa() -> str:
    """The instruction set in use: the best this machine has, or QRUN_ISA's."""

def force_isa(name: str) -> None: ...
def fast_dots() -> bool:
    """Whether its vectors have a dot product of bytes (VNNI, NEON's)."""

def threads() -> int: ...
def set_threads(n: int) -> None:
    """0: QRUN_NUM_THREADS, or as many as affinity and cgroup allow."""

def read_bandwidth(bytes: int, threads: int = 0) -> float:
    """GB/s of one pass of a loop that only reads; threads 1, or 0 for the whole pool."""

def peak_flops(kind: Literal["f32", "int8", "unit"], threads: int = 0) -> float:
    """GOP/s of multiply-adds, counted as two, of 1 thread, or 0 for the whole pool together.

    "unit": the matrix unit's, 0 without.
    """

def trim() -> None:
    """Give the pages of freed memory back to the system, where malloc keeps them."""

def blank(shapes: list[tuple[int, ...]], dtype: mx.Dtype) -> list[mx.array]:
    """Zeros side by side in large pages, resident once written: for what ops write in place."""

def guarded(a: mx.array) -> mx.array:
    """A copy whose last byte lies just before an unreadable page."""

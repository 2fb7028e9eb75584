"""swiglu: silu(gate) * up on interleaved columns (Shazeer, 2020), where no product fuses it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from qrun.lazy import np, npt
from qrun.ops import _launch
from qrun.ops._shapes import check_dtype, check_shape
from qrun.ops.qmv import gated_ref


def swiglu(gate_up: mx.array) -> mx.array:
    """gate_up (M, 2N), column 2i = gate i, column 2i+1 = up i -> (M, N)."""
    check_dtype("swiglu", "gate_up", gate_up)
    if check_shape("swiglu", "gate_up", gate_up, "M N2")["N2"] % 2:
        raise ValueError(f"swiglu: axis 2N of gate_up is {gate_up.shape[1]}, must be even")
    return _launch.backend().swiglu(gate_up)


def swiglu_ref(gate_up: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The same in float64."""
    return gated_ref(gate_up.astype(np.float64), "swiglu")


def swiglu_bytes(gate_up: mx.array) -> int:
    """Two columns read for each written."""
    return gate_up.nbytes * 3 // 2

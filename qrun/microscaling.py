"""Float rows -> mxfp4 and nvfp4. `mx.quantize` searches its sixteen values one by one: minutes."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from qrun.quantization import E2M1, MODES, e4m3

ROWS = 1 << 17  # elements at a time, which a core's cache holds
SIZES = E2M1[:8]  # 0 .. 6; the other eight are the same with a sign


def quantize_fp4(
    values: npt.NDArray[np.float32], mode: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """w (N, K/8) and scales (N, K/group) of finite rows (N, K), as `mx.quantize` makes them.

    But where a group's largest value is below 2**-126, it makes NaN, and this zeros.
    """
    step = max(1, ROWS // values.shape[1])
    parts = [_quantize(values[i : i + step], mode) for i in range(0, len(values), step)]
    return np.concatenate([w for w, _ in parts]), np.concatenate([s for _, s in parts])


def _quantize(
    values: npt.NDArray[np.float32], mode: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    n, k = values.shape
    groups = values.reshape(n, -1, MODES[mode][0])
    sizes = np.abs(groups)
    wanted = sizes.max(axis=2) / np.float32(SIZES[-1])  # largest value -> largest code
    if mode == "mxfp4":
        exponent = np.ceil(np.log2(np.where(wanted > 0, wanted, 1)))
        scales = (exponent + 127).clip(0, 254).astype(np.uint8)
        scale = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    else:
        scales = np.array(mx.to_fp8(mx.array(wanted), stream=mx.cpu))
        scale = e4m3(scales).astype(np.float32)
    sizes /= np.where(scale > 0, scale, np.float32(np.inf))[:, :, None]
    code = np.zeros(sizes.shape, np.uint8)
    for low, high in pairwise(SIZES):
        code += sizes > np.float32((low + high) / 2)  # halfway is rounded down
    code |= ((groups < 0) & (code > 0)).view(np.uint8) << 3
    code = code.reshape(n, k)
    return (code[:, 0::2] | code[:, 1::2] << 4).view("<u4"), scales

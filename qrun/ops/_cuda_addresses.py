"""Where arrays of MLX lie on the device: their addresses, for launches of our own.

MLX has no call for it; a kernel that it launches is told, and writes them down. That takes long,
so what was learned is remembered as long as the array lives. An array that does not lie in the
order of rows is handed to the kernel as a fresh copy each time it is named. So each is named twice:
two addresses mean that it has none for us, and a copy that stays is taken in its place.

(`mx.contiguous` alone will not do: it also copies an array that lies well, if its buffer is 16 KB
larger than it has to be, as buffers used again are. What is written to the copy, nobody finds.)
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from qrun.ops._cuda_launch import Kernel, Plan, Shape, by_mlx
from qrun.ops._launch import Arrays

AT_ONCE = 128  # arrays whose addresses one kernel writes down


class _Known(NamedTuple):
    """Where an array lies, or its copy in the order of rows."""

    array: weakref.ref[mx.array]
    copy: mx.array | None
    address: int


_known: dict[int, _Known] = {}  # by id; gone with the array


def address_of(array: mx.array) -> int:
    """Where one lies; quick if it was asked for before."""
    known = _known.get(id(array))
    return addresses([array])[0] if known is None else known.address


def addresses(arrays: Arrays) -> list[int]:
    """Where arrays lie on the device, in the order of rows."""
    new = [a for a in {id(a): a for a in arrays}.values() if id(a) not in _known]
    mx.eval(new)
    asked = _asked([same for a in new for same in (a, a)])
    for array, address, again in zip(new, asked[::2], asked[1::2], strict=True):
        kept = array
        if address != again:
            kept = mx.contiguous(array)
            mx.eval(kept)
            (address,) = _asked([kept])
        forget = partial(_forget, id(array))
        copy = None if kept is array else kept
        _known[id(array)] = _Known(weakref.ref(array, forget), copy, address)
    return [_known[id(a)].address for a in arrays]


def _forget(key: int, _: object) -> None:
    del _known[key]


def _asked(arrays: Arrays) -> list[int]:
    """The addresses of evaluated arrays: a kernel is told, and writes it down."""
    names = [f"a{i}" for i in range(AT_ONCE)]
    text = (
        'extern "C" __global__ void qrun_addresses('
        + "".join(f"const void* {n}, " for n in names)
        + "unsigned long long* out) {\n"
        + "".join(
            f"  out[{i}] = reinterpret_cast<unsigned long long>({n});\n"
            for i, n in enumerate(names)
        )
        + "}\n"
    )
    kernel = Kernel("addresses", "qrun_addresses", text, Shape(1))
    plan = Plan(kernel, AT_ONCE, [((AT_ONCE,), mx.uint64)], [], (1, 1, 1))
    found: list[int] = []
    for start in range(0, len(arrays), AT_ONCE):
        part = arrays[start : start + AT_ONCE]
        padded = part + part[:1] * (AT_ONCE - len(part))
        (out,) = by_mlx(plan, padded)
        found += [int(v) for v in np.array(out)[: len(part)]]
    return found

"""The KV cache: keys and values of every layer, allocated ahead, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import mlx.core as mx

from qrun.errors import UsageError
from qrun.hardware import sparing
from qrun.ops import _launch
from qrun.positions import Rope

STEP = 256  # capacities are multiples of this, so that growing one seldom changes a shape


@dataclass(frozen=True)
class CacheSpec:
    """What one layer keeps a position: Hkv heads of D dims for k, the same for v.

    window: of so many positions up to its own a query sees the keys; 0: of all.
    """

    kv_heads: int
    head_dim: int
    rope: Rope
    window: int = 0


def cache_bytes(specs: Sequence[CacheSpec], length: int, dtype: mx.Dtype) -> int:
    """Bytes of keys and values of `length` positions."""
    return 2 * length * dtype.size * sum(spec.kv_heads * spec.head_dim for spec in specs)


class Cache:
    """State of one generation. Per layer: keys and values (B, Hkv, C, D), and a rope table.

    `length` positions are held; `offset` is the same number as an int32 array, for
    the ops. Models replace `keys[i]` and `values[i]` by what `ops.rope` returns. `planned` is the
    number of positions asked for, which rules like longrope look at; `capacity` is what there is.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], capacity: int, dtype: mx.Dtype, *, batch: int = 1
    ) -> None:
        self.specs = list(specs)
        self.dtype = dtype
        self.batch = batch
        self.length = 0
        self.planned = 0
        self.capacity = 0
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.tables: list[mx.array] = []
        self.offset = _position(0)
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions in all; what is held stays.

        Raises UsageError if the held keys would have to be rotated otherwise (see `Rope`): the text
        must be read again, into a cache made for the whole length.
        """
        if capacity <= self.planned:
            return
        ropes = {spec.rope for spec in self.specs}
        if self.length and not all(rope.same(self.planned, capacity) for rope in ropes):
            raise UsageError(
                f"a text of {capacity} positions is rotated otherwise than one of {self.planned}: "
                "the cache cannot grow to it"
            )
        self.planned = capacity
        whole = -(-capacity // STEP) * STEP
        fresh = whole - self.capacity
        if fresh:
            self.hold(self._grown(self.state, fresh))
        with sparing():  # float64 on the way takes six times what stays
            tables = {rope: rope.table(whole, self.planned) for rope in ropes}
        self.tables = [tables[spec.rope] for spec in self.specs]
        self.capacity = whole

    def _grown(self, held: list[mx.array], fresh: int) -> list[mx.array]:
        """The state with `fresh` more positions behind each array; from nothing: that many."""
        shapes = [(self.batch, s.kv_heads, fresh, s.head_dim) for s in self.specs]
        new = _launch.backend().blank(shapes * 2, self.dtype)
        if not held:
            return new
        return [mx.concatenate([a, b], axis=2) for a, b in zip(held, new, strict=True)]

    @property
    def state(self) -> list[mx.array]:
        """What ops write to: all keys, then all values."""
        return [*self.keys, *self.values]

    def bound(self, state: list[mx.array], offset: mx.array) -> Cache:
        """The same cache seen with other arrays: inside a traced function the placeholders."""
        other = copy(self)
        other.offset = offset
        other.hold(state)
        return other

    def hold(self, state: list[mx.array]) -> None:
        """Hold what a step returned as `state`."""
        layers = len(self.specs)
        self.keys, self.values = list(state[:layers]), list(state[layers:])

    def advance(self, count: int) -> None:
        """Count `count` more positions as held."""
        self.length += count
        self.offset = _position(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values allocated."""
        return sum(a.nbytes for a in (*self.keys, *self.values))

    def bytes_held(self) -> int:
        """Bytes of the keys and values that a decode step reads: where there is a window, its."""
        seen = (min(self.length, spec.window or self.length) for spec in self.specs)
        each = (a.nbytes // self.capacity for a in self.keys)
        return 2 * sum(n * size for n, size in zip(seen, each, strict=True))


def _position(length: int) -> mx.array:
    """The ops read the first of four: MLX keeps arrays of up to 8 bytes in host memory on CUDA."""
    return mx.array([length, 0, 0, 0], mx.int32)

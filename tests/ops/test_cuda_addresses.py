"""Addresses of arrays, as a kernel tells them. No GPU needed: a table stands for the device."""

from __future__ import annotations

import gc
from itertools import count

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops import _cuda_addresses
from qrun.ops._cuda_addresses import AT_ONCE, address_of, addresses
from qrun.ops._cuda_launch import Plan


class Device:
    """Tells where arrays lie; those of `strided` are copied for every mention, as MLX does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.strided: set[int] = set()
        self.launches = 0
        self._next = count(4096, 4096)
        self._at: dict[int, int] = {}
        monkeypatch.setattr(_cuda_addresses, "by_mlx", self.run)
        monkeypatch.setattr(_cuda_addresses, "_known", {})

    def run(self, plan: Plan, inputs: list[mx.array]) -> list[mx.array]:
        assert len(inputs) == AT_ONCE
        self.launches += 1
        at = [next(self._next) if id(a) in self.strided else self.at(a) for a in inputs]
        return [mx.array(np.array(at, np.uint64))]

    def at(self, array: mx.array) -> int:
        return self._at.setdefault(id(array), next(self._next))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_an_array_in_the_order_of_rows_has_its_own_address(device: Device) -> None:
    arrays = [mx.zeros((3, 4)) for _ in range(AT_ONCE)]
    assert addresses([*arrays, arrays[5]]) == [device.at(a) for a in [*arrays, arrays[5]]]
    assert device.launches == 2  # each is named twice
    assert address_of(arrays[7]) == device.at(arrays[7])
    assert device.launches == 2  # remembered


def test_any_other_has_that_of_a_copy_which_stays(device: Device) -> None:
    plain, turned = mx.zeros((3, 4)), mx.zeros((3, 4)).T
    device.strided.add(id(turned))
    before = set(device._at)
    first = addresses([plain, turned])
    assert first[0] == device.at(plain)
    (copy,) = set(device._at) - before - {id(plain)}
    assert first[1] == device._at[copy]
    assert addresses([turned]) == first[1:]


def test_what_is_gone_is_forgotten(device: Device) -> None:
    array = mx.zeros(5)
    addresses([array])
    assert len(_cuda_addresses._known) == 1
    del array
    gc.collect()
    assert not _cuda_addresses._known

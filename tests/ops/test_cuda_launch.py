"""From an op to the driver: what is worked out once, what a launch hands over. No GPU needed."""

from __future__ import annotations

import ctypes
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest

from qrun.ops import _cuda_driver, _cuda_launch
from qrun.ops._cuda_launch import Plan, Recipe, Shape, ceil_div, launch, run_by
from qrun.ops._cuda_tiles import CLUSTERS, wgmma_tile


def plans_of(*calls: tuple[mx.array, mx.array | None, float]) -> list[Plan]:
    """What is launched for each x, bias and scale."""
    plans: list[Plan] = []

    def recipe(scale: float, *, x: mx.array, bias: mx.array | None) -> Recipe:
        asked.append(scale)
        source = f"f(x, {_cuda_launch.pointer('bias', bias, 'T')}, {scale}, x_shape[1]);"
        return Recipe("f.cuh", source, {"y": (x.shape, x.dtype)}, {}, (x.shape[0], 2, 1), Shape(64))

    def note(plan: Plan, inputs: list[mx.array]) -> list[mx.array]:
        plans.append(plan)
        return inputs

    asked: list[float] = []
    with run_by(note):
        for x, bias, scale in calls:
            launch(recipe, {"x": x, "bias": bias}, scale)
    assert len(asked) == len(set(map(id, plans)))
    return plans


def test_a_recipe_is_asked_once_for_all_that_is_alike() -> None:
    x, b = mx.zeros((3, 8)), mx.zeros(8)
    first, *rest = plans_of(
        (x, b, 1.0),
        (x + 1, b + 1, 1.0),
        (x, b, 2.0),
        (x, None, 1.0),
        (x[:2], b, 1.0),
        (x.astype(mx.float16), b, 1.0),
    )
    assert rest[0] is first
    assert all(other is not first for other in rest[1:])
    assert rest[3].kernel is first.kernel  # another length, the same kernel
    texts = {plan.kernel.text for plan in [first, *rest]}
    assert len(texts) == 4


@pytest.mark.parametrize("n", [576, 1024, 3072, 4096, 6144, 28672])
@pytest.mark.parametrize("k", [576, 2048, 4096, 14336])
def test_clusters_all_run_at_once(n: int, k: int) -> None:
    for rows in range(9, 2100, 13):
        tile = wgmma_tile(rows, n, k)
        assert tile.splits <= max(1, k // 128)
        if tile.splits > 1:
            assert (
                ceil_div(rows, tile.bm) * ceil_div(n, tile.bn) <= CLUSTERS[tile.blocks][tile.splits]
            )


def test_a_recording_is_of_its_own_thread() -> None:
    seen: list[bool] = []
    with run_by(lambda plan, inputs: inputs):
        other = Thread(target=lambda: seen.append(_cuda_launch.alone()))
        other.start()
        other.join()
        assert seen == [False] and _cuda_launch.alone()
    assert not _cuda_launch.alone()


def test_a_launch_hands_over_pointers_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    (plan, *_) = plans_of((mx.zeros((3, 8)), mx.zeros(8), 1.0))
    taken: list[Any] = []

    def call(name: str, config: Any, function: Any, at: Any, extra: None) -> None:
        c = config._obj
        values = [ctypes.c_uint64.from_address(at[i]).value for i in range(len(at))]
        taken.append((name, [*c.grid], [*c.block], c.stream, c.count, function, values))

    monkeypatch.setattr(_cuda_driver, "call", call)
    monkeypatch.setattr(_cuda_driver, "function", lambda kernel: kernel.name)
    for handle, pointers in ((5, [1 << 40, 1 << 41, 1 << 42]), (6, [7, 8, 9])):
        stream = object.__new__(_cuda_driver.Stream)
        stream.handle = ctypes.c_void_p(handle)
        stream.launch(plan, pointers)
        assert taken.pop() == (
            *("cuLaunchKernelEx", [3, 2, 1], [64, 1, 1], handle, 1, plan.kernel.name),
            [*pointers, 8],
        )


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cuda_launch, "MOST_PLANS", 3)
    monkeypatch.setattr(_cuda_launch, "_plans", {})
    plans_of(*((mx.zeros((n, 8)), None, 1.0) for n in range(1, 9)))
    assert 0 < len(_cuda_launch._plans) <= 3

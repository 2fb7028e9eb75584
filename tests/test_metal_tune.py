"""The chooser of Metal kernels, with a clock that the test winds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from qrun.ops import _metal_geometry as geometry
from qrun.ops import _metal_tune as tune
from tests.ops import metal_support as support

OWNER = "Apple M9, test"


class Clock:
    """Seconds pass only when a job is evaluated: `cost` of it, by name."""

    def __init__(self, costs: dict[str, float]) -> None:
        self.now = 0.0
        self.costs = costs
        self.pending: list[str] = []

    def __call__(self) -> float:
        return self.now

    def evaluate(self, *arrays: object) -> None:
        self.now += sum(self.costs[name] for name in self.pending)
        self.pending.clear()

    def job(self, name: str, y: float = 1.0) -> Callable[[], mx.array]:
        def call() -> mx.array:
            self.pending.append(name)
            return mx.full((3,), y)

        return call


def pick(clock: Clock, jobs: dict[str, Callable[[], mx.array]], until: float = 100) -> str | None:
    return tune.fastest(jobs, "mlx", until, clock, clock.evaluate, lambda line: None)


def test_fastest_wins() -> None:
    clock = Clock({"a": 3, "b": 1, "mlx": 2})
    assert pick(clock, {name: clock.job(name) for name in clock.costs}, 1e9) == "b"


def test_mlx_wins_where_it_is_faster() -> None:
    clock = Clock({"a": 3, "b": 4, "mlx": 2})
    assert pick(clock, {name: clock.job(name) for name in clock.costs}, 1e9) == "mlx"


def test_one_slow_round_does_not_decide() -> None:
    """The best round counts: another program's second is not the candidate's."""
    clock = Clock({"a": 1, "mlx": 2})
    jobs = {name: clock.job(name) for name in clock.costs}
    evaluate, calls = clock.evaluate, [0]

    def disturbed(*arrays: object) -> None:
        calls[0] += 1
        clock.now += 50 if calls[0] == 5 else 0
        evaluate(*arrays)

    assert tune.fastest(jobs, "mlx", 1e9, clock, disturbed, lambda line: None) == "a"


def test_wrong_and_broken_candidates_are_out_and_named() -> None:
    clock = Clock({"wrong": 1, "broken": 1, "fine": 3, "mlx": 4})
    said: list[str] = []

    def broken() -> mx.array:
        raise RuntimeError("no such function\nat line 3")

    jobs = {
        "wrong": clock.job("wrong", 1.2),
        "broken": broken,
        "fine": clock.job("fine", 1.001),
        "mlx": clock.job("mlx"),
    }
    assert tune.fastest(jobs, "mlx", 1e9, clock, clock.evaluate, said.append) == "fine"
    assert said == [
        "wrong does not agree with mlx here: please report this",
        "broken does not run here: no such function",
    ]


def test_nan_is_wrong() -> None:
    clock = Clock({"nan": 1, "mlx": 4})
    jobs = {"nan": clock.job("nan", float("nan")), "mlx": clock.job("mlx")}
    assert pick(clock, jobs, 1e9) == "mlx"


def test_no_time_no_choice() -> None:
    clock = Clock({"a": 3, "mlx": 2})
    assert pick(clock, {name: clock.job(name) for name in clock.costs}, until=1) is None


def shapes() -> list[tune.Shape]:
    m = support.matrix(16, 64)
    return [tune.Shape(rows, m, mx.float16, norm=True) for rows in (1, 64)]


@pytest.fixture
def all_jobs(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Every shape's jobs on the fake clock: the second candidate is the fastest."""
    clock = Clock({})

    def jobs(shape: tune.Shape) -> dict[str, Callable[[], mx.array]]:
        names = list(tune.candidates(shape.rows, shape.m, 2))
        clock.costs |= {name: 0.001 if i == 1 else 0.002 for i, name in enumerate(names)}
        return {name: clock.job(name) for name in names}

    monkeypatch.setattr(tune.Shape, "jobs", jobs)
    return clock


def test_tuning_is_kept(tmp_path: Path, all_jobs: Clock) -> None:
    path = tmp_path / "deep" / "metal.json"
    said: list[str] = []

    def again(again: bool = False) -> tune.Choices:
        choices = tune.Choices.load(path, OWNER)
        tune.tune(
            shapes(), choices, again=again, clock=all_jobs, evaluate=all_jobs.evaluate,
            say=said.append,
        )  # fmt: skip
        return choices

    first = again()
    assert len(first.best) == 2
    assert len(said) == 2
    for shape in shapes():
        assert first.best[shape.key] == list(tune.candidates(shape.rows, shape.m, 2))[1]
    started = all_jobs.now
    assert again().best == first.best
    assert all_jobs.now == started, "known shapes are not timed again"
    again(again=True)
    assert all_jobs.now > started


def test_the_budget_holds_and_the_next_load_goes_on(tmp_path: Path, all_jobs: Clock) -> None:
    path = tmp_path / "metal.json"
    said: list[str] = []
    choices = tune.Choices.load(path, OWNER)
    tune.tune(
        shapes(), choices, budget=0.1, clock=all_jobs, evaluate=all_jobs.evaluate, say=said.append
    )
    assert len(choices.best) == 1
    assert "by the table until the next load" in said[-1]
    assert all_jobs.now < 0.2
    choices = tune.Choices.load(path, OWNER)
    tune.tune(
        shapes(), choices, budget=1, clock=all_jobs, evaluate=all_jobs.evaluate, say=said.append
    )
    assert len(choices.best) == 2


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, all_jobs: Clock) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    choices = tune.Choices(tmp_path / "file" / "metal.json", OWNER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_read", lambda path: {})
        tune.tune(shapes(), choices, clock=all_jobs, evaluate=all_jobs.evaluate, say=said.append)
    assert len(choices.best) == 2
    assert said[-1].startswith("tuning is not kept: ")


def test_devices_and_versions_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "metal.json"
    for owner in ("Apple M1, 1", "Apple M1, 2"):
        choices = tune.Choices.load(path, owner)
        assert choices.best == {}
        choices.best["shape"] = owner
        choices.save()
    assert json.loads(path.read_text()) == {
        "Apple M1, 1": {"shape": "Apple M1, 1"},
        "Apple M1, 2": {"shape": "Apple M1, 2"},
    }


def test_owner_names_device_and_versions() -> None:
    assert re.fullmatch(r".+, mlx \d[\w.]*, kernels [0-9a-f]{8}", tune.owner())


def test_a_damaged_file_is_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "metal.json"
    path.write_text('{"half')
    choices = tune.Choices.load(path, OWNER)
    assert choices.best == {}
    choices.best["shape"] = "mlx"
    choices.save()
    assert tune.Choices.load(path, OWNER).best == {"shape": "mlx"}


def test_without_timings_the_table_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "here", lambda: geometry.FAMILIES["M3"])
    for shape in shapes():
        named = tune.candidates(shape.rows, shape.m, 2)
        first = next(iter(named))
        assert first != "mlx"
        for choices in (
            None,
            tune.Choices(Path(), OWNER, {shape.key: "a name of another version"}),
        ):
            product = tune.chosen(shape, choices)
            assert (product.func, product.keywords) == (named[first].func, named[first].keywords)
        assert (
            tune.chosen(shape, tune.Choices(Path(), OWNER, {shape.key: "mlx"})) is tune.mlx_product
        )


def test_unmeasured_matrix_units_are_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simdgroup matrices do not reach the M5's matrix units; MLX's own products do."""
    one, many = shapes()
    for chip, expected in (("M4", False), ("M5", True)):
        monkeypatch.setattr(geometry, "here", lambda chip=chip: geometry.FAMILIES[chip])
        assert tune.chosen(one, None) is not tune.mlx_product
        assert (tune.chosen(many, None) is tune.mlx_product) == expected


def test_mlx_product_is_the_contract() -> None:
    """What ours are compared with computes the same thing."""
    m = support.matrix(16, 64)
    shape = tune.Shape(5, m, mx.float32, True, True, True, "swiglu")
    y = shape.jobs()["mlx"]()
    assert y.shape == (5, 8)
    assert y.dtype == mx.float32
    assert shape.key == "5x16x64 affine 4 bits group 64 mlx.core.float32 norm bias swiglu residual"

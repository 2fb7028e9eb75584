"""The chooser of Metal kernels, on a device that is not there, by a clock that the test winds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from qrun import printing
from qrun.errors import UsageError
from qrun.loader import LoadedModel, load
from qrun.ops import _launch, _metal, _metal_backend, _metal_call, _metal_candidates, _metal_tune
from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_candidates import MLX, Shape, candidates
from qrun.ops._metal_product import ACTIVATIONS
from qrun.ops._metal_timings import Timings, owner
from qrun.ops._metal_tune import Job, jobs, measure, tune
from tests.conftest import Run
from tests.ops import metal_support as support
from tests.ops.metal_epilogues import behind64

OWNER = "Apple M9, test"


# ---- one product


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

    def job(self, name: str, y: float = 1.0) -> Job:
        def call() -> mx.array:
            self.pending.append(name)
            return mx.full((3,), y)

        return Job(call, call)

    def measure(
        self, met: dict[str, Job], fair: float = 1e9, until: float = 1e9
    ) -> dict[str, float | None]:
        return measure(met, mx.ones((3,)), fair, until, self, self.evaluate)


def test_the_best_round_counts() -> None:
    """Another program's second is not the candidate's."""
    clock = Clock({"a": 1, "mlx": 2})
    evaluate, calls = clock.evaluate, [0]

    def disturbed(*arrays: object) -> None:
        calls[0] += 1
        clock.now += 50 if calls[0] == 5 else 0
        evaluate(*arrays)

    met = {name: clock.job(name) for name in clock.costs}
    assert measure(met, mx.ones((3,)), 1e9, 1e9, clock, disturbed) == {"a": 1, "mlx": 2}
    assert calls[0] == 2 + 2 * _metal_tune.ROUNDS


def test_wrong_and_broken_candidates_are_out_and_named() -> None:
    clock = Clock({"wrong": 1, "nan": 1, "fine": 3})

    def broken() -> mx.array:
        raise RuntimeError("no such function\nat line 3")

    met = {
        "wrong": clock.job("wrong", 1.2),
        "nan": clock.job("nan", float("nan")),
        "broken": Job(broken, broken),
        "fine": clock.job("fine", 1.001),
    }
    with pytest.warns(UserWarning, match="here") as said:
        seconds = clock.measure(met)
    assert seconds == {"wrong": None, "nan": None, "broken": None, "fine": 3}
    assert [str(w.message) for w in said] == [
        "wrong does not agree with MLX's product here: please report this",
        "nan does not agree with MLX's product here: please report this",
        "broken does not run here: no such function",
    ]


def test_long_products_get_two_rounds() -> None:
    clock = Clock({"a": 3, "mlx": 2})
    met = {name: clock.job(name) for name in clock.costs}
    assert clock.measure(met, fair=1) == {"a": 3, "mlx": 2}
    assert clock.now == 5 * 3  # one call each, then two rounds


def test_no_time_no_seconds() -> None:
    clock = Clock({"a": 3, "mlx": 2})
    assert clock.measure({name: clock.job(name) for name in clock.costs}, until=1) == {}


def test_a_job_takes_its_matrices_in_turn_and_its_calls_wait_for_each_other() -> None:
    first, second = support.matrix(16, 64, seed=1), support.matrix(16, 64, seed=2)
    used: list[Any] = []
    norm = (mx.ones((64,)), 1e-5)
    shapes = [Shape(1, m, mx.float32, norm, residual=True) for m in (first, second)]

    def product(x: mx.array, m: Any, **fused: Any) -> mx.array:
        assert fused["norm"] is norm
        assert fused["residual"].shape == (1, 16)
        used.append((m, x))
        return _metal_candidates.mlx_product(x, m, **fused)

    jobs(shapes, {"it": product}, lambda f: f)["it"].batch()
    assert [m for m, _ in used] == [first, second] * (_metal_tune.BATCH_FEW // 2)
    assert len({id(x) for _, x in used}) == len(used)


# ---- what there is to choose from


def test_the_table_decides_until_something_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "here", lambda: geometry.FAMILIES["M3"])
    for rows in (1, 8, 23, 64, 512):
        shape = Shape(rows, support.matrix(16, 64), mx.float16)
        named = shape.candidates()
        first, second, *_ = named
        assert first != MLX
        assert list(named)[-1] == MLX
        known = Timings(Path(), OWNER)
        assert known.product(shape) is named[first]
        known.seconds[shape.key] = {first: None, second: 2.0, MLX: 3.0}
        assert known.product(shape) is named[second]
        known.seconds[shape.key] = {"a name of another version": 1.0}
        assert known.product(shape) is named[first]


@pytest.mark.parametrize("chip", geometry.FAMILIES)
def test_candidates_are_few_and_fit(chip: str) -> None:
    for rows, x_bytes in ((1, 2), (4, 2), (16, 4), (64, 2), (64, 4)):
        named = candidates(geometry.FAMILIES[chip], rows, 4096, 4096, 4, x_bytes)
        assert 3 <= len(named) <= 6
        assert MLX in named


def test_unmeasured_matrix_units_are_left_to_mlx() -> None:
    """Simdgroup matrices do not reach the M5's matrix units; MLX's own products do."""
    for chip, left in (("M4", False), ("M5", True)):
        family = geometry.FAMILIES[chip]
        assert next(iter(candidates(family, 1, 4096, 4096, 4, 2))) != MLX
        assert (next(iter(candidates(family, 64, 4096, 4096, 4, 2))) == MLX) == left


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name])
def test_mlx_product_is_the_contract(activation: str) -> None:
    """What ours are compared with computes the same thing."""
    m = support.matrix(16, 64)
    norm, bias = (mx.ones((64,)), 1e-5), mx.ones((16,))
    shape = Shape(5, m, mx.float32, norm, bias, True, activation, 2.0)
    y = jobs([shape], {MLX: _metal_candidates.mlx_product}, lambda f: f)[MLX].once()
    x = support.numbers(mx.random.normal((5, 64), key=mx.random.key(0)))
    normed = x / (((x**2).mean(1, keepdims=True) + 1e-5) ** 0.5)
    want = behind64(
        normed @ m.values.T, bias=support.numbers(bias), activation=activation, scale=2.0
    )
    assert abs(support.numbers(y) - want).max() < 1e-4 * abs(want).max()
    assert y.dtype == mx.float32
    assert shape.key == f"5x16x64 affine 4 bits group 64 float32 norm bias {activation} residual"


# ---- the file


def test_devices_and_versions_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metal.json"
    for name, seconds in (("Apple M1, 1", 1.0), ("Apple M1, 2", 2.0)):
        known = Timings(path, name)
        known.read()
        assert known.seconds == {}
        known.seconds["shape"] = {MLX: seconds}
        known.save()
    assert json.loads(path.read_text()) == {
        "Apple M1, 1": {"shape": {MLX: 1.0}},
        "Apple M1, 2": {"shape": {MLX: 2.0}},
    }
    assert list(path.parent.iterdir()) == [path]


def test_owner_names_device_and_versions() -> None:
    assert re.fullmatch(r".+, mlx \d[\w.]*, qrun \d[\w.]*, kernels [0-9a-f]{8}", owner())


@pytest.mark.parametrize(
    "text",
    [
        '{"half',
        "[]",
        "3",
        "\udcff",
        f'{{"{OWNER}": 3}}',
        f'{{"{OWNER}": {{"shape": []}}}}',
        f'{{"{OWNER}": {{"shape": {{"mlx": "fast"}}}}}}',
        f'{{"{OWNER}": {{"shape": {{"mlx": NaN}}}}}}',
    ],
)
def test_a_damaged_file_is_an_empty_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "metal.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    known = Timings(path, OWNER)
    known.read()
    assert known.seconds == {}
    known.seconds["shape"] = {MLX: 1.0, "broken": None}
    known.save()
    again = Timings(path, OWNER)
    again.read()
    assert again.seconds == known.seconds


# ---- all products of a model


class Device:
    """A Mac that is not there: products are zeros, and take the seconds that the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.now = 0.0
        self.pending = 0.0
        self.calls: list[str] = []
        self.compiled: set[str] = set()
        self.compilation = 0.0  # seconds of the first call of each kernel in a process
        self.seconds: Callable[[str], float] = lambda name: 0.001
        self.wrong = ""

        def product(name: str) -> Callable[..., mx.array]:
            def run(x: mx.array, m: Any, shape: Any = None, tile: Any = None, **fused: Any):
                which = f"{name} M={x.shape[0]} {shape or tile or ''}"
                self.calls.append(which)
                self.pending += self.seconds(which)
                if which not in self.compiled:
                    self.pending += self.compilation
                    self.compiled.add(which)
                columns = m.n if fused["activation"] is None else m.n // 2
                wrong = bool(self.wrong) and self.wrong in which
                return mx.full((x.shape[0], columns), int(wrong), x.dtype)

            return run

        def kernel(**_: Any) -> Callable[..., list[mx.array]]:
            def call(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
                return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]

            return call

        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(_launch, "_backend", lambda on_cpu: _metal_backend)
        monkeypatch.setattr(geometry, "here", lambda: geometry.FAMILIES["M3"])
        monkeypatch.setattr(mx.fast, "metal_kernel", kernel)
        monkeypatch.setattr(_metal, "qmv", product("qmv"))
        monkeypatch.setattr(_metal, "qmm", product("qmm"))
        monkeypatch.setattr(_metal_candidates, "mlx_product", product(MLX))
        monkeypatch.setattr(_metal_backend, "writes_in_place", lambda: True)
        clocked = partial(tune, clock=lambda: self.now, evaluate=self.evaluate, traced=lambda f: f)
        monkeypatch.setattr(_metal_tune, "tune", clocked)

    def evaluate(self, *arrays: mx.array) -> None:
        mx.eval(*arrays)
        self.now, self.pending = self.now + self.pending, 0.0

    def load(self, folder: Path, **options: Any) -> tuple[LoadedModel, float]:
        """A load in a process of its own, and how long it timed."""
        _metal_backend.timings.cache_clear()
        self.compiled.clear()
        self.pending, before = 0.0, self.now
        return load(folder, **options), self.now - before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Device]:
    caches = (candidates, _metal_call._compiled, _metal_backend.timings)
    for function in caches:
        function.cache_clear()
    yield Device(monkeypatch, tmp_path / "cache")
    for function in caches:
        function.cache_clear()


def chosen() -> dict[str, str]:
    known = _metal_backend.timings()
    return {key: str(known.fastest(key)) for key in known.seconds}


def test_the_first_load_times_and_the_second_does_not(device: Device, tiny_folder: Path) -> None:
    device.seconds = lambda name: 0.0004 if "rows=2" in name else 0.0005
    shown: list[str] = []
    model, taken = device.load(tiny_folder, show=shown.append)
    assert 0 < taken < 2
    picks = chosen()
    # qkv, o, gate and up, down, the head; one row and many; the head sees one row only.
    assert len(picks) == 2 * 4 + 1
    assert {key.split("x")[0] for key in picks} == {"1", "64"}
    assert {"norm", "residual", "norm swiglu"} <= {re.split(r"float32 ?", key)[1] for key in picks}
    assert all("rows 2" in name for key, name in picks.items() if key.startswith("1x"))
    # Every product against MLX's first; then the other geometries.
    assert shown[0] == "timing kernels on this device, once: 1 of 18"
    assert shown[-1] == ""
    assert model.notes == [f"kernels: 9 products timed for {taken:.1f} s"]

    again, taken = device.load(tiny_folder)
    assert (taken, again.notes) == (0, [])
    assert chosen() == picks


def test_what_was_chosen_multiplies(device: Device, tiny_folder: Path) -> None:
    for loser, want in (("qm", MLX), (MLX, "qm")):
        device.seconds = lambda name, loser=loser: 0.002 if loser in name else 0.001
        model, _ = device.load(tiny_folder, tune=True)
        for rows in (1, 40):
            device.calls.clear()
            mx.eval(model.model(mx.zeros((rows,), mx.int32), model.new_cache(64)))
            assert len(device.calls) == 2 * 4
            assert all(call.startswith(want) for call in device.calls), device.calls


def test_tune_times_again_and_no_tune_goes_by_the_table(device: Device, tiny_folder: Path) -> None:
    device.seconds = lambda name: 0.002 if "qm" in name else 0.001
    _, taken = device.load(tiny_folder, tune=False)
    assert taken == 0
    assert chosen() == {}
    device.load(tiny_folder)
    assert set(chosen().values()) == {MLX}
    _, taken = device.load(tiny_folder, tune=False)
    assert (taken, chosen()) == (0, {})
    device.seconds = lambda name: 0.001 if "qm" in name else 0.002
    _, taken = device.load(tiny_folder, tune=True)
    assert taken > 0
    assert MLX not in chosen().values()


def slow(name: str) -> float:
    """Seconds of a call where one chunk of a prompt takes 40 ms a product."""
    return 0.04 if "M=512" in name else 0.001


def test_the_budget_holds_and_the_next_load_goes_on(device: Device, tiny_folder: Path) -> None:
    """A large model: a first load decides what it can in two seconds, and later ones the rest."""
    device.seconds, device.compilation = slow, 0.1
    keys: list[int] = []
    for _ in range(20):
        model, taken = device.load(tiny_folder)
        keys.append(len(chosen()))
        assert taken < 2
        if not model.notes:
            break
    assert keys == sorted(keys)
    assert keys[0] < keys[-1] == 9
    assert 2 < len(keys) < 10
    assert taken == 0


def test_who_asks_for_it_gets_all_of_it(device: Device, tiny_folder: Path) -> None:
    device.seconds, device.compilation = slow, 0.1
    model, taken = device.load(tiny_folder, tune=True)
    assert taken > 2
    assert "left" not in model.notes[0]
    _, taken = device.load(tiny_folder)
    assert taken == 0


def test_decode_comes_first(device: Device, tiny_folder: Path) -> None:
    device.seconds = lambda name: 0.04
    device.load(tiny_folder)
    assert chosen()
    assert all(key.startswith("1x") for key in chosen())


def test_wrong_kernels_never_multiply(device: Device, tiny_folder: Path) -> None:
    device.wrong = "qm"
    device.seconds = lambda name: 0.0001 if "qm" in name else 0.001
    with pytest.warns(UserWarning, match="does not agree with MLX's product here"):
        device.load(tiny_folder)
    assert set(chosen().values()) == {MLX}
    _, taken = device.load(tiny_folder)  # nor are they tried again
    assert taken == 0


def test_a_damaged_file_is_timed_again(device: Device, tiny_folder: Path, tmp_path: Path) -> None:
    device.load(tiny_folder)
    (file,) = (tmp_path / "cache" / "qrun").iterdir()
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    _, taken = device.load(tiny_folder)
    assert taken > 0
    assert set(json.loads(file.read_text())) == {owner()}


def test_a_place_that_cannot_be_written_is_said(
    device: Device, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model, _ = device.load(tiny_folder)
    assert model.notes[-1].startswith("the timings of kernels are not kept: ")
    assert len(chosen()) == 9


def test_other_backends_have_nothing_to_tune(tiny_folder: Path, command: Run) -> None:
    with pytest.raises(UsageError, match="has no kernels to choose from"):
        load(tiny_folder, tune=True)
    assert load(tiny_folder, tune=False).notes == []
    done = command("bench", "--no-kernels", "--tune", tiny_folder)
    assert (done.code, done.out) == (2, b"")
    done = command("bench", "--tune")
    assert done.code == 2
    assert "--tune needs a MODEL" in done.err


def test_the_command_line_passes_it_on(
    device: Device, tiny_folder: Path, command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import qrun

    given: list[Any] = []

    def stop(*_: Any, tune: bool | None = None, **__: Any) -> None:
        given.append(tune)
        raise UsageError("enough")

    monkeypatch.setattr(qrun, "load", stop)
    for args in (["generate", "-p", "x"], ["bench", "--no-kernels"]):
        for option in ([], ["--no-tune"]):
            assert command(*args, *option, tiny_folder).code == 2
    command("bench", "--no-kernels", "--tune", tiny_folder)
    assert given == [None, False, None, False, True]


def test_progress_is_one_line_and_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printing.status_line(True)("timing")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for show in (True, False):
        line = printing.status_line(show)
        line("timing")
        line("")
    assert capsys.readouterr().err == "\r\x1b[Ktiming\r\x1b[K"

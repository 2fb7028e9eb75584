"""activations="int8" and "exact" reach every product of a model, and only the CPU has them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from qrun.errors import UsageError
from qrun.generation import prefill
from qrun.loader import LoadedModel, load
from qrun.ops.matrix import Activations
from tests import zoo
from tests.conftest import Run

IDS = [(7 * i + 3) % 60 for i in range(24)]


def logits(model: LoadedModel, ids: list[int]) -> np.ndarray:
    return np.array(prefill(model, ids, model.new_cache(len(ids))).astype(mx.float32))


@pytest.mark.native
@pytest.mark.parametrize("case", ["llama", "qwen3_moe"])
def test_eight_bits_move_the_logits_a_little(case: str, tmp_path: Path) -> None:
    folder = zoo.write(tmp_path / "model", case, bits=4)
    modes: tuple[Activations, ...] = ("default", "exact", "int8")
    default, exact, int8 = (load(folder, activations=a) for a in modes)
    for ids in (IDS, IDS[:1]):  # a prompt, and what a decode step does
        want, got = logits(default, ids), logits(int8, ids)
        np.testing.assert_array_equal(logits(exact, ids), want)  # float32 x: the same already
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 1e-4 < error < 0.1


@pytest.mark.native
def test_the_command_line_passes_it_on(cli: Run, tiny_folder: Path) -> None:
    done = cli("generate", tiny_folder, "-p", "hello", "-n", 4, "--activations", "int8", "--json")
    assert done.code == 0, done
    assert len(json.loads(done.out)["tokens"]) <= 4


@pytest.mark.parametrize("backend", ["mlx"], indirect=True)
def test_who_has_no_choice_says_so(backend: str, tiny_folder: Path) -> None:
    with pytest.raises(UsageError, match="only the CPU's own kernels have a choice"):
        load(tiny_folder, activations="int8")


def test_unknown_ones_are_a_usage_error(tiny_folder: Path) -> None:
    with pytest.raises(UsageError, match="must be default, exact or int8, not 'int4'"):
        load(tiny_folder, activations="int4")  # pyright: ignore[reportArgumentType]

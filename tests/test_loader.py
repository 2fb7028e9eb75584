"""Loading as a whole, and what importing qrun does: nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import qrun
from qrun.errors import CheckpointError, QrunError, UsageError
from qrun.loader import ALIASES, load
from qrun.paths import MODELS
from tests import zoo
from tests.tiny import VOCAB, Stored, stored, tiny


def test_a_loaded_model_knows_what_a_generation_needs(tiny_folder: Path) -> None:
    model = load(tiny_folder)
    assert model.context == 512
    assert model.eos == {model.tokenizer.id_of("<|im_end|>")}
    assert model.dtype == mx.float32  # a CPU computes in it, whatever the file has
    assert model.load_seconds > 0
    assert model.folder == tiny_folder


def test_limits_of_mlx_are_left_as_they_were(tiny_folder: Path, tmp_path: Path) -> None:
    broken = tiny(tmp_path / "broken")
    (broken / "tokenizer.json").unlink()
    cache, memory = mx.set_cache_limit(123 << 20), mx.set_memory_limit(9 << 30)
    try:
        qrun.generate(load(tiny_folder), "hello", max_tokens=2)
        with pytest.raises(CheckpointError):
            load(broken)
    finally:
        assert (mx.set_cache_limit(cache), mx.set_memory_limit(memory)) == (123 << 20, 9 << 30)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_is_a_choice(dtype: str, tiny_folder: Path) -> None:
    assert load(tiny_folder, dtype=dtype).dtype == getattr(mx, dtype)


def test_an_unknown_dtype_is_a_usage_error(tiny_folder: Path) -> None:
    with pytest.raises(UsageError, match="unknown dtype 'int8'"):
        load(tiny_folder, dtype="int8")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (5, {}, "a model is a folder or a hub id, not 5"),
        (None, {}, "a model is a folder or a hub id, not None"),
        (b"folder", {}, "a model is a folder or a hub id, not b'folder'"),
        ("owner/name", {"revision": 5}, "a revision is a text, not 5"),
        ("folder", {"dtype": []}, r"unknown dtype \[\]"),
        ("folder", {"activations": 5}, "activations must be default, exact or int8, not 5"),
        ("folder", {"tune": "x"}, "tune must be None, False or True, not 'x'"),
        ("folder", {"show": 5}, "show must be a function of a line, not 5"),
    ],
)
def test_arguments_of_another_type_are_usage_errors(
    model: Any, options: dict[str, Any], message: str, tiny_folder: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        load(tiny_folder if model == "folder" else model, **options)


def test_a_step_reads_all_weights_but_one_row_of_an_untied_embedding(tmp_path: Path) -> None:
    tied, untied = tiny(tmp_path / "tied"), tiny(tmp_path / "untied", tied=False)
    sizes = {}
    for folder in (tied, untied):
        data = (folder / "model.safetensors").read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        spans = {n: e["data_offsets"] for n, e in header.items() if n != "__metadata__"}
        sizes[folder] = {name: end - start for name, (start, end) in spans.items()}
    assert load(tied).step_bytes == sum(sizes[tied].values())
    embedding = sum(n for name, n in sizes[untied].items() if "embed_tokens" in name)
    row = embedding // VOCAB
    assert load(untied).step_bytes == sum(sizes[untied].values()) - embedding + row


def test_unknown_config_keys_are_told_not_dropped(tmp_path: Path) -> None:
    config = {"residual_multiplier": 2.0, "transformers_version": "4.0"}
    notes = load(tiny(tmp_path, config=config)).notes
    assert notes == ["config.json: not used: residual_multiplier"]


@pytest.mark.parametrize(
    ("case", "published"),
    [
        (
            "qwen3_moe",  # a mixture in every layer: intermediate_size is of a dense one's
            {
                "attention_dropout": 0.0,
                "max_window_layers": 48,
                "output_router_logits": False,
                "rope_scaling": None,
                "router_aux_loss_coef": 0.001,
                "sliding_window": None,
                "use_sliding_window": False,
            },
        ),
        ("qwen2", {"max_window_layers": 21, "sliding_window": 99, "use_sliding_window": False}),
        ("mixtral", {"router_jitter_noise": 0.0, "sliding_window": None}),
        ("gemma3_text", {"cache_implementation": "hybrid", "attn_logit_softcapping": None}),
    ],
)
def test_published_configs_have_no_unused_keys(
    case: str, published: dict[str, Any], tmp_path: Path
) -> None:
    def edit(config: dict[str, Any], _: Any) -> None:
        config |= published

    notes = load(zoo.write(tmp_path, case, bits=4, edit=edit)).notes
    assert not [note for note in notes if "not used" in note]


def test_aliases_point_to_files() -> None:
    assert all((MODELS / f"{name}.py").exists() for name in ALIASES.values())
    assert not any((MODELS / f"{name}.py").exists() for name in ALIASES)


def test_a_missing_backend_says_what_to_install(python: Callable[..., str]) -> None:
    """As on a Linux machine with plain `pip install mlx`."""
    code = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mlx.core':\n"
        "            raise ImportError('libmlx.so: cannot open shared object file')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "sys.platform = 'linux'\n"
        "import qrun\n"
        "try: qrun.load\n"
        "except qrun.BackendError as error: print(error.exit_code, error, error.hint)\n"
    )
    out = python(code)
    assert out.startswith("7 MLX is installed without a backend")
    assert "pip install" in out
    assert "mlx[cpu]" in out


def test_importing_qrun_does_nothing(python: Callable[..., str]) -> None:
    """Case 18: no process limit, signal handler, device, thread, socket or slow module."""
    code = (
        "import os, resource, signal, sys, threading, time\n"
        "def state():\n"
        "    limits = [resource.getrlimit(getattr(resource, n)) for n in dir(resource)\n"
        "              if n.startswith('RLIMIT_')]\n"
        "    handlers = [signal.getsignal(s) for s in signal.valid_signals()]\n"
        "    return limits, handlers, dict(os.environ), threading.active_count(), sys.path[:]\n"
        "events = []\n"
        "sys.addaudithook(lambda event, args: events.append(event))\n"
        "before = state()\n"
        "start = time.process_time()\n"
        "import qrun\n"
        "took = time.process_time() - start\n"
        "assert state() == before\n"
        "assert not [e for e in events if e.startswith(('socket.', 'subprocess.'))], events\n"
        "heavy = {'mlx', 'mlx.core', 'numpy', 'tokenizers', 'jinja2', 'click', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert sorted(qrun.__all__) == qrun.__all__\n"
        "print(took)\n"
    )
    assert min(float(python(code)) for _ in range(3)) < 0.05


def test_loading_changes_no_process_state_either(
    python: Callable[..., str], tiny_folder: Path
) -> None:
    code = (
        "import resource, signal, sys\n"
        "import mlx.core as mx\n"
        "def state():\n"
        "    limits = [resource.getrlimit(getattr(resource, n)) for n in dir(resource)\n"
        "              if n.startswith('RLIMIT_')]\n"
        "    return limits, [signal.getsignal(s) for s in signal.valid_signals()],"
        " mx.default_device()\n"
        "before = state()\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "import qrun\n"
        "qrun.generate(qrun.load(sys.argv[1]), 'x', max_tokens=2)\n"
        "assert state() == before\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "print('same')\n"
    )
    assert python(code, tiny_folder) == "same\n"


def test_public_names_are_what_they_say() -> None:
    for name in qrun.__all__:
        value = getattr(qrun, name)
        assert value.__name__ == name
    assert set(qrun.__all__) <= set(dir(qrun))
    assert {name for name in dir(qrun) if name[0] != "_"} == set(qrun.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = qrun.nonsense
    errors = [getattr(qrun, name) for name in qrun.__all__ if name.endswith("Error")]
    assert all(issubclass(error, QrunError) for error in errors)
    codes = [error.exit_code for error in errors if error is not QrunError]
    assert sorted(codes) == [2, 3, 4, 5, 6, 7]


def test_case_18_no_second_copy_of_the_weights(python: Callable[..., str], tmp_path: Path) -> None:
    """The peak of a load is the weights and a few matrices on their way, not twice the weights."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    folder = tiny(tmp_path, config=wide, bits=8, group_size=64)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 100 << 20
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "import qrun, mlx.core as mx, numpy\n"
        "from qrun.loader import load\n"
        "from qrun.hardware import peak_memory\n"
        "load(sys.argv[1])\n"
        "base = peak_memory()\n"
        "load(sys.argv[2])\n"
        "print(peak_memory() - base)\n"
    )
    small = tiny(tmp_path / "small")
    grown = int(python(code, small, folder))
    assert grown < 1.5 * size


def test_a_model_without_position_limit_gets_a_default(tmp_path: Path) -> None:
    assert load(tiny(tmp_path, config={"max_position_embeddings": None})).context == 2048


def test_the_checkpoint_is_checked_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(tmp_path, shards=3)
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"")

    def read(self: object, name: str) -> mx.array:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr("qrun.checkpoint.Checkpoint.read", read)
    with pytest.raises(CheckpointError, match="is empty"):
        load(tmp_path)


def test_norms_in_another_type_do_not_widen_the_rest(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        for name in tensors:
            if "norm" in name:
                tensors[name] = stored(np.ones(128), "F32")

    model = load(tiny(tmp_path, edit=edit), dtype="bfloat16")
    hidden = model.model(mx.array([1, 2], mx.int32), model.new_cache(2))
    assert hidden.dtype == mx.bfloat16


def test_a_loaded_model_is_a_key(tiny_folder: Path) -> None:
    """Of a cache, say: it is itself, and nothing else is."""
    one, other = load(tiny_folder), load(tiny_folder)
    assert len({one: 1, other: 2}) == 2
    assert one != other

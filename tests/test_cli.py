"""The real command line in a process of its own: what goes where, and exit codes."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrun.tokenizer import Tokenizer
from tests.conftest import NATIVE, ROOT, Outcome, Run, environment
from tests.tiny import Stored, stored, tiny, write_json, write_safetensors

ERRORS = ("qrun: error: ", "  hint: ")


def assert_fails(outcome: Outcome, code: int, *parts: str) -> None:
    """One line that holds all parts, perhaps a hint, the exit code, and nothing on stdout."""
    assert outcome.code == code, outcome.err
    assert outcome.out == b""
    lines = outcome.err.splitlines()
    assert len(lines) <= 2
    assert lines[0].startswith(ERRORS[0])
    assert all(line.startswith(ERRORS[1]) for line in lines[1:])
    for part in parts:
        assert part in outcome.err
    assert "Traceback" not in outcome.err


# ---- text, and what else there is


def test_generates_text_on_stdout_and_nothing_on_stderr(cli: Run, tiny_folder: Path) -> None:
    done = cli("generate", tiny_folder, "-p", "hello", "-n", 8, "-q")
    assert done.code == 0
    assert done.err == ""
    assert done.out.endswith(b"\n")
    report = json.loads(cli("generate", tiny_folder, "-p", "hello", "-n", 8, "--json").out)
    assert done.out.decode() == report["text"] + "\n" * (not report["text"].endswith("\n"))


def test_case_17_statistics_and_notes_stay_off_stdout(cli: Run, tiny_folder: Path) -> None:
    plain = cli("generate", tiny_folder, "-p", "hello", "-n", 8)
    noisy = cli("generate", tiny_folder, "-p", "hello", "-n", 8, "--stats", "-v")
    assert noisy.code == 0
    assert noisy.out == plain.out
    for word in ("load", "prefill", "decode", "tok/s", "GB/s", "peak", "backend", "context 512"):
        assert word in noisy.err
    assert re.search(r"decode .* tok/s   7 steps\n", noisy.err)  # the prefill makes the first
    assert "\x1b" not in noisy.err  # no terminal, no colours


@pytest.mark.parametrize(
    ("count", "told"), [(0, ["load", "peak"]), (1, ["load", "first", "prefill", "peak"])]
)
def test_statistics_of_what_there_was(
    count: int, told: list[str], command: Run, tiny_folder: Path
) -> None:
    """No rate of a prefill or a decode that never was."""
    done = command("generate", tiny_folder, "-p", "hello", "-n", count, "--stats", "-q")
    assert [line.split()[0] for line in done.err.splitlines()] == told


def test_statistics_of_one_are_singular(command: Run, tiny_folder: Path) -> None:
    done = command("generate", tiny_folder, "-p", "x", "--raw", "-n", 2, "--stats", "-q")
    assert re.search(r"prefill .* tok/s   1 token\n(.*\n)*decode .* tok/s   1 step\n", done.err)


def test_json_is_one_object(cli: Run, tiny_folder: Path) -> None:
    done = cli("generate", tiny_folder, "-p", "hello", "-n", 8, "--json", "--stats", "--seed", 7)
    report = json.loads(done.out)
    assert report["generated_tokens"] == len(report["tokens"]) == 8
    assert report["decode_steps"] == 7
    assert report["finish_reason"] == "length"
    assert report["seed"] == 7
    assert done.out.count(b"\n") == 1


def test_stream_json_is_one_object_a_line(cli: Run, tiny_folder: Path) -> None:
    done = cli("generate", tiny_folder, "-p", "hello", "-n", 8, "--stream-json")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert "".join(line["text"] for line in lines[:-1]) == lines[-1]["result"]["text"]
    assert all(set(line) == {"text"} for line in lines[:-1])


def test_case_09_no_tokens_wanted(cli: Run, tiny_folder: Path) -> None:
    done = cli("generate", tiny_folder, "-p", "hello", "--max-tokens", 0, "-q")
    assert (done.code, done.out, done.err) == (0, b"", "")
    report = json.loads(cli("generate", tiny_folder, "-p", "x", "-n", 0, "--json").out)
    assert (report["text"], report["finish_reason"]) == ("", "length")


def test_every_way_to_give_a_prompt(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hello ü", encoding="utf-8")
    options = ("-n", 8, "--json", "-q")
    given = cli("generate", tiny_folder, "-p", "hello ü", *options)
    want = json.loads(given.out)["tokens"]
    for args, stdin in (
        (("--prompt-file", file), b""),
        (("-p", "-"), "hello ü".encode()),
        ((), "hello ü".encode()),
        ((), "hello ü".encode("utf-8-sig")),
    ):
        done = cli("generate", tiny_folder, *args, *options, stdin=stdin)
        assert json.loads(done.out)["tokens"] == want


def test_system_and_raw(cli: Run, tiny_folder: Path) -> None:
    def count(*args: str) -> int:
        done = cli("generate", tiny_folder, "-p", "hello", "-n", 0, "--json", *args)
        return json.loads(done.out)["prompt_tokens"]

    assert count("--raw") < count() < count("--system", "a")


def test_a_system_message_needs_a_template(command: Run, tmp_path: Path) -> None:
    folder = tiny(tmp_path, template=None)
    done = command("generate", folder, "-p", "hello", "--system", "a", "-q")
    assert_fails(done, 2, "no chat template: it takes one text, no system message", "hint: put ")
    assert command("generate", folder, "-p", "hello", "-n", 1, "-q").code == 0


def test_the_model_may_come_from_the_environment(cli: Run, tiny_folder: Path) -> None:
    done = cli("generate", "-p", "hello", "-n", 0, QRUN_MODEL=str(tiny_folder))
    assert done.code == 0


def test_same_seed_same_text(cli: Run, tiny_folder: Path) -> None:
    def text(seed: int) -> bytes:
        return cli("generate", tiny_folder, "-p", "x", "-n", 16, "-t", 2, "--seed", seed).out

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_stop_strings(cli: Run, tiny_folder: Path) -> None:
    text = cli("generate", tiny_folder, "-p", "x", "-n", 16, "-q").out.decode()
    stop = text[3:5]
    done = cli("generate", tiny_folder, "-p", "x", "-n", 16, "-q", "--stop", stop)
    assert done.out.decode().removesuffix("\n") == text[: text.find(stop)]


# ---- broken checkpoints: one line, exit code 4


def truncate(by: Callable[[int], int]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        os.truncate(path, by(path.stat().st_size))

    return change


def replace_with(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def drop(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text()) | changes
        write_json(folder / "config.json", values)

    return change


BROKEN: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "one byte short": ({}, truncate(lambda n: n - 1), "model.safetensors is truncated"),
    "half": ({}, truncate(lambda n: n // 2), "model.safetensors is truncated"),
    "empty": ({}, truncate(lambda n: 0), "model.safetensors is empty"),
    "lfs pointer": (
        {},
        replace_with("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        "git lfs pull",
    ),
    "html": ({}, replace_with("model.safetensors", b"<!doctype html><html>"), "is a web page"),
    "missing shard": (
        {"shards": 3},
        drop("model-00002-of-00003.safetensors"),
        "model-00002-of-00003.safetensors is missing",
    ),
    "stray file": (
        {"shards": 2},
        lambda folder: write_safetensors(folder / "model.safetensors", {}),
        "model.safetensors is not named in",
    ),
    "no config": ({}, drop("config.json"), "config.json is missing"),
    "no tokenizer": ({}, drop("tokenizer.json"), "has no tokenizer"),
    "broken config": ({}, replace_with("config.json", b'{"a": '), "config.json is not valid JSON"),
    "empty config": ({}, replace_with("config.json", b""), "config.json is empty"),
    "lfs config": (
        {},
        replace_with("config.json", b"version https://git-lfs.github.com/spec/v1"),
        "config.json is a git-lfs pointer",
    ),
    "html tokenizer": (
        {},
        replace_with("tokenizer.json", b"<!DOCTYPE html><html>"),
        "tokenizer.json is a web page",
    ),
    "binary config": ({}, replace_with("config.json", b"\xff\xfe{}"), "config.json cannot be read"),
    "config a list": ({}, replace_with("config.json", b"[]"), "must hold a JSON object"),
    "broken index": (
        {"shards": 2},
        replace_with("model.safetensors.index.json", b"{"),
        "index.json is not valid JSON",
    ),
    "broken tokenizer": ({}, replace_with("tokenizer.json", b"{}"), "tokenizer.json cannot be"),
    "broken tokenizer config": (
        {},
        replace_with("tokenizer_config.json", b"{"),
        "tokenizer_config.json is not valid JSON",
    ),
    "binary template": ({}, replace_with("chat_template.jinja", b"\xff"), "chat_template.jinja"),
    "architecture": ({}, config(model_type="mamba9"), "architecture 'mamba9' is not supported"),
    "architecture as a path": ({}, config(model_type="../../x"), "is not supported"),
    "no architecture": ({}, config(model_type=None), "model_type is missing"),
    "rope type": (
        {},
        config(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
        "rope type 'spiral' is not supported",
    ),
    "new rope type": (
        {},
        config(rope_parameters={"rope_type": "spiral"}),
        "rope type 'spiral' is not supported",
    ),
    "rope without factor": ({}, config(rope_scaling={"type": "linear"}), "factor is missing"),
    "activation": ({}, config(hidden_act="relu"), "hidden_act is 'relu'"),
    "number as text": ({}, config(hidden_size="128"), "hidden_size must be a whole number"),
    "no layers": ({}, config(num_hidden_layers=0), "num_hidden_layers must be a whole number"),
    "heads": ({}, config(num_key_value_heads=3), "is no multiple of num_key_value_heads 3"),
    "another size": ({}, config(hidden_size=192), "does not fit its config.json"),
    "a layer too few": ({}, config(num_hidden_layers=1), "layers.1"),
    "awq": (
        {"config": {"quantization": None, "quantization_config": {"quant_method": "awq"}}},
        lambda folder: None,
        "quantization method 'awq' is not supported",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_case_13_broken_checkpoints_are_one_line(command: Run, fault: str, tmp_path: Path) -> None:
    options, change, message = BROKEN[fault]
    change(tiny(tmp_path / "model", **options))
    done = command("generate", tmp_path / "model", "-p", "hello", "-n", 1, "-q")
    assert_fails(done, 4, message, str(tmp_path))


@pytest.mark.parametrize("fault", ["one byte short", "html", "missing shard", "broken config"])
def test_case_13_and_so_in_a_process_of_its_own(cli: Run, fault: str, tmp_path: Path) -> None:
    options, change, message = BROKEN[fault]
    change(tiny(tmp_path / "model", **options))
    done = cli("generate", tmp_path / "model", "-p", "hello", "-n", 1, "-q")
    assert_fails(done, 4, message, str(tmp_path))


def test_case_05_non_finite_logits(cli: Run, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Stored]) -> None:
        tensors["model.norm.weight"] = stored(np.full(128, np.nan), "F16")

    folder = tiny(tmp_path, edit=edit)
    assert_fails(cli("generate", folder, "-p", "x", "-q"), 6, "logits are not finite", "hint")


def test_case_10_prompt_too_long_names_both_numbers(cli: Run, tiny_folder: Path) -> None:
    done = cli("generate", tiny_folder, "--raw", "-q", stdin=b"x" * 600)
    assert_fails(done, 5, "600 tokens", "512")


def test_case_11_a_failing_template_is_one_line(cli: Run, tmp_path: Path) -> None:
    folder = tiny(tmp_path, template="{{ raise_exception('no system role') }}")
    done = cli("generate", folder, "-p", "x", "-q")
    assert_fails(done, 2, "chat template refuses: no system role", "--raw")
    assert cli("generate", folder, "-p", "x", "-n", 1, "--raw", "-q").code == 0
    done = cli("generate", folder, "-p", "x", "--system", "y", "-q")
    assert_fails(done, 2, "template refuses: no system role", "hint: leave out --system; --raw")


def test_a_template_without_an_end_is_a_bad_checkpoint(cli: Run, tmp_path: Path) -> None:
    folder = tiny(tmp_path, template="{% for x in range(99999) %}" * 3 + "{% endfor %}" * 3)
    done = cli("generate", folder, "-p", "x", "-q")
    assert_fails(done, 4, "chat template fails: it does not come to an end", "--raw")
    looked = cli("inspect", folder)
    assert looked.code == 0  # it loads, and --raw works
    assert b"note          the model's chat template fails: it does not come" in looked.out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((), 2, "Missing command"),
        (("frobnicate",), 2, "frobnicate"),
        (("generate",), 2, "MODEL"),
        (("generate", "{model}", "--bogus"), 2, "--bogus"),
        (("generate", "{model}", "-p", "x", "-n", "many"), 2, "many"),
        (("generate", "{model}", "-p", "x", "-n", "-1"), 2, "0 or more, but is -1"),
        (("generate", "{model}", "-p", "x", "-t", "-1"), 2, "temperature must be 0, or lie in"),
        (("generate", "{model}", "-p", "x", "--top-p", "2"), 2, "top_p must lie in"),
        (("generate", "{model}", "-p", "x", "--logit-bias", "a"), 2, "ID=BIAS, not 'a'"),
        (("generate", "{model}", "-p", "x", "--logit-bias", "9999=1"), 2, "token 9999 is not in"),
        (("generate", "{model}", "-p", "x", "--prompt-file", "{file}"), 2, "exclude each other"),
        (("generate", "{model}", "-p", "x", "--json", "--stream-json"), 2, "exclude each other"),
        (("generate", "{model}", "--prompt-file", "{binary}"), 2, "cannot be read as UTF-8"),
        (
            ("generate", "{model}", "--prompt-file", "/dev/zero"),
            5,
            "the prompt has more than 64 MB",
        ),
        (("generate", "{model}", "-p", "x", "--raw", "--system", "y"), 2, "no system message"),
        (("generate", "{model}", "-p", "x", "--stop", ""), 2, "must not be empty"),
        (("generate", "{model}", "-p", "", "--raw"), 2, "the prompt is empty"),
        (("generate", "./nowhere", "-p", "x"), 3, "./nowhere: no such folder"),
        (("convert", "./nowhere", "./x"), 3, "nowhere: no such file or folder"),
        (("generate", "./nowhere", "Why?"), 2, "what is 'Why?'? Only MODEL goes without an option"),
        (("generate", "./nowhere", "-p", "x", "-t", "-1"), 2, "temperature must be 0, or lie in"),
        (("generate", "a b", "-p", "x"), 3, "no such folder"),
        (("generate", "a" * 300, "-p", "x"), 3, "aaa: file name too long"),
        (("generate", "{file}", "-p", "x"), 3, "is a file, not a model folder"),
    ],
)
def test_wrong_usage(
    command: Run, args: Sequence[str], code: int, message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    places = {"model": tiny_folder, "file": tmp_path / "file", "binary": tmp_path / "binary"}
    quiet = ["-q"] if args[:1] == ("generate",) else []
    done = command(*(arg.format(**places) for arg in args), *quiet)
    assert_fails(done, code, message)


@pytest.mark.skipif(not NATIVE, reason="the variable is the native kernels'")
@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("bench",)])
def test_threads_that_are_no_number(command: Sequence[str], cli: Run, tiny_folder: Path) -> None:
    done = cli(*command, tiny_folder, QRUN_NUM_THREADS="all")
    assert_fails(done, 2, "QRUN_NUM_THREADS=all: must be a number from 1 to 1024")


@pytest.mark.skipif(not NATIVE, reason="the variable is the native kernels'")
@pytest.mark.parametrize("command", [("generate", "-p", "x"), ("bench",)])
def test_an_unknown_instruction_set(command: Sequence[str], cli: Run, tiny_folder: Path) -> None:
    done = cli(*command, tiny_folder, QRUN_ISA="mmx")
    assert_fails(done, 2, 'instruction set "mmx" (QRUN_ISA): unknown; known here: portable')


def test_a_text_that_standard_output_cannot_hold(cli: Run, tiny_folder: Path) -> None:
    beyond = Tokenizer(tiny_folder).inner.encode("→", add_special_tokens=False).ids
    bias = [f"--logit-bias={i}=1000" for i in beyond]
    done = cli("generate", tiny_folder, "-p", "x", "-n", "2", *bias, PYTHONIOENCODING="latin-1")
    assert_fails(done, 1, "standard output is latin-1, which has no", "PYTHONIOENCODING=utf-8")


@pytest.mark.parametrize("how", ["2>/dev/full", "2>&-"])
def test_the_code_tells_where_nobody_reads_the_error(how: str, tmp_path: Path) -> None:
    command = f"exec {sys.executable} -m qrun generate {tmp_path}/nowhere -p x {how}"
    done = subprocess.run(["/bin/sh", "-c", command], env=environment(), check=False)
    assert done.returncode == 3


def test_standard_input_that_is_closed(tiny_folder: Path) -> None:
    command = f"exec {sys.executable} -m qrun generate {tiny_folder} -p - <&-"
    done = subprocess.run(
        ["/bin/sh", "-c", command], env=environment(), stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr[:24]) == (2, b"qrun: error: no prompt\n ")


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_a_folder_whose_name_is_not_utf8(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    folder = os.fsdecode(bytes(tmp_path / "m") + b"\xff")
    shutil.copytree(tiny_folder, folder)
    assert cli("generate", folder, "-p", "x", "-n", 1, "-v").code == 0
    done = cli("inspect", folder, "--json")
    assert done.code == 0
    assert json.loads(done.out.decode())["folder"] == folder


def test_standard_output_that_is_closed(tiny_folder: Path) -> None:
    """`qrun ... >&-`"""
    command = f"exec {sys.executable} -m qrun generate {tiny_folder} -p x -n 1 --raw -q >&-"
    done = subprocess.run(
        ["/bin/sh", "-c", command], env=environment(), stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr.decode()) == (
        1,
        "qrun: error: standard output is closed\n",
    )


def test_standard_input_that_is_no_text(cli: Run, tiny_folder: Path) -> None:
    assert_fails(cli("generate", tiny_folder, "-q", stdin=b"\xff"), 2, "is not UTF-8 text")


def test_debug_shows_the_traceback(cli: Run, tmp_path: Path) -> None:
    done = cli("--debug", "generate", tmp_path, "-p", "x")
    assert done.code == 4  # as without --debug
    assert "Traceback" in done.err
    assert "CheckpointError" in done.err


# ---- help, version, completion


def test_help_names_every_exit_code(cli: Run) -> None:
    for command in ([], ["generate"], ["convert"]):
        done = cli(*command, "--help")
        assert done.code == 0
        assert done.err == ""
        for code in ("0  done", "2  wrong usage", "4  bad checkpoint", "130  interrupted"):
            assert code in done.out.decode()


def test_version(cli: Run) -> None:
    import qrun

    assert cli("--version").out.decode() == f"qrun {qrun.__version__}\n"


def test_help_is_quick_and_does_not_load_mlx(python: Callable[..., str]) -> None:
    """Under 0.25 s. CPU time of the best of five, since others may hold up the clock."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "qrun", "--help"],
            env=environment(),
            stdout=subprocess.DEVNULL,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.25
    loaded = python(
        "import sys; sys.argv = ['qrun', '--help']\n"
        "from qrun.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if m in "
        "{'mlx.core', 'numpy', 'tokenizers', 'jinja2', 'huggingface_hub'}))"
    )
    assert loaded.splitlines()[-1] == "[]"


def test_a_greedy_text_loads_no_numpy(tiny_folder: Path, python: Callable[..., str]) -> None:
    """70 ms and 12 MB. numpy is loaded when something is computed with it."""
    loaded = python(
        "import sys\n"
        "from qrun.cli import main\n"
        "sys.argv = ['qrun', 'generate', sys.argv[1], '-p', 'hello', '-n', '3']\n"
        "main()\n"
        "print('numpy' in sys.modules)\n",
        tiny_folder,
    )
    assert loaded.splitlines()[-1] == "False"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str, python: Callable[..., str]) -> None:
    start = "import sys; sys.argv[0] = 'qrun'\nfrom qrun.cli import main\nmain()"
    assert "qrun" in python(start, _QRUN_COMPLETE=f"{shell}_source")


# ---- signals and pipes


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A model that goes on for ever: no end token, a context of 100,000."""
    return tiny(tmp_path, eos_in=(), config={"max_position_embeddings": 100_000})


def heed_interrupts() -> None:
    """In a child: a test run in the background may ignore them, and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*args: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "qrun", *map(str, args)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=heed_interrupts,
    )


FOREVER = ("-p", "x", "-n", 90_000, "-q", "--logit-bias", "72=1000")


def test_interrupt_during_generation(endless: Path) -> None:
    with start("generate", endless, *FOREVER) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # text arrives piece by piece, long before the end
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert err.strip() == b""


@pytest.mark.parametrize("module", ["click", "qrun.printing"])
def test_interrupt_before_the_command_line(module: str) -> None:
    # Python would answer with a traceback; so the process just ends, as from any signal.
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[1]: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from qrun.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, module],
        capture_output=True,
        env=environment(),
        timeout=60,
        preexec_fn=heed_interrupts,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("module", ["mlx.core", "tokenizers"])
def test_interrupt_during_the_imports(
    module: str, tiny_folder: Path, python: Callable[..., str]
) -> None:
    """Half of a second in which Python itself would answer with a traceback."""
    code = (
        "import sys\n"
        "module, folder = sys.argv[1:]\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == module: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['qrun', 'generate', folder, '-p', 'x', '-n', '1']\n"
        "sys.stderr = sys.stdout\n"
        "from qrun.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended.code)\n"
    )
    assert python(code, module, tiny_folder).strip() == "130"


def assert_quiet(process: subprocess.Popen[bytes]) -> None:
    """Close the reading end; the process must end with 0 and say nothing."""
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("form", [(), ("--stream-json",)])
def test_case_17_a_closed_pipe_is_quiet(form: Sequence[str], endless: Path) -> None:
    with start("generate", endless, *FOREVER, *form) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        assert_quiet(process)


@pytest.mark.parametrize("args", [("--help",), ("generate", "{model}", "-p", "x", "-n", "3", "-q")])
def test_case_17_a_pipe_closed_from_the_start_is_quiet(
    args: Sequence[str], tiny_folder: Path
) -> None:
    with start(*(arg.format(model=tiny_folder) for arg in args)) as process:
        assert_quiet(process)


# ---- poor surroundings


def test_case_19_no_compiler_and_no_temporary_folder(tiny_folder: Path, tmp_path: Path) -> None:
    """Nothing is compiled and nothing is written: a writing Python ends the process with 99."""
    guard = (
        "import os, sys\n"
        "def hook(event, args):\n"
        "    wrote = event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+')\n"
        "    wrote = wrote and not str(args[0]).startswith('/dev/')\n"
        "    if wrote or event in ('subprocess.Popen', 'os.system', 'os.posix_spawn', 'os.mkdir',\n"
        "                          'os.fork', 'os.exec', 'tempfile.mkstemp', 'tempfile.mkdtemp'):\n"
        "        sys.stderr.write(f'{event} {args}'); sys.stderr.flush(); os._exit(99)\n"
        "sys.dont_write_bytecode = True\n"
        "sys.addaudithook(hook)\n"
        "from qrun.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", guard, "generate", str(tiny_folder), "-p", "x", "-n", "40", "-q"],
        capture_output=True,
        env=environment(
            PATH=str(tmp_path), TMPDIR="/proc/none", CC=None, CXX=None, HOME="/proc/none"
        ),
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    assert done.stdout


@pytest.mark.skipif(NATIVE, reason="the native kernels are here")
def test_missing_kernels_are_said_once(cli: Run, tiny_folder: Path) -> None:
    done = cli("generate", tiny_folder, "-p", "x", "-n", 1)
    assert done.code == 0
    assert done.err.count("using MLX's own slow CPU product") == 1
    assert len(done.err.splitlines()) == 1


def test_a_read_only_model_folder_is_enough(cli: Run, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model")
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    for path in (*folder.iterdir(), folder):
        path.chmod(path.stat().st_mode & ~0o222)
    assert cli("generate", folder, "-p", "x", "-n", 1, cwd=ROOT).code == 0
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before
    folder.chmod(0o755)

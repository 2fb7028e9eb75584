"""Generation as a whole, on tiny models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import qrun
from qrun import NonFiniteError, PromptTooLongError, Sampling, UsageError
from qrun.loader import LoadedModel, load
from qrun.ops import _launch
from tests import zoo
from tests.reference_model import ReferenceModel
from tests.tiny import Stored, stored, tiny, write_json

HELLO = {"role": "user", "content": "hello"}
IDS = [72, 101, 260, 108, 111]


def tokens(model: LoadedModel, n: int = 12, **options: Any) -> list[int]:
    return qrun.generate(model, IDS, max_tokens=n, **options).tokens


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny model without any end token."""
    return load(tiny(tmp_path_factory.mktemp("endless"), eos_in=()))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_are_the_references(backend: Any, arch: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, arch, eos_in=())
    model = load(folder, dtype="float32")  # 16 bits have ties
    reference = ReferenceModel(folder)
    got = tokens(model, 16)
    logits = reference.logits(IDS + got)[len(IDS) - 1 : -1, : model.vocab]
    assert got == logits.argmax(-1).tolist()


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2"])
def test_threads_may_share_a_model(backend: Any, case: str, tmp_path: Path) -> None:
    model = load(zoo.write(tmp_path / case, case, bits=4))
    prompts = [[5 + n + 3 * i for i in range(3 + 9 * n)] for n in range(6)]
    options = [Sampling(), Sampling(temperature=0.9, seed=3)]

    def text(n: int) -> list[int]:
        sampling = options[n % 2]
        return qrun.generate(model, prompts[n], max_tokens=24, sampling=sampling).tokens

    alone = [text(n) for n in range(len(prompts))]
    device = mx.default_device()  # of this thread: the fixture's
    with ThreadPoolExecutor(
        len(prompts), initializer=mx.set_default_device, initargs=(device,)
    ) as pool:
        for _ in range(3):
            assert list(pool.map(text, range(len(prompts)))) == alone


def test_a_stream_is_refused_before_its_first_piece(endless: LoadedModel) -> None:
    with pytest.raises(UsageError, match="logit_bias: token 1000000"):
        qrun.stream(endless, IDS, sampling=Sampling(logit_bias={10**6: 1.0}))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.8, seed=1), Sampling(repetition_penalty=1.3, logit_bias={7: 2.0})],
)
def test_a_stream_may_go_on_in_another_thread(
    backend: Any, sampling: Sampling, tmp_path: Path
) -> None:
    model = load(zoo.write(tmp_path / "llama", "llama", bits=4))
    device = mx.default_device()

    def a_piece(stream: Any) -> Any:
        mx.set_default_device(device)
        return next(stream)

    stream = qrun.stream(model, IDS, max_tokens=12, sampling=sampling)
    result = None
    while result is None:
        with ThreadPoolExecutor(1) as pool:  # another thread each time
            result = pool.submit(a_piece, stream).result().result
    assert result.tokens == tokens(model, sampling=sampling)


def test_case_06_tokens_do_not_depend_on_the_batch_they_came_in(
    backend: Any, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in one chunk, in chunks, or token by token: the same greedy text."""
    model = load(tiny_folder)
    want = tokens(model)
    for chunk in (1, 2, 3):
        monkeypatch.setattr(_launch.backend(), "PREFILL_ROWS", chunk)
        assert tokens(model) == want


def test_a_text_continues_where_its_own_tokens_end(endless: LoadedModel) -> None:
    whole = tokens(endless, 12)
    rest = qrun.generate(endless, IDS + whole[:5], max_tokens=7).tokens
    assert whole[:5] + rest == whole


def first_new(sequence: list[int]) -> int:
    """Index of the first token, from the third on, that did not occur before."""
    return next(i for i in range(2, len(sequence)) if sequence[i] not in sequence[:i])


@pytest.mark.parametrize("place", ["config", "generation_config", "tokenizer"])
def test_case_07_eos_in_one_place_only(place: str, endless: LoadedModel, tmp_path: Path) -> None:
    want = tokens(endless)
    at = first_new(want)
    result = qrun.generate(load(tiny(tmp_path, eos=want[at], eos_in=[place])), IDS, max_tokens=12)
    assert result.tokens == want[:at]
    assert result.finish_reason == "stop"
    assert endless.tokenizer.decode(want[:at]) == result.text


def test_case_07_eos_is_the_union_of_all_places(tmp_path: Path) -> None:
    tiny(tmp_path, eos_in=["tokenizer"], config={"eos_token_id": [3, 4]})
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 5})
    model = load(tmp_path)
    assert model.eos == {3, 4, 5, model.tokenizer.eos}


@pytest.mark.parametrize("broken", ["{", "[1]", '{"eos_token_id": "two"}', ""])
def test_case_07_a_malformed_generation_config_is_a_warning(broken: str, tmp_path: Path) -> None:
    tiny(tmp_path, eos_in=["config"])
    (tmp_path / "generation_config.json").write_text(broken)
    with pytest.warns(UserWarning, match=r"ignored: .*generation_config\.json") as caught:
        model = load(tmp_path)
    assert len([w for w in caught if "generation_config" in str(w.message)]) == 1
    assert model.eos


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "folder"}, "the model must be one that qrun.load returned, not 'folder'"),
        ({"model": None}, "the model must be one that qrun.load returned, not None"),
        ({"prompt": 5}, "a prompt is a text, a list of messages, or a list of token ids"),
        ({"max_tokens": "x"}, "max_tokens must be a whole number, 0 or more, but is 'x'"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number, 0 or more, but is 2.5"),
        ({"max_tokens": None}, "max_tokens must be a whole number, 0 or more, but is None"),
        ({"max_tokens": True}, "max_tokens must be a whole number, 0 or more, but is True"),
        ({"stop": 5}, "stop must be a text or a list of texts, not 5"),
        ({"stop": [5]}, r"stop must be a text or a list of texts, not \[5\]"),
        ({"stop": b"x"}, "stop must be a text or a list of texts, not b'x'"),
        ({"stop": None}, "stop must be a text or a list of texts, not None"),
        ({"sampling": {}}, r"sampling must be a qrun.Sampling, not \{\}"),
        ({"system": 5}, "a message is a mapping with role and content, not"),
    ],
)
def test_arguments_of_another_type_are_usage_errors(
    options: dict[str, Any], message: str, endless: LoadedModel
) -> None:
    with pytest.raises(UsageError, match=message):
        qrun.generate(**({"model": endless, "prompt": "he"} | options))


def test_a_text_that_no_memory_holds_is_a_usage_error(tmp_path: Path) -> None:
    model = load(tiny(tmp_path, config={"max_position_embeddings": 2**31 - 1}))
    with pytest.raises(UsageError, match=r"a text of 2147483646 tokens takes \d+\.\d GB of cache"):
        qrun.generate(model, [1], max_tokens=2**31 - 3)
    assert len(qrun.generate(model, [1], max_tokens=2).tokens) <= 2


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_case_09_max_tokens(n: int, endless: LoadedModel) -> None:
    result = qrun.generate(endless, IDS, max_tokens=n)
    assert len(result.tokens) == n
    assert result.finish_reason == "length"
    assert result.tokens == tokens(endless, 8)[:n]
    assert result.prompt_tokens == len(IDS)


def test_negative_max_tokens_is_a_usage_error(endless: LoadedModel) -> None:
    with pytest.raises(UsageError, match="max_tokens must be a whole number, 0 or more, but is -1"):
        qrun.generate(endless, IDS, max_tokens=-1)


def test_case_10_a_prompt_that_does_not_fit_names_both_numbers(endless: LoadedModel) -> None:
    assert endless.context == 512
    for length in (512, 700):
        with pytest.raises(PromptTooLongError, match=rf"{length} tokens.*holds 512"):
            qrun.stream(endless, [1] * length)


def test_case_10_generation_ends_where_the_context_ends(endless: LoadedModel) -> None:
    result = qrun.generate(endless, [1, 2] * 255, max_tokens=100)
    assert len(result.tokens) == 2
    assert result.finish_reason == "length"


@pytest.mark.parametrize("size", [1, 2, 5, 11])
def test_case_16_stop_strings_across_token_boundaries(size: int, endless: LoadedModel) -> None:
    text = qrun.generate(endless, IDS, max_tokens=40).text
    start = next(i for i in range(4, len(text)) if text.find(text[i : i + size]) == i)
    stop = text[start : start + size]
    pieces = list(qrun.stream(endless, IDS, max_tokens=40, stop=["never", stop]))
    result = pieces[-1].result
    assert result is not None
    assert result.text == text[:start] == "".join(p.text for p in pieces)
    assert result.finish_reason == "stop"
    assert all(p.result is None for p in pieces[:-1])


def test_case_16_a_stop_string_that_never_completes_is_printed(endless: LoadedModel) -> None:
    text = qrun.generate(endless, IDS, max_tokens=20).text
    stopped = qrun.generate(endless, IDS, max_tokens=20, stop=[text[-3:] + "more"])
    assert stopped.text == text
    assert stopped.finish_reason == "length"


@pytest.mark.parametrize("kind", ["bytelevel", "sentencepiece"])
def test_case_08_the_stream_joined_is_the_decode_of_all_tokens(kind: str, tmp_path: Path) -> None:
    model = load(tiny(tmp_path, tokenizer=kind, eos_in=()))
    for seed in range(5):
        sampling = Sampling(temperature=3.0, seed=seed)
        pieces = list(qrun.stream(model, IDS, max_tokens=60, sampling=sampling))
        result = pieces[-1].result
        assert result is not None
        joined = "".join(p.text for p in pieces)
        assert joined == result.text == model.tokenizer.decode(result.tokens)


def test_whole_numbers_may_be_numpys(endless: LoadedModel) -> None:
    ids = list(np.array(IDS, np.int32))
    want = qrun.generate(endless, IDS, max_tokens=3)
    assert qrun.generate(endless, ids, max_tokens=np.int64(3)).tokens == want.tokens  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="list of token ids, not of type ndarray"):
        qrun.generate(endless, np.array(IDS))  # type: ignore[arg-type]


def test_case_10_ids_beyond_the_tokenizer_are_never_generated(endless: LoadedModel) -> None:
    size = endless.vocab
    logits = endless.model.logits(endless.model(mx.array([1], mx.int32), endless.new_cache(1)))
    assert logits.shape[-1] > size
    sampling = Sampling(temperature=100.0, seed=1)
    assert max(tokens(endless, 300, sampling=sampling)) < size


def test_same_seed_same_text(endless: LoadedModel) -> None:
    def text(seed: int | None) -> qrun.Generation:
        return qrun.generate(
            endless, IDS, max_tokens=20, sampling=Sampling(temperature=1.5, seed=seed)
        )

    assert text(3).tokens == text(3).tokens
    assert text(3).tokens != text(4).tokens
    drawn = text(None)
    assert text(drawn.seed).tokens == drawn.tokens


def test_sampling_options_reach_the_sampler(endless: LoadedModel) -> None:
    plain = tokens(endless, 4)
    biased = tokens(endless, 4, sampling=Sampling(logit_bias={plain[0]: -1000.0}))
    assert plain[0] not in biased
    few = tokens(endless, 40, sampling=Sampling(frequency_penalty=1000.0))
    assert len(set(few)) == 40


def poisoned(folder: Path, value: float) -> Path:
    def edit(tensors: dict[str, Stored]) -> None:
        weight = np.ones(128)
        weight[5] = value
        tensors["model.norm.weight"] = stored(weight, "F32")

    return tiny(folder, edit=edit)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9)])
def test_case_05_non_finite_logits_stop_with_an_error(
    backend: Any, value: float, sampling: Sampling, tmp_path: Path
) -> None:
    model = load(poisoned(tmp_path, value))
    with pytest.raises(NonFiniteError, match=r"not finite after 0 tokens"):
        qrun.generate(model, IDS, sampling=sampling)


def test_case_05_float16_overflow_stops_with_an_error(backend: Any, tmp_path: Path) -> None:
    """In float32 the same model is fine."""

    def edit(tensors: dict[str, Stored]) -> None:
        for name in ("scales", "biases"):
            key = f"model.layers.0.mlp.down_proj.{name}"
            tensors[key] = stored(tensors[key][1].astype(np.float32) * 1e6, "F32")

    folder = tiny(tmp_path, edit=edit, dtype="F32")
    assert tokens(load(folder, dtype="float32"), 3)
    with pytest.raises(NonFiniteError, match="not finite"):
        tokens(load(folder, dtype="float16"), 3)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ("", {"raw": True}, "the prompt is empty"),
        ([1, 10_000], {}, "token 10000 is not in 0 .. 272"),
        ([-1], {}, "token -1 is not in"),
        ("x", {"raw": True, "system": "y"}, "a raw prompt takes no system message"),
        ([1], {"system": "y"}, "token ids take no system message"),
        ([HELLO], {"raw": True}, "a raw prompt is a text or a list of token ids, not messages"),
        ([1, HELLO], {}, "a message is a mapping with role and content, not 1"),
        ("x\udcff", {}, r"the prompt is not UTF-8 text: character 1 is '.udcff'"),
        ("x", {"system": "\ud800"}, "the system message is not UTF-8 text: character 0"),
        ([HELLO, {**HELLO, "content": "ab\ud83d"}], {}, "message 1: its content is not UTF-8 text"),
        ([{**HELLO, "role": "\ud800"}], {}, "message 0: its role is not UTF-8 text: character 0"),
        ("x", {"stop": [""]}, "a stop string must not be empty"),
    ],
)
def test_prompts_that_cannot_be(
    prompt: Any, options: dict[str, Any], message: str, endless: LoadedModel
) -> None:
    with pytest.raises(UsageError, match=message):
        qrun.stream(endless, prompt, **options)


def test_all_forms_of_a_prompt(endless: LoadedModel) -> None:
    def count(prompt: Any, **options: Any) -> int:
        return qrun.generate(endless, prompt, max_tokens=0, **options).prompt_tokens

    messages = [{"role": "user", "content": "hello"}]
    ids = endless.tokenizer.encode_chat(messages)
    assert count("hello") == count(messages) == count(ids) == len(ids)
    assert count("hello", raw=True) == len(endless.tokenizer.encode("hello"))
    system = [{"role": "system", "content": "a"}, *messages]
    assert count("hello", system="a") == count(system) == count(messages, system="a")


def test_two_streams_of_one_model_do_not_disturb_each_other(endless: LoadedModel) -> None:
    alone = qrun.generate(endless, IDS, max_tokens=20).text
    other = qrun.generate(endless, [5, 6, 7], max_tokens=20).text
    one = qrun.stream(endless, IDS, max_tokens=20)
    two = qrun.stream(endless, [5, 6, 7], max_tokens=20)
    pairs = zip(one, two, strict=False)
    first, second = zip(*((a.text, b.text) for a, b in pairs), strict=True)
    first = "".join(first) + "".join(p.text for p in one)
    second = "".join(second) + "".join(p.text for p in two)
    # zip drops one piece of the longer stream; both begin alike and nothing else is mixed in.
    assert alone.startswith(first[:5])
    assert other.startswith(second[:5])


def test_an_abandoned_stream_leaves_nothing_behind(endless: LoadedModel) -> None:
    want = tokens(endless)
    for _ in range(3):
        stream = qrun.stream(endless, IDS, max_tokens=50)
        next(stream)
        stream.close()
    assert tokens(endless) == want


def test_case_18_memory_does_not_grow_with_every_token(backend: Any, tiny_folder: Path) -> None:
    model = replace(load(tiny_folder), eos=frozenset[int]())
    held = []
    for _ in qrun.stream(model, IDS, max_tokens=240, sampling=Sampling(logit_bias={72: 1000.0})):
        held.append(mx.get_active_memory())
    # One cache of 256 positions serves all steps: what a late step holds, an early one held. The
    # least of the late ones counts: the next step is under way and may hold its own for a moment.
    # Anything kept a token would raise them all: a row of logits, 150 times, is 180 KB.
    assert len(held) > 200
    assert min(held[200:]) <= max(held[10:50])


def test_results_say_what_happened(endless: LoadedModel) -> None:
    result = qrun.generate(endless, IDS, max_tokens=9)
    assert result.timings.prefill > 0
    assert result.timings.decode > 0
    assert result.prefill_rate == pytest.approx(5 / result.timings.prefill)
    assert result.decode_steps == 8
    assert result.decode_rate == pytest.approx(8 / result.timings.decode)
    # From 5 to 13 positions: the last token is not fed back. 2 layers, k and v, 2 heads of 32 dims,
    # float32.
    assert result.cache_bytes == 9 * 2 * 2 * 2 * 32 * 4


def test_the_step_of_an_end_token_is_counted(endless: LoadedModel) -> None:
    ids = qrun.generate(endless, IDS, max_tokens=9).tokens
    end = next(i for i in range(1, 9) if ids[i] not in ids[:i])
    result = qrun.generate(replace(endless, eos=frozenset({ids[end]})), IDS, max_tokens=9)
    assert (len(result.tokens), result.decode_steps) == (end, end)
    assert qrun.generate(endless, IDS, max_tokens=0).decode_steps == 0


def test_a_single_stop_string_is_one_string(endless: LoadedModel) -> None:
    whole = qrun.generate(endless, "x", raw=True, max_tokens=20).text
    stop = whole[5:9]
    text = qrun.generate(endless, "x", raw=True, max_tokens=20, stop=stop).text
    assert text == whole[: whole.index(stop)]


@pytest.mark.parametrize("prompt", ["", "  \n", "bad \udcff byte", b"bytes", None, 7])
def test_what_is_no_prompt_is_refused(endless: LoadedModel, prompt: Any) -> None:
    with pytest.raises(UsageError):
        qrun.generate(endless, prompt, max_tokens=1)


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-300}, {"frequency_penalty": 1e300}, {"presence_penalty": 3e38}]
)
def test_numbers_that_float32_cannot_hold_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match="must"):
        Sampling(**options)

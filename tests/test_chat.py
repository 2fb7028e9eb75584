"""Chat templates: every place a checkpoint keeps one, and rendering."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qrun.chat import render
from qrun.errors import CheckpointError, UsageError
from qrun.tokenizer import Tokenizer
from tests.tiny import CHATML, tiny, write_json

HELLO = [{"role": "user", "content": "hello"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def text_of(folder: Path, messages: list[dict[str, str]]) -> str:
    tokenizer = Tokenizer(folder)
    return tokenizer.inner.decode(tokenizer.encode_chat(messages), skip_special_tokens=False)


@pytest.mark.parametrize("form", ["string", "list", "jinja"])
def test_case_11_all_sources_of_a_template(form: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path, template_form=form)
    assert text_of(folder, HELLO) == ("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_case_11_the_jinja_file_wins(tmp_path: Path) -> None:
    tiny(tmp_path, template="from the config")
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert text_of(tmp_path, HELLO) == "from the file"


def test_case_11_no_template_gives_the_raw_prompt(tmp_path: Path) -> None:
    assert text_of(tiny(tmp_path, template=None), HELLO) == "hello"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "short"}, *HELLO],
        HELLO * 3,
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "assistant", "tool_calls": []}],
    ],
)
def test_case_11_no_template_takes_no_conversation(messages: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no chat template: it takes one text, no system message"):
        text_of(tiny(tmp_path, template=None), messages)


def test_half_a_character_out_of_a_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="what the chat template made is not UTF-8 text"):
        text_of(tiny(tmp_path, template="{{ '\\ud800' }}"), HELLO)


def test_half_a_character_for_a_special_token(tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "\\ud800"}')
    assert Tokenizer(tmp_path).bos is None


def test_case_11_exactly_one_bos(tmp_path: Path) -> None:
    """The template writes BOS itself, and this tokenizer adds one to every text."""
    folder = tiny(tmp_path, tokenizer="sentencepiece", template="{{ bos_token }}" + CHATML)
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode_chat(HELLO)
    assert ids[0] == tokenizer.bos
    assert ids.count(tokenizer.bos or -1) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for x in range(10**9) %}{{ x }}{% endfor %}",
    ],
)
def test_case_11_a_failing_template_is_one_line(template: str) -> None:
    with pytest.raises(CheckpointError, match="the model's chat template fails: ") as caught:
        render(template, HELLO, SPECIAL)
    assert "\n" not in str(caught.value)
    assert caught.value.hint is not None
    assert "--raw" in caught.value.hint


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "hi"}]])
def test_content_that_a_template_cannot_read_is_the_callers_mistake(content: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content, "more": 1}]
    with pytest.raises(UsageError, match=r"does not take the content of message 1, which is no te"):
        render("{% for m in messages %}{{ m.content + '' }}{% endfor %}", messages, SPECIAL)


def test_a_template_that_is_no_template_is_a_bad_checkpoint() -> None:
    with pytest.raises(CheckpointError, match=r"chat template is broken: .* \(line 1\)"):
        render("{% if %}", HELLO, SPECIAL)


def test_a_template_that_drops_everything_is_a_bad_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="chat template makes no text of the messages"):
        render("{{ nothing }}", HELLO, SPECIAL)


def test_raise_exception_keeps_its_message() -> None:
    with pytest.raises(UsageError, match="refuses: only pairs of turns"):
        render("{{ raise_exception('only pairs of turns') }}", HELLO, SPECIAL)


@pytest.mark.parametrize(
    "message",
    [
        "hello",
        7,
        {"content": "hello"},
        {"role": 1},
        {"role": "user"},
        {"role": "user", "content": 5},
    ],
)
def test_what_is_no_message_is_the_callers_mistake(message: Any) -> None:
    with pytest.raises(UsageError, match="a message is a mapping with role and content"):
        render(CHATML, [message], SPECIAL)


GROW = (
    "{% set ns = namespace(s='xx', n=99, l=[1]) %}"
    "{% for i in range(60) %}{% set STEP %}{% endfor %}"
)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ loop.length }}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}"
        "{% endfor %}",
        "{% for x in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{{ 'x' * 10**11 }}",
        "{{ [1] * 10**11 }}",
        "{{ 2 ** 1000000000 }}",
        "{{ '%1000000000d' % 5 }}",
        "{{ '%*d' % (1000000000, 5) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ '%1000000000d' | format(5) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 1.5 | round(1000000000) }}",
        GROW.replace("STEP", "ns.s = ns.s ~ ns.s"),
        GROW.replace("STEP", "ns.s = ns.s + ns.s"),
        GROW.replace("STEP", "ns.s = ns.s.replace('x', ns.s)"),
        GROW.replace("STEP", "ns.s = ns.s | replace('x', ns.s)"),
        GROW.replace("STEP", "ns.s = [ns.s, ns.s] | join"),
        GROW.replace("STEP", "ns.s = ns.s.join([ns.s, ns.s])"),
        GROW.replace("STEP", "ns.n = ns.n * ns.n"),
        GROW.replace("STEP", "ns.l = ns.l + ns.l"),
    ],
)
def test_the_work_of_a_template_has_an_end(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qrun.sandbox.BUDGET", 1 << 22)
    with pytest.raises(CheckpointError, match="the model's chat template fails: it ") as caught:
        render(template, HELLO, SPECIAL)
    assert caught.value.hint is not None
    assert "--raw" in caught.value.hint


def test_the_time_of_a_template_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qrun.sandbox.BUDGET", 1 << 60)
    monkeypatch.setattr("qrun.sandbox.SECONDS", 0.1)
    with pytest.raises(CheckpointError, match="does not come to an end"):
        render("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, HELLO, SPECIAL)


def test_a_long_conversation_is_no_work() -> None:
    long = [{"role": "user", "content": "word " * 1000}] * 4000
    assert len(render(CHATML, long, SPECIAL)) > 20_000_000


def test_a_long_conversation_that_is_counted_at_every_turn_is_no_work() -> None:
    """As qwen3's template does."""
    template = "{% for m in messages %}{{ messages|length - loop.index0 }}{% endfor %}"
    assert render(template, [{"role": "user", "content": "hi"}] * 8000, SPECIAL).endswith("21")


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'ö': '<'} | tojson }}", '{"ö": "<"}'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        (
            "{{ {'b': 1, 'a': 'ö'} | tojson(true, none, (',', ':'), true) }}",
            '{"a":"\\u00f6","b":1}',
        ),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            HELLO[0]["content"],
        ),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks and lstrip_blocks
        ("{{ messages | length }}{{ add_generation_prompt }}", "1True"),
        ("{{ strftime_now('%Y')[:1] }}", "2"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}", "5"),
        ("{% for m in messages %}{{ loop.last }}{{ loop.length }}{% else %}-{% endfor %}", "True1"),
        ("{% for x in nothing %}{{ x }}{% else %}-{% endfor %}", "-"),
        ("{% for k, v in {'a': 1}.items() if v %}{{ k }}{% endfor %}", "a"),
        ("{{ '%d%%' % 1700000000 }}{{ '{{}}{}'.format(1700000000) }}", "1700000000%{}1700000000"),
        ("{{ tools is defined }}{{ tools }}", "False"),
    ],
)
def test_the_environment_that_templates_expect(template: str, want: str) -> None:
    assert render(template, HELLO, SPECIAL) == want


def test_a_template_cannot_change_the_conversation() -> None:
    with pytest.raises(CheckpointError):
        render("{{ messages.append(1) }}", HELLO, SPECIAL)
    assert len(HELLO) == 1


@pytest.mark.parametrize("broken", [[{"name": "tool_use", "template": "x"}], [1, 2], 7, {}])
def test_a_list_without_default_is_named(broken: object, tmp_path: Path) -> None:
    tiny(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": broken})
    with pytest.raises(CheckpointError, match="chat_template has no usable default"):
        Tokenizer(tmp_path)


def test_several_messages_with_a_system_message(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "he"}, *HELLO, {"role": "assistant", "content": "a"}]
    text = text_of(tiny(tmp_path), messages)
    assert text.startswith("<|im_start|>system\nhe<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n")
    assert text.endswith("assistant\na<|im_end|>\n<|im_start|>assistant\n")


def test_jinja2_stays_whole_for_others(python: Callable[..., str]) -> None:
    """qrun imports it without its __init__, whoever comes later has all of it."""
    code = (
        "import sys\n"
        "from qrun.chat import render\n"
        "text = render('{{ messages[0].content }}', [{'role': 'user', 'content': 'x'}], {})\n"
        "assert 'jinja2.bccache' not in sys.modules\n"
        "import jinja2, jinja2.sandbox\n"
        "assert jinja2.exceptions.TemplateError is jinja2.TemplateError\n"
        "assert issubclass(jinja2.sandbox.SandboxedEnvironment, jinja2.Environment)\n"
        "assert not hasattr(jinja2, 'nonsense')\n"
        "print(text, jinja2.Template('{{ a }}').render(a=3))\n"
    )
    assert python(code) == "x 3\n"

"""The pre-tokenizers of byte-level BPE that a GGUF only names, as tokenizer.json writes them.

The rules are those of the original tokenizer.json files. An unknown name must be refused: the wrong
rule would give other ids for the same text, and quietly worse answers.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _split(pattern: str) -> Json:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def byte_level(words: bool) -> Json:
    """Bytes as visible characters; with `words`, after GPT-2's split into words."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": words,
    }


def _cased(contractions: str, digits: str, slash: str) -> Json:
    """Words that begin anew at a capital after small letters, as in o200k and Tekken."""
    return _split(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contractions}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contractions}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DIGITS: Json = {"type": "Digits", "individual_digits": True}
_GPT2 = [byte_level(True)]
_SMOLLM = [_DIGITS, byte_level(True)]
_LLAMA3 = [_split(_WORDS_DIGITS % "{1,3}"), byte_level(False)]
_QWEN2 = [_split(_WORDS_DIGITS % ""), byte_level(False)]
_O200K = [_cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}", "/"), byte_level(False)]
_TEKKEN = [_cased("", "", "/"), byte_level(False)]
# What llama.cpp does with files too old to name their rule
_DEFAULT = [
    _split(r"[\p{P}\$\+<=>\^~\|]+"),
    _split(_WORDS),
    _split(r"\p{N}+"),
    _split(r"[0-9][0-9][0-9]"),
    byte_level(False),
]
PRE_TOKENIZERS: dict[str, list[Json]] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "stablelm2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "tekken": _TEKKEN,
}
# A word that is a token as a whole is taken before any merge, and a BOS belongs in front
WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
ADDS_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
NFC = frozenset({"qwen2", "deepseek-r1-qwen"})

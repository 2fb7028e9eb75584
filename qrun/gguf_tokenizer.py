"""tokenizer.json and its companions from a GGUF's tokenizer metadata.

A GGUF names a pre-tokenizer (`tokenizer.ggml.pre`) instead of carrying its rule; the rules here are
those of the original tokenizer.json files. An unknown name is refused: the wrong rule would give
other ids for the same text, and quietly worse answers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from qrun.errors import CheckpointError

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


def _byte_level(words: bool) -> Json:
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
_GPT2 = [_byte_level(True)]
_SMOLLM = [_DIGITS, _byte_level(True)]
_LLAMA3 = [_split(_WORDS_DIGITS % "{1,3}"), _byte_level(False)]
_QWEN2 = [_split(_WORDS_DIGITS % ""), _byte_level(False)]
_O200K = [_cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}", "/"), _byte_level(False)]
_TEKKEN = [_cased("", "", "/"), _byte_level(False)]
# What llama.cpp does with files too old to name their rule
_DEFAULT = [
    _split(r"[\p{P}\$\+<=>\^~\|]+"),
    _split(_WORDS),
    _split(r"\p{N}+"),
    _split(r"[0-9][0-9][0-9]"),
    _byte_level(False),
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
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_ADDS_BOS = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# Tokens that end an assistant's turn, where the file's template writes them
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "</s>")


def tokenizer_files(path: Path, metadata: Json, context: int) -> tuple[dict[str, str], Json]:
    """File name -> content, and the ids that belong into config.json as well."""
    return _Tokenizer(path, metadata).files(context)


class _Tokenizer:
    def __init__(self, path: Path, metadata: Json) -> None:
        self.path, self.metadata = path, metadata
        model = self.get("model", str)
        if model != "gpt2":
            raise CheckpointError(f"{path}: unknown tokenizer model {model!r}")
        self.tokens: list[str] = self.strings("tokens")
        types = self.get("token_type", list, [1] * len(self.tokens))
        if len(types) != len(self.tokens):
            raise CheckpointError(
                f"{path}: {len(self.tokens)} tokens, but {len(types)} token types"
            )
        # converters fill holes in the vocabulary; such an id stands for no text
        self.types = [
            0 if kind == _UNUSED and re.fullmatch(r"\[PAD\d+\]", token) else int(kind)
            for token, kind in zip(self.tokens, types, strict=True)
        ]
        self.vocab = {t: i for i, t in enumerate(self.tokens) if self.types[i]}
        if len(self.vocab) != sum(map(bool, self.types)):
            seen = set[str]()
            twice = next(t for t in self.tokens if t in seen or seen.add(t))
            raise CheckpointError(f"{path}: token {twice!r} occurs twice")
        self.pre = self.get("pre", str, "default")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if kind is list and hasattr(value, "tolist"):
            value = value.tolist()
        if value is None:
            raise CheckpointError(f"{self.path}: metadata tokenizer.ggml.{key} is missing")
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{self.path}: metadata tokenizer.ggml.{key} is no {kind.__name__}"
            )
        return value

    def strings(self, key: str) -> list[str]:
        found = self.get(key, list)
        if not all(isinstance(s, str) for s in found):
            raise CheckpointError(f"{self.path}: metadata tokenizer.ggml.{key} is not of strings")
        return found

    def special(self, key: str) -> int | None:
        """The id of a special token, if the file names one that exists."""
        found = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if found is None or found == 0xFFFFFFFF:
            return None
        if not isinstance(found, int) or not 0 <= found < len(self.tokens):
            raise CheckpointError(
                f"{self.path}: metadata tokenizer.ggml.{key}_token_id is {found}, "
                f"of {len(self.tokens)} tokens"
            )
        return found

    # ---- tokenizer.json

    def files(self, context: int) -> tuple[dict[str, str], Json]:
        bos, eos = self.special("bos"), self.special("eos")
        text = json.dumps(self.tokenizer_json(bos), ensure_ascii=False, indent=1)
        try:
            tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{self.path}: damaged tokenizer metadata: {error}") from None
        stops = self.stops(eos)
        ids: Json = {"bos_token_id": bos, "eos_token_id": eos}
        ids = {key: value for key, value in ids.items() if value is not None}
        generation: Json = ids | {"eos_token_id": stops} if stops else ids
        texts = {
            "tokenizer.json": text,
            "tokenizer_config.json": _dump(self.tokenizer_config(context)),
            "generation_config.json": _dump(generation),
        }
        return texts, ids

    def tokenizer_json(self, bos: int | None) -> Json:
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self.added_tokens(),
            "normalizer": {"type": "NFC"} if self.pre in _NFC else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": self.pre_tokenizers()},
            "post_processor": self.post_processor(bos),
            "decoder": _byte_level(True),
            "model": self.byte_level_model(),
        }

    def pre_tokenizers(self) -> list[Json]:
        if self.pre not in PRE_TOKENIZERS:
            raise CheckpointError(
                f"{self.path}: unknown pre-tokenizer {self.pre!r}",
                hint="take a GGUF of another model, or convert the original folder instead",
            )
        return PRE_TOKENIZERS[self.pre]

    def byte_level_model(self) -> Json:
        merges: list[list[str]] = []
        for merge in self.strings("merges"):
            left, space, right = merge[:1] + merge[1:].partition(" ")[0], " ", ""
            right = merge[len(left) + 1 :]
            if not (left and space and right):
                raise CheckpointError(f"{self.path}: malformed merge {merge!r}")
            merges.append([left, right])
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": self.pre in _WHOLE_WORDS,
            "vocab": self.vocab,
            "merges": merges,
        }

    def added_tokens(self) -> list[Json]:
        return [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self.types[i] == _CONTROL,
            }
            for i, token in enumerate(self.tokens)
            if self.types[i] in (_CONTROL, _USER_DEFINED) and token
        ]

    def post_processor(self, bos: int | None) -> Json:
        """In front of a text, and of each text of a pair, the BOS if the file asks for one."""
        if not self.get("add_bos_token", bool, self.pre in _ADDS_BOS) or bos is None:
            return _byte_level(True)
        token = self.tokens[bos]
        special, a, b = (
            {"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        )
        return {
            "type": "TemplateProcessing",
            "single": [special, a],
            "pair": [special, a, {"SpecialToken": {"id": token, "type_id": 1}}, b],
            "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
        }

    # ---- the companions

    def tokenizer_config(self, context: int) -> Json:
        config: Json = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.get("add_bos_token", bool, self.pre in _ADDS_BOS),
        }
        for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
            found = self.special(key)
            if found is not None:
                config[f"{name}_token"] = self.tokens[found]
        templates = self.templates()
        if len(templates) > 1:
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in templates.items()
            ]
        elif templates:
            config["chat_template"] = next(iter(templates.values()))
        return config

    def templates(self) -> dict[str, str]:
        """The chat templates by name; the unnamed one is "default"."""
        prefix = "tokenizer.chat_template"
        found = {
            key.removeprefix(prefix).removeprefix(".") or "default": text
            for key, text in self.metadata.items()
            if key == prefix or key.startswith(prefix + ".")
        }
        return {name: text for name, text in found.items() if isinstance(text, str) and text}

    def stops(self, eos: int | None) -> list[int]:
        """Every id that ends a turn: those the file names, and those its template writes."""
        stops = {eos, self.special("eot"), self.special("eom")} - {None}
        written = "".join(self.templates().values())
        for token in _END_OF_TURN:
            i = self.vocab.get(token)
            if i is not None and self.types[i] == _CONTROL and token in written:
                stops.add(i)
        return sorted(i for i in stops if i is not None)


def _dump(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"

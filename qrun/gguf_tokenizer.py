"""tokenizer.json and its companions from a GGUF's tokenizer metadata.

Two families: "gpt2" is byte-level BPE with a list of merges, "llama" is SentencePiece's BPE, whose
merges follow from the scores, with byte tokens for what is not in the vocabulary.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from qrun.errors import CheckpointError
from qrun.gguf_pretokenizers import ADDS_BOS, NFC, PRE_TOKENIZERS, WHOLE_WORDS, byte_level

Json = dict[str, Any]

_SPACE = "▁"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
# Tokens that end an assistant's turn, where the file's template writes them
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "</s>")


def tokenizer_files(path: Path, metadata: Json, context: int) -> tuple[dict[str, str], Json]:
    """File name -> content, and the ids that belong into config.json as well."""
    return _Tokenizer(path, metadata).files(context)


class _Tokenizer:
    def __init__(self, path: Path, metadata: Json) -> None:
        self.path, self.metadata = path, metadata
        model = self.get("model", str)
        if model not in ("gpt2", "llama"):
            raise CheckpointError(f"{path}: unknown tokenizer model {model!r}")
        self.pieces = model == "llama"  # SentencePiece's
        self.tokens = self.strings("tokens")
        types = self.numbers("token_type", [1] * len(self.tokens))
        if self.pieces:  # files keep the spaces of user-defined tokens as spaces
            self.tokens = [t.replace(" ", _SPACE) for t in self.tokens]
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
        self.adds_bos = self.get("add_bos_token", bool, self.pieces or self.pre in ADDS_BOS)
        self.adds_prefix = self.get("add_space_prefix", bool, True)  # of pieces only

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

    def numbers(self, key: str, default: Sequence[float] | None = None) -> list[float]:
        found = self.get(key, list, default)
        if not all(isinstance(n, (int, float)) for n in found):
            raise CheckpointError(f"{self.path}: metadata tokenizer.ggml.{key} is not of numbers")
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
        text = json.dumps(self.tokenizer_json(bos), ensure_ascii=False, separators=(",", ":"))
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
            "post_processor": self.post_processor(bos),
            **(self.pieces_family() if self.pieces else self.byte_level_family()),
        }

    def byte_level_family(self) -> Json:
        return {
            "normalizer": {"type": "NFC"} if self.pre in NFC else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": self.pre_tokenizers()},
            "decoder": byte_level(True),
            "model": self.bpe(self.listed_merges(), ignore_merges=self.pre in WHOLE_WORDS),
        }

    def pieces_family(self) -> Json:
        """Spaces become visible; some models also put one in front, and drop it when decoding."""
        spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        decoders: list[Json] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if self.adds_prefix:
            prefix: Json = {"type": "Prepend", "prepend": _SPACE}
            spaces = {"type": "Sequence", "normalizers": [prefix, spaces]}
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self.special("unknown")
        return {
            "normalizer": spaces,
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self.bpe(
                self.scored_merges(),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            ),
        }

    def pre_tokenizers(self) -> list[Json]:
        if self.pre not in PRE_TOKENIZERS:
            raise CheckpointError(
                f"{self.path}: unknown pre-tokenizer {self.pre!r}",
                hint="take a GGUF of another model, or convert the original folder instead",
            )
        return PRE_TOKENIZERS[self.pre]

    def bpe(self, merges: list[tuple[str, str]], **options: Any) -> Json:
        model: Json = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
        }
        return model | options | {"vocab": self.vocab, "merges": merges}

    def listed_merges(self) -> list[tuple[str, str]]:
        merges: list[tuple[str, str]] = []
        for merge in self.strings("merges"):
            at = merge.find(" ", 1)  # a part may begin with a space, but not end with one
            if not 0 < at < len(merge) - 1:
                raise CheckpointError(f"{self.path}: malformed merge {merge!r}")
            merges.append((merge[:at], merge[at + 1 :]))
        return merges

    def scored_merges(self) -> list[tuple[str, str]]:
        """Every way to make a piece out of two others, the best pieces first.

        SentencePiece joins the two neighbours whose piece scores best, which a list of merges in
        this order does too. User-defined pieces go before all others: it never cuts them.
        """
        scores = self.numbers("scores")
        if len(scores) != len(self.tokens):
            raise CheckpointError(f"{self.path}: {len(self.tokens)} tokens, {len(scores)} scores")
        found: list[tuple[float, int, str, str]] = []
        vocab = self.vocab
        for token, kind, score in zip(self.tokens, self.types, scores, strict=True):
            if kind not in (_NORMAL, _USER_DEFINED):
                continue
            rank = math.inf if kind == _USER_DEFINED else score
            for i in range(1, len(token)):
                left, right = token[:i], token[i:]
                if left in vocab and right in vocab:
                    found.append((rank, i, left, right))
        # ties as the original converters break them: longer parts first
        found.sort(key=lambda m: (m[0], m[1], len(m[3])), reverse=True)
        return [(left, right) for _, _, left, right in found]

    def added_tokens(self) -> list[Json]:
        return [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": self.eats_space(token),
                "normalized": False,
                "special": self.types[i] == _CONTROL,
            }
            for i, token in enumerate(self.tokens)
            if self.types[i] in (_CONTROL, _USER_DEFINED) and token
        ]

    def eats_space(self, token: str) -> bool:
        """Phi-3's SentencePiece tokens swallow the space behind them; the files do not say so."""
        phi3 = self.pieces and self.metadata.get("general.architecture") == "phi3"
        return phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")

    def post_processor(self, bos: int | None) -> Json:
        """In front of a text, and of each text of a pair, the BOS if the file asks for one."""
        if not self.adds_bos or bos is None:
            return byte_level(True)
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
            "add_bos_token": self.adds_bos,
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

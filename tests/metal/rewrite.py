"""The few places where Metal's text is not C++ for OpenCL, rewritten in memory, line by line.

* `threadgroup T a[N];` becomes a reference into the runtime's arena, so that its accesses can be
  bounded and shadowed.
* `float4(a, b)` and `vec<T, 4>(a, b)` become `metal::make<...>(a, b)`: OpenCL has no such
  constructor; `half(x)` and `bfloat(x)` too, since clang does not convert one to the other.
* `constant T c [[function_constant(7)]];` gets the value that the caller gave for 7.
* A constructor cannot be qualified with `thread` in OpenCL: the word is dropped there.

Line numbers never change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SCALARS = "char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat"
_VECTOR = re.compile(rf"\b(?:metal::)?((?:{_SCALARS})[234]|half|bfloat)(?=\s*\()")
_VEC = re.compile(r"\b(?:metal::)?vec\s*<")
_ALIAS = re.compile(
    rf"\busing\s+(\w+)\s*=\s*(?:typename\s+)?(?:metal::)?(?:vec\s*<|(?:{_SCALARS})[234]\s*;)"
    rf"|\btypedef\s+(?:metal::)?(?:vec\s*<[^;]*>|(?:{_SCALARS})[234])\s*(\w+)\s*;"
)
_ARRAY = re.compile(r"(?:\balignas\s*\([^)]*\)\s*)?\bthreadgroup\s+([^;]*);")
_FUNCTION_CONSTANT = re.compile(
    r"(\bconstant\s+\w+\s+\w+)\s*\[\[\s*function_constant\((\d+)\)\s*\]\]\s*;"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.S)


def blank(text: str) -> str:
    """The text with comments and string contents replaced by spaces; positions are kept."""

    def spaces(m: re.Match[str]) -> str:
        s = m.group()
        if s[0] in "\"'":
            return s[0] + " " * (len(s) - 2) + s[0]
        return re.sub(r"[^\n]", " ", s)

    return _COMMENT.sub(spaces, text)


def closing(text: str, start: int, pair: str) -> int:
    """Position after the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == pair[0]:
            depth += 1
        elif text[i] == pair[1]:
            depth -= 1
            if depth == 0:
                return i + 1
    return len(text)


def split(text: str, separator: str = ",") -> list[str]:
    """Split at separators outside all brackets."""
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == separator and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [*parts, text[last:]]


@dataclass
class Rewriter:
    """Collects the threadgroup arrays (their position is their id in the runtime)."""

    arrays: list[str] = field(default_factory=list)

    constants: dict[int, object] = field(default_factory=dict)  # function constants

    def __call__(self, text: str) -> str:
        text = _FUNCTION_CONSTANT.sub(self._constant, text)
        text = _replace_outside_comments(text, self._arrays)
        return _replace_outside_comments(text, _vectors)

    def _constant(self, m: re.Match[str]) -> str:
        value = self.constants.get(int(m.group(2)), 0)
        return f"{m.group(1)} = {str(value).lower() if isinstance(value, bool) else value};"

    def _arrays(self, text: str) -> str:
        def declare(m: re.Match[str]) -> str:
            before = text[: m.start()].rstrip()
            declarators = split(m.group(1))
            head = re.fullmatch(
                r"([^(){}&*=\[]*[\s>])(\w+)\s*((?:\[.*\])?)\s*", declarators[0], re.S
            )
            if not head or (before and before[-1] not in ";{}"):
                return m.group()  # a parameter, a cast, a pointer, a function's type
            base = head.group(1).strip()
            out = []
            for declarator in [head.group(2) + head.group(3), *declarators[1:]]:
                d = re.fullmatch(r"\s*(\w+)\s*((?:\[.*\])*)\s*", declarator, re.S)
                if not d:
                    return m.group()
                name, extent = d.groups()
                whole = f"metal::em_array<{base}{extent}>"
                out.append(
                    f"threadgroup {whole}& {name} = *(threadgroup {whole}*)"
                    f"em_threadgroup_array({len(self.arrays)}, sizeof({whole}));"
                )
                self.arrays.append(name)
            return " ".join(out) + "\n" * m.group().count("\n")

        return _ARRAY.sub(declare, text)


def _vectors(text: str) -> str:
    aliases = {a or b for a, b in _ALIAS.findall(text)}
    text = _VECTOR.sub(_make_unless_declared(text), text)
    for alias in aliases:
        pattern = re.compile(rf"(?<![\w.>:])((?:metal::)?{alias})(?=\s*\()")
        text = pattern.sub(_make_unless_declared(text), text)
    at = 0
    while m := _VEC.search(text, at):
        end = closing(text, m.end() - 1, "<>")
        inner = text[m.end() : end - 1]
        before = text[: m.start()].rstrip()
        if re.match(r"\s*\(", text[end:]) and not before.endswith(("operator", "<")):
            text = f"{text[: m.start()]}metal::make<metal::vec<{inner}>>{text[end:]}"
            at = m.start() + len("metal::make<metal::vec<")
        else:
            at = m.end()
    return _constructors(text)


def _constructors(text: str) -> str:
    classes = set(re.findall(r"\b(?:struct|class)\s+(\w+)", text))
    at = 0
    for m in re.finditer(r"\b(\w+)\s*(\()", text):
        if m.group(1) not in classes or m.start() < at:
            continue
        at = closing(text, m.start(2), "()")
        if q := re.match(r"\s*(thread)\b(?=\s*[:{=;])", text[at:]):
            text = text[: at + q.start(1)] + " " * 6 + text[at + q.end(1) :]
    return text


def _make_unless_declared(text: str):
    def make(m: re.Match[str]) -> str:
        if text[: m.start()].rstrip().endswith(("operator", "typedef", "using")):
            return m.group()
        return f"metal::make<{m.group(1)}>"

    return make


def _replace_outside_comments(text: str, change) -> str:
    """Apply `change` to the code between comments and strings, as one text with marks for those."""
    kept: list[str] = []

    def hide(m: re.Match[str]) -> str:
        kept.append(m.group())
        return f" \x01{len(kept) - 1}\x02 "

    hidden = _COMMENT.sub(hide, text)
    return re.sub(r" \x01(\d+)\x02 ", lambda m: kept[int(m.group(1))], change(hidden))

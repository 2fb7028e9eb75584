"""What Metal refuses, or this project's rules do, and clang's C++ for OpenCL accepts.

A lint by tokens, not a parser: it looks at declarations, parameter lists and casts, with comments
and strings blanked. Each rule is a function that yields (position, message).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.metal.rewrite import blank, closing, split

Hit = tuple[int, str]
SPACES = r"(?:device|threadgroup|constant|thread|ray_data|object_data)"
_QUALIFIED = re.compile(rf"\b{SPACES}\b")
_TYPE = (
    r"(?:const\s+|volatile\s+|typename\s+)*[A-Za-z_][\w:]*"
    r"(?:\s*<[^;{}()]*?>)?(?:::\w+)*(?:\s+const)?"
)
_NOT_TYPES = {
    *("return", "else", "case", "goto", "using", "typedef", "new", "delete", "throw", "sizeof"),
    *("in", "operator", "public", "private", "protected", "if", "while", "for", "switch", "do"),
}
_FUNCTION = re.compile(
    r"(?<![\w.>])((?:operator\s*[^\s\w(]+|operator\s*\(\s*\)|~?[A-Za-z_]\w*))\s*(\()"
)
_KEYWORDS = {
    *("if", "for", "while", "switch", "return", "sizeof", "alignas", "decltype", "static_assert"),
    *("alignof", "catch", "constexpr", "template", "noexcept", "make", "defined", "operator"),
}

_WORDS = {
    "goto": "goto",
    "virtual": "virtual functions",
    "dynamic_cast": "dynamic_cast",
    "typeid": "typeid",
    "try": "exceptions",
    "catch": "exceptions",
    "throw": "exceptions",
    "new": "new",
    "delete": "delete",
    "thread_local": "thread_local",
    "register": "register",
    "asm": "inline assembly",
    "__asm__": "inline assembly",
    "co_await": "coroutines",
    "co_return": "coroutines",
    "double": "double",
    "wchar_t": "wchar_t",
    "__global": "such word, but device",
    "__local": "such word, but threadgroup",
    "__private": "such word, but thread",
    "__constant": "such word, but constant",
    "__generic": "such word",
    "__kernel": "such word, but kernel",
    "_Float16": "such word, but half",
    "__fp16": "such word, but half",
    "__bf16": "such word, but bfloat",
    "_BitInt": "such word",
    "_ExtInt": "such word",
    "__int128": "128-bit integers",
    "vertex": "such name: it marks a shader",
    "fragment": "such name: it marks a shader",
}


def _before(text: str, at: int) -> str:
    return text[max(0, at - 200) : at]


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _head(text: str, at: int) -> str:
    """What stands between the end of the statement before and a position."""
    return text[max(text.rfind(c, 0, at) for c in ";{}") + 1 : at]


def _words(text: str) -> Iterator[Hit]:
    for m in re.finditer(r"\b(?:" + "|".join(_WORDS) + r")\b", text):
        if m.group() == "delete" and re.search(r"=\s*$", _before(text, m.start())):
            continue  # a deleted member
        yield m.start(), f"{m.group()}: Metal has no {_WORDS[m.group()]}"
    for m in re.finditer(r"\blong\s+(?:double|long)\b", text):
        yield m.start(), f"Metal has no {m.group()}"
    for m in re.finditer(r"\bstd::", text):
        yield m.start(), "Metal has no std::"


def _includes(text: str) -> Iterator[Hit]:
    for m in re.finditer(r"^[ \t]*#[ \t]*include[ \t]*\"", text, re.M):
        yield (
            m.start(),
            "mx.fast.metal_kernel compiles text: it finds no file for a quoted #include",
        )
    for m in re.finditer(r"^[ \t]*#[ \t]*include[ \t]*<(?!metal_)([^>]*)>", text, re.M):
        yield m.start(), f"<{m.group(1)}> is no header of Metal's"


def _vector_sizes(text: str) -> Iterator[Hit]:
    for m in re.finditer(r"\bvec\s*<[^<>;]*,\s*(\d+)\s*>", text):
        if m.group(1) not in "234":
            yield m.start(), f"vectors have 2, 3 or 4 components, not {m.group(1)}"
    kinds = "char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat"
    for m in re.finditer(rf"\(\s*(?:{kinds})[234]\s*\)\s*\(", text):
        inside = text[m.end() - 1 : closing(text, m.end() - 1, "()")][1:-1]
        if len(split(inside)) > 1:
            yield m.start(), "an OpenCL vector literal; Metal means the comma operator by it"
    for m in re.finditer(r"\.(?:s[0-9a-fA-F]{1,4}|lo|hi|even|odd)\b(?!\s*\()", text):
        yield m.start(), f"{m.group()} is a component of OpenCL's, not of Metal's"


def _opencl_functions(text: str) -> Iterator[Hit]:
    names = (
        r"get_(?:global|local|group)_\w+|convert_\w+|as_(?:u?(?:char|short|int|long)|float|half)\d?"
    )
    for m in re.finditer(rf"\b(?:{names}|barrier|mem_fence|printf)\s*\(", text):
        yield m.start(), f"{m.group()[:-1].strip()} is OpenCL's, not Metal's"


def _lambdas(text: str) -> Iterator[Hit]:
    for m in re.finditer(
        r"(?:[=(,{;]|\breturn)\s*(\[[&=\w\s,]*\])\s*(?:\([^()]*\)\s*)?(?:->[^{;]*)?\{", text
    ):
        yield m.start(1), "lambdas need Metal 3.2; write a function"


# ---- pointers and references ----


def _is_pointer(declaration: str) -> bool:
    """Does a parameter or type have * or & outside brackets, in front of a default?"""
    depth = 0
    for i, c in enumerate(declaration):
        depth += (c in "([{<") - (c in ")]}>")
        if depth == 0 and c == "=":
            return False
        if depth == 0 and c in "*&" and i:
            return True
    return False


def _functions(text: str) -> Iterator[tuple[re.Match[str], int, int, int]]:
    """Definitions: (name match, start of the parameters, their end, start of the body)."""
    for m in _FUNCTION.finditer(text):
        name = m.group(1)
        if name in _KEYWORDS:
            continue
        before = _before(text, m.start()).rstrip()
        if before and not re.match(r"[\w\]>*&~:}{;,]", before[-1]):
            continue
        last = re.search(r"\w+$", before[-20:])
        if last and last.group() in _NOT_TYPES:
            continue
        if (
            before[-1:] in ":,"
            and not before.endswith("::")
            and name != _enclosing_class(text, m.start())
        ):
            continue  # an initializer of a constructor
        end = closing(text, m.start(2), "()")
        tail = re.match(
            rf"\s*(?:const\b|{SPACES}\b|noexcept\b|\[\[[^\]]*\]\]|\s)*(:(?!:)[^;{{]*?)?(\{{)",
            text[end:],
        )
        if not tail:
            continue
        starts_statement = not before or before[-1] in ";{}:"
        if starts_statement and not name.startswith(("operator", "~")) and before[-1:] != ":":
            owner = _enclosing_class(text, m.start())
            if owner != name:
                continue  # a macro or a call
        yield m, m.start(2) + 1, end - 1, end + tail.start(2)


def _enclosing_class(text: str, at: int) -> str | None:
    """The name of the class whose braces are the innermost around a position."""
    depth = 0
    for i in range(at - 1, -1, -1):
        if text[i] == "}":
            depth += 1
        elif text[i] == "{":
            if depth == 0:
                head = _head(text, i)
                found = re.search(r"\b(?:struct|class|union)\s+(?:alignas\([^)]*\)\s*)?(\w+)", head)
                return (
                    found.group(1) if found and "(" not in head.split(found.group())[-1] else None
                )
            depth -= 1
    return None


def _parameters(text: str) -> Iterator[Hit]:
    for m, start, end, _ in _functions(text):
        at = start
        for parameter in split(text[start:end]):
            if _is_pointer(parameter) and not _QUALIFIED.search(parameter):
                offset = len(parameter) - len(parameter.lstrip())
                yield (
                    at + offset,
                    (f"parameter `{_squeeze(parameter)}` of {m.group(1)} has no address space"),
                )
            at += len(parameter) + 1


_LOCAL = re.compile(
    rf"(?:(?<=[;{{}}:>)])|^)(\s*)((?:(?:static|constexpr|inline|METAL_FUNC|friend|extern)\s+)*)({_TYPE})"
    r"\s*([*&]+)\s*(?:const\s+)?(operator\b|[A-Za-z_]\w*)\s*([=;(\[,:{)])",
    re.M,
)


def _locals(text: str) -> Iterator[Hit]:
    for m in _LOCAL.finditer(text):
        kind = m.group(3)
        first = kind.split()[0].split("<")[0]
        if first in _NOT_TYPES or _QUALIFIED.search(kind):
            continue
        before = _before(text, m.start()).rstrip()
        if before and before[-1] not in ";{}:>":
            continue  # inside an expression
        if before.endswith(">") and not re.search(r"\btemplate\s*<[^;{}]*>$", before):
            continue
        if before.endswith(":") and not re.search(
            r"\b(?:public|private|protected|case[^:;]*|default)\s*:$", before
        ):
            continue
        if (
            "\n" not in m.group(1)
            and before
            and before[-1] not in ";{}"
            and not before.endswith(">")
        ):
            continue
        yield (
            m.start(3),
            f"`{' '.join(m.group(2, 3)).strip()}{m.group(4)} {m.group(5)}` has no address space",
        )
    for m in re.finditer(rf"\bfor\s*\(\s*({_TYPE})\s*([*&]+)\s*\w+\s*[:=]", text):
        if not _QUALIFIED.search(m.group(1)):
            yield m.start(1), f"`{m.group(1)}{m.group(2)}` in a loop has no address space"
    for m in re.finditer(rf"\b(?:using\s+\w+\s*=|typedef)\s*({_TYPE})\s*[*&]+", text):
        if not _QUALIFIED.search(m.group(1)):
            yield m.start(1), f"the alias of `{m.group(1)}*` has no address space"


def _casts(text: str) -> Iterator[Hit]:
    for m in re.finditer(r"\b(?:static|reinterpret|const)_cast\s*(<)", text):
        inner = text[m.end() : closing(text, m.start(1), "<>") - 1]
        if re.search(r"[*&]\s*(?:const)?\s*$", inner) and not _QUALIFIED.search(inner):
            yield m.start(), f"a cast to `{inner.strip()}`, which has no address space"
    for m in re.finditer(rf"\(\s*({_TYPE})\s*[*&]+\s*\)\s*(?=[\w(&])", text):
        if not _QUALIFIED.search(m.group(1)) and not re.search(
            r"[\w\])]\s*$", _before(text, m.start())
        ):
            yield m.start(), f"a cast to `{m.group(1)}*`, which has no address space"


def _members(text: str) -> Iterator[Hit]:
    for m, _, end, body in _functions(text):
        owner = _enclosing_class(text, m.start())
        if owner is None or m.group(1).lstrip("~") == owner:
            continue
        head = _head(text, m.start())
        if re.search(r"\b(?:static|friend)\b", head):
            continue
        if not _QUALIFIED.search(text[end:body]):
            yield m.start(), f"member function {owner}::{m.group(1)} has no address space"


# ---- functions ----


Key = tuple[str, str, int]  # class or "", name, number of arguments


def _recursion(text: str) -> Iterator[Hit]:
    where: dict[Key, int] = {}
    bodies: dict[Key, str] = {}
    for m, start, end, body in _functions(text):
        count = len(split(text[start:end])) if text[start:end].strip() else 0
        me = (_enclosing_class(text, m.start()) or "", m.group(1), count)
        where.setdefault(me, m.start())
        bodies[me] = bodies.get(me, "") + text[body : closing(text, body, "{}")]
    calls: dict[Key, set[Key]] = {}
    for me, inside in bodies.items():
        calls[me] = set()
        for c in re.finditer(r"(?:\b(\w+)(?:<[^;(){}]*>)?::)?(?<![\w.>])(\w+)\s*(\()", inside):
            args = inside[c.end(3) : closing(inside, c.start(3), "()") - 1]
            count = len(split(args)) if args.strip() else 0
            for owner in [c.group(1)] if c.group(1) else [me[0], ""]:
                if (owner, c.group(2), count) in where:
                    calls[me].add((owner, c.group(2), count))
                    break
    for me in where:
        seen, todo = set(), list(calls[me])
        while todo:
            if (f := todo.pop()) not in seen:
                seen.add(f)
                todo += calls[f]
        if me in seen:
            yield where[me], f"{me[1]} calls itself: Metal has no recursion"


def _is_kernel(text: str, at: int) -> bool:
    return bool(re.search(r"(?:\bkernel\b|\[\[\s*kernel\s*\]\])", _head(text, at)))


def _kernels(text: str) -> Iterator[Hit]:
    names = {}
    for m, _, _, body in _functions(text):
        head = _head(text, m.start())
        if _is_kernel(text, m.start()):
            names[m.group(1)] = m.start()
            if not re.search(r"\bvoid\s*$", head.rstrip()):
                yield m.start(), f"kernel {m.group(1)} must return void"
            continue
        inside = text[body : closing(text, body, "{}")]
        for d in re.finditer(
            r"[;{}]\s*(threadgroup\s+[\w:<>, ]+?\s+\w+\s*(?:\[[^;]*\])?\s*;)", inside
        ):
            yield body + d.start(1), "threadgroup variables belong in a kernel, not in a function"
        for d in re.finditer(
            r"[;{}]\s*(static\s+(?!constexpr|constant|const\s+constant)\w+)", inside
        ):
            yield body + d.start(1), "a static variable in a function must be constant"


def _variadic(text: str) -> Iterator[Hit]:
    for m in re.finditer(r"[(,]\s*\.\.\.\s*\)\s*\{", text):
        yield m.start(), "Metal has no variadic functions"


RULES: list[Callable[[str], Iterator[Hit]]] = [
    *(_words, _includes, _vector_sizes, _opencl_functions, _lambdas, _parameters, _locals, _casts),
    *(_members, _recursion, _kernels, _variadic),
]


def lint(text: str, file: str = "header") -> list[str]:
    """`file:line: message` for everything that breaks a rule; `#line` directives are obeyed."""
    clean = blank(text)
    code = re.sub(
        r"^[ \t]*#[ \t]*(?!include|define)[^\n]*", lambda m: " " * len(m.group()), clean, flags=re.M
    )
    hits = sorted({hit for rule in RULES for hit in rule(code)})
    marks = [(0, 1, file)]
    for m in re.finditer(
        r"^[ \t]*#[ \t]*line[ \t]+(\d+)(?:[ \t]+\"([^\"\n]*)\")?[^\n]*\n?", text, re.M
    ):
        marks.append((m.end(), int(m.group(1)), m.group(2) or marks[-1][2]))
    out = []
    for at, message in hits:
        start, line, name = max(mark for mark in marks if mark[0] <= at)
        out.append(f"{name}:{line + text.count(chr(10), start, at)}: {message}")
    return out

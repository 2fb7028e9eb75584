"""What a Mac's compiler is given, made here: MLX's own text around a kernel, and in front of it.

MLX can record a custom kernel for export where there is no Metal; the text that it then generates
is the one that it compiles on a Mac. In front of that it puts kernels/utils.h with all that this
includes: the same files lie in its wheel for every system.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.metal import signature as sig
from tests.metal.clang import METAL_FLAGS, CompileError, find_clang
from tests.metal.lint import lint
from tests.metal.rewrite import Rewriter

# `mlx` is a namespace package: the core module's file says where its headers are.
INCLUDE = Path(mx.__file__).parent / "include"
KERNELS = "mlx/backend/metal/kernels/"


@dataclass(frozen=True)
class Generated:
    """One kernel as MLX compiles it."""

    name: str
    text: str

    def parts(self) -> tuple[str, str]:
        """The function, and the line that makes an instance of its template."""
        text, line, rest = self.text.partition("\ntemplate [[host_name(")
        return text, line + rest


def generated(function: Callable[..., Any], *arrays: mx.array) -> list[Generated]:
    """The custom kernels that function(*arrays) launches, each text once."""
    found: dict[str, Generated] = {}

    def see(node: dict[str, Any]) -> None:
        if node.get("name") == "CustomKernel":
            name, text = node["arguments"][:2]
            found.setdefault(text, Generated(name, text))

    mx.export_function(see, function, *arrays)
    return list(found.values())


def inlined(*names: str, without: Sequence[str] = ()) -> str:
    """MLX's kernel headers with their quoted includes in place, as its build makes them."""
    seen = {KERNELS + name for name in without}

    def one(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (INCLUDE / name).read_text().replace("#pragma once", "")
        return re.sub(r'#include "([^"]+)"', lambda m: one(m.group(1)), text)

    return "".join(one(KERNELS + n) for n in names)


@cache
def prelude() -> str:
    """All that MLX puts in front of a custom kernel, compilable here.

    bf16_math.h calls functions of Apple's compiler: any that take what they are given will do. The
    name of math modes, and logging, which differs between versions of Metal, are not needed.
    """
    text = inlined("utils.h", without=["logging.h"])
    inner = sorted(set(re.findall(r"\b__metal_\w+(?=\()", text)))
    names = [
        f"template <typename A, typename... B> A {name}(A a, B...) {{ return a; }}"
        for name in inner
    ]
    modes = [f"#define {mode} 0" for mode in sorted(set(re.findall(r"\b__METAL_\w+_MATH__", text)))]
    # Apple's <metal_stdlib> includes what here has headers of its own.
    return "\n".join(["#include <metal_simdgroup>", *modes, *names, text])


def names(text: str) -> set[str]:
    """What a text declares at its top level: types, functions, constants, macros."""
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    macros = set(re.findall(r"^\s*#\s*define\s+(\w+)", bare, re.M))
    bare = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", "", bare, flags=re.M)
    bare = re.sub(r"namespace\s+\w+\s*\{", "", bare)  # names inside become visible by `using`
    while (fewer := re.sub(r"\{[^{}]*\}", ";", bare)) != bare:
        bare = fewer
    macros |= set(re.findall(r"METAL_FUNC otype (\w+)\(", text))  # declared by macros, in metal
    types = set(re.findall(r"\b(?:struct|class|using|enum)\s+(\w+)", bare))
    types |= set(re.findall(r"\btypedef\s[^;]*?(\w+)\s*;", bare))
    functions = set(
        re.findall(r"\b(\w+)\s*\([^;()]*(?:\([^()]*\)[^;()]*)*\)\s*(?:const|thread|\s)*;", bare)
    )
    constants = set(re.findall(r"\b(\w+)\s*=[^=;]*;", bare))
    return (macros | types | functions | constants) - {"namespace", "metal", "type"}


def compile_on_a_mac(kernel: Generated) -> None:
    """Clang's front end on MLX's prelude and text, instantiation included; then the lint."""
    function, instance = kernel.parts()
    instance = re.sub(r"\[\[.*\]\]", "", instance)  # clang takes no attributes there
    text = Rewriter()(f"{sig.OURS}{prelude()}\n{function}{instance}")
    command = [*find_clang(), *METAL_FLAGS, "-Wno-everything", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr)
    if found := lint(kernel.text, kernel.name):
        raise CompileError("\n".join(found))

"""Text that Metal refuses, refused here too: by clang or by the lint. And text that must pass.

The text is in refused.metal and accepted.metal, in parts headed `//// name`: a header, or with
`//// body: name` the body of a kernel with the inputs x (16 floats) and s (a scalar).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.metal import CompileError, metal_kernel
from tests.metal.lint import lint


def parts(file: str) -> dict[str, str]:
    """name -> text; the name keeps its `body: `."""
    text = (Path(__file__).parent / file).read_text()
    found = [part.partition("\n") for part in text.split("\n//// ")[1:]]
    return {name: snippet for name, _, snippet in found}


REFUSED = parts("refused.metal")
ACCEPTED = parts("accepted.metal")


def build(name: str, text: str) -> None:
    body, header = "out[0] = x[0] + s;", text
    if name.startswith("body: "):
        body, header = text, ""
    kernel = metal_kernel("snippet", ["x", "s"], ["out"], body, header, check=False)
    kernel(
        inputs=[np.ones(16, np.float32), np.float32(1)],
        output_shapes=[(1,)],
        output_dtypes=[np.float32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(CompileError) as refused:
        build(name, REFUSED[name])
    assert "header:" in str(refused.value) or "body:" in str(refused.value)
    assert "emulator_base" not in str(refused.value) or "static assertion" in str(refused.value)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    build(name, ACCEPTED[name])


def test_there_are_enough() -> None:
    assert len(REFUSED) >= 75
    assert len(ACCEPTED) >= 19


def test_the_lint_names_file_and_line() -> None:
    text = '#include <metal_simdgroup>\n#line 7 "a.metal"\nint a;\nvoid f(float* x) {}\n'
    assert lint(text) == ["a.metal:8: parameter `float* x` of f has no address space"]

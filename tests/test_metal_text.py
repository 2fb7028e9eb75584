"""Every kernel's text as MLX compiles it on a Mac: its own signature behind its own prelude.

What can go wrong there and not on the emulator: a name that MLX's prelude has too, an overload that
it adds, an input that lies in another address space than the kernel wants, the signature itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from qrun.loader import load
from qrun.ops import _launch, _metal_backend, _mlx
from qrun.ops import _metal_geometry as geometry
from qrun.ops._metal_call import header
from qrun.paths import KERNELS
from tests import tiny, zoo
from tests.emulated import CACHES
from tests.metal import CompileError, metal_kernel
from tests.metal.mlx_text import Generated, compile_on_a_mac, generated, inlined, names, prelude

SOURCES = sorted(p for p in KERNELS.rglob("*.metal") if p.parent.name != "common")


def small(folder: Path) -> Path:
    return tiny.tiny(folder)


def mixed(folder: Path) -> Path:
    """Many formats, one layer dense."""
    layers = {
        "model.embed_tokens": {"group_size": 64, "bits": 8},
        "model.layers.0.self_attn.v_proj": {"group_size": 32, "bits": 6},
        "model.layers.1.mlp.down_proj": {"group_size": 128, "bits": 3},
    }
    return tiny.tiny(folder, layers=layers, dtype="BF16", dense=["layers.0.mlp.down_proj"])


def gemma2(folder: Path) -> Path:
    return zoo.write(folder, "gemma2_window", bits=4, dtype="BF16")


def qwen3(folder: Path) -> Path:
    return zoo.write(folder, "qwen3", bits=4, dtype="BF16")


def launched(folder: Path, dtype: str, rows: Sequence[int]) -> tuple[list[Generated], set[str]]:
    """What a model launches for so many new tokens: MLX's texts, and the emulator's."""
    theirs: list[Generated] = []
    ours: set[str] = set()
    real = mx.fast.metal_kernel

    def both(**arguments: Any) -> Any:
        kernel, emulator = real(**arguments), metal_kernel(**arguments)

        def call(**given: Any) -> Any:
            ours.add(emulator.text(**given))
            return kernel(**given)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "_backend", lambda on_cpu: _metal_backend)
        patch.setattr(geometry, "here", lambda: geometry.FAMILIES["M3"])
        patch.setattr(mx.fast, "metal_kernel", both)
        patch.setattr(_metal_backend, "writes_in_place", lambda: True)
        for function in CACHES:
            function.cache_clear()
        model = load(folder, dtype=dtype, tune=False)
        for count in rows:
            cache = model.new_cache(600)  # long enough for decode to split its context
            ids = mx.zeros((count,), mx.int32)

            def step(ids: mx.array, cache: Any = cache) -> mx.array:
                return model.model.logits(model.model(ids, cache)[-1:])

            with pytest.MonkeyPatch.context() as plain:  # what is exported must be evaluated
                plain.setattr(_launch, "_backend", lambda on_cpu: _mlx)
                mx.eval(step(ids, model.new_cache(600)), cache.keys, cache.values, cache.tables)
                mx.eval(cache.offset)
            theirs += generated(step, ids)
    for function in CACHES:
        function.cache_clear()
    return theirs, ours


@pytest.mark.parametrize(
    ("model", "dtype", "rows"),
    [
        (small, "float16", (1, 2, 12, 30, 40)),
        (mixed, "float32", (1, 5, 40)),
        (gemma2, "bfloat16", (1, 40)),
        (qwen3, "bfloat16", (1, 40)),
    ],
)
def test_what_a_mac_compiles(model: Any, dtype: str, rows: Sequence[int], tmp_path: Path) -> None:
    theirs, ours = launched(model(tmp_path), dtype, rows)
    assert {kernel.parts()[0] for kernel in theirs} == ours
    for text in {kernel.text: kernel for kernel in theirs}.values():
        compile_on_a_mac(text)


def test_what_a_mac_would_refuse_is_refused() -> None:
    """A type or function of the prelude once more, a small array in device space, a macro."""
    texts = [
        ("typedef float bfloat16_t;", "y[0] = x[0];", 8),
        ("inline float log1p(float x) { return x; }", "y[0] = x[0];", 8),
        ("METAL_FUNC float f(const device float* x) { return x[0]; }", "y[0] = f(x);", 4),
        ("", "y[0] = MTL_CONST;", 8),
    ]
    for text, body, size in texts:
        kernel = mx.fast.metal_kernel(
            name="t", input_names=["x"], output_names=["y"], source=body, header=text + "\n"
        )

        def run(x: mx.array, kernel: Any = kernel) -> mx.array:
            one = (1, 1, 1)
            return kernel(
                inputs=[x],
                grid=one,
                threadgroup=one,
                output_shapes=[(1,)],
                output_dtypes=[mx.float32],
            )[0]

        (found,) = generated(run, mx.zeros((size,)))
        with pytest.raises(CompileError):
            compile_on_a_mac(found)


def test_names_are_read() -> None:
    text = "#define A(x) x\nstruct B { int c; };\nint d(int e) { return e; }\nconstant int f = 1;\n"
    text += "typedef half g;\nenum { h = 1 };\ntemplate <typename i> i j(i k);\nusing l = int;\n"
    assert {"A", "B", "d", "f", "g", "j", "l"} <= names(text)
    assert not {"c", "e", "i", "k"} & names(text)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_name_is_in_mlx_too(source: Path) -> None:
    """Not even one that happens to compile: an overload of MLX's would change what is called."""
    theirs = names(prelude()) | names(inlined("utils.h"))
    assert {"bfloat16_t", "Limits", "ceildiv", "elem_to_loc", "log1p", "max", "MTL_CONST"} <= theirs
    ours = names(header(str(source.relative_to(KERNELS))))
    assert len(ours) > 3
    assert not (ours & theirs) - {"namespace"}

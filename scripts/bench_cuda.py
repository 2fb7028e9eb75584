"""Times the CUDA kernels, one against another, on this GPU or in two steps.

    python scripts/bench_cuda.py emit build/NAME [GROUP ...]   here: the cases as CUDA C++
    bash build/NAME/run.sh [TEXT]                              there: nvcc, then run them

Weights are rotated past the L2 cache, launches are replayed from a CUDA graph, products are checked
against float64. GROUPs: qmv qmm sdpa, and odd: every kernel once at odd shapes, for
`compute-sanitizer build/NAME/bench "" once`. Neither MLX nor Python is needed on the GPU machine.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from qrun.ops import (
    _cuda_attend,
    _cuda_mixture,
    _cuda_product,
    _cuda_qmm,
    _cuda_rows,
    _cuda_sdpa,
    _cuda_tiles,
)
from qrun.ops._cuda_launch import TYPES, Plan, ceil_div, run_by
from qrun.ops.matrix import QuantizedMatrix
from qrun.quantization import Quantization

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (1024, 1024))  # N, K
ROTATING = ("w", "scales", "biases")
KINDS = {"x": "b", "q": "b", "k_cache": "b", "v_cache": "b", "w": "u", "scales": "s", "biases": "s"}
PLAIN: dict[str, Any] = {
    **{"q_norm": None, "k_norm": None, "eps": 1e-5},
    **{"scale": 0.1, "window": 0, "softcap": 0.0},
}
NONE: dict[str, Any] = {"bias": None, "residual": None, "activation": None, "scale": 1.0}


@dataclass
class Recording:
    """What one op launches: kernels as source, launches as source, arrays by name."""

    kernels: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    arrays: dict[str, mx.array] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def name(self, array: mx.array, wanted: str) -> str:
        if id(array) not in self.names:
            self.names[id(array)] = wanted
            self.arrays[wanted] = array
        return self.names[id(array)]

    def run(self, plan: Plan, inputs: list[mx.array]) -> list[mx.array]:
        """A runner that only takes notes."""
        kernel, made = (
            plan.kernel,
            [mx.zeros(shape, dtype) for shape, dtype in plan.outputs],
        )
        names = re.findall(r"\* (\w+)[,)]", kernel.text.split("{", 1)[0])
        arguments = [
            f'b.get<{TYPES[array.dtype]}>("{self.name(array, name)}")'
            for name, array in zip(names, [*inputs, *made], strict=True)
        ]
        arguments += map(str, plan.numbers)
        if kernel.text not in self.kernels:
            self.kernels.append(kernel.text)
        shared = kernel.shape.shared
        self.launches.append(
            f"launch({kernel.name}, dim3{plan.grid}, {kernel.shape.threads}, {shared}, stream, "
            f"{', '.join(arguments)});"
        )
        return made


def case(
    group: str, label: str, run: Callable[[], Any], flops: float = 0, product: str = "0, 0, 0, 0"
) -> str:
    """A translation unit for what `run` launches."""
    recording = Recording()
    with run_by(recording.run):
        run()
    lines: list[str] = []
    for name, a in recording.arrays.items():
        # Indices are zeros, but for the offset; every other array is filled with NaN.
        indices = name == "offset" or (a.dtype == mx.int32 and name in ("row", "expert", "place"))
        kind = f"'{KINDS[name]}'" if name in KINDS else "'i'" if indices else "0"
        value = int(a.reshape(-1)[0].item()) if indices else 0
        rotating = str(name in ROTATING).lower()
        lines.append(f'{{"{name}", {a.nbytes}u, {kind}, {rotating}, {value}}}')
    moved = sum(a.nbytes for n, a in recording.arrays.items() if n in KINDS or n == "y")
    return (
        '#include "../../scripts/bench_cuda.cuh"\n'
        + "\n".join(recording.kernels)
        .replace('#include "', '#include "../../kernels/')
        .replace('extern "C" __global__', "static __global__")
        + f'static Register entry(Case{{"{label}", "{group}", {{{", ".join(lines)}}},\n'
        + "  [](const Buffers& b, cudaStream_t stream) {\n    "
        + "\n    ".join(recording.launches)
        + f"\n  }},\n  {float(moved)}, {float(flops)}, {product}}});\n"
    )


def matrix(n: int, k: int, group: int = 64) -> QuantizedMatrix:
    scales = mx.zeros((n, k // group), mx.bfloat16)
    biases = mx.zeros((n, k // group), mx.bfloat16)
    w = mx.zeros((n, k // 8), mx.uint32)
    return QuantizedMatrix.of(w, scales, biases, Quantization(4, group))


def qmv_cases() -> list[str]:
    """The tile that `qmv_tile` takes (marked), and others: take, warps, teams, blocks, ahead."""
    tiles = {
        4096: (
            (4, 8, 1, 2, True),
            (2, 16, 1, 1, True),
            (2, 16, 1, 1, False),
            (4, 8, 2, 1, False),
            (2, 8, 2, 1, True),
        ),
        14336: ((4, 14, 1, 1, True), (2, 28, 1, 1, True), (2, 14, 2, 1, False)),
        1024: ((2, 4, 1, 4, False), (2, 4, 4, 1, False), (1, 8, 2, 1, False)),
    }
    out: list[str] = []
    for n, k in SHAPES:
        m = matrix(n, k)
        for rows in (1, 2, 4, 8, 16):
            chosen = _cuda_tiles.qmv_tile(rows, n, k, 64, alike=True, clusters=True)
            others = [
                _cuda_tiles.QmvTile(chosen.rows, *t, chosen.dequantized)
                for t in tiles[k]
                if chosen.rows <= 4 or not t[-1]
            ]
            for tile in dict.fromkeys([chosen, *others]):
                if tile.shared(n, k, 64) > _cuda_tiles.SHARED // tile.blocks - 1024:
                    continue
                x = mx.zeros((rows, k), mx.bfloat16)
                out.append(
                    case(
                        f"qmv {n:5}x{k:<5} M {rows:2}",
                        " ".join(f"{f} {v}" for f, v in zip(tile._fields, tile, strict=True))
                        + " *" * (tile == chosen),
                        lambda x=x, m=m, tile=tile: _cuda_product._qmv(
                            x, m, tile, None, None, None, None, 1.0
                        ),
                        2.0 * rows * n * k,
                        f"{rows}, {n}, {k}, 64",
                    )
                )
    return out


def qmm_cases() -> list[str]:
    """The tile that `qmm_tile` takes (marked), and others."""
    mma, wgmma = _cuda_tiles.MmaTile, _cuda_tiles.WgmmaTile
    tiles: dict[int, tuple[Any, ...]] = {
        16: (mma(16, 1, 1, 8),),
        32: (mma(32, 1, 1, 8),),
        64: (wgmma(64, 2, 6, 2), mma(64, 1, 1, 8)),
        128: (wgmma(64, 2, 6, 2), wgmma(128, 2, 3, 2)),
        256: (wgmma(128, 2, 3, 2), wgmma(256, 2, 3, 1)),
        512: (wgmma(128, 2, 3, 2), wgmma(256, 2, 3, 1)),
        2048: (wgmma(128, 2, 3, 2), wgmma(256, 2, 3, 1)),
    }
    out: list[str] = []
    for n, k in SHAPES:
        m = matrix(n, k)
        for rows, candidates in tiles.items():
            x = mx.zeros((rows, k), mx.bfloat16)
            chosen = _cuda_product.qmm_tile(rows, n, k, 64)
            for tile in dict.fromkeys([chosen, *candidates]):
                name = " ".join(f"{f} {v}" for f, v in zip(tile._fields, tile, strict=True))
                out.append(
                    case(
                        f"qmm {n:5}x{k:<5} M {rows:4}",
                        f"{type(tile).__name__.removesuffix('Tile').lower()} {name}"
                        + " *" * (tile == chosen),
                        lambda x=x, m=m, tile=tile: _cuda_qmm.by_tile(x, m, tile, None, **NONE),
                        2.0 * rows * n * k,
                        f"{rows}, {n}, {k}, 64",
                    )
                )
    return out


def sdpa_cases() -> list[str]:
    out: list[str] = []
    for heads, kv, d in ((32, 8, 128), (16, 8, 128), (32, 8, 64), (9, 3, 64)):
        for held in (512, 4096, 7936, 32768):
            cache = [mx.zeros((1, kv, held + 256, d), mx.bfloat16) for _ in range(2)]
            q = mx.zeros((1, heads, 1, d), mx.bfloat16)
            out.append(
                case(
                    f"sdpa decode {heads}/{kv} D {d} S {held}",
                    "split",
                    lambda q=q, c=cache, held=held: _cuda_sdpa.sdpa(
                        q, *c, mx.array([held - 1], mx.int32), scale=0.1, window=0, softcap=0
                    ),
                )
            )
            if held > _cuda_attend.LONGEST:
                continue
            table = mx.zeros((held + 256, d // 2, 2))
            qkv = mx.zeros((1, (heads + 2 * kv) * d), mx.bfloat16)
            out.append(
                case(
                    f"attend {heads}/{kv} D {d} S {held}",
                    "one launch",
                    lambda x=qkv, c=cache, held=held, table=table, heads=heads: _cuda_attend.attend(
                        x, *c, mx.array([held - 1], mx.int32), table, heads=heads, **PLAIN
                    ),
                )
            )
        q = mx.zeros((1, heads, 2048, d), mx.bfloat16)
        cache = [mx.zeros((1, kv, 2048, d), mx.bfloat16) for _ in range(2)]
        out.append(
            case(
                f"sdpa prefill {heads}/{kv} D {d} L 2048",
                "flash",
                lambda q=q, c=cache: _cuda_sdpa.sdpa(
                    q, *c, mx.array([0], mx.int32), scale=0.1, window=0, softcap=0
                ),
                2.0 * heads * d * 2048 * 2048,
            )
        )
    return out


def odd_cases() -> list[str]:
    """Every kernel of the backend where nothing is a round number."""
    out: list[str] = []
    bf16 = mx.bfloat16

    def add(label: str, run: Callable[[], Any], product: str = "0, 0, 0, 0") -> None:
        out.append(case(f"odd {label}", "", run, product=product))

    for n, k, group in ((37, 96, 32), (130, 576, 64), (51, 640, 128), (1041, 1024, 64)):
        m = matrix(n, k, group)
        even = matrix(n + n % 2, k, group)
        for rows in (1, 3, 7, 13, 16):
            x = mx.zeros((rows, k), bf16)
            add(
                f"qmv {n}x{k} group {group} M {rows}",
                lambda x=x, m=m: _cuda_product.qmv(x, m, **NONE, norm=None),
                f"{rows}, {n}, {k}, {group}",
            )
            behind: dict[str, Any] = {
                "norm": (mx.zeros((k,), bf16), 1e-5),
                "bias": mx.zeros((even.n,), bf16),
                "residual": mx.zeros((rows, even.n // 2), bf16),
                "activation": "swiglu",
                "scale": 0.5,
            }
            add(
                f"qmv with all behind {even.n}x{k} M {rows}",
                lambda x=x, m=even, b=behind: _cuda_product.qmv(x, m, **b),
            )
        for rows in (17, 67, 131, 300):
            x = mx.zeros((rows, k), bf16)
            tiles = [_cuda_tiles.mma_tile(rows, n, group)]
            for tile in (
                _cuda_tiles.WgmmaTile(16, 2, 8, 2, 3, splits=3),
                _cuda_tiles.WgmmaTile(64, 2, 6, 1, 3),
            ):
                tiles += [tile] if ceil_div(k, 128) >= tile.splits else []
            for tile in tiles:
                add(
                    f"qmm {n}x{k} group {group} M {rows} {tile}",
                    lambda x=x, m=m, tile=tile: _cuda_qmm.by_tile(x, m, tile, None, **NONE),
                    f"{rows}, {n}, {k}, {group}",
                )
    # A block has several tiles.
    x, m, tile = (
        mx.zeros((150, 1024), bf16),
        matrix(5895, 1024, 64),
        _cuda_tiles.WgmmaTile(64, 2, 6, 1, 3),
    )
    add(
        f"qmm 5895x1024 group 64 M 150 {tile}",
        lambda x=x, m=m, tile=tile: _cuda_qmm.by_tile(x, m, tile, None, **NONE),
        "150, 5895, 1024, 64",
    )
    # What the choice of tiles takes only where a team has several tiles.
    for group, tile in (
        (64, _cuda_tiles.QmvTile(1, take=2, warps=1, teams=1, blocks=1, ahead=True)),
        (32, _cuda_tiles.QmvTile(3, take=1, warps=2, teams=2, blocks=1, ahead=True)),
        (64, _cuda_tiles.QmvTile(7, take=1, warps=2, teams=3, blocks=1, dequantized=True)),
        (32, _cuda_tiles.QmvTile(5, take=2, warps=1, teams=2, blocks=1, dequantized=True)),
        (
            64,
            _cuda_tiles.QmvTile(16, take=1, warps=1, teams=1, blocks=1, dequantized=True, splits=2),
        ),
    ):
        x, m = mx.zeros((tile.rows, 256), bf16), matrix(6405, 256, group)
        add(
            f"qmv 6405x256 group {group} {tile}",
            lambda x=x, m=m, tile=tile: _cuda_product._qmv(x, m, tile, *(None,) * 4, 1.0),
            f"{tile.rows}, 6405, 256, {group}",
        )
    m = matrix(37, 96, 32)
    add("embedding", lambda: _cuda_rows.embedding(mx.zeros(5, mx.int32), m, dtype=bf16, scale=2.0))
    add("rms_norm", lambda: _cuda_rows.rms_norm(mx.zeros((3, 77), bf16), mx.zeros(77, bf16), 1e-5))
    add("swiglu", lambda: _cuda_rows.swiglu(mx.zeros((3, 154), bf16)))
    add("argmax", lambda: _cuda_rows.argmax(mx.zeros((2, 777), bf16), 770))
    x = mx.zeros((3, 77), bf16)
    add("rms_norm with a residual", lambda: _cuda_rows.rms_norm(x, mx.zeros(77, bf16), 1e-5, x))
    add("layer norm", lambda: _cuda_rows.rms_norm(x, mx.zeros(77, bf16), 1e-5, centered=True))
    two = [mx.zeros(24, bf16), mx.zeros(13, bf16)]
    add("rms_norm of parts", lambda: _cuda_rows.rms_norm_parts(x, two, 1e-5))
    add("softcap", lambda: _cuda_rows.softcap(x, 2.0))
    wide = mx.zeros((3, 96), bf16)
    add("gemm", lambda: _cuda_product.gemm(wide, mx.zeros((37, 96), bf16), **NONE))
    logits = mx.zeros((7, 37), bf16)
    add("route", lambda: _cuda_mixture.route(logits, 3, False))
    row, expert = mx.zeros(21, mx.int32), mx.zeros(21, mx.int32)
    share, rest = mx.zeros((7, 3), mx.float32), mx.zeros((7, 50), bf16)
    made = mx.zeros((21, 50), bf16)
    add("combine", lambda: _cuda_mixture.combine(made, row.reshape(7, 3), share, rest))
    experts, few = matrix(5 * 50, 96, 32), mx.zeros((21, 96), bf16)
    how = {"count": 5, "activation": "swiglu", "grouped": True}
    add("gather_qmm of few", lambda: _cuda_mixture.gather_qmm(few, experts, row, expert, **how))
    many, last = mx.zeros((300, 96), bf16), mx.zeros(300, mx.int32)
    add("gather_qmm of many", lambda: _cuda_mixture.gather_qmm(many, experts, None, last, **how))
    f32 = mx.zeros((5, 96), mx.float32)
    add("qmv plain", lambda: _cuda_product.qmv(f32, m, **NONE, norm=None))
    for heads, kv, d, capacity, at in (
        (3, 1, 24, 70, 69),
        (9, 3, 64, 300, 257),
        (6, 2, 128, 90, 0),
    ):
        cache = [mx.zeros((1, kv, capacity, d), bf16) for _ in range(2)]
        offset, table = mx.array([at], mx.int32), mx.zeros((capacity, d // 4, 2))
        qkv = mx.zeros((1, (heads + 2 * kv) * d), bf16)
        norm = mx.zeros(d, bf16)
        where: dict[str, Any] = {"heads": heads, "q_norm": norm, "k_norm": norm, "eps": 1e-5}
        how: dict[str, Any] = {"scale": 0.1, "window": 50, "softcap": 3.0}
        add(
            f"rope D {d}",
            lambda a=(qkv, *cache, offset, table), w=where: _cuda_rows.rope(*a, **w),
        )
        add(
            f"attend D {d}",
            lambda a=(qkv, *cache, offset, table), w=where, h=how: _cuda_attend.attend(
                *a, **w, **h
            ),
        )
        for length in (1, min(67, capacity - at)):
            q = mx.zeros((1, heads, length, d), bf16)
            add(
                f"sdpa D {d} L {length}",
                lambda q=q, c=cache, o=offset, h=how: _cuda_sdpa.sdpa(q, *c, o, **h),
            )
    return out


RUN = """#!/usr/bin/env bash
# Builds the cases beside it and runs those whose group contains the first argument.
set -euo pipefail
cd "$(dirname "$0")"
nvcc_one() { nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -c -o "${1%.cu}.o" "$1"; }
export -f nvcc_one
ls case*.cu main.cu | xargs -P "$(nproc)" -I{} bash -c 'nvcc_one {}'
nvcc -o bench *.o
./bench "${1:-}"
"""


def emit(folder: Path, groups: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _cuda_product.generation = lambda: 9
    for old in folder.glob("case*"):
        old.unlink()
    makers = {"qmv": qmv_cases, "qmm": qmm_cases, "sdpa": sdpa_cases, "odd": odd_cases}
    sources = [s for name in groups or list(makers)[:3] for s in makers[name]()]
    for i, source in enumerate(sources):
        (folder / f"case{i}.cu").write_text(source)
    (folder / "main.cu").write_text('#include "../../scripts/bench_cuda_main.cu"\n')
    (folder / "run.sh").write_text(RUN)
    print(f"{len(sources)} cases in {os.fspath(folder)}")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] != "emit":
        raise SystemExit(__doc__)
    emit(Path(sys.argv[2]), sys.argv[3:])

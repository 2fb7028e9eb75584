"""Times qrun's 4-bit products on this GPU beside humming's, torch's and MLX's, in turn.

    python scripts/bench_cuda_peers.py [--budget SECONDS] [--out FILE.json]

Every round gives each library one turn: a replayed graph of products whose weights, all together,
do not fit the L2 cache. bfloat16, groups of 64; a result that is wrong has no time. Who cannot take
part is named with the reason. Compiling does not count as time spent.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from qrun.hardware import device_name
from qrun.ops import _cuda
from qrun.ops import _cuda_driver as driver
from qrun.ops._cuda_program import Program, Tape, load, record
from qrun.ops._launch import Arrays
from qrun.ops.matrix import QuantizedMatrix
from qrun.quantization import Quantization

SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (1024, 1024))  # N, K
ROWS = (1, 16, 64, 256, 2048, 4, 8, 128, 512, 32, 4096)  # what matters most comes first
GROUP = 64
ROTATED = 320e6  # bytes of weights at least between two readings of one; the L2 cache has 50 MB
LAUNCHES = 96  # in a graph at least, for few rows: what a replay costs by itself disappears
ROUNDS = 9
SLOW = 0.03  # seconds: who takes longer for a turn takes part in every third round only
COMPILING = 270  # seconds at most, for humming
ALLOWED = 0.1  # root mean square of the error, of the result's; MLX sums in 16 bits


@dataclass(frozen=True)
class Matrix:
    """w = scale * (code - 8), (N, K): what symmetric and affine formats can both say exactly."""

    n: int
    k: int

    @cached_property
    def w(self) -> Any:
        """uint32 (N, K / 8)."""
        return np.random.default_rng(0).integers(0, 1 << 32, (self.n, self.k // 8), np.uint32)

    @cached_property
    def scales(self) -> Any:
        """float32 (N, K / GROUP), exact in bfloat16."""
        whole = np.random.default_rng(1).integers(128, 256, (self.n, self.k // GROUP))
        return (whole / 2**15).astype(np.float32)

    @property
    def copies(self) -> int:
        """How many rotate: codes and scales are what the leanest format reads."""
        return int(-(-ROTATED // (self.n * self.k / 2 + self.n * self.k / GROUP * 2)))

    def launches(self, rows: int) -> int:
        """Products in a graph: every copy equally often."""
        return self.copies * (-(-LAUNCHES // self.copies) if rows <= 128 else 1)

    def product(self, x: Any, columns: Any) -> Any:
        """Some columns of x @ w.T."""
        codes = self.w[columns].view(np.uint8)
        q = np.stack([codes & 15, codes >> 4], -1).reshape(len(columns), self.k)
        return x @ ((q.astype(np.float32) - 8) * np.repeat(self.scales[columns], GROUP, 1)).T


Point = tuple[Matrix, int]  # and rows of x
# Runs all the products of a graph -> seconds; some rows and columns of the last one, float32.
Turn = tuple[Callable[[], float], Callable[[Any, Any], Any]]
# What a library does with a matrix, x and a number of launches. Making it compiles its kernels.
Library = Callable[[Matrix, Any, int], Turn]


def timed(stream: int | None, replay: Callable[[], object]) -> float:
    """Seconds on the device of the second of two replays; the first brings the clocks up."""
    start, end, ms = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
    for event in (start, end):
        driver.call("cuEventCreate", ctypes.byref(event), 0)
    replay()
    driver.call("cuEventRecord", start, ctypes.c_void_p(stream))
    replay()
    driver.call("cuEventRecord", end, ctypes.c_void_p(stream))
    driver.call("cuEventSynchronize", end)
    driver.call("cuEventElapsedTime", ctypes.byref(ms), start, end)
    for event in (start, end):
        driver.call("cuEventDestroy_v2", event)
    return ms.value / 1e3


@cache
def mlx_copies(matrix: Matrix) -> list[QuantizedMatrix]:
    """As MLX holds them, on the device; qrun takes them as they are."""
    w, scales = mx.array(matrix.w), mx.array(matrix.scales).astype(mx.bfloat16)
    made = [(w + 0, scales + 0, scales * -8) for _ in range(matrix.copies)]
    mx.eval(made)
    return [QuantizedMatrix.of(*arrays, Quantization(4, GROUP)) for arrays in made]


def mlx_some(y: mx.array, rows: Any, columns: Any) -> Any:
    return np.array(y[mx.array(rows)][:, mx.array(columns)].astype(mx.float32))


def qrun(points: Sequence[Point]) -> Library:
    """As a decode step runs them: recorded into a CUDA graph whose kernels may start early."""
    plain: Any = {"norm": None, "bias": None, "residual": None, "activation": None, "scale": 1.0}

    def recorded(matrix: Matrix, x: mx.array, launches: int) -> Tape:
        copies = mlx_copies(matrix)
        op = _cuda.qmv if x.shape[0] <= _cuda.QMV_ROWS else _cuda.qmm

        def step(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
            made = [op(inputs[0], copies[i % len(copies)], **plain) for i in range(launches)]
            return made[-1:], state

        tape = record(step, [x], [])
        if tape is None:
            raise RuntimeError("the product is not one of launches alone")
        return tape

    def turn(matrix: Matrix, x: Any, launches: int) -> Turn:
        inputs, stream = [mx.array(x).astype(mx.bfloat16)], driver.stream()
        program = Program(recorded(matrix, inputs[0], launches), inputs, [])
        y = program(inputs)[0]

        def replay() -> None:
            program._graph.launch(stream)  # pyright: ignore[reportPrivateUsage]

        return partial(timed, stream.handle.value, replay), partial(mlx_some, y)

    every = Tape()
    for matrix, rows in points:
        x = mx.zeros((rows, matrix.k), mx.bfloat16)
        every.launches += recorded(matrix, x, 1).launches
    load(every)
    return turn


def mlx(points: Sequence[Point]) -> Library:
    """quantized_matmul of the same arrays, compiled; its products need not wait for each other."""

    def turn(matrix: Matrix, x: Any, launches: int) -> Turn:
        held, copies = mx.array(x).astype(mx.bfloat16), mlx_copies(matrix)
        arrays: list[Any] = [(m.w, m.scales, m.biases) for m in copies]

        def products(x: mx.array) -> list[mx.array]:
            turns = (arrays[i % len(arrays)] for i in range(launches))
            return [mx.quantized_matmul(x, *m, group_size=GROUP, bits=4) for m in turns]

        chain: Any = mx.compile(products)

        def seconds() -> float:
            start = time.perf_counter()
            mx.eval(chain(held))
            mx.synchronize()
            return time.perf_counter() - start

        return seconds, lambda rows, columns: mlx_some(chain(held)[-1], rows, columns)

    return turn


def torch_graph(products: Sequence[Callable[[], Any]], launches: int) -> Turn:
    """Products of torch's tensors in a CUDA graph, one after another and again from the first."""
    torch: Any = import_module("torch")
    graph = torch.cuda.CUDAGraph()
    y = products[0]()  # what a first call does besides, such as loading a module
    torch.cuda.synchronize()
    # MLX's own threads may allocate meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(launches):
            y = products[i % len(products)]()

    def some(rows: Any, columns: Any) -> Any:
        graph.replay()
        picked = y[torch.from_numpy(rows).cuda()][:, torch.from_numpy(columns).cuda()]
        return picked.float().cpu().numpy()

    stream = torch.cuda.current_stream().cuda_stream
    return partial(timed, stream, graph.replay), some


def torch_int4(points: Sequence[Point]) -> Library:
    """_weight_int4pack_mm; 8 inner tiles of k: its widest loads."""
    torch: Any = import_module("torch")
    aten = torch.ops.aten

    @cache
    def copies(matrix: Matrix) -> list[tuple[Any, Any]]:
        pairs = torch.from_numpy(matrix.w.view(np.uint8)).cuda()  # of codes
        swapped = pairs << 4 | pairs >> 4  # torch wants the first one above
        w = aten._convert_weight_to_int4pack(swapped, 8)
        scales = torch.from_numpy(matrix.scales).cuda().bfloat16().t()
        s = torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()
        return [(w.clone(), s.clone()) for _ in range(matrix.copies)]

    def turn(matrix: Matrix, x: Any, launches: int) -> Turn:
        product = partial(aten._weight_int4pack_mm, torch.from_numpy(x).cuda().bfloat16())
        return torch_graph([partial(product, w, GROUP, s) for w, s in copies(matrix)], launches)

    return turn


def humming(points: Sequence[Point]) -> Library:
    """Its layer of symmetric int4, which reads and computes least; kernels by its own heuristics.

    Of the list of kernels that it would compile for any M, those for our M are compiled.
    """
    torch: Any = import_module("torch")
    forward = import_module("humming.forward").humming_forward
    heuristics = import_module("humming.tune").get_heuristics_config
    prepare = import_module("humming.kernel.humming").HummingKernel.prepare_kernels
    ours = {1, *(rows for _, rows in points)}  # 1: it looks that up for any M
    layers: dict[Matrix, tuple[Any, str, Future[Any]]] = {}  # layer, tuning, its kernels
    pool = ThreadPoolExecutor(len(SHAPES))
    for matrix in dict.fromkeys(matrix for matrix, _ in points):
        layer = import_module("humming.layer").HummingLayer(
            shape_n=matrix.n,
            shape_k=matrix.k,
            weight_config={"dtype": "uint4", "group_size": GROUP},
            torch_dtype=torch.bfloat16,
        )
        layer = layer.cuda()
        w, scales = (torch.from_numpy(a) for a in (matrix.w.view(np.int32), matrix.scales))
        layer.load_from_tensors({"weight": w, "weight_scale": scales.bfloat16()})
        layer.transform()
        config = layer.humming_config
        chosen = [k for k in heuristics(config) if any(k[0] < m <= k[1] for m in ours)]
        tuning = json.dumps(chosen)
        kernels = pool.submit(prepare, config.to_str(), None, tuning, 0)
        layers[matrix] = layer, tuning, kernels
    wait([kernels for *_, kernels in layers.values()], COMPILING)
    pool.shutdown(wait=False, cancel_futures=True)

    @cache
    def copies(matrix: Matrix) -> list[dict[str, Any]]:
        held: dict[str, Any] = layers[matrix][0].state_dict()
        return [{name: a.clone() for name, a in held.items()} for _ in range(matrix.copies)]

    def turn(matrix: Matrix, x: Any, launches: int) -> Turn:
        layer, tuning, kernels = layers[matrix]
        if not kernels.done():
            raise TimeoutError(f"not compiled within {COMPILING} s")
        kernels.result()
        held = torch.from_numpy(x).cuda().bfloat16()
        y = torch.empty((len(x), matrix.n), dtype=held.dtype, device="cuda")
        product = partial(
            forward, layer.humming_config, inputs=held, outputs=y, tuning_config=tuning
        )
        return torch_graph([partial(product, **copy) for copy in copies(matrix)], launches)

    return turn


@dataclass
class Measured:
    """What was measured at one point."""

    n: int
    k: int
    rows: int
    launches: int
    errors: dict[str, float] = field(default_factory=dict)  # relative, by library
    samples: dict[str, list[float]] = field(default_factory=dict)  # microseconds a product


def measure(
    libraries: dict[str, Library],
    points: Sequence[Point],
    budget: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Measured]:
    """Point by point, until the budget in seconds is spent."""
    end = clock() + budget
    for at, (matrix, rows) in enumerate(points):
        if clock() > end:
            say(f"{budget:g} s are over: {len(points) - at} of {len(points)} points left out")
            return
        found = Measured(matrix.n, matrix.k, rows, matrix.launches(rows))
        x = np.random.default_rng(rows).standard_normal((rows, matrix.k), np.float32)
        x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # exact in bfloat16
        some = np.linspace(0, rows - 1, min(rows, 64)).astype(np.int64)
        columns = np.linspace(0, matrix.n - 1, 512).astype(np.int64)
        expected = matrix.product(x[some], columns)
        turns: dict[str, tuple[Turn, float]] = {}
        for name, library in libraries.items():
            try:
                turn = library(matrix, x, found.launches)
                off = np.square(turn[1](some, columns) - expected).mean()
                found.errors[name] = float(np.sqrt(off / np.square(expected).mean()))
                if not found.errors[name] <= ALLOWED:
                    raise ArithmeticError(f"off by {found.errors[name]:.1e} of the result")
                turns[name] = turn, turn[0]()
            except Exception as error:
                say(f"{name} at {matrix.n}x{matrix.k} M {rows}: {line(error)}")
        for n in range(ROUNDS):
            for name, ((seconds, _), first) in list(turns.items()):
                if first < SLOW or n % 3 == 0:
                    try:
                        us = seconds() / found.launches * 1e6
                        found.samples.setdefault(name, []).append(us)
                    except Exception as error:
                        say(f"{name} at {matrix.n}x{matrix.k} M {rows}: {line(error)}")
                        del turns[name]
            if clock() > end:
                break
        yield found


def line(error: Exception) -> str:
    """What went wrong, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def table(found: Sequence[Measured], names: Sequence[str]) -> str:
    """Medians in microseconds; how many times as long as qrun the best other one takes."""
    lines = [["N x K", "M", *names, "best peer / qrun", "TFLOP/s"]]
    for each in sorted(found, key=lambda f: (SHAPES.index((f.n, f.k)), f.rows)):
        us = {name: median(samples) for name, samples in each.samples.items()}
        ours, peers = us.get("qrun"), [us[name] for name in us if name != "qrun"]
        lines.append([f"{each.n}x{each.k}", str(each.rows)])
        lines[-1] += [f"{us[name]:.2f}" if name in us else "-" for name in names]
        lines[-1] += [f"{min(peers) / ours:.2f}" if ours and peers else "-"]
        lines[-1] += [f"{2e-6 * each.rows * each.n * each.k / ours:.1f}" if ours else "-"]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(cells, widths, strict=True)) for cells in lines
    )


def main() -> None:
    """Compile, measure, show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--budget", type=float, default=120, help="seconds, without compiling")
    parser.add_argument("--out", type=Path, help="all samples as JSON, written after every point")
    args = parser.parse_args()
    notes: list[str] = []

    def say(text: str) -> None:
        notes.append(text)
        print(text, flush=True)

    driver.enter()
    matrices = [Matrix(n, k) for n, k in SHAPES]
    points = [(matrix, rows) for rows in ROWS for matrix in matrices]
    libraries: dict[str, Library] = {}
    makers = {"qrun": qrun, "humming": humming, "torch": torch_int4, "mlx.core": mlx}
    for name, make in makers.items():
        start = time.monotonic()
        try:
            libraries[name] = make(points)
            took, which = time.monotonic() - start, import_module(name).__version__
            say(f"{name} {which}: ready after {took:.1f} s")
        except Exception as error:
            say(f"{name} is left out: {line(error)}")
    found: list[Measured] = []
    try:
        for each in measure(libraries, points, args.budget, say):
            found.append(each)
            mx.clear_cache()
            if args.out:
                report = {"device": device_name(), "notes": notes, "points": [*map(asdict, found)]}
                args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    finally:
        print(table(found, list(libraries)))
    worst = {name: max((f.errors.get(name, 0) for f in found), default=0) for name in libraries}
    print("largest error:", ", ".join(f"{name} {error:.1e}" for name, error in worst.items()))


if __name__ == "__main__":
    main()

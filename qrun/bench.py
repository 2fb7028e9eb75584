"""Speed, measured side by side: kernels against the machine's ceilings, models against peers.

Everything that is compared runs interleaved in one go, and medians of ratios are reported: machines
drift, and only what ran at the same time can be compared.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from qrun.generation import decode_step, prefill
from qrun.loader import LoadedModel
from qrun.ops import QuantizedMatrix, _launch, qmm, qmv
from qrun.ops._launch import Arrays
from qrun.ops.qmv import qmv_bytes
from qrun.peers import Peer
from qrun.quantization import Quantization
from qrun.sampling import Sampler, Sampling

PREFILLS = (16, 512, 2048)
CONTEXTS = (16, 1024)
STEPS = 32
# N x K of layers of small and large models, odd K included.
SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (1536, 576), (576, 1536))
LADDER_SHAPES = ((4096, 4096), (1536, 576))  # N x K
PATIENCE = 10.0  # seconds: a peer that takes longer to answer is asked once, not once a round
COLD_BYTES = 512 << 20  # matrices rotated through: more than any cache that is ours alone


@dataclass(frozen=True)
class Row:
    """One measurement: a rate, the ceiling met in the same run, and the peers' rates."""

    what: str
    rate: float
    unit: str
    ceiling: float | None = None
    peers: dict[str, float] = field(default_factory=dict[str, float])
    ratios: dict[str, float] = field(default_factory=dict[str, float])  # to each peer's rate
    seconds: list[float] = field(default_factory=list[float])
    peer_seconds: dict[str, list[float]] = field(default_factory=dict[str, "list[float]"])
    flops: float = 0.0  # of one run, for the roofline
    bytes: float = 0.0

    @property
    def share(self) -> float | None:
        """Part of the ceiling reached."""
        return self.rate / self.ceiling if self.ceiling else None


def bench_model(
    model: LoadedModel,
    peers: Sequence[Peer] = (),
    *,
    rounds: int = 5,
    prefills: Sequence[int] = PREFILLS,
    contexts: Sequence[int] = CONTEXTS,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Prefill and decode of the whole model, in turn with the peers."""
    rows: list[Row] = []
    for tokens in (n for n in prefills if n < model.context):
        progress(f"prefill {tokens}")
        turns = Turns(lambda n=tokens: prefill_seconds(model, n), prompt(model, tokens), peers)
        rows.append(turns.row("prefill", tokens, rounds))
    for context in (n for n in contexts if n + STEPS < model.context):
        progress(f"decode at {context}")
        walls: list[float] = []

        def run(context: int = context, walls: list[float] = walls) -> float:
            seconds, moved = decode_seconds(model, context)
            walls.append(STEPS * read_rate() / moved)
            return seconds

        turns = Turns(run, prompt(model, context), peers)
        rows.append(turns.row("decode", context, rounds, walls))
    return rows


@dataclass(frozen=True)
class Turns:
    """qrun and its peers, one after the other, round by round."""

    run: Callable[[], float]
    ids: Sequence[int]
    peers: Sequence[Peer]

    def row(self, what: str, tokens: int, rounds: int, walls: Sequence[float] = ()) -> Row:
        """Medians of rates, and of ratios within a round. The first round warms up."""
        own: list[float] = []
        others: dict[str, list[float]] = {peer.name: [] for peer in self.peers}
        waited = dict.fromkeys(others, 0.0)  # a decode's prefill included
        for _ in range(rounds + 1):
            own.append(self.run())
            for peer in self.peers:
                taken = others[peer.name]
                if waited[peer.name] < PATIENCE:
                    start = time.perf_counter()
                    taken.append(peer.seconds(what, self.ids, STEPS))
                    waited[peer.name] = time.perf_counter() - start
        pairs = {n: list(zip(own, taken, strict=False)) for n, taken in others.items()}
        warm = {n: p[1:] or p for n, p in pairs.items()}
        work = tokens if what == "prefill" else STEPS
        return Row(
            f"{what} {tokens}" if what == "prefill" else f"{what} at {tokens}",
            work / statistics.median(own[1:]),
            "tok/s",
            statistics.median(walls[1:]) if walls else None,
            {n: work / statistics.median(b for _, b in p) for n, p in warm.items()},
            {n: statistics.median(b / a for a, b in p) for n, p in warm.items()},
            own[1:],
            {n: [b for _, b in p] for n, p in warm.items()},
        )


@contextmanager
def started(
    wanted: Sequence[tuple[str, str]], model: LoadedModel, ggufs: Sequence[Path]
) -> Generator[list[Peer]]:
    """Peers (name, Python) with their models loaded; llama.cpp once for each GGUF."""
    layers = 0 if mx.default_device().type == mx.cpu else -1  # -1: all on the GPU
    dtype = str(model.dtype).removeprefix("mlx.core.")
    with ExitStack() as stack:
        peers: list[Peer] = []
        for name, python in wanted:
            files = [(gguf, threads() or os.cpu_count(), layers) for gguf in ggufs]
            for arguments in files if name == "llama.cpp" else [(model.folder, dtype)]:
                peers.append(Peer(name, python, *arguments))
                stack.callback(peers[-1].close)
        yield peers


def threads() -> int:
    """Threads of the CPU's kernels; 0 on a GPU, or where there are none."""
    if mx.default_device().type != mx.cpu or _launch.native_problem() is not None:
        return 0
    from qrun import _ext

    return _ext.threads()


def prefill_seconds(model: LoadedModel, tokens: int) -> float:
    """Seconds to feed that many tokens to an empty cache, up to the logits behind the last."""
    ids = prompt(model, tokens)
    cache = model.new_cache(tokens)
    mx.eval(cache.keys, cache.values)
    start = time.perf_counter()
    mx.eval(prefill(model, ids, cache))
    return time.perf_counter() - start


def decode_seconds(model: LoadedModel, context: int) -> tuple[float, int]:
    """Seconds of STEPS single tokens behind `context` others, and the bytes they must move."""
    cache = model.new_cache(context + STEPS + 1)
    sampler = Sampler(Sampling(), [], model.vocab)
    token = prefill(model, prompt(model, context), cache, sampler)
    step = decode_step(model, cache, sampler)
    token = step(token)  # the first step may be traced
    token.item()
    moved = 0
    start = time.perf_counter()
    for _ in range(STEPS):
        following = step(token)
        token.item()
        token = following
        moved += model.step_bytes + cache.bytes_held()
    token.item()
    return time.perf_counter() - start, moved


def prompt(model: LoadedModel, tokens: int) -> list[int]:
    """That many ids of no meaning, the same every time."""
    return [(7 * i + 11) % (model.vocab - 100) + 50 for i in range(tokens)]


def read_rate(size: int = 256 << 20) -> float:
    """Bytes a second that a plain read loop over so many bytes reaches right now."""
    if threads():
        from qrun import _ext

        return _ext.read_bandwidth(size, _ext.threads()) * 1e9
    from qrun.hardware import read_bandwidth

    return read_bandwidth()


def peak_rate(dtype: mx.Dtype = mx.float32) -> float | None:
    """GFLOP/s that the instructions of qmm reach right now on all threads; None without `threads`.

    dtype: of x, which is taken apart into three numbers of 8 bits, or two; bfloat16 is one where
    there is a matrix unit, and float32 stays as it is where neither the unit nor vectors have a
    dot product of bytes (kernels/qmm/README.md).
    """
    if not threads():
        return None
    from qrun import _ext

    unit = _ext.peak_flops("unit")
    if not unit and not _ext.fast_dots() and dtype == mx.float32:
        return _ext.peak_flops("f32")
    parts = 3 if dtype == mx.float32 else 1 if unit and dtype == mx.bfloat16 else 2
    return (unit or _ext.peak_flops("int8")) / parts


def bench_kernels(
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rows: Sequence[int] = (1, 4, 8, 512),
    spec: Quantization | None = None,
    dtype: mx.Dtype | None = None,
    rounds: int = 7,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """qmv and qmm on cold matrices, in turn with the read loop: GB/s, or GFLOP/s for many rows.

    dtype: of x; by default what a model would have there, float32 on a CPU, float16 on a GPU.
    """
    spec = spec or Quantization()
    dtype = dtype or (mx.float32 if mx.default_device().type == mx.cpu else mx.float16)
    out: list[Row] = []
    for n, k in shapes:
        matrices = cold_matrices(n, k, spec)
        for m in rows:
            op = qmv if m <= 16 else qmm
            progress(f"{op.__name__} {n}x{k}, M = {m}")
            x = mx.random.normal((m, k)).astype(dtype)
            used = matrices if m <= 16 else matrices[:1]
            flops, moved = 2 * m * n * k, qmv_bytes(x, used[0])
            run = one_after_another(op, x, used)
            run()
            seconds: list[float] = []
            walls: list[float] = []
            for _ in range(rounds):
                start = time.perf_counter()
                run()
                seconds.append((time.perf_counter() - start) / len(used))
                if m <= 16:
                    walls.append(read_rate(moved * len(used)))
            middle = statistics.median(seconds)
            name = f"{op.__name__} {n}x{k} g{spec.group_size} M={m}"
            if m <= 16:
                rate, unit, wall = moved / middle / 1e9, "GB/s", statistics.median(walls) / 1e9
            else:
                rate, unit, wall = flops / middle / 1e9, "GFLOP/s", peak_rate(dtype)
            out.append(Row(name, rate, unit, wall, seconds=seconds, flops=flops, bytes=moved))
    return out


def one_after_another(
    op: Callable[..., mx.array], x: mx.array, matrices: Sequence[QuantizedMatrix]
) -> Callable[[], None]:
    """Products of x with all matrices; on a CPU as one primitive, which is how a step does them."""
    if mx.default_device().type != mx.cpu:
        return lambda: mx.eval([op(x, m) for m in matrices])

    def step(inputs: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
        y = None
        for m in matrices:
            y = op(inputs[0], m, residual=y)  # each needs the one before
        assert y is not None
        return [y], state

    replay = _launch.backend().traced(step)
    return lambda: mx.eval(replay([x], [])[0])


def bench_ladder(
    *,
    shapes: Sequence[tuple[int, int]] = LADDER_SHAPES,
    spec: Quantization | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Where a backend has a choice of kernels (Metal): each of them, against MLX's own."""
    ladder = getattr(_launch.backend(), "ladder", None)
    out: list[Row] = []
    if ladder is None:
        return out
    wall = read_rate()
    for n, k in shapes:
        matrices = cold_matrices(n, k, spec or Quantization())
        rungs = ladder(matrices, mx.float16, show=progress)
        rungs += ladder(matrices, mx.float32, (512,), show=progress)
        for rung in rungs:
            flops = 2 * rung.m * rung.n * rung.k
            moved = qmv_bytes(mx.zeros((rung.m, k), mx.float16), matrices[0])
            few = rung.m <= 16
            work, unit = (moved, "GB/s") if few else (flops, "GFLOP/s")
            rate, ceiling = work / rung.seconds / 1e9, wall / 1e9 if few else None
            row = Row(f"{rung.what}: {rung.way}", rate, unit, ceiling, flops=flops, bytes=moved)
            row.seconds.append(rung.seconds)
            if rung.way != "mlx":
                row.peers["mlx"] = work / rung.mlx / 1e9
                row.ratios["mlx"] = rung.mlx / rung.seconds
            out.append(row)
    return out


def cold_matrices(n: int, k: int, spec: Quantization) -> list[QuantizedMatrix]:
    """Random packed matrices, together larger than the caches."""
    rng = np.random.default_rng(0)
    words, groups = (n, k * spec.bits // 32), (n, k // spec.group_size)
    size = n * k * spec.bits // 8 + 4 * n * k // spec.group_size
    count = max(2, min(512, -(-COLD_BYTES // size)))
    out: list[QuantizedMatrix] = []
    for _ in range(count):
        w = mx.array(rng.integers(0, 1 << 32, words, dtype=np.uint32))
        scales = mx.array(rng.uniform(0.5, 1.5, groups).astype(np.float16))
        biases = scales * -8
        out.append(QuantizedMatrix.of(w, scales, biases, spec).pack())
    return out

"""Working memory of the CPU kernels: leased for a task, not kept by every thread that was."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import mlx.core as mx
import numpy as np
import pytest

import qrun.ops as ops
from qrun.ops.matrix import QuantizedMatrix
from tests.ops import matrices

pytest.importorskip("qrun._ext", reason="built without the CPU extension")


@pytest.fixture
def matrix() -> QuantizedMatrix:
    return matrices.sample(64, 2048, 4, 64).matrix(64)


@pytest.fixture
def x(matrix: QuantizedMatrix) -> mx.array:
    """Of which a product takes 2 to 4 MB of working memory, and its result 64 KB."""
    x = mx.sin(mx.arange(256 * matrix.k, dtype=mx.float32)).reshape(256, matrix.k)
    mx.eval(x)
    return x


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_that_ended_leaves_no_working_memory(matrix: QuantizedMatrix, x: mx.array) -> None:
    """MLX keeps a thread of its own for every one that was: what is that thread's, stays."""

    def resident_after(threads: int) -> int:
        for _ in range(threads):
            thread = Thread(target=lambda: mx.eval(ops.qmm(x, matrix)))
            thread.start()
            thread.join()
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    before = resident_after(10)
    assert resident_after(40) - before < 40 << 19


def test_threads_side_by_side_do_not_share_it(matrix: QuantizedMatrix, x: mx.array) -> None:
    def product(rows: int) -> np.ndarray:
        return np.array(ops.qmm(x[-rows:], matrix))

    rows = [1, 3, 8, 9, 33, 64, 200, 256] * 6
    alone = [product(n) for n in rows]
    with ThreadPoolExecutor(8) as pool:
        for got, want in zip(pool.map(product, rows), alone, strict=True):
            np.testing.assert_array_equal(got, want)

"""rms_norm, rope, sdpa, swiglu and argmax of the CPU extension, on every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from . import reference as ref
from .test_cpu_products import FLOATS, ext, isa, random

__all__ = ["isa"]


def offset(n: int) -> mx.array:
    return mx.array([n], dtype=mx.int32)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5, 576), (40, 1024)])
def test_rms_norm(isa: str, dtype: str, shape: tuple, centered: bool) -> None:
    rng = np.random.default_rng(1)
    x, weight = random(rng, *shape, dtype=dtype), random(rng, shape[-1])
    h = ref.f64(x)
    want = ref.rms_norm(h - centered * h.mean(-1, keepdims=True), ref.f64(weight), 1e-5)
    got = ext.rms_norm(x, weight, 1e-5, centered=centered)
    assert got.dtype == x.dtype
    assert np.abs(ref.f64(got) - want).max() <= 2 * ref.ulp(float(np.abs(want).max()), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 33, 5000])
def test_swiglu(isa: str, dtype: str, n: int) -> None:
    x = random(np.random.default_rng(n), 3, 2 * n, dtype=dtype) * 4
    want = ref.silu(ref.f64(x)[:, ::2]) * ref.f64(x)[:, 1::2]
    got = ext.swiglu(ext.guarded(x))
    assert np.abs(ref.f64(got) - want).max() <= 2 * ref.ulp(float(np.abs(want).max()), dtype)


def address(a: mx.array) -> int:
    return np.asarray(memoryview(a)).__array_interface__["data"][0]


@pytest.mark.parametrize("size", [1, 5000, 1 << 20])
def test_results_begin_with_a_cache_line_and_never_share_memory(size: int) -> None:
    """Freed blocks are used again: by one array at a time."""
    rng = np.random.default_rng(size)
    kept: list[tuple[mx.array, np.ndarray]] = []
    for round in range(6):
        x = random(rng, 1, 2 * size, dtype="float32")
        y = ext.swiglu(x)
        mx.eval(y)
        assert address(y) % 64 == 0
        if round % 2:
            kept.append((y, ref.f64(y).copy()))
        del y
    for y, before in kept:
        np.testing.assert_array_equal(ref.f64(y), before)


def test_activations_far_out(isa: str) -> None:
    x = mx.array([[-1000.0, 2, -100, 2, -0.0, 2, 100, 2, 1e30, 1, np.nan, 1]])
    np.testing.assert_array_equal(np.array(ext.swiglu(x))[0, [0, 2, 3]], [0, 0, 200])
    y = np.array(ext.swiglu(x))[0]
    assert abs(y[1]) < 1e-30
    assert y[4] == np.float32(1e30)
    assert np.isnan(y[5])


def test_argmax(isa: str) -> None:
    rng = np.random.default_rng(0)
    for n in (1, 15, 16, 17, 49152):
        x = random(rng, 3, n)
        np.testing.assert_array_equal(np.array(ext.argmax(x, x.shape[-1])), np.array(x).argmax(-1))
    assert ext.argmax(mx.array([1.0, 3, 3, 2]), 4).item() == 1
    assert ext.argmax(mx.array([-1.0] * 40), 40).item() == 0
    for bad in (np.nan, np.inf):
        assert ext.argmax(mx.array([1.0] * 20 + [bad]), 21).item() == -1
        assert ext.argmax(mx.array([bad] + [1.0] * 20), 21).item() == -1


SDPA = [
    # B, H, Hkv, L, D, C, offset, window, softcap
    (1, 9, 3, 1, 64, 1300, 1200, 0, 0.0),
    (1, 9, 3, 1, 64, 40, 0, 0, 0.0),
    (2, 4, 2, 17, 80, 64, 3, 0, 0.0),
    (1, 14, 2, 1, 64, 700, 600, 100, 30.0),
    (1, 8, 8, 40, 24, 64, 0, 0, 0.0),
    (1, 4, 4, 2, 128, 1100, 1050, 513, 0.0),
    (2, 16, 1, 3, 32, 20, 16, 4, 0.0),
    (1, 3, 1, 600, 16, 700, 90, 70, 0.0),
    (1, 2, 1, 1, 256, 70, 64, 0, 50.0),
]


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
    ],
)
@pytest.mark.parametrize("case", SDPA, ids=str)
def test_sdpa(isa: str, case: tuple, q_dtype: str, kv_dtype: str) -> None:
    b, h, kv, length, d, capacity, at, window, softcap = case
    rng = np.random.default_rng(at)
    q = random(rng, b, h, length, d, dtype=q_dtype)
    k, v = (random(rng, b, kv, capacity, d, dtype=kv_dtype) for _ in "kv")
    # What is beyond the valid keys must not matter, whatever it is.
    beyond = mx.arange(capacity)[:, None] >= at + length
    nan = mx.array(float("nan"), dtype=ref.DTYPES[kv_dtype])
    k_dirty, v_dirty = (mx.where(beyond, nan, a) for a in (k, v))
    options = {"scale": d**-0.5, "window": window, "softcap": softcap}
    got = ext.sdpa(q, k_dirty, v_dirty, offset(at), **options)
    want = ref.sdpa(ref.f64(q), ref.f64(k), ref.f64(v), at, **options)
    assert got.dtype == q.dtype
    assert got.shape == want.shape
    error = np.abs(ref.f64(got) - want).max()
    assert error <= ref.ulp(float(np.abs(want).max()), q_dtype) + 2e-6


def test_sdpa_has_the_same_bits_for_any_length_and_thread_count(isa: str) -> None:
    rng = np.random.default_rng(12)
    k, v = random(rng, 1, 2, 1400, 64), random(rng, 1, 2, 1400, 64)
    q = random(rng, 1, 6, 60, 64)
    options = {"scale": 0.125, "window": 900}
    together = np.array(ext.sdpa(q, k, v, offset(1300), **options))
    before = ext.threads()
    try:
        for threads in (1, 2, 5):
            ext.set_threads(threads)
            for i in (0, 1, 59):
                one = ext.sdpa(q[:, :, i : i + 1], k, v, offset(1300 + i), **options)
                np.testing.assert_array_equal(np.array(one)[:, 0], together[:, i])
            np.testing.assert_array_equal(
                np.array(ext.sdpa(q, k, v, offset(1300), **options)), together
            )
    finally:
        ext.set_threads(before)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize(
    "case",
    [(1, 9, 3, 1, 64, 64, 40, 5), (2, 4, 2, 17, 80, 20, 40, 3), (1, 2, 1, 3, 17, 8, 8, 0)],
    ids=str,
)
@pytest.mark.parametrize("norms", [True, False])
def test_rope(isa: str, case: tuple, dtype: str, kv_dtype: str, norms: bool) -> None:
    b, h, kv, length, d, rotated, capacity, at = case
    rng = np.random.default_rng(d)
    qkv = random(rng, b, length, (h + 2 * kv) * d, dtype=dtype)
    k, v = (random(rng, b, kv, capacity, d, dtype=kv_dtype) for _ in "kv")
    table = random(rng, capacity, min(rotated, d) // 2, 2)
    q_norm, k_norm = (random(rng, d, dtype=dtype) if norms else None for _ in "qk")
    want_k, want_v = ref.f64(k), ref.f64(v)
    q, k_out, v_out = ext.rope(
        qkv, k, v, offset(at), table, heads=h, kv_heads=kv, head_dim=d,
        q_norm=q_norm, k_norm=k_norm, eps=1e-6,
    )  # fmt: skip
    mx.eval(q, k_out, v_out)
    x = ref.f64(qkv).reshape(b, length, h + 2 * kv, d).swapaxes(1, 2)
    xq, xk, xv = x[:, :h], x[:, h : h + kv], x[:, h + kv :]
    if norms:
        xq, xk = ref.rms_norm(xq, ref.f64(q_norm), 1e-6), ref.rms_norm(xk, ref.f64(k_norm), 1e-6)
    want_q = ref.rotate(xq, ref.f64(table), at)
    want_k[:, :, at : at + length] = ref.rotate(xk, ref.f64(table), at)
    want_v[:, :, at : at + length] = xv
    for got, want, t in [(q, want_q, dtype), (k_out, want_k, kv_dtype), (v_out, want_v, kv_dtype)]:
        assert np.abs(ref.f64(got) - want).max() <= 2 * ref.ulp(float(np.abs(want).max()), t) + 2e-6
    # in place: the caches that were passed in hold the same numbers
    np.testing.assert_array_equal(ref.f64(k), ref.f64(k_out))
    np.testing.assert_array_equal(ref.f64(v), ref.f64(v_out))


@pytest.mark.alone
def test_a_full_cache_is_an_error(isa: str) -> None:
    k = mx.zeros((1, 1, 8, 16))
    with pytest.raises(RuntimeError, match="9 keys in a cache of 8"):
        mx.eval(ext.sdpa(mx.zeros((1, 1, 1, 16)), k, k, offset(8), scale=1.0))
    with pytest.raises(RuntimeError, match="do not fit a cache of 8"):
        mx.eval(
            ext.rope(
                mx.zeros((1, 2, 48)),
                k,
                k + 0,
                offset(7),
                mx.zeros((8, 8, 2)),
                heads=1,
                kv_heads=1,
                head_dim=16,
            )
        )


def test_embedding_outside_the_matrix_is_nan_and_nothing_is_read() -> None:
    matrix = ref.Matrix(np.random.default_rng(0), 5, 32, 4, 32, "float16")
    packed = ext.guarded(ext.pack(matrix.w, matrix.scales, matrix.biases, 4, 32))
    ids = mx.array([0, 5, 1 << 30, -1], dtype=mx.int32)
    y = np.array(ext.embedding(ids, packed, 5, 32, 4, 32, mx.float16, mx.float32))
    assert np.isfinite(y[[0, 3]]).all()
    assert np.isnan(y[[1, 2]]).all()
    np.testing.assert_array_equal(y[3], matrix.dense32[4])


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    code = "import mlx.core as mx, qrun._ext as e\n" + code
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip


def test_threads_follow_affinity_and_environment() -> None:
    assert python("print(e.threads())", QRUN_NUM_THREADS="3").stdout.strip() == "3"
    bad = python("e.threads()", QRUN_NUM_THREADS="many")
    assert bad.returncode != 0
    assert "QRUN_NUM_THREADS=many" in bad.stderr
    pinned = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(e.threads())"
    )
    if hasattr(os, "sched_setaffinity"):
        assert python(pinned).stdout.strip() == "1"


WORK = """
def work():
    x = mx.random.normal((64, 1024)); w = mx.ones((1024,))
    y = e.rms_norm(x, w, 1e-5); mx.eval(y); return y
"""


def test_the_process_ends_with_threads_asleep_or_awake() -> None:
    for pause in ("0", "0.05"):
        run = python(
            WORK + f"import time; work(); time.sleep({pause}); print('end')", QRUN_NUM_THREADS="4"
        )
        assert (run.returncode, run.stdout.strip()) == (0, "end"), run.stderr


def test_a_busy_pool_serves_several_streams() -> None:
    code = (
        WORK
        + """
import threading
def many():
    with mx.stream(mx.new_stream(mx.cpu)):
        for _ in range(200): work()
ts = [threading.Thread(target=many) for _ in range(4)]
[t.start() for t in ts]; [t.join() for t in ts]; print('end', flush=True)
import os; os._exit(0)  # MLX 0.32.4 alone aborts now and then when such streams end
"""
    )
    run = python(code, QRUN_NUM_THREADS="4")
    assert (run.returncode, run.stdout.strip()) == (0, "end"), run.stderr


def test_blank_arrays_are_zeros_apart_from_each_other() -> None:
    shapes = [(1, 3, 256, 64)] * 60 + [(2, 5, 7)]  # 12 MB; 4 times as much has large pages
    for arrays in (ext.blank(shapes, mx.float32), ext.blank(shapes * 4, mx.float32)):
        places = [np.array(a, copy=False).__array_interface__["data"][0] for a in arrays]
        assert all(place % 64 == 0 for place in places)
        ends = [place + a.nbytes for place, a in zip(places, arrays, strict=True)]
        assert all(end <= place for end, place in zip(ends, places[1:], strict=False))
        assert arrays[-1].shape == (2, 5, 7)
        assert all(mx.all(a == 0).item() for a in arrays[-2:])

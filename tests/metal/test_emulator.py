"""What the emulator computes (attributes, types, exchange, fragments, atomics) and counts."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.metal import Bfloat16, CompileError, MetalError, clang, metal_kernel, settings
from tests.metal.signature import ATTRIBUTES, parameters, signature

SIMD = "#include <metal_simdgroup>\n#include <metal_quadgroup>\n#include <metal_simdgroup_matrix>\n"
RNG = np.random.default_rng(1)


def run(body: str, inputs: list[Any], shape: tuple[int, ...], dtype: Any = np.float32, **more: Any):
    names = ["a", "b", "c", "d"][: len(inputs)]
    call = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "template": None, "init_value": None}
    call |= {k: more.pop(k) for k in list(call) if k in more}
    kernel = metal_kernel("test", names, ["out"], body, SIMD + more.pop("header", ""), **more)
    return kernel(inputs=inputs, output_shapes=[shape], output_dtypes=[dtype], **call)


# ---- the call ----


def test_attributes_of_a_ragged_grid() -> None:
    grid, group = (10, 5, 3), (4, 2, 2)
    three = [n for n, (kind, _) in ATTRIBUTES.items() if kind == "uint3"]
    body = "uint3 g = thread_position_in_grid;\nuint o = ((g.z * 5 + g.y) * 10 + g.x) * 30;\n"
    for i, name in enumerate(three):
        body += f"out[o + {3 * i}] = {name}.x; out[o + {3 * i + 1}] = {name}.y;"
        body += f" out[o + {3 * i + 2}] = {name}.z;\n"
    body += "out[o + 27] = thread_index_in_threadgroup; out[o + 28] = thread_index_in_simdgroup;\n"
    body += "out[o + 29] = simdgroup_index_in_threadgroup + 100 * simdgroups_per_threadgroup;"
    out = run(
        body, [np.zeros(1, np.float32)], (3, 5, 10, 30), np.uint32, grid=grid, threadgroup=group
    )
    got = {n: out[0][..., 3 * i : 3 * i + 3] for i, n in enumerate(three)}
    for z, y, x in np.ndindex(3, 5, 10):
        at = np.array([x, y, z])
        whole = np.array(group)
        first = at // whole * whole
        extent = np.minimum(whole, np.array(grid) - first)
        one = {n: v[z, y, x].tolist() for n, v in got.items()}
        assert one["thread_position_in_grid"] == at.tolist()
        assert one["thread_position_in_threadgroup"] == (at - first).tolist()
        assert one["threadgroup_position_in_grid"] == (at // whole).tolist()
        assert one["threadgroups_per_grid"] == [3, 3, 2]
        assert one["threads_per_grid"] == one["grid_size"] == list(grid)
        assert one["threads_per_threadgroup"] == extent.tolist()
        assert one["dispatch_threads_per_threadgroup"] == list(group)
        assert one["grid_origin"] == [0, 0, 0]
        p = at - first
        index = (p[2] * extent[1] + p[1]) * extent[0] + p[0]
        assert out[0][z, y, x, 27:].tolist() == [index, index % 32, index // 32 + 100]


def test_signature_follows_the_body() -> None:
    inputs = [("x", "float32", (2, 8)), ("n", "int32", (1,)), ("s", "bfloat16", ())]
    body = "y[0] = x[x_shape[0]] + x_ndim + thread_position_in_grid.x;"
    params = parameters(body, inputs, [("y", "float16")], atomic_outputs=False)
    text = signature("f", body, params, [("T", mx.float16), ("N", 4), ("B", True)])
    assert text == (
        "template <typename T, int N, bool B>\n"
        "[[kernel]] void f(\n"
        "  const device float* x [[buffer(0)]],\n"
        "  const constant int* x_shape [[buffer(1)]],\n"
        "  const constant int& x_ndim [[buffer(2)]],\n"
        "  const constant int32_t* n [[buffer(3)]],\n"
        "  const constant bfloat16_t& s [[buffer(4)]],\n"
        "  device float16_t* y [[buffer(5)]],\n"
        "  uint3 thread_position_in_grid [[thread_position_in_grid]]) {\n"
    )


def test_shape_and_strides_of_a_strided_input() -> None:
    a = np.arange(40, dtype=np.float32).reshape(5, 8)[:, ::2]
    body = (
        "uint i = thread_position_in_grid.x;\n"
        "out[i] = a[i / 4 * a_strides[0] + i % 4 * a_strides[1]] + a_shape[1] * 100\n"
        "  + a_ndim * 1000;"
    )
    for contiguous in (True, False):
        out = run(body, [a], (20,), grid=(20, 1, 1), ensure_row_contiguous=contiguous)
        assert (out[0] == a.ravel() + 2400).all()


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "uint32", "int64", "float16", "float32"]
)
def test_numpy_types(dtype: str) -> None:
    a = RNG.integers(0, 100, 32).astype(dtype)
    out = run("out[thread_position_in_grid.x] = a[thread_position_in_grid.x];", [a], (32,), dtype)
    assert out[0].dtype == a.dtype
    assert (out[0] == a).all()


def test_mlx_in_mlx_out() -> None:
    a = mx.random.normal((32,)).astype(mx.bfloat16)
    body = "uint i = thread_position_in_grid.x; out[i] = T(a[i]);"
    out = run(body, [a], (32,), mx.bfloat16, template=[("T", mx.bfloat16)])
    assert isinstance(out[0], mx.array)
    assert out[0].dtype == mx.bfloat16
    assert mx.array_equal(out[0], a)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_sixteen_bit_sums_round_at_every_step(kind: str) -> None:
    values = RNG.standard_normal((32, 64)).astype(np.float32)

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float16) if kind == "float16" else Bfloat16.of(x).float32()

    rows = rounded(values)
    a = rows if kind == "float16" else Bfloat16.of(values)
    expected = np.zeros(32, np.float32)
    for k in range(64):
        expected = rounded(expected + rows[:, k].astype(np.float32) * 1).astype(np.float32)
    body = (
        "uint i = thread_position_in_grid.x; T s = 0;\n"
        "for (int k = 0; k < 64; ++k) s += a[i * 64 + k];\nout[i] = s;"
    )
    out = run(body, [a], (32,), kind, template=[("T", kind)])
    got = out[0].astype(np.float32) if kind == "float16" else out[0].float32()
    assert (got == expected).all()


def test_outputs_start_as_nan_or_as_the_init_value() -> None:
    body = "if (a[0] > 5) out[0] = 1;"
    a = np.zeros(8, np.float32)
    out = run(body, [a], (3,), check=False)
    assert np.isnan(out[0]).all()
    assert out.report[0].kind == "unwritten output"
    out = run(body, [a], (3,), init_value=2.5)
    assert (out[0] == 2.5).all()
    assert not out.report


def test_function_constants_and_in_place_inputs() -> None:
    header = "constant int shift [[function_constant(3)]];\n"
    a = np.zeros(32, np.float32)
    body = "uint i = thread_position_in_grid.x; ((device float*)a)[i] = i + shift; out[i] = i;"
    run(body, [a], (32,), header=header, function_constants={3: 7}, in_place=["a"])
    assert (a == np.arange(32) + 7).all()


def test_a_wrong_call_is_refused() -> None:
    kernel = metal_kernel("k", ["a"], ["out"], "out[0] = a[0];")
    good = {"output_shapes": [(1,)], "output_dtypes": [np.float32], "grid": (1, 1, 1)}
    with pytest.raises(ValueError, match="inputs has 2 entries"):
        kernel(inputs=[np.zeros(1)] * 2, threadgroup=(1, 1, 1), **good)
    with pytest.raises(ValueError, match="1024 at most"):
        kernel(inputs=[np.zeros(1, np.float32)], threadgroup=(1025, 1, 1), **good)


# ---- exchange ----

VALUES = RNG.integers(1, 5, 64)
EXCHANGES = {
    "simd_sum(x)": lambda v: np.full(32, v.sum()),
    "simd_product(x)": lambda v: np.full(32, v.prod()),
    "simd_min(x)": lambda v: np.full(32, v.min()),
    "simd_max(x)": lambda v: np.full(32, v.max()),
    "simd_prefix_inclusive_sum(x)": lambda v: v.cumsum(),
    "simd_prefix_exclusive_sum(x)": lambda v: v.cumsum() - v,
    "simd_shuffle(x, 31 - l)": lambda v: v[::-1],
    "simd_shuffle_xor(x, 5)": lambda v: v[np.arange(32) ^ 5],
    "simd_shuffle_down(x, 3)": lambda v: np.append(v[3:], v[29:]),
    "simd_shuffle_up(x, 3)": lambda v: np.append(v[:3], v[:29]),
    "simd_shuffle_rotate_down(x, 3)": lambda v: np.roll(v, -3),
    "simd_shuffle_rotate_up(x, 3)": lambda v: np.roll(v, 3),
    "simd_shuffle_and_fill_down(x, T(9), 3)": lambda v: np.append(v[3:], [9, 9, 9]),
    "simd_shuffle_and_fill_up(x, T(9), 3)": lambda v: np.append([9, 9, 9], v[:29]),
    "simd_broadcast(x, 7)": lambda v: np.full(32, v[7]),
    "simd_broadcast_first(x)": lambda v: np.full(32, v[0]),
    "T(simd_all(x > 0)) + 2 * T(simd_any(x > 3))":
        lambda v: np.full(32, int((v > 0).all()) + 2 * int((v > 3).any())),
    "T(popcount(ulong(simd_ballot(x > T(2)))))": lambda v: np.full(32, (v > 2).sum()),
    "quad_sum(x)": lambda v: v.reshape(8, 4).sum(1).repeat(4),
    "quad_shuffle_xor(x, 1)": lambda v: v[np.arange(32) ^ 1],
    "quad_broadcast(x, 2)": lambda v: v[np.arange(32) // 4 * 4 + 2],
}  # fmt: skip


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
def test_exchange_between_lanes(order: str) -> None:
    """All of them in one kernel, for a float, a half, an int and an unsigned byte."""
    body = "uint i = thread_position_in_grid.x, l = thread_index_in_simdgroup; T x = a[i];\n"
    body += "\n".join(f"out[{k} * 64 + i] = {e};" for k, e in enumerate(EXCHANGES))
    for dtype in ("float32", "float16", "int32", "uint32"):
        v = VALUES.astype(dtype)
        out = run(
            body, [v], (len(EXCHANGES), 64), dtype, grid=(64, 1, 1), threadgroup=(64, 1, 1),
            template=[("T", dtype)], order=order,
        )  # fmt: skip
        for k, (text, expected) in enumerate(EXCHANGES.items()):
            for half in (slice(0, 32), slice(32, 64)):
                e = expected(v[half].astype(np.float64 if dtype[0] == "f" else np.int64))
                with np.errstate(over="ignore"):
                    assert (out[0][k, half] == e.astype(dtype)).all(), (dtype, text)


def test_a_short_simdgroup_exchanges_among_its_threads() -> None:
    a = np.arange(40, dtype=np.float32)
    body = (
        "uint i = thread_position_in_grid.x;\nout[i] = simd_sum(a[i]) + simd_shuffle_down(a[i], 1);"
    )
    out = run(body, [a], (40,), grid=(40, 1, 1), threadgroup=(64, 1, 1))
    down = np.concatenate([a[1:32], a[31:32], a[33:], a[39:]])
    sums = np.where(a < 32, a[:32].sum(), a[32:].sum())
    assert (out[0] == sums + down).all()


# ---- fragments ----


def test_lane_mapping_of_a_fragment() -> None:
    a = np.arange(64, dtype=np.float32)
    body = (
        "simdgroup_matrix<float, 8, 8> m;\nsimdgroup_load(m, a, 8);\n"
        "uint l = thread_index_in_simdgroup;\n"
        "out[2 * l] = m.thread_elements()[0]; out[2 * l + 1] = m.thread_elements()[1];"
    )
    out = run(body, [a], (64,))[0].reshape(32, 2)
    lane = np.arange(32)
    q = lane // 4
    row, column = (q & 4) + lane // 2 % 4, (q & 2) * 2 + lane % 2 * 2
    assert (out[:, 0] == row * 8 + column).all()
    assert (out[:, 1] == out[:, 0] + 1).all()


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_fragments_load_multiply_store(kind: str, transposed: bool) -> None:
    a = RNG.integers(-4, 5, (16, 24)).astype(np.float32)
    b = RNG.integers(-4, 5, (16, 24)).astype(np.float32)
    wrap = Bfloat16.of if kind == "bfloat16" else lambda x: x.astype(kind)
    body = (
        "simdgroup_matrix<T, 8, 8> A, B; simdgroup_matrix<float, 8, 8> C(2.0f), D;\n"
        f"simdgroup_load(A, a, 24, ulong2(8, 3), {str(transposed).lower()});\n"
        "simdgroup_load(B, b + 24 * 2 + 5, 24);\n"
        "simdgroup_multiply_accumulate(D, A, B, C);\n"
        f"simdgroup_store(D, out, 12, ulong2(4, 0), {str(transposed).lower()});"
    )
    out = run(body, [wrap(a), wrap(b)], (8, 12), template=[("T", kind)], init_value=0)[0]
    A = a[3:11, 8:16].T if transposed else a[3:11, 8:16]
    expected = A @ b[2:10, 5:13] + 2 * np.eye(8)
    assert (out[:, 4:] == (expected.T if transposed else expected)).all()
    assert (out[:, :4] == 0).all()


# ---- atomics and order ----


@pytest.mark.parametrize("order", ["forward", "backward", "random"])
def test_atomics(order: str) -> None:
    a = RNG.integers(0, 1000, 128).astype(np.int32)
    body = (
        "int v = a[thread_position_in_grid.x];\n"
        "atomic_fetch_add_explicit(out, v, memory_order_relaxed);\n"
        "atomic_fetch_max_explicit(out + 1, v, memory_order_relaxed);\n"
        "atomic_fetch_xor_explicit(out + 2, v, memory_order_relaxed);\n"
        "int old = atomic_load_explicit(out + 3, memory_order_relaxed);\n"
        "while (!atomic_compare_exchange_weak_explicit(out + 3, &old, old + 2,\n"
        "    memory_order_relaxed, memory_order_relaxed)) {}"
    )
    out = run(
        body, [a], (4,), np.int32, grid=(128, 1, 1), threadgroup=(64, 1, 1), atomic_outputs=True,
        init_value=0, order=order,
    )  # fmt: skip
    assert out[0].tolist() == [a.sum(), a.max(), np.bitwise_xor.reduce(a), 256]


def test_an_atomic_store_reads_nothing() -> None:
    """So it may come first, in memory that nobody has written."""
    body = "threadgroup atomic_uint t; const uint i = thread_position_in_grid.x;\n"
    body += "if (i == 0) atomic_store_explicit(&t, 7u, memory_order_relaxed);\n"
    body += "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    body += "out[i] = a[i] + atomic_fetch_add_explicit(&t, 1u, memory_order_relaxed);"
    out = run(body, [np.zeros(9, np.uint32)], (9,), np.uint32, grid=(9, 1, 1))
    assert sorted(out[0].tolist()) == list(range(7, 16))


def test_orders_differ_and_seeds_repeat() -> None:
    body = "out[1 + atomic_fetch_add_explicit((device atomic_uint*)out, 1u, memory_order_relaxed)]"
    body += " = thread_position_in_grid.x + uint(a[0]);"

    def arrivals(order: str, seed: int = 0) -> list[int]:
        out = run(
            body, [np.zeros(9, np.float32)], (97,), np.uint32, grid=(96, 1, 1), init_value=0,
            check=False, order=order, seed=seed,
        )  # fmt: skip
        return out[0][1:].tolist()

    assert arrivals("forward") == list(range(96))
    assert arrivals("backward") == list(range(95, -1, -1))
    random = [tuple(arrivals("random", seed)) for seed in (1, 2, 1)]
    assert random[0] == random[2] != random[1]
    assert sorted(random[0]) == list(range(96))


# ---- what it counts and says ----


def test_counters() -> None:
    body = (
        "uint i = thread_position_in_grid.x; threadgroup float t[64];\n"
        "t[i % 64] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "float4 v = ((const device float4*)b)[i];\n"
        "out[i] = half(t[63 - i % 64] + v.x + v.y + v.z + v.w);"
    )
    a, b = np.ones(128, np.float32), np.ones(512, np.float32)
    out = run(body, [a, b], (128,), np.float16, grid=(128, 1, 1), threadgroup=(64, 1, 1))
    c = out.counters
    assert c.buffers["a"].reads == {4: 128}
    assert c.buffers["a"].most_reads == 1
    assert c.buffers["b"].reads == {16: 128}
    assert c.buffers["b"].narrowest_read == 16
    assert (c.buffers["b"].least_reads, c.buffers["b"].most_reads) == (1, 1)
    assert c.buffers["out"].writes == {2: 128}
    assert c.buffers["out"].kind == "output"
    assert c.buffers["t"].reads == c.buffers["t"].writes == {4: 128}
    assert c.buffers["t"].kind == "threadgroup"
    assert c.threadgroup_bytes == 256
    assert (c.barriers, c.threadgroups, c.threads) == (2, 2, 128)
    assert c.barriers_per_threadgroup == 1


GRID = """
template <int TM, int TN>
void product(const device float* a, const device float* b, device float* c, int K) {
  simdgroup_matrix<float, 8, 8> A[TM], B[TN], C[TM][TN];
  for (int i = 0; i < TM * TN; ++i)
    C[i / TN][i % TN] = make_filled_simdgroup_matrix<float, 8, 8>(0);
  for (int k = 0; k < K; k += 8) {
    for (int i = 0; i < TM; ++i) simdgroup_load(A[i], a + i * 8 * K + k, K);
    for (int j = 0; j < TN; ++j) simdgroup_load(B[j], b + k * TN * 8 + j * 8, TN * 8);
    for (int i = 0; i < TM; ++i)
      for (int j = 0; j < TN; ++j) simdgroup_multiply_accumulate(C[i][j], A[i], B[j], C[i][j]);
  }
  for (int i = 0; i < TM; ++i)
    for (int j = 0; j < TN; ++j) simdgroup_store(C[i][j], c + i * 8 * TN * 8 + j * 8, TN * 8);
}
"""


@pytest.mark.parametrize("tile", [1, 2, 4])
def test_multiplies_per_fragment_load(tile: int) -> None:
    a = RNG.standard_normal((8 * tile, 32)).astype(np.float32)
    b = RNG.standard_normal((32, 8 * tile)).astype(np.float32)
    template = [("T", tile)]
    out = run(
        "product<T, T>(a, b, out, 32);",
        [a, b],
        (8 * tile, 8 * tile),
        header=GRID,
        template=template,
    )
    assert np.allclose(out[0], a @ b, atol=1e-5)
    assert out.counters.multiplies == tile * tile * 4
    assert out.counters.multiplies_per_load == tile / 2


def test_registers_rank_accumulator_grids() -> None:
    kernel = metal_kernel("rank", ["a", "b"], ["c"], "product<T, T>(a, b, c, 64);", SIMD + GRID)
    found = {}
    for tile in (2, 4, 8):
        a = np.zeros((8 * tile, 64), np.float32)
        found[tile] = kernel.registers(
            inputs=[a, a.T.copy()], output_dtypes=[np.float32], threadgroup=(32, 2, 2),
            template=[("T", tile)],
        )  # fmt: skip
    assert found[2].vector < found[4].vector < found[8].vector
    assert found[4].vector < 128 < found[8].vector  # what a lane of an Apple GPU has


def test_findings_name_the_file_that_a_line_directive_gives() -> None:
    header = '#line 20 "kernels/one.metal"\n'
    header += "float f(const device float* x, uint i) {\n  return x[i + 9];\n}\n"
    out = run("out[thread_position_in_grid.x] = f(a, thread_position_in_grid.x);",
              [np.zeros(32, np.float32)], (32,), header=header, check=False)  # fmt: skip
    assert [f.where for f in out.report] == ["kernels/one.metal:21"]
    assert out.report[0].kind == "out of bounds"
    assert out.report[0].buffer == "a"


def test_settings_collect_launches() -> None:
    with settings.use(launches=[], order="random", seed=5) as s:
        run("out[0] = a[0];", [np.zeros(9, np.float32)], (1,), grid=(1, 1, 1))
        assert s.launches is not None
        assert [x.name for x in s.launches] == ["test"]
    assert settings.launches is None
    assert settings.order == "forward"


def test_an_error_stays_with_its_launch() -> None:
    with pytest.raises(MetalError):
        run("out[40] = a[0];", [np.zeros(9, np.float32)], (1,), grid=(1, 1, 1))
    out = run("out[0] = a[0];", [np.ones(9, np.float32)], (1,), grid=(1, 1, 1))
    assert out[0][0] == 1
    assert not out.report


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QRUN_CLANG", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(clang.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompileError, match=r"apt-get install .* clang-19"):
        clang.find_clang.__wrapped__()

"""qmv, qmm and embedding of the CPU extension, on every instruction set that runs here."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from qrun.quantization import Quantization, dequantize_ref
from tests import tiny

from . import reference as ref

ext = pytest.importorskip("qrun._ext", reason="built without the CPU extension")

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33]
WIDTHS = [1, 3, 7, 8, 9, 31, 33, 97, 1024]
DEPTHS = [32, 64, 96, 128, 256, 576, 896, 4864]
GROUPS = [32, 64, 128]
FLOATS = ["float32", "float16", "bfloat16"]


def instruction_sets() -> list[str]:
    found = []
    for name in ["portable", "avx2", "avx512", "avx512vnni", "amx", "neon"]:
        try:
            ext.force_isa(name)
        except ValueError:
            continue
        found.append(name)
    return found


BEST = ext.isa()
ISAS = instruction_sets()
ext.force_isa(BEST)
# Where a matrix unit, or float multiply-adds over panels of w, take over and sum in another order.
WIDE_FROM = {"portable": 9, "avx2": 9, "avx512": 16, "amx": 9}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    ext.force_isa(request.param)
    yield request.param
    ext.force_isa(BEST)


def pairwise(rng: np.random.Generator, *axes: list, rounds: int = 3) -> list[tuple]:
    """Few tuples that show every pair of values of any two axes at least once, or nearly so."""
    wanted = {
        (a, x, b, y)
        for a, b in itertools.combinations(range(len(axes)), 2)
        for x in axes[a]
        for y in axes[b]
    }
    cases = []
    while wanted:
        best, gain = None, -1
        for _ in range(30 * rounds):
            case = tuple(axis[rng.integers(len(axis))] for axis in axes)
            new = sum(
                (a, case[a], b, case[b]) in wanted
                for a, b in itertools.combinations(range(len(axes)), 2)
            )
            if new > gain:
                best, gain = case, new
        if gain == 0:
            a, x, b, y = next(iter(wanted))
            best = list(best)
            best[a], best[b] = x, y
            best = tuple(best)
        cases.append(best)
        wanted -= {(a, best[a], b, best[b]) for a, b in itertools.combinations(range(len(axes)), 2)}
    return cases


CASES = [
    (m, n, k, bits, group, x, s)
    for m, n, k, bits, group, x, s in pairwise(
        np.random.default_rng(7), ROWS, WIDTHS, DEPTHS, [4, 8], GROUPS, FLOATS, FLOATS
    )
    if k % group == 0
]


def product(x: mx.array, matrix: ref.Matrix, packed: mx.array, **options: object) -> mx.array:
    return ext.qmv(
        x, packed, matrix.n, matrix.k, matrix.bits, matrix.group,
        scale_dtype=matrix.scale_dtype, **options,
    )  # fmt: skip


def pack(matrix: ref.Matrix) -> mx.array:
    return ext.pack(matrix.w, matrix.scales, matrix.biases, matrix.bits, matrix.group)


def random(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> mx.array:
    return mx.array(rng.normal(size=shape)).astype(ref.DTYPES[dtype])


def test_every_row_count_and_width_is_covered() -> None:
    assert {c[0] for c in CASES} == set(ROWS)
    assert {c[1] for c in CASES} == set(WIDTHS)
    assert {c[2] for c in CASES} == set(DEPTHS)
    assert {c[4] for c in CASES} == set(GROUPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_accumulation(isa: str, case: tuple) -> None:
    m, n, k, bits, group, x_dtype, s_dtype = case
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    matrix = ref.Matrix(rng, n, k, bits, group, s_dtype)
    x = random(rng, m, k, dtype=x_dtype)
    want = ref.f64(x) @ matrix.dense.T
    # The plain op in that dtype: float32 sums, one rounding.
    plain = ref.f64(x).astype(np.float32) @ matrix.dense.astype(np.float32).T
    plain = ref.round_to(plain.astype(np.float64), x_dtype)
    packed = pack(matrix)
    got = product(x, matrix, packed)
    assert got.dtype == x.dtype
    assert got.shape == (m, n)
    ref.assert_accumulates(got, want, plain, x_dtype)
    ref.assert_accumulates(product(x, matrix, packed, activations="exact"), want, plain, x_dtype)
    # One digit a group of x: half a step of 1/127 of its maximum, at random, on every element.
    scale = np.abs(want).max() if k > 64 else np.abs(matrix.dense).sum(1).max()
    error = np.abs(ref.f64(product(x, matrix, packed, activations="int8")) - want).max()
    assert error < 0.06 * scale + ref.ulp(float(np.abs(want).max()), x_dtype)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(
    ("group", "s_dtype"), [(32, "float16"), (64, "bfloat16"), (128, "float32")]
)
def test_one_hot_rows_give_the_matrix(isa: str, bits: int, group: int, s_dtype: str) -> None:
    rng = np.random.default_rng(bits)
    matrix = ref.Matrix(rng, 41, 384, bits, group, s_dtype)
    packed = pack(matrix)
    eye = mx.eye(384)
    for rows in (384, 5, 1):  # the three kinds of kernel
        got = np.concatenate(
            [
                np.array(product(eye[i : i + rows], matrix, packed))
                for i in range(0, 384 if rows > 1 else 20, rows)
            ]
        )
        np.testing.assert_array_equal(got, matrix.dense32.T[: len(got)])
    ids = mx.array(rng.permutation(41).astype(np.int32))
    rows = ext.embedding(ids, packed, 41, 384, bits, group, matrix.scale_dtype, mx.float32)
    np.testing.assert_array_equal(np.array(rows), matrix.dense32[np.array(ids)])


@pytest.mark.parametrize(
    ("bits", "group", "k"), [(4, 64, 576), (4, 64, 2048), (4, 128, 2176), (8, 64, 2112)]
)
def test_a_row_has_the_same_bits_in_any_company(isa: str, bits: int, group: int, k: int) -> None:
    rng = np.random.default_rng(3)
    matrix = ref.Matrix(rng, 97, k, bits, group, "float16")
    packed = pack(matrix)
    x = random(rng, 33, k)
    alone = np.concatenate([np.array(product(x[i : i + 1], matrix, packed)) for i in range(33)])
    for rows in (2, 3, 4, 5, 7, 8, 9, 16, 33):
        together = np.array(product(x[:rows], matrix, packed))
        # Many rows may be summed otherwise; there too company changes no bit.
        wide = rows >= WIDE_FROM.get(isa, 34)
        same = np.array(product(x, matrix, packed)) if wide else alone
        np.testing.assert_array_equal(together, same[:rows])
    before = ext.threads()
    try:
        for n in (1, 2, 5):
            ext.set_threads(n)
            np.testing.assert_array_equal(np.array(product(x, matrix, packed)), same)
    finally:
        ext.set_threads(before)


@pytest.mark.skipif("amx" not in ISAS, reason="no matrix unit")
@pytest.mark.parametrize("activations", ["default", "exact"])
def test_bfloat16_is_one_term_of_a_matrix_unit_and_loses_nothing(activations: str) -> None:
    rng = np.random.default_rng(4)
    matrix = ref.Matrix(rng, 97, 576, 4, 64, "float16")
    packed = pack(matrix)
    x = random(rng, 70, 576, dtype="bfloat16")
    wide = product(x.astype(mx.float32), matrix, packed)  # three terms, two of them zero
    got = product(x, matrix, packed, activations=activations)
    np.testing.assert_array_equal(
        np.array(got.astype(mx.float32)), np.array(wide.astype(mx.bfloat16).astype(mx.float32))
    )


def test_behind_a_guarded_array_nothing_can_be_read() -> None:
    code = (
        "import ctypes, mlx.core as mx, numpy as np\n"
        "from qrun import _ext\n"
        "a = np.array(_ext.guarded(mx.ones((3, 7))), copy=False)\n"
        "start = a.__array_interface__['data'][0]\n"
        "assert len(ctypes.string_at(start, a.nbytes)) == 84\n"
        "print('inside', flush=True)\n"
        "ctypes.string_at(start, a.nbytes + 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "inside\n", done.stderr
    assert done.returncode < 0


@pytest.mark.parametrize("case", [(1, 3, 32, 4, 32), (3, 7, 96, 8, 32), (17, 33, 128, 4, 128)])
def test_nothing_is_read_behind_the_arrays(isa: str, case: tuple) -> None:
    m, n, k, bits, group = case
    rng = np.random.default_rng(1)
    matrix = ref.Matrix(rng, n, k, bits, group, "float16")
    guarded = ext.guarded
    packed = ext.pack(
        guarded(matrix.w), guarded(matrix.scales), guarded(matrix.biases), bits, group
    )
    x, weight, bias, residual = (random(rng, *s) for s in [(m, k), (k,), (n,), (m, n)])
    options = {"norm_weight": weight, "eps": 1e-5, "bias": bias, "residual": residual}
    want = product(x, matrix, packed, **options)
    options = {name: guarded(a) if isinstance(a, mx.array) else a for name, a in options.items()}
    got = product(guarded(x), matrix, guarded(packed), **options)
    np.testing.assert_array_equal(np.array(got), np.array(want))


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("activation", ["none", "swiglu", "geglu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_prologue_and_epilogue(isa: str, rows: int, activation: str, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    n, k = 50, 128
    matrix = ref.Matrix(rng, n, k, 4, 32, "float16")
    width = n if activation == "none" else n // 2
    x, weight, bias, residual = (
        random(rng, *s, dtype=dtype) for s in [(rows, k), (k,), (n,), (rows, width)]
    )
    y = ref.rms_norm(ref.f64(x), ref.f64(weight), 1e-5) @ matrix.dense.T * 0.125 + ref.f64(bias)
    if activation != "none":
        gate = ref.silu if activation == "swiglu" else ref.gelu_tanh
        y = gate(y[:, ::2]) * y[:, 1::2]
    y += ref.f64(residual)
    got = product(
        x, matrix, pack(matrix), norm_weight=weight, eps=1e-5, bias=bias, residual=residual,
        activation=activation, scale=0.125,
    )  # fmt: skip
    error = np.abs(ref.f64(got) - y).max()
    assert error <= ref.ulp(float(np.abs(y).max()), dtype) + 2e-6 * np.abs(y).max()


def test_strided_inputs_are_read_in_their_order(isa: str) -> None:
    rng = np.random.default_rng(5)
    matrix = ref.Matrix(rng, 33, 64, 4, 32, "float16")
    packed = pack(matrix)
    x = random(rng, 64, 6)
    for strided in (x.T, x.T[::2], x.T[:, ::-1], mx.broadcast_to(x[:, :1].T, (4, 64))):
        got = product(strided, matrix, packed)
        want = product(mx.array(np.array(strided)), matrix, packed)
        np.testing.assert_array_equal(np.array(got), np.array(want))
    wide = mx.zeros((33, 16), dtype=mx.uint32)
    wide[:, ::2] = matrix.w
    again = ext.pack(wide[:, ::2], matrix.scales, matrix.biases, 4, 32)
    np.testing.assert_array_equal(np.array(again), np.array(packed))


@pytest.mark.parametrize("rows", [1, 4, 17])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_numbers_come_through(isa: str, rows: int, bad: float) -> None:
    rng = np.random.default_rng(6)
    matrix = ref.Matrix(rng, 17, 64, 4, 32, "float16")
    x = np.array(random(rng, rows, 64))
    x[0, 40] = bad
    y = np.array(product(mx.array(x), matrix, pack(matrix)))
    assert not np.isfinite(y[0]).any()
    assert np.isfinite(y[1:]).all()


def test_large_and_small_numbers(isa: str) -> None:
    rng = np.random.default_rng(8)
    matrix = ref.Matrix(rng, 16, 64, 4, 32, "float32")
    packed = pack(matrix)
    x = random(rng, 3, 64)
    for factor in (1e-30, 1e-20, 1e20, 1e30):
        got = ref.f64(product(x * factor, matrix, packed)) / factor
        np.testing.assert_allclose(got, ref.f64(x) @ matrix.dense.T, rtol=0, atol=1e-4)
    assert not np.array(product(mx.zeros((3, 64)), matrix, packed)).any()


MICROSCALING = [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]


@pytest.mark.parametrize(("mode", "bits", "group"), MICROSCALING)
def test_microscaling_formats(isa: str, mode: str, bits: int, group: int) -> None:
    """Every code and many scales, at each kind of kernel, and nothing read behind the arrays."""
    rng = np.random.default_rng(9)
    n, k = 37, 608
    codes = rng.integers(0, 1 << bits, (n, k)).astype(np.uint8)
    if mode == "mxfp8":
        codes[codes & 127 == 127] = 0
    lowest, highest = (1, 100) if mode == "nvfp4" else (100, 140)
    scales = rng.integers(lowest, highest, (n, k // group)).astype(np.uint8)
    w = tiny.pack_bits(codes, bits)
    dense = dequantize_ref(w, scales, None, Quantization(bits, group, mode))
    packed = ext.pack(
        ext.guarded(mx.array(w)), ext.guarded(mx.array(scales)), None, bits, group, mode=mode
    )
    options = {"scale_dtype": mx.float32, "mode": mode}  # bytes have no such type: it is not used

    def times(x: mx.array) -> np.ndarray:
        got = ext.qmv(ext.guarded(x), ext.guarded(packed), n, k, bits, group, **options)
        return ref.f64(got)

    for rows in (1, 2, 3, 4, 5, 8, 9, 17, 33):
        x = random(rng, rows, k)
        size = (np.abs(ref.f64(x)) @ np.abs(dense).T).max()
        assert np.abs(times(x) - ref.f64(x) @ dense.T).max() < 1e-6 * size
    np.testing.assert_array_equal(times(mx.eye(k)).T, dense)
    np.testing.assert_array_equal(times(mx.eye(k)[:3]).T, dense[:, :3])
    ids = mx.arange(n)
    rows = ext.embedding(ids, packed, n, k, bits, group, mx.float32, mx.float32, mode=mode)
    np.testing.assert_array_equal(np.array(rows), dense)
    x = random(rng, 33, k)
    if mode == "mxfp8":  # no bytes to multiply: floats everywhere
        wide = 16 if "avx512" in isa or isa == "amx" else 9
    else:  # a matrix unit wants more than nvfp4's 16 codes a scale
        wide = 34 if (isa, mode) == ("amx", "nvfp4") else WIDE_FROM.get(isa, 34)
    for fewer in (16, 17) if wide <= 33 else (1, 4):
        np.testing.assert_array_equal(times(x)[:fewer], times(x[:fewer]))


# Whole numbers whose digits are all at an end (the most significant one as far as x goes there),
# by the count of digits: a group's largest makes its scale a power of two, here 1.
EXTREMES = {
    1: [[127], [-127]],
    2: [[127, -128], [-127, 127], [126, 127], [-126, -128]],
    3: [[127, -128, -128], [-127, 127, 127], [126, -128, 127], [-126, 127, -128]],
}


@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    [("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)] + MICROSCALING[:2],
)
@pytest.mark.parametrize("count", EXTREMES)
def test_the_largest_sums(isa: str, mode: str, bits: int, group: int, count: int) -> None:
    """Largest codes against digits at their ends: sums in 16 bits must not overflow."""
    n, k = 33, 256
    affine = mode == "affine"
    codes = np.full((n, k), (1 << bits) - 1 if affine else 7, np.uint8)
    w = mx.array(tiny.pack_bits(codes, bits))
    if affine:
        scales = mx.ones((n, k // group))
        packed = ext.pack(w, scales, mx.zeros(scales.shape), bits, group)
        dense = codes.astype(np.float64)
    else:
        bytes_ = np.full((n, k // group), 56 if mode == "nvfp4" else 127, np.uint8)
        packed = ext.pack(w, mx.array(bytes_), None, bits, group, mode=mode)
        dense = dequantize_ref(np.array(w), bytes_, None, Quantization(bits, group, mode))
        assert (dense == 6).all()
    numbers = [np.polyval(digits, 256) for digits in EXTREMES[count]]
    for m in (1, 4, 8, 16):
        for first in range(len(numbers)):
            x = np.array([[numbers[(first + row) % len(numbers)]] * k for row in range(m)])
            got = ext.qmv(
                mx.array(x.astype(np.float32)), packed, n, k, bits, group, scale_dtype=mx.float32,
                mode=mode, activations={1: "int8", 2: "default", 3: "exact"}[count],
            )  # fmt: skip
            np.testing.assert_allclose(ref.f64(got), x @ dense.astype(np.float64).T, rtol=2e-6)


@pytest.mark.parametrize(("mode", "bits", "group"), MICROSCALING)
def test_scales_at_the_ends(mode: str, bits: int, group: int) -> None:
    """The smallest and the largest scale, and NaN: of a scale, and of a code where there is one."""
    bytes_ = [0, 1, 2, 126] if mode == "nvfp4" else [0, 1, 130, 240]
    codes = np.tile(np.arange(group) % 8 + 1, (len(bytes_) + 2, 1)).astype(np.uint8)
    nan = 127 if mode == "nvfp4" else 255
    scales = np.array([[b] for b in (*bytes_, nan, 120)], np.uint8)
    if mode == "mxfp8":
        codes[-1, 3] = 0xFF
    w = tiny.pack_bits(codes, bits)
    packed = ext.pack(mx.array(w), mx.array(scales), None, bits, group, mode=mode)
    got = ext.qmv(
        mx.ones((1, group)), packed, len(codes), group, bits, group, scale_dtype=mx.float32,
        mode=mode,
    )  # fmt: skip
    dense = dequantize_ref(w, scales, None, Quantization(bits, group, mode))
    small = np.finfo(np.float32).tiny  # subnormal sums may lose bits
    np.testing.assert_allclose(np.array(got)[0, :4], dense.sum(1)[:4], rtol=1e-6, atol=small)
    assert np.isnan(np.array(got)[0, 4])
    assert np.isnan(np.array(got)[0, 5]) == (mode == "mxfp8")


def test_ops_compile(isa: str) -> None:
    rng = np.random.default_rng(2)
    matrix = ref.Matrix(rng, 64, 64, 4, 32, "float16")
    packed = pack(matrix)

    @mx.compile
    def twice(x: mx.array) -> mx.array:
        return product(product(x, matrix, packed), matrix, packed, residual=x)

    for _ in range(3):
        x = random(rng, 2, 64)
        want = product(product(x, matrix, packed), matrix, packed, residual=x)
        np.testing.assert_array_equal(np.array(twice(x)), np.array(want))


def test_violations_are_named() -> None:
    rng = np.random.default_rng(4)
    matrix = ref.Matrix(rng, 34, 64, 4, 32, "float16")
    packed = pack(matrix)
    x = random(rng, 2, 64)
    with pytest.raises(ValueError, match=r"x has shape \(2, 32\).*k = 64"):
        product(x[:, :32], matrix, packed)
    with pytest.raises(ValueError, match="packed has shape"):
        product(x, matrix, packed[:-1])
    with pytest.raises(ValueError, match="residual has shape"):
        product(x, matrix, packed, residual=x)
    with pytest.raises(ValueError, match="activation must be"):
        product(x, matrix, packed, activation="relu")
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        product(x.astype(mx.int32), matrix, packed)
    with pytest.raises(ValueError, match="7 bits"):
        ext.pack(matrix.w, matrix.scales, matrix.biases, 7, 32)
    with pytest.raises(ValueError, match="group_size must be"):
        ext.pack(matrix.w, matrix.scales, matrix.biases, 4, 16)
    odd = ref.Matrix(rng, 33, 64, 4, 32, "float16")
    packed_odd = pack(odd)
    with pytest.raises(ValueError, match="even"):
        product(x, odd, packed_odd, activation="swiglu")


@pytest.mark.parametrize("name", ["nonsense", "neon" if "neon" not in ISAS else "amx"])
def test_an_unknown_instruction_set_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="QRUN_ISA"):
        ext.force_isa(name)
    run = subprocess.run(
        [sys.executable, "-c", "import mlx.core, qrun._ext as e; e.isa()"],
        env={**os.environ, "QRUN_ISA": name}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode != 0
    assert name in run.stderr

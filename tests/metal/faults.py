"""The seeded faults: kernels with one mistake each, the finding it must give, and the line.

`//!` marks the line (or lines) of which a finding must name one. Faults with `right` give the right
numbers in every order that is tried: no comparison with a reference would show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

F32 = np.float32
HEADER = "#include <metal_simdgroup>\n#include <metal_simdgroup_matrix>\n"
X = np.arange(256, dtype=F32)


@dataclass
class Fault:
    name: str
    kind: str  # of the finding
    body: str
    header: str = ""
    out: Any = (64,)  # shape of the output, or a list of shapes
    grid: tuple[int, int, int] = (64, 1, 1)
    group: tuple[int, int, int] = (64, 1, 1)
    right: np.ndarray | None = None  # what comes out, and should
    atomic: bool = False
    init: float | None = None
    buffer: str = ""  # the finding must name it


IDS = "uint i = thread_position_in_grid.x, l = thread_index_in_threadgroup;\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
FAULTS = [
    # ---- races ----
    Fault(
        "no barrier between write and read",
        "race",
        IDS + "threadgroup float t[64]; t[l] = x[i];\nout[i] = t[63 - l]; //!",
    ),
    Fault(
        "no barrier before the tile is filled again",
        "race",
        IDS + "threadgroup float t[64]; float s = 0;\n"
        "for (int k = 0; k < 2; ++k) {\n"
        "  t[l] = x[i + 64 * k]; //!\n" + BARRIER + "  s += t[63 - l];\n}\nout[i] = s;",
    ),
    Fault(
        "lanes of one simdgroup, in step by luck",
        "race",
        IDS + "threadgroup float t[32]; t[l] = x[i];\nout[i] = t[l ^ 1]; //!",
        grid=(32, 1, 1),
        group=(32, 1, 1),
        out=(32,),
    ),
    Fault(
        "the barrier names the wrong memory",
        "race",
        IDS + "threadgroup float t[64]; t[l] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_device);\nout[i] = t[63 - l]; //!",
        right=X[63::-1],
    ),
    Fault(
        "the barrier names no memory",
        "race",
        IDS + "threadgroup float t[64]; t[l] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_none);\nout[i] = t[63 - l]; //!",
        right=X[63::-1],
    ),
    Fault(
        "exchange through device memory, barrier for threadgroup memory",
        "race",
        IDS + "out[i] = x[i];\n" + BARRIER + "float s = out[63 - i]; //!\n"
        "threadgroup_barrier(mem_flags::mem_device); if (s < 0) out[i] = s;",
        right=X[:64],
    ),
    Fault(
        "simdgroup_barrier where two simdgroups meet",
        "race",
        IDS + "threadgroup float t[64]; t[l] = x[i];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = t[63 - l]; //!",
    ),
    Fault(
        "every thread writes the same value",
        "race",
        IDS + "threadgroup float t; t = 1; //!\n" + BARRIER + "out[i] = t + x[i];",
        right=X[:64] + 1,
    ),
    Fault(
        "two threads write one output",
        "race",
        IDS + "out[i / 2] = x[i / 2]; //!",
        out=(32,),
        right=X[:32],
    ),
    Fault(
        "two threadgroups write one output",
        "race",
        IDS + "out[l] = x[l]; //!",
        out=(32,),
        group=(32, 1, 1),
        right=X[:32],
    ),
    Fault(
        "a threadgroup reads what another wrote",
        "race",
        IDS + "float a = out[63 - i]; //!\nout[i] = a + x[i]; //!",
        group=(32, 1, 1),
        init=0,
    ),
    Fault(
        "a sum without atomics",
        "race",
        IDS
        + "threadgroup float t; if (l == 0) t = 0;\n"
        + BARRIER
        + "t += x[i]; //!\n"
        + BARRIER
        + "out[i] = t;",
        right=np.full(64, X[:64].sum()),
    ),
    Fault(
        "an atomic sum, read plainly too early",
        "race",
        IDS + "threadgroup atomic_uint t; if (l == 0) atomic_store_explicit(&t, 0u, "
        "memory_order_relaxed);\n"
        + BARRIER
        + "atomic_fetch_add_explicit(&t, 1u, memory_order_relaxed); //!\n"
        "out[i] = *(threadgroup uint*)&t + x[i]; //!",
    ),
    Fault(
        "a plain write among atomics",
        "race",
        IDS + "if (l == 5) *(device float*)out = 0; //!\n"
        "atomic_fetch_add_explicit(out, x[i], memory_order_relaxed); //!",
        out=(1,),
        atomic=True,
        init=0,
    ),
    Fault(
        "a fragment is stored and loaded with no barrier",
        "race",
        "threadgroup float t[64];\n"
        "simdgroup_matrix<float, 8, 8> a = make_filled_simdgroup_matrix<float, 8, 8>(1), b;\n"
        "simdgroup_store(a, t, 8);\n"
        "simdgroup_load(b, t, 8, ulong2(0), true); //!\n"
        "simdgroup_store(b, out, 8); if (thread_position_in_grid.x > 999) out[0] = x[0];",
        grid=(32, 1, 1),
        group=(32, 1, 1),
    ),
    Fault(
        "double buffering with one buffer",
        "race",
        IDS + "threadgroup float t[2][64]; float s = 0; t[0][l] = x[i];\n"
        "for (int k = 0; k < 3; ++k) {\n" + BARRIER + "  if (k < 2)\n"
        "    t[k & 0][l] = x[i + 64 * (k + 1)]; //!\n"
        "  s += t[k & 0][63 - l]; //!\n}\nout[i] = s;",
    ),
    Fault(
        "a broadcast slot is written again too early",
        "race",
        IDS + "threadgroup float t; float s = 0;\nfor (uint k = 0; k < 2; ++k) {\n"
        "  if (l == k * 40) t = x[k]; //!\n" + BARRIER + "  s += t;\n}\nout[i] = s;",
    ),
    # ---- uninitialised ----
    Fault(
        "the tile's edge is not filled with zeros",
        "uninitialised read",
        IDS
        + "threadgroup float t[64]; if (l < 60) t[l] = x[i];\n"
        + BARRIER
        + "out[i] = t[63 - l]; //!",
    ),
    Fault(
        "accumulating into an output that nobody set",
        "uninitialised read",
        IDS + "out[i] += x[i]; //!",
    ),
    Fault(
        "threadgroup memory kept from the threadgroup before",
        "uninitialised read",
        IDS + "threadgroup float t[32]; if (i < 32) t[l] = x[l];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = t[31 - l]; //!",
        group=(32, 1, 1),
        grid=(64, 1, 1),
    ),
    # ---- out of bounds ----
    Fault("reads behind the input", "out of bounds", IDS + "out[i] = x[i + 193]; //!"),
    Fault(
        "reads in front of the input",
        "out of bounds",
        IDS + "out[i] = x[(int)i - 1]; //!",
        buffer="",
    ),
    Fault(
        "a masked read that is made all the same",
        "out of bounds",
        IDS + "float v = x[i * 8]; //!\nout[i] = v * (i * 8 < 256 ? 1.0f : 0.0f);",
    ),
    Fault(
        "writes behind the output", "out of bounds", IDS + "out[i + 1] = x[i]; //!", buffer="out"
    ),
    Fault(
        "a threadgroup array overrun through a pointer",
        "out of bounds",
        IDS
        + "threadgroup float t[64]; threadgroup float* p = t;\np[l + 1] = x[i]; //!\n"
        + BARRIER
        + "out[i] = p[l];",
        buffer="t",
    ),
    Fault(
        "a vector load over the end",
        "out of bounds",
        IDS + "const device packed_float4* p = (const device packed_float4*)(x + 1);\n"
        "out[i] = dot(float4(p[i]), float4(1)); //!",
    ),
    Fault(
        "an index that wrapped around",
        "wild access",
        IDS + "out[i] = x[(ulong)(i - 1u) * 4000000000ul]; //!",
    ),
    Fault(
        "a private array's index",
        "array index",
        IDS + "float r[4] = {1, 2, 3, 4}; int n = int(x[i]);\nout[i] = r[n]; //!",
    ),
    # ---- alignment ----
    Fault(
        "a float4 at a multiple of 4 bytes",
        "misaligned",
        IDS + "float4 v = *(const device float4*)(x + i); //!\nout[i] = v.y + v.w;",
    ),
    Fault(
        "a component of a float4 at a multiple of 4 bytes",
        "misaligned",
        IDS
        + "float4 v = x[i];\nv.xy = (*(const device float4*)(x + i)).wz; //!\nout[i] = dot(v, v);",
    ),
    Fault(
        "a word at an odd byte",
        "misaligned",
        IDS + "const device uchar* p = (const device uchar*)x;\n"
        "out[i] = *(const device ushort*)(p + 2 * i + 1); //!",
    ),
    # ---- outputs ----
    Fault(
        "the last elements are never written",
        "unwritten output",
        IDS + "if (i < 60) out[i] = x[i];",
        buffer="out",
    ),
    Fault(
        "writes to an input",
        "write to input",
        IDS + "((device float*)x)[i] = 1; //!\nout[i] = 1;",
        buffer="x",
    ),
    # ---- divergence ----
    Fault(
        "a barrier in a branch",
        "divergent",
        IDS + "if (l < 32)\n  threadgroup_barrier(mem_flags::mem_threadgroup); //!\nout[i] = x[i];",
    ),
    Fault(
        "two barriers in two branches",
        "divergent",
        IDS + "if (l < 32) {\n  threadgroup_barrier(mem_flags::mem_none); //!\n} else {\n"
        "  threadgroup_barrier(mem_flags::mem_none); //!\n}\nout[i] = x[i];",
    ),
    Fault(
        "some threads leave before the barrier",
        "divergent",
        IDS + "out[i] = x[i];\nif (l >= 60) return;\nthreadgroup_barrier(mem_flags::mem_none); //!",
    ),
    Fault(
        "a reduction in a branch",
        "divergent",
        IDS + "float s = 0;\nif (l % 32 < 16)\n  s = simd_sum(x[i]); //!\nout[i] = s;",
    ),
    Fault(
        "different collectives in two branches",
        "divergent",
        IDS + "float s;\nif (l % 2)\n  s = simd_max(x[i]); //!\nelse\n  s = simd_min(x[i]); //!\n"
        "out[i] = s;",
    ),
    Fault(
        "one helper, called from two branches",
        "divergent",
        IDS + "float s;\nif (l % 2) s = total(x[i]);\nelse s = total(x[i] * 2.0f);\nout[i] = s;",
        header="float total(float v) {\n  return simd_sum(v); //!\n}\n",
    ),
    Fault(
        "a loop whose length differs between lanes",
        "divergent",
        IDS + "float s = x[i];\nfor (uint k = 0; k < 1 + l % 2; ++k)\n"
        "  s += simd_shuffle_xor(s, 1); //!\nout[i] = s;",
    ),
    Fault(
        "a fragment product in a branch",
        "divergent",
        "simdgroup_matrix<float, 8, 8> a(1.0f), b(1.0f), c(0.0f);\n"
        "if (thread_index_in_simdgroup < 16)\n"
        "  simdgroup_multiply_accumulate(c, a, b, c); //!\n"
        "simdgroup_store(c, out, 8); if (thread_index_in_simdgroup > 99) out[0] = x[0];",
        grid=(32, 1, 1),
        group=(32, 1, 1),
    ),
    Fault(
        "a fragment load in a branch",
        "divergent",
        "simdgroup_matrix<float, 8, 8> a(1.0f);\nif (thread_index_in_simdgroup < 16)\n"
        "  simdgroup_load(a, x, 8); //!\nsimdgroup_store(a, out, 8);",
        grid=(32, 1, 1),
        group=(32, 1, 1),
    ),
    Fault(
        "a fragment product in a short simdgroup",
        "divergent",
        "simdgroup_matrix<float, 8, 8> a(1.0f), b(1.0f), c(0.0f);\n"
        "simdgroup_multiply_accumulate(c, a, b, c); //!\n"
        "out[thread_position_in_grid.x] = c.thread_elements()[0] + x[0];",
        grid=(24, 1, 1),
        group=(32, 1, 1),
        out=(24,),
    ),
    Fault(
        "a value from a lane that does not exist",
        "inactive lane",
        IDS + "out[i] = simd_shuffle(x[i], 31); //!",
        grid=(24, 1, 1),
        group=(32, 1, 1),
        out=(24,),
    ),
    # ---- limits ----
    Fault(
        "a loop that never ends",
        "endless",
        IDS + "uint k = uint(x[i]);\nwhile (k != 1000) k = (k + 2) % 512; //!\nout[i] = k;",
    ),
    Fault(
        "more than 32 KiB of threadgroup memory",
        "threadgroup memory",
        IDS + "threadgroup float a[4096];\nthreadgroup float b[4097]; //!\n"
        "a[l] = x[i]; b[l] = a[l]; out[i] = b[l];",
        right=X[:64],
    ),
    Fault(
        "a division by zero",
        "division by zero",
        IDS + "uint d = uint(x[i]);\nout[i] = i / d; //!",
    ),
]

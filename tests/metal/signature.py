"""The text that `mx.fast.metal_kernel` makes around a body, and the entry that calls it.

The rules are MLX's: inputs of fewer than 8 elements live in `constant` space, scalars (no
dimensions) are references; `x_shape`, `x_strides`, `x_ndim` and the thread
attributes exist only if the body mentions them; template arguments are types, ints and bools.
"""

from __future__ import annotations

import math
from typing import Any

from tests.metal.arrays import METAL_TYPES, dtype_name, is_mlx

# name -> (type, number in the runtime's em_attribute), in MLX's order
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": ("uint", 16),
    "dispatch_simdgroups_per_threadgroup": ("uint", 11),
    "dispatch_threads_per_threadgroup": ("uint3", 6),
    "grid_origin": ("uint3", 99),
    "grid_size": ("uint3", 4),
    "quadgroup_index_in_threadgroup": ("uint", 13),
    "quadgroups_per_threadgroup": ("uint", 15),
    "simdgroup_index_in_threadgroup": ("uint", 8),
    "simdgroups_per_threadgroup": ("uint", 10),
    "thread_execution_width": ("uint", 12),
    "thread_index_in_quadgroup": ("uint", 14),
    "thread_index_in_simdgroup": ("uint", 9),
    "thread_index_in_threadgroup": ("uint", 7),
    "thread_position_in_grid": ("uint3", 0),
    "thread_position_in_threadgroup": ("uint3", 1),
    "threadgroup_position_in_grid": ("uint3", 2),
    "threadgroups_per_grid": ("uint3", 3),
    "threads_per_grid": ("uint3", 4),
    "threads_per_simdgroup": ("uint", 12),
    "threads_per_threadgroup": ("uint3", 5),
}
SMALL = 8  # inputs with fewer elements are in constant space

# What the rewriting of threadgroup arrays needs.
OURS = """#include <metal_stdlib>
namespace metal {
template <typename T> struct em_array_of { using type = T; };
template <typename T> using em_array = typename em_array_of<T>::type;
}
"""
# What kernels may use of the text that MLX puts in front of them (kernels/utils.h and below).
PRELUDE = (
    OURS
    + """using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(IdxT elem, constant const int* shape,
                            constant const int64_t* strides, int ndim) {
  IdxT loc = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    loc += (elem % shape[i]) * IdxT(strides[i]);
    elem /= shape[i];
  }
  return loc;
}
"""
)


def template_text(value: Any) -> tuple[str, str]:
    """A template argument -> (kind of its parameter, its text)."""
    if isinstance(value, bool):
        return "bool", str(int(value))
    if isinstance(value, int):
        return "int", str(value)
    if is_mlx(value) or isinstance(value, (str, type)) or hasattr(value, "itemsize"):
        return "typename", METAL_TYPES[dtype_name(value)]
    raise TypeError(f"a template argument is a dtype, an int or a bool, not {value!r}")


class Parameter:
    """One buffer of the signature: where its bytes come from and how the kernel declares it."""

    def __init__(self, name: str, text: str, pointer: str, reference: bool, source: str) -> None:
        self.name = name
        self.text = text  # as declared, without the attribute
        self.pointer = pointer  # the type to cast the address to
        self.reference = reference
        self.source = source  # "input", "shape", "strides", "ndim", "output"


def parameters(
    body: str,
    inputs: list[tuple[str, str, tuple[int, ...]]],  # name, dtype, shape
    outputs: list[tuple[str, str]],  # name, dtype
    atomic_outputs: bool,
) -> list[Parameter]:
    found: list[Parameter] = []
    for name, dtype, shape in inputs:
        space = "constant" if math.prod(shape) < SMALL else "device"
        kind = f"const {space} {METAL_TYPES[dtype]}"
        scalar = len(shape) == 0
        found.append(
            Parameter(name, f"{kind}{'&' if scalar else '*'} {name}", f"{kind}*", scalar, "input")
        )
        if scalar:
            continue
        for what, ctype, ref in (
            ("shape", "const constant int", False),
            ("strides", "const constant int64_t", False),
            ("ndim", "const constant int", True),
        ):
            if f"{name}_{what}" in body:
                text = f"{ctype}{'&' if ref else '*'} {name}_{what}"
                found.append(Parameter(f"{name}_{what}", text, f"{ctype}*", ref, what))
    for name, dtype in outputs:
        kind = f"atomic<{METAL_TYPES[dtype]}>" if atomic_outputs else METAL_TYPES[dtype]
        found.append(Parameter(name, f"device {kind}* {name}", f"device {kind}*", False, "output"))
    return found


def function_name(
    name: str,
    template: list[tuple[str, Any]],
    inputs: list[tuple[str, tuple[int, ...]]],  # dtype, shape
    outputs: list[str],  # dtypes
) -> str:
    """Everything that the text depends on is in the name: MLX keeps one text per name."""
    parts = ["custom_kernel_" + name]
    if template:
        parts.append("_" + "_".join(template_text(v)[1] for _, v in template))
    for dtype, shape in inputs:
        small = "s" if not shape else "c" if math.prod(shape) < SMALL else ""
        parts.append(METAL_TYPES[dtype] + small)
    return "_".join([*parts, *(METAL_TYPES[dtype] for dtype in outputs)])


def attributes(body: str) -> list[str]:
    return [name for name in ATTRIBUTES if name in body]


def signature(
    name: str, body: str, params: list[Parameter], template: list[tuple[str, Any]]
) -> str:
    """`template <...> [[kernel]] void name(...)`, as MLX writes it."""
    text = ""
    if template:
        text = f"template <{', '.join(f'{template_text(v)[0]} {n}' for n, v in template)}>\n"
    lines = [f"  {p.text} [[buffer({i})]]" for i, p in enumerate(params)]
    lines += [f"  {ATTRIBUTES[a][0]} {a} [[{a}]]" for a in attributes(body)]
    return f"{text}[[kernel]] void {name}(\n" + ",\n".join(lines) + ") {\n"


def entry(
    name: str,
    body: str,
    params: list[Parameter],
    template: list[tuple[str, Any]],
    amd_threads: int = 0,
) -> str:
    """The function that the runtime calls once a thread; for `amd_threads`, a kernel for AMD."""
    args = [
        f"{'*' if p.reference else ''}({p.pointer})em_argument({i})" for i, p in enumerate(params)
    ]
    for a in attributes(body):
        kind, number = ATTRIBUTES[a]
        if kind == "uint":
            args.append(f"em_attribute({number}, 0)")
        else:
            parts = ", ".join(f"em_attribute({number}, {d})" for d in range(3))
            args.append(f"uint3{{{parts}}}")
    values = ", ".join(template_text(v)[1] for _, v in template)
    call = f"{name}<{values}>" if template else name
    head = 'extern "C" __attribute__((visibility("default"))) void em_entry()'
    if amd_threads:
        limit = f"__attribute__((amdgpu_flat_work_group_size(1, {amd_threads})))"
        head = f"__kernel {limit} void em_entry(const __global ulong* em_args)"
    return f"{head} {{\n  {call}({', '.join(args)});\n}}\n"

"""What runs the other Metal tests: three random orders, and the same bits in each."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from qrun.ops._metal_call import Call, Kernel
from tests.metal import MetalError
from tests.metal.clang import unsupported
from tests.ops.metal_support import SEEDS, once, run

HEAD = "#include <metal_stdlib>\n#include <metal_atomic>\nusing namespace metal;\n"


@pytest.fixture(autouse=True)
def _emulated() -> None:
    if reason := unsupported():
        pytest.skip(reason)


def of_64_threads(name: str, source: str, in_place: tuple[str, ...] = ()) -> Call:
    x = mx.zeros((64,), mx.float32)
    mx.eval(x)
    shape = ((64, 1, 1), (64, 1, 1), ((64,),), (mx.float32,), in_place)
    return Call(Kernel(name, ("x",), ("y",), source, HEAD), (x,), (), *shape)


TICKETS = """
threadgroup atomic_uint next;
const uint i = thread_position_in_grid.x;
if (i == 0) { atomic_store_explicit(&next, 0u, memory_order_relaxed); }
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = x[i] + float(atomic_fetch_add_explicit(&next, 1u, memory_order_relaxed));
"""


def test_a_result_that_hangs_on_the_order_is_noticed() -> None:
    """Without a race: each thread draws a number, and who is first gets 0."""
    call = of_64_threads("tickets", TICKETS)
    assert sorted(np.array(once(call, SEEDS[0])[0])) == list(range(64))
    with pytest.raises(AssertionError, match="seed 2"):
        run(call)


def test_so_is_what_it_writes_in_place() -> None:
    write = "((device float*)x)[i] = y[i];\n"
    with pytest.raises(AssertionError, match="seed 2"):
        run(of_64_threads("tickets_in_place", TICKETS + write, ("x",)))


def test_every_order_finds_its_array_as_it_was() -> None:
    source = "const uint i = thread_position_in_grid.x;\ny[i] = 1;\n((device float*)x)[i] += 1;\n"
    call = of_64_threads("count", source, ("x",))
    run(call)
    np.testing.assert_array_equal(np.array(call.inputs[0]), np.ones(64))


def test_a_finding_raises() -> None:
    with pytest.raises(MetalError):
        run(
            of_64_threads(
                "past", "y[thread_position_in_grid.x] = x[thread_position_in_grid.x + 1];"
            )
        )

"""The Metal backend on the emulator: models run through `_metal_backend` where no Mac is.

`mx.fast.metal_kernel` becomes the emulator's, so that everything from the model down to MLX's call
is what runs on a Mac; a step is not traced, because the emulator needs values.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from qrun.ops import _launch, _metal_backend, _metal_call, _metal_candidates
from qrun.ops import _metal_geometry as geometry
from tests.metal import Launch, metal_kernel, settings
from tests.metal.clang import unsupported


def _kernel(**arguments: Any) -> metal_kernel:
    """The emulator asks to be told what a kernel writes among its inputs; MLX never knows."""
    rope = arguments["name"].startswith("qrun_rope")
    return metal_kernel(**arguments, in_place=("k_cache", "v_cache") if rope else ())


CACHES = (
    _metal_call._compiled,
    _metal_backend.timings,
    _metal_backend.writes_in_place,
    _metal_candidates.candidates,
)


@contextmanager
def emulated(seed: int = 1) -> Generator[list[Launch], None, None]:
    """Inside, models run on emulated Metal, threads in random order; collects the launches."""
    if reason := unsupported():
        pytest.skip(reason)
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "_backend", lambda on_cpu: _metal_backend)
        patch.setattr(_metal_backend, "traced", lambda step: step)
        patch.setattr(geometry, "here", lambda: geometry.FAMILIES["M3"])  # where all is ours
        patch.setattr(mx.fast, "metal_kernel", _kernel)
        for function in CACHES:
            function.cache_clear()
        with settings.use(order="random", seed=seed, launches=launches):
            yield launches
    for function in CACHES:
        function.cache_clear()

"""What was timed on this machine, kept in a file; and which candidate is the quickest by it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from qrun.ops._metal_call import header
from qrun.ops._metal_candidates import Product, Shape
from qrun.paths import cache_dir

Seconds = dict[str, float | None]  # by candidate; None: it does not run here, or not rightly


@dataclass
class Timings:
    """Seconds of every candidate of every product timed so far, for one device and its versions.

    One file serves all devices and versions. `wanted` is what `listening` collects.
    """

    path: Path
    owner: str  # device and versions
    seconds: dict[str, Seconds] = field(default_factory=dict[str, Seconds])
    wanted: dict[str, list[Shape]] | None = None

    @staticmethod
    def here() -> Timings:
        """Those of this machine, none of them read yet."""
        return Timings(cache_dir() / "metal.json", owner())

    def read(self) -> None:
        """Take in what the file knows of this owner."""
        self.seconds |= _read(self.path).get(self.owner, {})

    def save(self) -> None:
        """Written beside and renamed, so that a reader never meets half a file."""
        everything = _read(self.path) | {self.owner: self.seconds}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        draft.write_text(json.dumps(everything, indent=1) + "\n")
        draft.replace(self.path)

    def fastest(self, key: str) -> str | None:
        """The name of the quickest candidate of a product, if any was timed."""
        sound = {name: s for name, s in self.seconds.get(key, {}).items() if s is not None}
        return min(sound, key=lambda name: sound[name]) if sound else None

    def product(self, shape: Shape) -> Product:
        """What multiplies: the quickest candidate, else the default (the first)."""
        named = shape.candidates()
        name = self.fastest(shape.key) or ""
        return named[name] if name in named else next(iter(named.values()))

    @contextmanager
    def listening(self) -> Generator[dict[str, list[Shape]], None, None]:
        """Collects the products that are asked for inside, every occurrence, by key."""
        self.wanted = {}
        try:
            yield self.wanted
        finally:
            self.wanted = None


def owner() -> str:
    """Whose timings: this device, this MLX, this qrun, these kernels."""
    import qrun

    files = ("qmv/qmv.metal", "qmv/qmv_wide.metal", "qmm/qmm.metal", "rms_norm/rms_norm.metal")
    kernels = zlib.crc32("".join(map(header, files)).encode())
    versions = f"mlx {cast(Any, mx).__version__}, qrun {qrun.__version__}"
    return f"{mx.device_info()['device_name']}, {versions}, kernels {kernels:08x}"


def _read(path: Path) -> dict[str, dict[str, Seconds]]:
    """What is sound in the file. Absent or damaged: nothing, for it can all be timed again."""
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {
        owner: {key: seconds for key, seconds in shapes.items() if _sound(seconds)}
        for owner, shapes in (found.items() if isinstance(found, dict) else ())
        if isinstance(shapes, dict)
    }


def _sound(seconds: Any) -> bool:
    return isinstance(seconds, dict) and all(
        s is None or (isinstance(s, float) and s > 0) for s in seconds.values()
    )

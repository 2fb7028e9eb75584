"""What `qrun bench` measured, as a table, as JSON, as a roofline picture."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qrun import __version__
from qrun.bench import Row, peak_rate, read_rate, threads
from qrun.errors import UsageError
from qrun.hardware import device_name
from qrun.ops import _launch

_PRODUCTS = ("qmv", "qmm")
_MARKS = "os^Dv<>"


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything needed to read the numbers later: machine, versions, ceilings, raw seconds."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "qrun": __version__,
        "device": device_name(),
        "backend": _launch.backend().NAME,
        "threads": threads(),
        "system": platform.platform(),
        "read_bytes_per_second": read_rate(),
        "peak_gflops": peak_rate(),
        "rows": [{**asdict(row), "share": row.share} for row in rows],
    }


def table(rows: Sequence[Row]) -> str:
    """A plain table: rate, share of the ceiling; each peer's rate, and ours over it."""
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    lines = [["", "rate", "unit", "ceiling", "share", *names]]
    for row in rows:
        share = "" if row.share is None else f"{row.share:.0%}"
        ceiling = "" if row.ceiling is None else f"{row.ceiling:.1f}"
        peers = [
            f"{row.peers[n]:.1f} ({row.ratios[n]:.2f}x)" if n in row.peers else "" for n in names
        ]
        lines.append([row.what, f"{row.rate:.1f}", row.unit, ceiling, share, *peers])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    first, *rest = widths
    padded = [
        [line[0].ljust(first), *(c.rjust(w) for c, w in zip(line[1:], rest, strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def require_matplotlib() -> None:
    """Raises where there is none."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib", hint='run: pip install "qrun[plot]"')


def plot(measured: dict[str, Any], path: Path) -> None:
    """The roofline (Williams et al., 2009): operations a second over operations a byte."""
    require_matplotlib()
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    wall, peak = measured["read_bytes_per_second"] / 1e9, measured["peak_gflops"]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    ridge = [peak / wall] if peak else []
    intensity = sorted([1.0, *ridge, 4096.0])
    roof = [min(wall * x, peak) if peak else wall * x for x in intensity]
    axes.plot(intensity, roof, color="black", label=f"read {wall:.0f} GB/s")
    if peak:
        axes.plot([], [], " ", label=f"float32 x {peak:.0f} GFLOP/s")
    # One mark a shape, one color a number of rows: "qmv NxK g64 M=1".
    points = [(r, *r["what"].split(" M=")) for r in measured["rows"] if r["what"][:3] in _PRODUCTS]
    shapes = list(dict.fromkeys(shape.split()[1] for _, shape, _ in points))
    counts = list(dict.fromkeys(m for _, _, m in points))
    for row, shape, m in points:
        seconds = statistics.median(row["seconds"])
        mark, color = _MARKS[shapes.index(shape.split()[1]) % len(_MARKS)], f"C{counts.index(m)}"
        at = (row["flops"] / row["bytes"], row["flops"] / seconds / 1e9)
        axes.plot(*at, mark, color=color, alpha=0.8)
    for shape, mark in zip(shapes, _MARKS, strict=False):
        axes.plot([], [], mark, color="grey", label=shape)
    for n, m in enumerate(counts):
        axes.plot([], [], "s", color=f"C{n}", label=f"M = {m}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"{measured['device']}, {measured['threads']} threads: N x K, M rows of x")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

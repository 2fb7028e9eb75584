"""What `qrun bench` measured, as a table, as JSON, as a roofline picture."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import mlx.core as mx

from qrun import __version__
from qrun.bench import Row, peak_rate, read_rate
from qrun.errors import UsageError
from qrun.hardware import device_name
from qrun.ops import _launch


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything needed to read the numbers later: machine, versions, ceilings, raw seconds."""
    on_cpu = mx.default_device().type == mx.cpu
    threads = 0
    if on_cpu and _launch.native_problem() is None:
        from qrun import _ext

        threads = _ext.threads()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "qrun": __version__,
        "device": device_name(),
        "backend": _launch.backend().NAME,
        "threads": threads,
        "system": platform.platform(),
        "read_bytes_per_second": read_rate(),
        "peak_gflops": peak_rate(),
        "rows": [{**asdict(row), "share": row.share} for row in rows],
    }


def table(rows: Sequence[Row]) -> str:
    """A plain table: rate, share of the ceiling, and how many times each peer's rate."""
    names = list(dict.fromkeys(name for row in rows for name in row.peers))
    lines = [["", "rate", "unit", "ceiling", "share", *names]]
    for row in rows:
        share = "" if row.share is None else f"{row.share:.0%}"
        ceiling = "" if row.ceiling is None else f"{row.ceiling:.1f}"
        peers = [
            f"{row.peers[n]:.1f} ({row.rate / row.peers[n]:.2f}x)" if n in row.peers else ""
            for n in names
        ]
        lines.append([row.what, f"{row.rate:.1f}", row.unit, ceiling, share, *peers])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    first, *rest = widths
    padded = [
        [line[0].ljust(first), *(c.rjust(w) for c, w in zip(line[1:], rest, strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(cells) for cells in padded)


def plot(measured: dict[str, Any], path: Path) -> None:
    """The roofline (Williams et al., 2009): operations a second over operations a byte."""
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError("--plot needs matplotlib", hint="run: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    rows = [r for r in measured["rows"] if r["flops"]]
    wall, peak = measured["read_bytes_per_second"] / 1e9, measured["peak_gflops"]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    intensity = [2.0**i for i in range(0, 13)]
    roof = [min(wall * x, peak) if peak else wall * x for x in intensity]
    axes.plot(intensity, roof, color="black", label=f"{wall:.0f} GB/s, {peak or 0:.0f} GFLOP/s")
    for row in rows:
        seconds = sorted(row["seconds"])[len(row["seconds"]) // 2]
        axes.plot(row["flops"] / row["bytes"], row["flops"] / seconds / 1e9, "o", label=row["what"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(measured["device"])
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

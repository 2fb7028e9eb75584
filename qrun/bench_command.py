"""`qrun bench`: its options, what can be wrong with them, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qrun import printing, reading
from qrun.command import EXIT_CODES, activations_option, listen
from qrun.errors import UsageError

if TYPE_CHECKING:
    from qrun.ops.matrix import Activations


@click.command(
    short_help="Measure kernels and a model against this machine's limits.", epilog=EXIT_CODES
)
@click.argument("model", envvar="QRUN_MODEL", required=False, type=click.Path())
@click.option("--kernels/--no-kernels", default=True, help="Measure the products alone.")
@click.option(
    "--group-size",
    type=click.Choice(["32", "64", "128"]),
    default="64",
    show_default=True,
    help="Of the kernels' matrices.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Per median.")
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME[=PYTHON]",
    help="Run llama.cpp or mlx-lm in turn, with that Python if not this one. Repeatable.",
)
@click.option(
    "--gguf",
    "ggufs",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What llama.cpp runs: MODEL in a format of its own, Q4_0 say. Repeatable.",
)
@activations_option
@click.option(
    "--tune/--no-tune",
    default=None,
    help="Apple GPU: time all of MODEL's kernels again, or take a table's. Default: what is new.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON to this file.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Write a roofline PNG (needs matplotlib)."
)
def bench(
    model: str | None,
    kernels: bool,
    group_size: str,
    rounds: int,
    peers: tuple[str, ...],
    ggufs: tuple[Path, ...],
    activations: Activations,
    tune: bool | None,
    as_json: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure the kernels, and MODEL if given, against the machine's ceilings and peers.

    The ceilings are measured in the same run: a loop that reads memory, and on a CPU the
    instruction that products of many rows are made of. On an Apple GPU also every kernel there
    is to choose from, against MLX's own.
    """
    import qrun
    from qrun.hardware import set_threads

    set_threads(None)
    from qrun import bench as measure
    from qrun import report
    from qrun.peers import asked
    from qrun.quantization import Quantization

    listen()
    if tune and model is None:
        raise UsageError("--tune needs a MODEL: its products are what is timed")
    if peers and model is None:
        raise UsageError("--peer needs a MODEL: kernels alone have no peers")
    if model is None and not kernels:
        raise UsageError("nothing to measure: --no-kernels without a MODEL")
    if plot is not None:
        report.require_matplotlib()
    for path in (p for p in (out, plot) if p is not None):
        reading.check_writable(path)
    wanted = asked(peers, ggufs)
    progress = printing.status_line()
    # First, since all that can be wrong is wrong there.
    loaded = (
        None
        if model is None
        else qrun.load(model, activations=activations, tune=tune, show=progress)
    )
    rows: list[measure.Row] = []
    if kernels:
        spec = Quantization(4, int(group_size))
        rows += measure.bench_kernels(spec=spec, rounds=rounds, progress=progress)
        rows += measure.bench_ladder(spec=spec, progress=progress)
    if loaded is not None:
        with measure.started(wanted, loaded, ggufs) as others:
            rows += measure.bench_model(loaded, others, rounds=rounds, progress=progress)
    progress("")
    result = report.report(rows)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        report.plot(result, plot)
    if as_json:
        printing.print_json(result)
    else:
        click.echo(f"{result['device']}, {result['backend']}, {result['threads']} threads")
        click.echo(report.table(rows))

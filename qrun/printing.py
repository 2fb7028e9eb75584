"""What the command line prints: text, JSON, statistics, warnings, progress. No other logic."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from qrun.generation import Generation
    from qrun.inspect import Report
    from qrun.loader import LoadedModel

SELDOM = 10.0  # seconds between lines of progress where there is no terminal


def paint(text: str, color: str) -> str:
    plain = bool(os.environ.get("NO_COLOR")) or not sys.stderr.isatty()
    return text if plain else click.style(text, fg=color, bold=True)


def show_warnings(show: bool) -> None:
    """Warnings become one line each on stderr, or nothing."""

    def line(message: Warning | str, *_: Any, **__: Any) -> None:
        if show:
            click.echo(f"{paint('qrun: warning:', 'yellow')} {message}", err=True)

    warnings.showwarning = line
    warnings.simplefilter("always", UserWarning)


def print_json(value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False)
    # A file name that is not UTF-8 comes as halves of pairs: JSON has the same escapes for them.
    click.echo(text.encode(errors="backslashreplace").decode())
    sys.stdout.flush()


def summary(model: LoadedModel, result: Generation) -> dict[str, Any]:
    return {
        "text": result.text,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": len(result.tokens),
        "decode_steps": result.decode_steps,
        "seed": result.seed,
        "load_seconds": round(model.load_seconds, 4),
        "prefill_seconds": round(result.timings.prefill, 4),
        "decode_seconds": round(result.timings.decode, 4),
        "prefill_tokens_per_second": round(result.prefill_rate, 1) or None,
        "decode_tokens_per_second": round(result.decode_rate, 1) or None,
    }


def print_description(model: LoadedModel) -> None:
    """--verbose: what runs where, and what was ignored."""
    from qrun.hardware import device_name
    from qrun.ops import _launch

    name = str(model.dtype).removeprefix("mlx.core.")
    lines = [
        f"model    {model.folder} ({model.step_bytes / 1e6:.0f} MB a step, {name}, "
        f"context {model.context}, stop tokens {sorted(model.eos)})",
        f"backend  {_launch.backend().NAME} on {device_name()}",
        *(f"note     {note}" for note in model.notes),
    ]
    click.echo("\n".join(lines), err=True)


def print_stats(model: LoadedModel, result: Generation) -> None:
    """--stats: speeds, and the share of what a plain loop reaches now; of what there was."""
    from qrun.hardware import peak_memory, read_bandwidth

    peak = peak_memory()  # before measuring the bandwidth, which takes memory itself
    lines = [f"load      {model.load_seconds:8.3f} s"]
    if result.prefill_rate:
        first = model.load_seconds + result.timings.prefill
        lines += [
            f"first     {first:8.3f} s    (load and prefill)",
            f"prefill   {result.prefill_rate:8.1f} tok/s   {_count(result.prompt_tokens, 'token')}",
        ]
    if result.decode_rate:
        step = model.step_bytes + result.cache_bytes
        rate, wall = result.decode_rate * step, read_bandwidth(step)
        lines += [
            f"decode    {result.decode_rate:8.1f} tok/s   {_count(result.decode_steps, 'step')}",
            f"memory    {rate / 1e9:8.2f} GB/s    {rate / wall:.0%} of the {wall / 1e9:.1f} GB/s "
            "that a plain loop reaches over as many bytes",
        ]
    lines.append(f"peak      {peak / 1e6:8.0f} MB")
    click.echo("\n".join(lines), err=True)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def inspection(found: Report) -> str:
    """`qrun inspect`, for people: what differs only in a layer's number is one line."""
    from qrun.loader import grouped

    def size(n: float) -> str:
        return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.2f} MB"

    lines = [f"folder        {found.folder}", f"architecture  {found.architecture or 'unknown'}"]
    if found.parameters:
        lines.append(
            f"parameters    {found.parameters / 1e6:.1f} M in {size(found.weight_bytes)}, "
            f"{found.bits:.2f} bits each; a step reads {size(found.step_bytes)}"
        )
        lines.append(f"  {'':20} count  parameters   bits  format")
        for kind in found.kinds:
            formats = [
                f"{name} ({n})" if len(kind.formats) > 1 else name
                for name, n in kind.formats.items()
            ]
            lines.append(
                f"  {kind.name:20} {kind.count:5} {kind.parameters / 1e6:9.2f} M "
                f"{kind.bits:6.2f}  {formats[0] if formats else ''}".rstrip()
            )
            lines += [f"  {'':46}{more}" for more in formats[1:]]
        total = size(found.weight_bytes + found.cache_bytes)
        lines.append(
            f"memory        {total} for {found.length} positions: weights, and "
            f"{size(found.cache_bytes)} of {found.dtype} cache"
        )
    if found.context:
        lines.append(f"context       {found.context}")
    lines.append(f"stop tokens   {', '.join(map(str, found.stop_tokens)) or 'none'}")
    lines.append(f"template      {found.template}")
    lines += [f"note          {note}" for note in found.notes]
    for remedy, problems in groupby(found.problems, key=lambda problem: problem.remedy):
        lines += [f"problem       {text}" for text in grouped([p.text for p in problems])]
        lines.append(f"  remedy      {remedy}")
    lines.append("It would load." if found.loads else "It would not load.")
    return "\n".join(lines)


def seldom() -> Callable[[str], None]:
    """A callback for where there is no terminal: a line, if the last one was a while ago."""
    told = time.monotonic()

    def line(text: str) -> None:
        nonlocal told
        if text and time.monotonic() - told >= SELDOM:
            told = time.monotonic()
            click.echo(text, err=True)

    return line


def status_line(show: bool = True) -> Callable[[str], None]:
    """A callback that keeps one line on stderr up to date; "" removes it. No terminal: seldom."""
    if not show:
        return lambda text: None
    if not sys.stderr.isatty():
        return seldom()
    return lambda text: click.echo(f"\r\033[K{text}", nl=False, err=True)


def progress_bar() -> Callable[[str, int, int], None]:
    """A callback (phase, done, total): a bar on stderr, or a line now and then if no terminal."""
    terminal = sys.stderr.isatty()
    line = seldom()

    def show(phase: str, done: int, total: int) -> None:
        share = done / total if total else 1.0
        if terminal:
            bar = "#" * int(30 * share)
            click.echo(f"\r{phase:12} [{bar:30}] {share:4.0%}", nl=False, err=True)
            if done >= total:
                click.echo(err=True)
        else:
            line(f"{phase} {share:4.0%}")

    return show

"""The command line: options and printing, no other logic. Only results go to stdout."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from qrun import __version__, printing, reading
from qrun.bench_command import bench
from qrun.command import EXIT_CODES, activations_option, listen
from qrun.errors import QrunError, UsageError

if TYPE_CHECKING:
    from qrun.ops.matrix import Activations


@click.group(
    no_args_is_help=False,  # its way of printing help is an error whose message is the help
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, "--version", prog_name="qrun", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show a traceback on errors. In front of a command.")
def cli(debug: bool) -> None:
    """Run 4-bit language models at the speed of this machine's memory."""


@cli.command(
    short_help="Answer a prompt.",
    epilog=EXIT_CODES,
    context_settings={"allow_extra_args": True},  # a prompt without its -p: told so below
)
@click.argument("model", envvar="QRUN_MODEL", type=click.Path())
@click.option("-p", "--prompt", help="The prompt; - reads it from standard input.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the prompt from a file.",
)
@click.option("--system", help="A system message in front of the prompt.")
@click.option("--raw", is_flag=True, help="Give the prompt as it is: no chat template.")
@click.option(
    "-n",
    "--max-tokens",
    type=int,
    metavar="N",
    default=512,
    show_default=True,
    help="Stop after N.",
)
@click.option("--stop", multiple=True, help="End the text at this string. Repeatable.")
@click.option(
    "-t",
    "--temperature",
    type=float,
    metavar="T",
    default=0.0,
    help="Of sampling. Default 0: greedy.",
)
@click.option(
    "--top-k", type=int, metavar="K", default=0, help="Keep the K likeliest tokens. 0: all."
)
@click.option(
    "--top-p",
    type=float,
    metavar="P",
    default=1.0,
    help="Keep the likeliest that reach P together.",
)
@click.option(
    "--min-p",
    type=float,
    metavar="P",
    default=0.0,
    help="Keep tokens of P times the best chance.",
)
@click.option(
    "--repetition-penalty", type=float, metavar="X", default=1.0, help="Above 1: repeat less."
)
@click.option(
    "--presence-penalty",
    type=float,
    metavar="X",
    default=0.0,
    help="Subtract X from each token used.",
)
@click.option(
    "--frequency-penalty",
    type=float,
    metavar="X",
    default=0.0,
    help="Subtract X for each use of a token.",
)
@click.option(
    "--logit-bias", multiple=True, metavar="ID=BIAS", help="Add to a token's logit. Repeatable."
)
@click.option("--seed", type=int, metavar="N", help="Same seed, same text.")
@click.option("--revision", help="Revision of a hub repository.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Type of activations and cache. Default: float32 on a CPU, the model's own on a GPU.",
)
@activations_option
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="CPU threads. Default: all it may use."
)
@click.option(
    "--no-tune", is_flag=True, help="Apple GPU: kernels by a table, not timed on the first load."
)
@click.option("--stats", is_flag=True, help="Print speeds and memory to standard error.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("--stream-json", is_flag=True, help="Print one JSON object per piece of text.")
@click.option("-q", "--quiet", is_flag=True, help="No warnings.")
@click.option("-v", "--verbose", is_flag=True, help="Say what was loaded, and what was left out.")
def generate(
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    system: str | None,
    raw: bool,
    max_tokens: int,
    stop: tuple[str, ...],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: tuple[str, ...],
    seed: int | None,
    revision: str | None,
    dtype: str | None,
    activations: Activations,
    threads: int | None,
    no_tune: bool,
    stats: bool,
    as_json: bool,
    stream_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Answer a prompt with MODEL, a folder or a hub id (default: $QRUN_MODEL).

    Without -p and --prompt-file the prompt is read from standard input, if that is no terminal.
    """
    alone = click.get_current_context().args
    if alone:
        raise UsageError(
            f"what is {alone[0][:60]!r}? Only MODEL goes without an option",
            hint="a prompt is given with -p: qrun generate MODEL -p PROMPT",
        )
    if as_json and stream_json:
        raise UsageError("--json and --stream-json exclude each other")
    text = reading.read_prompt(prompt, prompt_file)
    printing.show_warnings(not quiet)

    import qrun
    from qrun.hardware import set_threads

    set_threads(threads)
    load = qrun.load
    listen()
    sampling = qrun.Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=reading.parse_bias(logit_bias),
        seed=seed,
    )
    loaded = load(
        model,
        revision=revision,
        dtype=dtype,
        activations=activations,
        tune=False if no_tune else None,
        show=printing.status_line(not quiet),
    )
    if verbose:
        printing.print_description(loaded)
    result = None
    for piece in qrun.stream(
        loaded, text, system=system, raw=raw, max_tokens=max_tokens, stop=stop, sampling=sampling
    ):
        result = piece.result
        if stream_json:
            printing.print_json({"text": piece.text})
        elif not as_json:
            click.echo(piece.text, nl=False)
            sys.stdout.flush()
    assert result is not None
    if as_json:
        printing.print_json(printing.summary(loaded, result))
    elif stream_json:
        printing.print_json({"result": printing.summary(loaded, result)})
    elif result.text and not result.text.endswith("\n"):
        click.echo()
    if stats:
        printing.print_stats(loaded, result)


@cli.command(short_help="Turn a GGUF or float safetensors into a 4-bit folder.", epilog=EXIT_CODES)
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option("--bits", type=int, metavar="N", help="Bits a weight. Default: the source's, or 4.")
@click.option(
    "--group-size", type=int, metavar="N", help="Weights a scale. Default: 32 (GGUF) or 64."
)
@click.option(
    "--mode", type=click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]), help="Default: affine."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Type of scales and of unquantized tensors. Default: the source's 16-bit type.",
)
@click.option(
    "--recipe",
    type=click.Choice(["mixed_3_6", "mixed_4_6", "mixed_4_8"]),
    help="Mixed precision: more bits for embedding, head, and the outer layers' v and down.",
)
@click.option("--force", is_flag=True, help="Replace DST if it exists.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no warnings, no summary.")
def convert(
    src: Path,
    dst: Path,
    bits: int | None,
    group_size: int | None,
    mode: str | None,
    dtype: str | None,
    recipe: str | None,
    force: bool,
    quiet: bool,
) -> None:
    """Turn SRC, a .gguf file or a folder of float safetensors, into a 4-bit model folder DST.

    GGUF tensors in Q4_0, Q4_1 and Q8_0 keep their exact values; DST appears only when complete.
    """
    printing.show_warnings(not quiet)

    from qrun.hardware import require_mlx

    require_mlx()
    from qrun.convert import convert as run

    listen()
    report = run(
        src,
        dst,
        bits=bits,
        group_size=group_size,
        mode=mode,
        dtype=dtype,
        recipe=recipe,
        force=force,
        progress=None if quiet else printing.progress_bar(),
    )
    if not quiet:
        lines = [
            f"{dst}: {report.model_type}, {report.parameters / 1e6:.1f} M parameters, "
            f"{report.bits_per_weight:.2f} bits a weight, {report.nbytes / 1e6:.0f} MB",
            *(f"note: {note}" for note in report.notes),
        ]
        click.echo("\n".join(lines), err=True)


@cli.command(short_help="Say what a model is, needs, and has wrong with it.", epilog=EXIT_CODES)
@click.argument("model", envvar="QRUN_MODEL", type=click.Path())
@click.option(
    "-c", "--context", type=click.IntRange(1), help="Positions to plan memory for. Default: all."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(model: str, context: int | None, as_json: bool) -> None:
    """Say what MODEL is, what memory it takes, and whether it would load; read no weights.

    The exit code is 0 if it would load, 4 if not. A hub id that is not in the cache is downloaded.
    """
    from qrun.hardware import require_mlx

    require_mlx()
    from qrun.inspect import inspect as look

    try:
        found = look(model, length=context)
    except QrunError as error:
        if not as_json:
            raise
        problem = {"text": str(error), "remedy": error.hint}
        printing.print_json({"folder": model, "loads": False, "problems": [problem]})
        sys.exit(error.exit_code)
    if as_json:
        printing.print_json(found.as_json())
    else:
        click.echo(printing.inspection(found))
    sys.stdout.flush()
    sys.exit(found.exit_code)


cli.add_command(bench)


def main() -> None:
    """Run a command; turn every outcome into an exit code and at most two lines."""
    debug, stdout = sys.argv[1:2] == ["--debug"], sys.stdout
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        _fail("standard output is closed", None, 1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # so that what cleans up on an interrupt also does here
    try:
        cli.main(standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _reader_left()
    except SystemExit:
        # click answers a closed pipe with exit code 1, and with another sys.stdout.
        if sys.stdout is not stdout:
            _reader_left()
        raise
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)
        sys.exit(130)
    except QrunError as error:
        if debug:
            _traceback()
        _fail(str(error), error.hint, error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), f"see {_command_path(error)} --help", error.exit_code)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except OSError as error:
        if debug:
            _traceback()
        where = error.filename or "standard output"
        _fail(f"{where}: {(error.strerror or str(error)).lower()}", None, 1)
    except UnicodeEncodeError as error:
        lost = error.object[error.start]
        _fail(
            f"standard output is {error.encoding}, which has no {lost!r}",
            "set PYTHONIOENCODING=utf-8",
            1,
        )
    except Exception as error:
        if debug:
            _traceback()
        _fail(f"{type(error).__name__}: {error}", "--debug shows where: qrun --debug ...", 1)


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _reader_left() -> NoReturn:
    """As in `qrun ... | head`: nothing to say, and nobody to say it to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python's last flush fails once more
    sys.exit(0)


def _traceback() -> None:
    import traceback

    traceback.print_exc()


def _fail(message: str, hint: str | None, code: int) -> None:
    with suppress(OSError):  # nobody may be there to read it; the code still tells
        click.echo(f"{printing.paint('qrun: error:', 'red')} {message}", err=True)
        if hint:
            click.echo(f"  hint: {hint}", err=True)
    sys.exit(code)


def _command_path(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "qrun"

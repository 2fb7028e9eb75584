"""What the commands of the command line share."""

from __future__ import annotations

import signal

import click

EXIT_CODES = """\b
Exit codes:
    0  done
    1  a file that cannot be written, or an unexpected error (see qrun --debug)
    2  wrong usage
    3  model not found
    4  bad checkpoint
    5  prompt too long
    6  the model's logits are not finite
    7  MLX has no backend here
  130  interrupted
"""

activations_option = click.option(
    "--activations",
    type=click.Choice(["default", "exact", "int8"]),
    default="default",
    show_default=True,
    help="CPU: how products read activations. int8: faster and less precise.",
)


def listen() -> None:
    """From here on an interrupt is an exception, and what was begun is cleaned up.

    Before, it ends the process (see __main__): MLX's import aborts on an exception.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)

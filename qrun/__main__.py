"""The command's entry point, so thin that an interrupt during the imports finds it in place."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Until that can answer, an interrupt ends the process without a word."""
    try:
        import signal

        # Not where somebody had it ignored: a background job, or nohup.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from qrun.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

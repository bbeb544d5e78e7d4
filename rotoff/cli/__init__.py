"""The command line: ``rotoff COMMAND ...`` or ``python -m rotoff COMMAND ...``.

Modules: `plans` makes and shows sequences, `models` runs models. Only `models` needs torch; only pictures need
matplotlib.

Exit codes: 0, done; 1, nothing fits the limit, the machine refuses the sequence, or a check failed; 2, wrong usage, a
file that cannot be read, or a model that cannot be measured; 130, interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from ..errors import InfeasibleError, InvalidSequenceError, RotoffError
from ..version import __version__

EXIT_CODES = (
    "exit codes: 0 done; 1 nothing fits, the sequence is refused, or a check failed; 2 wrong usage or input; 130"
    " interrupted"
)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands.

    Raises:
        ModuleNotFoundError: if rotoff is not compiled; the message says so.
    """
    from .. import solver as solver  # first, since the package explains its absence
    from . import models, plans

    top = argparse.ArgumentParser(
        prog="rotoff",
        description="Plan training steps inside a memory limit: recompute and offload, planned together.",
        epilog=f"{EXIT_CODES}. `rotoff COMMAND --help` shows an example of each.",
    )
    top.add_argument("--version", action="version", version=f"rotoff {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (models, plans):
        module.add_commands(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own; returns the exit code."""
    try:
        options = parser().parse_args(arguments)
    except SystemExit as stop:  # --help, --version, or wrong usage, which argparse has explained
        return stop.code if isinstance(stop.code, int) else 2
    except ModuleNotFoundError as error:
        print(f"rotoff: {error}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # for terminals whose encoding lacks some characters
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("rotoff: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough, as with `rotoff show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if options.traceback:
            raise
        said = str(error)
        if not isinstance(error, RotoffError | OSError | ModuleNotFoundError):
            said = f"{type(error).__name__}: {error} (--traceback shows where)"
        elif isinstance(error, OSError) and error.filename:
            said = f"{error.filename}: {error.strerror}"
        elif isinstance(error, ModuleNotFoundError) and error.name == "torch" and "rotoff" not in said:
            said = "this command runs a model and needs torch: pip install torch"
        print(f"rotoff {options.command}: {said}", file=sys.stderr)
        return 1 if isinstance(error, InfeasibleError | InvalidSequenceError) else 2
    return code

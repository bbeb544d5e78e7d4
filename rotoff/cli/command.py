"""Code that all commands share: declaring them, reading files, printing JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..core.chain import Chain
from ..core.sequence import Sequence
from ..errors import ChainError, SequenceFormatError
from ..io.json_file import read_json

T = TypeVar("T")
Run = Callable[[argparse.Namespace], int]  # runs a command, returns the exit code


class UsageError(Exception):
    """An input that a command cannot use; the user sees only the message."""


def add_command(
    commands: Any, name: str, run: Run, summary: str, example: str, details: str = ""
) -> argparse.ArgumentParser:
    """Add a command and return its parser. summary: one line of help; `details` follow it in the command's own help,
    which ends with the example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{details}".strip(),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--traceback", action="store_true", help="on an error, show where in the program it was raised")
    parser.set_defaults(run=run)
    return parser


def add_chain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chain", metavar="CHAIN.json", help="a file of `rotoff profile`; - for standard input")


def add_mem_slots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mem-slots", type=int, default=50, metavar="N", help="of the joint dynamic program (50)")


def read_chain(path: str) -> Chain:
    return _standard_input(Chain.from_dict, ChainError) if path == "-" else Chain.load(path)


def read_sequence(path: str) -> Sequence:
    return _standard_input(Sequence.from_dict, SequenceFormatError) if path == "-" else Sequence.load(path)


def _standard_input(build: Callable[[Any], T], error: type[Exception]) -> T:
    return read_json(sys.stdin.read, "standard input", build, error)


def listed(text: str) -> list[str]:
    """The names in an argument, separated by commas."""
    return [name.strip() for name in text.split(",")]


def print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=1)
    print()


def shown(options: argparse.Namespace, found: Any) -> None:
    """Print a result as text, or as JSON if the options say so."""
    if options.json:
        print_json(found.to_dict())
    else:
        print(found)


def check_suffix(path: str | None, suffixes: tuple[str, ...]) -> str | None:
    """The suffix of an output file; raises UsageError for an unknown one, before any work is done."""
    if path is None:
        return None
    suffix = Path(path).suffix.lower()
    if suffix not in suffixes:
        raise UsageError(
            f"{path} ends in {suffix or 'nothing'!r}; end it in {', '.join(suffixes[:-1])} or {suffixes[-1]}"
        )
    return suffix

"""Code that all commands share: declaring them, parsing arguments, reading files, printing JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..core.chain import Chain
from ..core.sequence import Sequence
from ..core.sizes import parse_bytes
from ..errors import ChainError, LimitError, SequenceFormatError
from ..io.json_file import read_json

T = TypeVar("T")
Argument = tuple[tuple[str, ...], dict[str, Any]]


class UsageError(Exception):
    """An input that a command cannot use; the user sees only the message."""


@dataclass(frozen=True)
class Command:
    """One command: name, one line of help, an example, a function that returns the exit code, and its arguments."""

    name: str
    summary: str
    example: str
    run: Callable[[argparse.Namespace], int]
    arguments: tuple[Argument, ...]
    details: str = ""


def argument(*names: str, **options: Any) -> Argument:
    """An argument, as for ``argparse.ArgumentParser.add_argument``."""
    return names, options


def add_command(commands: Any, command: Command) -> None:
    """Add a command's parser; its help ends with the example."""
    parser = commands.add_parser(
        command.name,
        help=command.summary,
        description=f"{command.summary[0].upper()}{command.summary[1:]}.\n\n{command.details}".strip(),
        epilog=f"example:\n  {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for names, options in (*command.arguments, JSON, TRACEBACK):
        parser.add_argument(*names, **options)
    parser.set_defaults(run=command.run)


def size(text: str) -> int:
    """Parse an argument that is a number of bytes."""
    try:
        return parse_bytes(text, "the size")
    except LimitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


JSON = argument("--json", action="store_true", help="print JSON instead of text")
TRACEBACK = argument("--traceback", action="store_true", help="on an error, show where in the program it was raised")
CHAIN = argument("chain", metavar="CHAIN.json", help="a file of `rotoff profile`; - for standard input")


def read_chain(path: str) -> Chain:
    return _standard_input(Chain.from_dict, ChainError) if path == "-" else Chain.load(path)


def read_sequence(path: str) -> Sequence:
    return _standard_input(Sequence.from_dict, SequenceFormatError) if path == "-" else Sequence.load(path)


def _standard_input(build: Callable[[Any], T], error: type[Exception]) -> T:
    return read_json(sys.stdin.read, "standard input", build, error)


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

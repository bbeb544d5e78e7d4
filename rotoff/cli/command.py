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


class UsageError(Exception):
    """An input that a command cannot use; the user sees only the message."""


@dataclass(frozen=True)
class Command:
    """One command: name, one line of help, an example, its arguments, and a function that returns the exit code."""

    name: str
    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    details: str = ""


def add_command(commands: Any, command: Command) -> None:
    """Add a command's parser; its help ends with the example."""
    parser = commands.add_parser(
        command.name,
        help=command.summary,
        description=f"{command.summary[0].upper()}{command.summary[1:]}.\n\n{command.details}".strip(),
        epilog=f"example:\n  {command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    parser.add_argument("--traceback", action="store_true", help="on an error, show where in the program it was raised")
    parser.set_defaults(run=command.run)


def size(text: str) -> int:
    """Parse an argument that is a number of bytes."""
    try:
        return parse_bytes(text, "the size")
    except LimitError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size_or_zero(text: str) -> int:
    """Parse an argument that is a number of bytes or 0."""
    return 0 if text.strip() == "0" else size(text)


def add_chain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "chain", metavar="CHAIN.json", help="a chain file, as `rotoff profile` writes it; - for standard input"
    )


def add_sequence(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    parser.add_argument(
        "sequence",
        metavar="SEQ.json",
        nargs="?" if optional else None,
        help="a sequence file, as `rotoff solve` writes it"
        + ("; without it, the chain itself is shown" if optional else ""),
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def read_chain(path: str) -> Chain:
    return _standard_input(Chain.from_dict, ChainError) if path == "-" else Chain.load(path)


def read_sequence(path: str) -> Sequence:
    return _standard_input(Sequence.from_dict, SequenceFormatError) if path == "-" else Sequence.load(path)


def _standard_input(build: Callable[[Any], T], error: type[Exception]) -> T:
    return read_json(sys.stdin.read, "standard input", build, error)


def print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=1)
    print()


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

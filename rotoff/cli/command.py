"""Code that all commands share: declaring them, reading files, printing JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[argparse.Namespace], int]  # runs a command, returns the exit code
Add = Callable[..., object]  # adds an argument


class UsageError(Exception):
    """An input that a command cannot use; the user sees only the message."""


def add_command(commands: Any, name: str, run: Run, summary: str, example: str, details: str) -> Add:
    """Add a command, and return what adds an argument to it. summary: one line of help; `details` follow it in the
    command's own help, which ends with the example."""
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
    return parser.add_argument


def add_chain(add: Add) -> None:
    add("chain", metavar="CHAIN.json", help="a file of `rotoff profile`; - for standard input")


def add_mem_slots(add: Add) -> None:
    add("--mem-slots", type=int, default=50, metavar="N", help="of the joint dynamic program (50)")


def named(path: str) -> str:
    """The path of the file that an argument names."""
    return "/dev/stdin" if path == "-" else path


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

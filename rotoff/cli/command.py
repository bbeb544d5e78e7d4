"""Code that all commands share: declaring them, reading their arguments, printing their answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[argparse.Namespace], int]  # runs a command, returns the exit code
Add = Callable[..., object]  # adds an argument
_OWN = ("command", "run", "json", "traceback", "output", "target", "chain", "sequence")


def add_command(commands: Any, run: Run, example: str, summary: str, details: str = "") -> Add:
    """Add the command that the example names, and return what adds an argument to it. summary: one line of help;
    `details` follow it in the command's own help, which ends with the example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        example.split()[1],
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{details}".strip(),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what is not given has the default of the function that is called
    )
    parser.set_defaults(run=run, output=None, json=False, traceback=False)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--traceback", action="store_true", help="on an error, show where in the program it was raised")
    return parser.add_argument


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments that were given, as those of the function that the command calls."""
    given = {name: value for name, value in vars(options).items() if name not in _OWN}
    return given | dict(given.pop("option", ()))


def listed(text: str) -> list[str]:
    """The names in an argument, separated by commas."""
    return [name.strip() for name in text.split(",")]


def one_option(text: str) -> tuple[str, Any]:
    """A name and a value, such as ``refine=2``; a value that is no JSON is text."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def ending_in(*suffixes: str) -> Callable[[str], str]:
    """What reads the name of an output file, which must end in one of these."""

    def read(path: str) -> str:
        if Path(path).suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{path!r} must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}")
        return path

    return read


def answer(options: argparse.Namespace, data: Callable[[], Any], text: object) -> None:
    """Print an answer as text, with the name of the file that was written, or `data` as JSON if the options say so."""
    if options.json:
        print(json.dumps(data(), indent=1))
        return
    print(text)
    if options.output:
        print(f"\nwritten to {options.output}")

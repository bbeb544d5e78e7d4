"""The public names and their arguments are those of ``public_api.txt``: whoever changes one changes that file, and
means it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import rotoff

LISTED = Path(__file__).with_name("public_api.txt")
COMMANDS = ("profile", "estimate", "plan", "largest", "stages", "solve", "compare", "sweep", "simulate")
COMMANDS += ("show", "doctor")


def arguments(thing: Any) -> str:
    try:
        return ", ".join(
            f"{p.name}" + ("" if p.default is p.empty else f"={p.default!r}")
            for p in inspect.signature(thing).parameters.values()
        )
    except (TypeError, ValueError):
        return ""


def described() -> list[str]:
    """Every public name with its arguments, and those of the methods of classes."""
    found = []
    for name in sorted(set(dir(rotoff)) - {"annotations", "TYPE_CHECKING", "Any"}):
        thing = getattr(rotoff, name)
        if name.startswith("_") or inspect.ismodule(thing):
            continue
        found.append(f"{name}({arguments(thing)})" if callable(thing) else name)
        if inspect.isclass(thing) and not issubclass(thing, Exception):
            for method, function in sorted(vars(thing).items()):
                if not method.startswith("_") and (
                    callable(function) or isinstance(function, (classmethod, staticmethod))
                ):
                    found.append(f"{name}.{method}({arguments(getattr(thing, method))})")
    return found


def test_public_names_and_arguments_are_those_listed() -> None:
    assert described() == LISTED.read_text(encoding="utf-8").splitlines()


def test_every_command_has_help() -> None:
    listed = subprocess.run([sys.executable, "-m", "rotoff", "--help"], capture_output=True, text=True, timeout=60)
    assert listed.returncode == 0
    assert all(command in listed.stdout for command in COMMANDS)

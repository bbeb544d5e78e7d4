"""JSON files of one value: written atomically, and read with errors that name the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .atomic_write import write_whole

T = TypeVar("T")
DEEPEST = 100  # lists and objects within one another


def parse_nested(parse: Callable[[str], Any], text: str) -> Any:
    """What `parse` makes of `text`, such as ``json.loads``.

    Raises:
        ValueError: as `parse`, and if the value is nested so deeply that code which goes through it may fail.
    """
    try:
        value = parse(text)
        level: Any = [value]
        for _ in range(DEEPEST):
            rows = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (list, dict))]
            level = {id(one): one for row in rows for one in row}.values()
            if not level:
                return value
    except RecursionError:
        pass
    raise ValueError(f"it is nested more than {DEEPEST} deep; give at most {DEEPEST} lists and objects within another")


def save_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write `data` to `path`, one field a line."""
    write_whole(path, json.dumps(data, indent=1) + "\n")


def load_json(path: str | os.PathLike[str], build: Callable[[Any], T], error: type[Exception]) -> T:
    """Read the JSON file at `path` and pass it to `build`.

    Raises:
        error: if it is not JSON, or `build` raises one; the message begins with the path. OSError: if it cannot be
            read.
    """
    try:
        data = parse_nested(json.loads, Path(path).read_text(encoding="utf-8"))
    except ValueError as reason:
        raise error(f"{path} is not JSON: {reason}") from reason
    try:
        return build(data)
    except error as reason:
        raise error(f"{path}: {reason}") from reason


def is_text(value: Any) -> bool:
    """Whether `value` is text that every file and terminal accepts: a str without lone halves of surrogate pairs."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))

"""JSON files of one value: written whole or not at all, and read with errors that name the file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .atomic_write import write_whole

T = TypeVar("T")


def save_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write `data` to `path`, a field a line."""
    write_whole(path, json.dumps(data, indent=1) + "\n")


def load_json(path: str | os.PathLike[str], build: Callable[[Any], T], error: type[Exception]) -> T:
    """What `build` makes of the JSON in the file at `path`.

    Raises:
        error: where it is no JSON, or `build` raises one; the sentence begins with the file. OSError: if it cannot be
            read.
    """
    return read_json(lambda: Path(path).read_text(encoding="utf-8"), str(path), build, error)


def read_json(read: Callable[[], str], source: str, build: Callable[[Any], T], error: type[Exception]) -> T:
    """What `build` makes of the JSON that `read` gives; sentences begin with `source`, such as "standard input".

    Raises:
        error: where it is no JSON, or `build` raises one. OSError: if it cannot be read.
    """
    try:
        data = json.loads(read())
    except (ValueError, RecursionError) as reason:
        raise error(f"{source} is not JSON: {reason}") from reason
    try:
        return build(data)
    except error as reason:
        raise error(f"{source}: {reason}") from reason


def is_text(value: Any) -> bool:
    """Whether `value` is text that every file and terminal takes: a str without lone halves of surrogate pairs."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)

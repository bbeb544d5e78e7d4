"""Files of text and of JSON: written atomically, and read with errors that name the file."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OptionError

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


def named_directory(given: Any) -> Path:
    """The path that the option host_directory names, with ``~`` expanded.

    Raises:
        OptionError: if it can be no path of a directory.
    """
    try:
        if isinstance(given, (str, os.PathLike)):
            path = Path(given).expanduser()
            if b"\0" not in os.fsencode(path):
                return path
        reason = ""
    except (TypeError, ValueError, RuntimeError) as error:  # a path of bytes, lone surrogates, or an unknown user
        reason = f" ({error})"
    raise OptionError(f"host_directory is {given!r}{reason}; give the path of a directory")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to the file at `path` atomically: readers find the old content or all of `text`.

    The permissions of an existing file are kept; links are followed. Anything but a regular file (a pipe,
    ``/dev/stdout``) is written directly.

    Raises:
        OSError: if it cannot be written; the old content is then unchanged.
    """
    target = Path(os.path.realpath(path))
    mode = None
    try:
        found = os.stat(path).st_mode
        if not stat.S_ISREG(found):
            Path(path).write_text(text, encoding="utf-8")
            return
        mode = stat.S_IMODE(found)
        with target.open("a"):  # do not replace a file without write permission
            pass
    except FileNotFoundError:
        pass
    # in the same directory, since files can only be replaced within one file system
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        opened = partial(os.open, mode=0o666 if mode is None else mode)  # from the first byte on
        with open(beside, "x", encoding="utf-8", newline="", opener=opened) as file:
            file.write(text)
        if mode is not None:
            beside.chmod(mode)
        os.replace(beside, target)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = os.fspath(path), None  # not the file beside it, which nobody asked for
        raise

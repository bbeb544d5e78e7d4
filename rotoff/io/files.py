"""Files of text, JSON and settings: written atomically, and read with errors that name the file."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OptionError

T = TypeVar("T")


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
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} is not JSON: {reason}") from reason
    try:
        return build(data)
    except error as reason:
        raise error(f"{path}: {reason}") from reason


def load_settings(path: str | os.PathLike[str]) -> Any:
    """The values in a file of settings: JSON if it ends in .json, TOML if in .toml (from Python 3.11 on), else YAML
    (with PyYAML).

    Raises:
        OptionError: if it is not that. OSError: if it cannot be read.
    """
    how = {".json": ("json", "loads"), ".toml": ("tomllib", "loads")}.get(Path(path).suffix, ("yaml", "safe_load"))
    try:
        parse = getattr(import_module(how[0]), how[1])
    except ModuleNotFoundError as error:
        raise OptionError(f"{path} needs the module {error.name}, which is not installed; write JSON") from None
    text = Path(path).read_bytes()
    try:
        return parse(text.decode())
    except Exception as error:  # each module has its own
        raise OptionError(f"{path} is not {how[0]}: {' '.join(str(error).split())}") from error


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
    named, target = Path(path), Path(os.path.realpath(path))
    if named.exists() and not named.is_file():
        named.write_text(text, encoding="utf-8")
        return
    # in the same directory, since files can only be replaced within one file system
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666  # at no moment may others read a private file
    try:
        with open(beside, "x", encoding="utf-8", newline="", opener=partial(os.open, mode=mode)) as file:
            file.write(text)
        if target.exists():
            with target.open("a"):  # do not replace a file without write permission
                pass
            shutil.copymode(target, beside)
        beside.replace(target)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(named), None  # not the file beside it, which nobody asked for
        raise

"""Atomic writing of text files."""

from __future__ import annotations

import os
import secrets
import stat
from functools import partial
from pathlib import Path


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

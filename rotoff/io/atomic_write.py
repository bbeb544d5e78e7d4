"""Text files that are written whole or not at all, whatever happens meanwhile and whoever reads."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to the file at `path`: its readers find what was there before or all of `text`.

    Permissions of a file that was there are kept; links are followed. What is no regular file (a pipe, ``/dev/stdout``)
    is written to as it comes.

    Raises:
        OSError: if it cannot be written; what was there before still is.
    """
    target = Path(os.path.realpath(path))
    mode = None
    try:
        found = os.stat(path).st_mode
        if not stat.S_ISREG(found):
            Path(path).write_text(text, encoding="utf-8")
            return
        mode = stat.S_IMODE(found)
        with target.open("a"):  # a file that must not be written to is not replaced either
            pass
    except FileNotFoundError:
        pass
    # beside it, since files are replaced within one file system only
    beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
        if mode is not None:
            beside.chmod(mode)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise

"""Paths that users name in options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import OptionError


def named_directory(given: Any, option: str) -> Path:
    """The path that an option names, with ``~`` expanded.

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
    raise OptionError(f"{option} is {given!r}{reason}; give the path of a directory")

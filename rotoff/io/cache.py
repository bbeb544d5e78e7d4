"""A cache on disk for the next process: its plans.

Each entry is a JSON file. Its name is the hash of a key with everything that the entry depends on, and of rotoff's own
code. Files are written atomically; one that cannot be read is ignored with a warning in the log. Nothing is ever
unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .atomic_write import replace_with
from .json_file import parse_nested
from .paths import named_directory

logger = logging.getLogger("rotoff")
ENVIRONMENT = "ROTOFF_CACHE"  # the directory, or one of
NOWHERE = ("", "off", "0", "no", "false", "none")
KEPT = 1000  # most entries; the oldest are deleted first
PACKAGE = Path(__file__).parent.parent


def default_directory() -> Path | None:
    """``ROTOFF_CACHE`` from the environment, otherwise ``rotoff`` in the user's cache directory; None for "off"."""
    named = os.environ.get(ENVIRONMENT)
    if named is not None:
        return None if named.strip().lower() in NOWHERE else named_directory(named, ENVIRONMENT)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rotoff"
    except RuntimeError:  # a user without a home
        return None


class Cache:
    """A cache in `directory`; with None, it finds and keeps nothing."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.directory = None if directory is None else named_directory(directory, "cache_directory")

    @classmethod
    def of(cls, directory: str | os.PathLike[str] | bool | None) -> Cache:
        """The cache in `directory`; True: in the default directory. False or None: no cache.

        Raises:
            OptionError: for anything else.
        """
        if directory is not None and not isinstance(directory, (bool, str, os.PathLike)):
            raise OptionError(f"cache_directory is {directory!r}; give a directory, True, or None for none")
        return cls(default_directory() if directory is True else (directory or None))

    def find(self, key: Any) -> Any:
        """The value kept for `key` (of JSON values), or None."""
        if self.directory is None:
            return None
        path = self._path(key)
        try:
            return parse_nested(json.loads, _read(path))["value"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError) as error:
            logger.warning("rotoff: the cache file %s cannot be read and is ignored: %s", path, error)
            return None

    def keep(self, key: Any, value: Any) -> None:
        """Keep `value` (of JSON values) for `key`; if that fails, a warning is logged."""
        if self.directory is None:
            return
        path = self._path(key)
        try:
            self.directory.mkdir(0o700, parents=True, exist_ok=True)
            replace_with(
                path, json.dumps({"key": key, "value": value}), 0o600
            )  # what was trained is nobody else's business
            self._trim()
        except OSError as error:
            logger.warning("rotoff: cannot write to the cache directory %s: %s", self.directory, error)

    def _path(self, key: Any) -> Path:
        assert self.directory is not None
        text = code_of(PACKAGE) + json.dumps(key, sort_keys=True)
        return self.directory / f"plan-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def _trim(self) -> None:
        assert self.directory is not None
        files = list(self.directory.glob("*-*.json"))
        if len(files) <= KEPT:
            return
        for path in sorted(files, key=_age)[: len(files) - KEPT]:
            path.unlink(missing_ok=True)


@functools.cache
def code_of(package: Path) -> str:
    """A digest of the code in a folder. A version does not tell two commits of a clone apart."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.suffix == ".py":
            digest.update(path.read_bytes())
        elif path.suffix == ".so":  # megabytes
            digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process was first
        return 0.0


def _read(path: Path) -> str:
    """The text of the regular file at `path`: no link to another one is followed, and no pipe is waited for."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    with open(path, encoding="utf-8", opener=opened) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        return file.read()

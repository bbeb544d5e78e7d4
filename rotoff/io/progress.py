"""A progress bar on one line of the terminal."""

from __future__ import annotations

import sys
import time

EVERY = 5.0


class Bar:
    """A progress bar on standard error, if the work takes longer than 0.4 seconds. Where that is no terminal, a line
    each `EVERY` seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = 0.0
        self._begun = time.monotonic()
        self._on = sys.stderr is not None and sys.stderr.isatty()
        self._said = self._begun

    def __call__(self, done: float, note: str = "") -> None:
        now = time.monotonic()
        if not self._on and sys.stderr is not None and now - self._said >= EVERY:
            self._said = now
            print(f"{self._what}: {done:.0%} {note} ({now - self._begun:.0f} s)", file=sys.stderr, flush=True)
        if not self._on or now - max(self._shown, self._begun + 0.4) < 0.1:
            return
        self._shown = now
        cells = int(24 * min(1.0, max(0.0, done)))
        text = f"{self._what} [{'#' * cells}{'.' * (24 - cells)}] {done:4.0%} {note}"
        print(f"\r\x1b[2K{text[:100]}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

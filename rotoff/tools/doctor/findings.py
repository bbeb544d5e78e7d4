"""The doctor's findings: a verdict, a sentence and figures for each check, and the report file with all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ...version import __version__

TIMES = ("load", "bandwidth", "step time", "host waits", "overlap")  # checks that may say that steps are slower
OK, ATTENTION, FAILED = VERDICTS = ("ok", "attention", "failed")  # from best to worst


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    verdict: one of `VERDICTS`. sentence: what was found, and what to do if that is not ok. figures: JSON values; bytes,
    seconds, bytes per second. error: the traceback of an exception in the check. check, seconds: its name and duration.
    """

    verdict: str
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    check: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.verdict:<9}  {self.check}: {self.sentence}"


def judged(figures: dict[str, Any], said: str, *rules: tuple[object, str, str]) -> Finding:
    """The finding `said`, with the verdict and the words of the first of `rules` that holds: (whether, verdict, words).
    Without one it is ok."""
    for holds, verdict, more in rules:
        if holds:
            return Finding(verdict, f"{said}; {more}", figures)
    return Finding(OK, said, figures)


@dataclass
class Report:
    """The findings so far on one device. complete: whether every check has run."""

    device: str
    findings: list[Finding] = field(default_factory=list)
    complete: bool = False
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        """The worst verdict of all findings."""
        return max((finding.verdict for finding in self.findings), key=VERDICTS.index, default=OK)

    def conclusion(self, path: str) -> str:
        """What to do, in a line: ``WORKS``, ``WORKS, SLOWER THAN PREDICTED (why)`` or ``DO NOT USE (send path)``."""
        if self.verdict == FAILED or not self.complete:
            return f"DO NOT USE (send {path})"
        slower = [finding.check for finding in self.findings if finding.verdict == ATTENTION and finding.check in TIMES]
        return f"WORKS, SLOWER THAN PREDICTED (see {', '.join(slower)})" if slower else "WORKS"

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON, in the format of docs/command-line.md."""
        said = {"device": self.device, "complete": self.complete, "verdict": self.verdict, "seconds": self.seconds}
        checks = [{"check": finding.check, **asdict(finding)} for finding in self.findings]
        return {"format": "rotoff.doctor", "version": 1, "rotoff": __version__, **said, "checks": checks}

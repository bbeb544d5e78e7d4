"""Run the grid, cell by cell, each in a fresh process, and write one JSON file; an interrupted run goes on where it
stopped.

    python -m benchmarks.grid.run --suite cpu --out benchmarks/results/grid_cpu.json
    python -m benchmarks.grid.run --suite cuda --minutes 9 --out benchmarks/results/grid_cuda.json   # again until it
    says "complete"

Cells of one workload: plain; rotoff joint at --limits (percent of the plain peak); joint with room for everything, and
plain beside itself; each peer, and rotoff joint at its peak, named ``joint@PEER``; rotoff remat and offload; with
--compiled, `torch.compile` with its memory budgets and rotoff over compiled blocks. A cell that is in the file already,
from the same machine and versions, is not run again (--again CELL forces it; each keeps the commit that ran it). Where
others used the machine, --wider 0.06 runs those cells again, at the end, whose quartiles are further apart than that,
and keeps whichever run has them closer: a cell is chosen by its spread alone, never by what it says. Cells go round by
method, so that no method has the machine's best hour; on CUDA, where the machine may be there for minutes, one workload
after the other.

Times of stages that one cell has measured serve the later ones of the same call (rotoff's own cache, in a folder that
lives as long as the call); bytes are measured in each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import methods, workloads
from .aims import EVERYTHING, ITSELF


def machine(device: str) -> dict[str, Any]:
    """Hardware and versions; cells from another machine or other versions do not mix."""
    import torch

    import rotoff

    about: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rotoff": rotoff.__version__,
    }
    if device.startswith("cuda"):
        about |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return about


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def commit() -> str | None:
    """The commit that runs, marked where files other than results and docs differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        found = git("describe", "--always", "--abbrev=12")
        written = ":(top,exclude)benchmarks/results", ":(top,exclude)docs"
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *written)
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("-dirty" if changed else "")


class Grid:
    """The file of results, and what is still to do.

    cells: name -> what was asked ("cell") and what came out ("result"). The name is ``workload/method[@limit]``.
    """

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self.options = path, options
        self.data: dict[str, Any] = {"format": "rotoff.grid", "suite": options.suite}
        self.data |= {
            "machine": machine(options.device),
            "threads": options.threads,
            "limits": options.limits,
            "cells": {},
            "twice": [],
        }
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before.get("machine") != self.data["machine"]:
                raise SystemExit(f"{path} is of another machine or other versions; name another --out, or move it away")
            self.data |= {key: before[key] for key in ("cells", "twice") if key in before}
        for name in options.again:
            self.data["cells"].pop(name, None)
        self._waiting: list[str] | None = None  # those to be run again for their spread

    def result(self, name: str) -> dict[str, Any] | None:
        """What came out of the cell `name`, if it ran."""
        found = self.data["cells"].get(name)
        return found["result"] if found else None

    def todo(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, cell) of all cells that have not run, in order; later ones need the results of earlier ones."""
        options = self.options
        chosen = options.workloads or [w.name for w in workloads.SUITES[options.suite]]
        for together in [[name] for name in chosen] if options.suite == "cuda" else [chosen]:
            yield from self._cells(together)
        yield from self._wide(chosen)

    def _cells(self, chosen: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Those of some workloads, which go round by method."""
        options = self.options
        compiled = chosen if options.compiled == [] else [name for name in chosen if name in (options.compiled or ())]
        yield from self._peers(chosen, ("plain",))
        yield from self._at_limits(chosen, "joint")
        # with room for everything, twice over: what rotoff costs where it has nothing to do; and plain beside itself,
        # which says how much of that is the measurement's. Differences are small here, so there are more pairs.
        for workload in chosen:
            if (plain := self._peak(f"{workload}/plain")) is not None:
                yield from self._new(f"{workload}/joint@{EVERYTHING}", workload, "joint", 2 * plain, pairs=2)
        for workload in chosen:
            yield from self._new(f"{workload}/{ITSELF}", workload, ITSELF, None, pairs=2)
        for peer in methods.PEERS:
            yield from self._peers(chosen, (peer,))
            yield from self._in_their_bytes(chosen, "joint", (peer,))
        for mode in ("remat", "offload"):
            yield from self._at_limits(chosen, mode)
        yield from self._peers(compiled, methods.BUDGETS)
        yield from self._in_their_bytes(compiled, "joint-compiled", methods.BUDGETS)

    def _wide(self, chosen: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each cell once more whose quartiles are further apart than asked."""
        cells, most = self.data["cells"], self.options.wider
        if self._waiting is None:
            mine = {name: spread(cells[name]["result"]) for name in cells if name.split("/")[0] in chosen}
            self._waiting = [name for name, apart in mine.items() if most is not None and most < apart < math.inf]
        while self._waiting:
            name = self._waiting.pop(0)
            cell = cells[name]["cell"]
            seconds = max(cell["seconds"], self.options.seconds)
            yield name, cell | {"seconds": seconds, "host_directory": self.options.host_directory}

    def _peers(self, chosen: list[str], names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
        for method in names:
            for workload in chosen:
                yield from self._new(f"{workload}/{method}", workload, method, None)

    def _at_limits(self, chosen: list[str], mode: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for percent in self.options.limits:
            for workload in chosen:
                if (plain := self._peak(f"{workload}/plain")) is not None:
                    yield from self._new(f"{workload}/{mode}@{percent:g}%", workload, mode, int(plain * percent / 100))

    def _in_their_bytes(
        self, chosen: list[str], mode: str, peers: tuple[str, ...]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        for peer in peers:
            for workload in chosen:
                if (peak := self._peak(f"{workload}/{peer}")) is not None:
                    yield from self._new(f"{workload}/{mode}@{peer}", workload, mode, peak)

    def _peak(self, name: str) -> int | None:
        """What a step of this cell takes; where plain PyTorch runs out of memory, what it would take."""
        found = self.result(name)
        if found is None or name.endswith("/plain"):
            return found and (found["peak_allocated"] or found.get("predicted_peak"))
        return found["peak_allocated"]

    def _new(
        self, name: str, workload: str, method: str, limit: int | None, pairs: float = 1
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """The cell, if it has not run. pairs: how many, over the usual number."""
        if name not in self.data["cells"]:
            cell = {"suite": self.options.suite, "workload": workload, "method": method, "limit": limit}
            seconds = pairs * self.options.seconds
            cell |= {"device": self.options.device, "seconds": seconds, "threads": self.options.threads}
            yield name, cell | {"host_directory": self.options.host_directory}

    def run(self, name: str, cell: dict[str, Any], end: float | None = None) -> dict[str, Any] | None:
        """Run one cell in a process of its own and keep what came out; None where `end` came first, and nothing is
        kept."""
        command = [sys.executable, "-m", "benchmarks.grid.cell", json.dumps(cell)]
        begin, load = time.time(), os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        most = self.options.cell_minutes * 60
        allowed = most if end is None else min(most, max(1.0, end - begin))
        environment = {**os.environ, "ROTOFF_CACHE": self.options.times}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=allowed, env=environment)
            result = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            if allowed < most:
                return None
            result = {"status": "too slow", "note": f"stopped after {self.options.cell_minutes:g} minutes"}
        except (IndexError, ValueError):  # it died: killed for memory, or a fault that the note shows
            killed = done.returncode in (-9, 137)
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            result = {"status": "out of memory" if killed else "failed", "note": last[:500]}
            # the file has one line of it
            print(f"{name} died with exit code {done.returncode}:\n{done.stderr[-4000:]}", flush=True)
        kept = {key: value for key, value in cell.items() if key != "host_directory"}
        empty = {"peak_allocated": None, "ratio": None}
        record = {"cell": kept, "commit": commit(), "load_before": load, "seconds": round(time.time() - begin, 1)}
        record["result"] = empty | result
        before = self.data["cells"].get(name)
        if before is not None:
            self.data["twice"] = sorted({*self.data["twice"], name})
        if before is None or spread(record["result"]) < spread(before["result"]):
            self.data["cells"][name] = record
        self.save()
        return record["result"]

    def typical_seconds(self) -> float:
        """What a cell takes, as far as is known."""
        return statistics.median([record["seconds"] for record in self.data["cells"].values()] or [0.0])

    def save(self) -> None:
        """Write the file; an interruption leaves the one before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".part")
        fresh.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, self.path)


def spread(result: dict[str, Any]) -> float:
    """How far apart the quartiles of a cell's ratio are; infinite where there is none."""
    return math.inf if result["ratio"] is None else float(result["high"] - result["low"])


def said(name: str, result: dict[str, Any]) -> str:
    """One line of progress."""
    if result["status"] != "ok":
        return f"{name}: {result['status']} ({result['note']})"
    ratio = "" if result["ratio"] is None else f"{result['ratio']:.3f} of plain's time, "
    return f"{name}: {ratio}{result['peak_allocated'] / 2**20:.1f} MiB"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=list(workloads.SUITES), default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workloads", nargs="*", metavar="NAME", help="only these, in this order")
    parser.add_argument("--limits", nargs="*", type=float, default=[80, 60, 45, 30, 20], help="%% of the plain peak")
    parser.add_argument(
        "--compiled",
        nargs="*",
        metavar="NAME",
        help="also torch.compile with its memory budgets and rotoff over compiled blocks, of these workloads or of all",
    )
    parser.add_argument("--seconds", type=float, default=8, help="that a cell's timed steps may take (%(default)s)")
    parser.add_argument("--cell-minutes", type=float, default=5, help="after which a cell is stopped (%(default)s)")
    parser.add_argument(
        "--minutes", type=float, help="stop after this many; a cell under way is left for the next call"
    )
    parser.add_argument("--again", nargs="*", default=[], metavar="CELL", help="run these anew")
    parser.add_argument(
        "--wider", type=float, metavar="SPREAD", help="run those anew whose quartiles are further apart"
    )
    parser.add_argument("--host-directory", help="where the file of offloaded values lies; a real disk")
    parser.add_argument("--threads", type=int, help="compute threads of every method (CPU: cores - 1)")
    options = parser.parse_args(arguments)
    options.device = "cuda" if options.suite == "cuda" else "cpu"
    known = [workload.name for workload in workloads.SUITES[options.suite]]
    for name in options.workloads or ():
        if name not in known:
            parser.error(f"{name!r} is no workload of suite {options.suite}; it has {', '.join(known)}")
    if options.threads is None and options.device == "cpu":
        options.threads = max(1, (machine("cpu")["cores"] or 2) - 1)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when complete, 3 where the time was up before."""
    options = parse(arguments)
    grid = Grid(options.out, options)
    end = time.time() + 60 * options.minutes if options.minutes else None
    with tempfile.TemporaryDirectory(prefix="rotoff-grid-") as options.times:
        return _until(grid, end)


def _until(grid: Grid, end: float | None) -> int:
    """Cells until the time is up. The first one may take all the time of a cell, so that each call gets on."""
    first = True
    while (following := next(grid.todo(), None)) is not None:
        in_time = first or end is None or time.time() + grid.typical_seconds() < end
        result = grid.run(*following, None if first else end) if in_time else None
        if result is None:
            print(f"time is up; {len(grid.data['cells'])} cells are in {grid.path}; run this again to go on")
            return 3
        print(said(following[0], result), flush=True)
        first = False
    grid.save()
    print(f"complete: {len(grid.data['cells'])} cells in {grid.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

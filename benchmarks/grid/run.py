"""Run the grid, cell by cell, each in a fresh process, and write one JSON file; an interrupted run goes on where it
stopped.

    python -m benchmarks.grid.run --suite cpu --out benchmarks/results/grid_cpu.json
    python -m benchmarks.grid.run --suite cuda --minutes 9 --out benchmarks/results/grid_cuda.json   # again until it
    says "complete"

Cells of one workload: plain; rotoff joint at --limits (percent of the plain peak); joint with room for everything, and
plain beside itself; each peer, and rotoff joint at its peak, named ``joint@PEER``; rotoff remat and offload; with
--compiled, `torch.compile` with its memory budgets and rotoff in its bytes. A cell that is in the file already,
from the same machine and versions, is not run again (--again CELL forces it; each keeps the commit that ran it). Where
others used the machine, --wider 0.06 runs those cells again, at the end, whose quartiles are further apart than that,
and keeps whichever run has them closer: a cell is chosen by its spread alone, never by what it says. Cells go round by
method, so that no method has the machine's best hour; on CUDA, where the machine may be there for minutes, one workload
after the other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotoff.io.files import write_whole

from . import methods, workloads
from .aims import EVERYTHING, ITSELF


@dataclass(frozen=True)
class Round:
    """One method on some workloads. percent: of plain's peak, as the limit. like: whose peak is the limit."""

    method: str
    workloads: Sequence[str]
    percent: float = 0
    like: str = ""
    pairs: float = 1  # of steps, over the usual number


def machine(device: str) -> dict[str, Any]:
    """Hardware and versions; cells from another machine or other versions do not mix."""
    import torch

    import rotoff
    from rotoff.tools.doctor import cores, processor

    about: dict[str, Any] = {
        "cpu": processor(),
        "cores": cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rotoff": rotoff.__version__,
    }
    if device.startswith("cuda"):
        about |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return about


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

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data: dict[str, Any] = {
            **{"format": "rotoff.grid", "suite": options.suite, "machine": machine(options.device)},
            **{"threads": options.threads, "limits": options.limits, "cells": {}, "twice": []},
        }
        if options.out.exists():
            before = json.loads(options.out.read_text(encoding="utf-8"))
            if before.get("machine") != self.data["machine"]:
                raise SystemExit(f"{options.out} is of another machine or other versions; name another --out")
            self.data |= {key: before[key] for key in ("cells", "twice") if key in before}
        self.cells: dict[str, Any] = self.data["cells"]
        for name in options.again:
            self.cells.pop(name, None)

    def todo(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name, cell) of all cells that have not run, in order; later ones need the results of earlier ones."""
        chosen = self.options.workloads
        for together in [[name] for name in chosen] if self.options.suite == "cuda" else [chosen]:
            for round_of in self._rounds():
                for workload in together:
                    if workload in round_of.workloads and (cell := self._cell(workload, round_of)) is not None:
                        yield cell
        wide = {name: spread(record["result"]) for name, record in self.cells.items() if name.split("/")[0] in chosen}
        for name, apart in wide.items():
            if self.options.wider is not None and self.options.wider < apart < math.inf:
                yield name, {**self.cells[name]["cell"], "host_directory": self.options.host_directory}

    def _rounds(self) -> Iterator[Round]:
        every, compiled = self.options.workloads, self.options.compiled
        yield Round("plain", every)
        yield from (Round("joint", every, percent=percent) for percent in self.options.limits)
        # with room for everything, twice over: what rotoff costs where it has nothing to do; and plain beside itself,
        # which says how much of that is the measurement's. Differences are small here, so there are more pairs.
        yield Round("joint", every, like=EVERYTHING, pairs=2)
        yield Round(ITSELF, every, pairs=2)
        for peer in methods.PEERS:
            yield from (Round(peer, every), Round("joint", every, like=peer))
        for mode in ("remat", "offload"):
            yield from (Round(mode, every, percent=percent) for percent in self.options.limits)
        for peer in methods.BUDGETS:
            yield from (Round(peer, compiled), Round("joint", compiled, like=peer))

    def _cell(self, workload: str, of: Round) -> tuple[str, dict[str, Any]] | None:
        """The cell of a round, if it has not run and its limit is known."""
        options, limit = self.options, None
        name = f"{workload}/{of.method}" + (f"@{of.like}" if of.like else f"@{of.percent:g}%" if of.percent else "")
        if of.percent or of.like:
            found = self.cells.get(f"{workload}/{of.like if of.like not in ('', EVERYTHING) else 'plain'}")
            result = found["result"] if found else {}
            # where plain PyTorch runs out of memory, what it would take
            peak = result.get("peak_allocated") or result.get("predicted_peak")
            if peak is None:
                return None
            limit = int(peak * of.percent / 100) if of.percent else 2 * peak if of.like == EVERYTHING else peak
        if name in self.cells:
            return None
        cell = {"suite": options.suite, "workload": workload, "method": of.method, "limit": limit}
        cell |= {"device": options.device, "seconds": of.pairs * options.seconds, "threads": options.threads}
        return name, cell | {"host_directory": options.host_directory}

    def run(self, name: str, cell: dict[str, Any], end: float | None = None) -> dict[str, Any] | None:
        """Run one cell in a process of its own and keep what came out; None where `end` came first, and nothing is
        kept."""
        command = [sys.executable, "-m", "benchmarks.grid.cell", json.dumps(cell)]
        begin, load, most = time.time(), os.getloadavg(), self.options.cell_minutes * 60
        allowed = most if end is None else min(most, max(1.0, end - begin))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=allowed)
            result = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            if allowed < most:
                return None
            result = {"status": "too slow", "note": f"stopped after {self.options.cell_minutes:g} minutes"}
        except (IndexError, ValueError):  # it died: killed for memory, or a fault that the note shows
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            killed = done.returncode in (-9, 137)
            result = {"status": "out of memory" if killed else "failed", "note": last[:500]}
            # the file has one line of it
            print(f"{name} died with exit code {done.returncode}:\n{done.stderr[-4000:]}", flush=True)
        kept = {key: value for key, value in cell.items() if key != "host_directory"}
        record = {"cell": kept, "commit": commit(), "load_before": load[0], "seconds": round(time.time() - begin, 1)}
        record["result"] = {"peak_allocated": None, "ratio": None} | result
        before = self.cells.get(name)
        if before is not None:
            self.data["twice"] = sorted({*self.data["twice"], name})
        if before is None or spread(record["result"]) < spread(before["result"]):
            self.cells[name] = record
        write_whole(self.options.out, json.dumps(self.data, indent=1) + "\n")
        return record["result"]


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
    add = parser.add_argument
    add("--suite", choices=list(workloads.SUITES), default="cpu")
    add("--out", type=Path, required=True)
    add("--workloads", nargs="*", metavar="NAME", help="only these, in this order")
    add("--limits", nargs="*", type=float, default=[80, 60, 45, 30, 20], help="%% of the plain peak")
    add("--compiled", nargs="*", metavar="NAME", help="also torch.compile, of these workloads or of all")
    add("--seconds", type=float, default=8, help="that a cell's timed steps may take (%(default)s)")
    add("--cell-minutes", type=float, default=5, help="after which a cell is stopped (%(default)s)")
    add("--minutes", type=float, help="stop after this many; a cell under way is left for the next call")
    add("--again", nargs="*", default=[], metavar="CELL", help="run these anew")
    add("--wider", type=float, metavar="SPREAD", help="run those anew whose quartiles are further apart")
    add("--host-directory", help="where the file of offloaded values lies; a real disk")
    add("--threads", type=int, help="compute threads of every method (CPU: cores - 1)")
    options = parser.parse_args(arguments)
    options.device = "cuda" if options.suite == "cuda" else "cpu"
    known = [workload.name for workload in workloads.SUITES[options.suite]]
    options.workloads = options.workloads or known
    options.compiled = options.workloads if options.compiled == [] else options.compiled or []
    for name in options.workloads:
        if name not in known:
            parser.error(f"{name!r} is no workload of suite {options.suite}; it has {', '.join(known)}")
    if options.threads is None and options.device == "cpu":
        options.threads = max(1, (machine("cpu")["cores"] or 2) - 1)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when complete, 3 where the time was up before. The first cell may take all of a cell's time."""
    options = parse(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    grid = Grid(options)
    end = time.time() + 60 * options.minutes if options.minutes else None
    for n, (name, cell) in enumerate(grid.todo()):
        result = grid.run(name, cell, end if n else None) if not n or end is None or time.time() < end else None
        if result is None:
            print(f"time is up; {len(grid.cells)} cells are in {options.out}; run this again to go on")
            return 3
        print(said(name, result), flush=True)
    print(f"complete: {len(grid.cells)} cells in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

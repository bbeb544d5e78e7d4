"""Measured step time against the predicted one, at each limit and mode, as a table and JSON.

The model and its text are those of `examples/compare_modes.py`, whose options are taken too. A row trains plain PyTorch
and rotoff in turn, the one that goes first changing, and compares medians of the pairs:

* ratio: our step over plain PyTorch's beside it, against the step expected of the plan over keeping everything. What
  the machine does to both (a slower clock, a neighbour) cancels; this is the figure that is to be within 5 %.
* seconds: our step against the expected one, as it is.
* link: the expected step with the bandwidth measured anew right before the row: disks are not what they were a minute
  ago.

On Linux glibc returns freed memory to the system and fetches it back page by page in the next step. Plain PyTorch,
which holds most, pays most for that (5 to 10 % of a step, a page fault for each 4 KiB), and the measured ratio falls
below the predicted one. No operation of a plan costs it, so here freed memory stays with the process unless --malloc
default.

    python benchmarks/prediction.py --out benchmarks/results/prediction.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rotoff
from rotoff.io.atomic_write import write_whole
from rotoff.profile.measure import link_of

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import compare_modes  # after the path that it lies on

# of malloc.h, and values that keep all
MALLOPT = {"M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_MMAP_THRESHOLD": (-3, 2**30)}


@dataclass
class Row:
    """One limit and mode; times in seconds, shares as ratios, `*_error` = measured / predicted - 1."""

    limit: float
    mode: str
    predicted: float
    predicted_ratio: float
    measured: float
    measured_ratio: float
    ratio_error: float
    seconds_error: float
    with_link_now: float
    link_error: float
    moved_bytes: int
    pairs: int
    faults: float
    plain_faults: float


def keep_freed_memory() -> bool:
    """Have glibc's malloc hold on to what is freed; whether it could be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    told = [mallopt(*setting) for setting in MALLOPT.values()]  # all of them, also where one fails
    return told == [1] * len(told)


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def timed(model: torch.nn.Module, batch: compare_modes.Batch) -> tuple[float, int]:
    """Seconds of a step, and the pages that it had to fetch from the system."""
    before = page_faults()
    _, seconds = compare_modes.timed_step(model, batch)
    return seconds, page_faults() - before


def link_now(model: rotoff.Checkpointable) -> rotoff.Chain:
    """The chain, with the bandwidths of this minute."""
    d2h, h2d, *_ = link_of(model.chain.stages, partial(model._links.bandwidth, model.profile.device))
    return replace(model.chain, d2h_bandwidth=d2h, h2d_bandwidth=h2d)


def measure(comparison: compare_modes.Comparison, limit: float, mode: str, seconds: float, least: int) -> Row | None:
    """Pairs of steps for about `seconds`, but `least` of them; None where nothing fits."""
    model, options = comparison.model, comparison.options
    try:
        model.compute_sequence(int(limit * model.keep_all_memory), mode=mode)
    except rotoff.InfeasibleError:
        return None
    predicted, chain = model.get_expected_makespan(), link_now(model)
    data = compare_modes.batches(comparison.text, options)
    found: list[tuple[tuple[float, int], tuple[float, int]]] = []  # of plain PyTorch, and of rotoff
    start = time.perf_counter()
    while len(found) < least + 1 or time.perf_counter() - start < seconds:
        batch, pair = next(data), {}
        for which in (0, 1) if len(found) % 2 else (1, 0):
            torch.manual_seed(options.seed)
            pair[which] = timed((comparison.plain, model)[which], batch)
        found.append((pair[0], pair[1]))
    plain, ours = zip(*found[1:], strict=True)  # the first warms up
    ratio = statistics.median(b[0] / a[0] for a, b in zip(plain, ours, strict=True))
    step, predicted_ratio = statistics.median(s for s, _ in ours), predicted / model.profile.chain.compute_time
    now = rotoff.simulate(chain, model.sequence).makespan
    now_ratio = now / model.profile.chain.compute_time
    return Row(
        limit=limit,
        mode=mode,
        predicted=predicted,
        predicted_ratio=predicted_ratio,
        measured=step,
        measured_ratio=ratio,
        ratio_error=ratio / predicted_ratio - 1,
        seconds_error=step / predicted - 1,
        with_link_now=now_ratio,
        link_error=ratio / now_ratio - 1,
        moved_bytes=rotoff.simulate(model.chain, model.sequence).d2h_bytes,
        pairs=len(ours),
        faults=statistics.median(n for _, n in ours),
        plain_faults=statistics.median(n for _, n in plain),
    )


HEADER = (
    "limit  mode     predicted  measured   error  link now   error   seconds: predicted  measured   error  faults  "
    " plain"
)


def line(row: Row) -> str:
    ratios = f"{row.predicted_ratio:9.3f} {row.measured_ratio:9.3f} {100 * row.ratio_error:+6.1f}%"
    link = f"{row.with_link_now:9.3f} {100 * row.link_error:+6.1f}%"
    seconds = f"{row.predicted:18.4f} {row.measured:9.4f} {100 * row.seconds_error:+6.1f}%"
    return f"{row.limit:5.0%}  {row.mode:<7} {ratios} {link} {seconds} {row.faults:7.0f} {row.plain_faults:7.0f}"


def summary(rows: list[Row]) -> dict[str, Any]:
    errors = [abs(row.ratio_error) for row in rows]
    return {
        "largest_ratio_error": max(errors),
        "median_ratio_error": statistics.median(errors),
        "within_5_percent": sum(error <= 0.05 for error in errors),
        "largest_link_error": max(abs(row.link_error) for row in rows),
        "rows": len(rows),
    }


def figures(
    comparison: compare_modes.Comparison, kept: bool, load: tuple[float, float, float], seconds: float, rows: list[Row]
) -> dict[str, Any]:
    """What is written, after each row. kept: whether malloc keeps what is freed. load: before. seconds: since the
    start."""
    options, chain = comparison.options, comparison.model.chain
    return {
        "machine": {**compare_modes.machine(options), "load_before": load, "load_after": os.getloadavg()},
        "options": {key: str(value) if key in ("device", "json") else value for key, value in vars(options).items()},
        "freed_memory_kept": kept,
        "keep_all_bytes": comparison.model.keep_all_memory,
        "bandwidth": {"d2h": chain.d2h_bandwidth, "h2d": chain.h2d_bandwidth, "duplex": chain.duplex},
        "seconds": seconds,
        "stages": len(chain),
        "host_bound_stages": sum(comparison.model.profile.host_bound),
        "summary": summary(rows),
        "rows": [asdict(row) for row in rows],
    }


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures here")
    parser.add_argument("--seconds", type=float, default=20, help="time of each row's pairs, about (%(default)s)")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of steps in each row, at least (%(default)s)")
    parser.add_argument(
        "--malloc", choices=("keep", "default"), default="keep", help="what glibc does with freed memory"
    )
    own, rest = parser.parse_known_args(arguments)
    options = compare_modes.parse_options(rest)
    kept = own.malloc == "keep" and keep_freed_memory()
    torch.set_num_threads(options.threads)
    load, start = os.getloadavg(), time.perf_counter()
    progress = compare_modes.Progress(1)
    comparison = compare_modes.Comparison(options)
    # what a process does first is slower: plain steps bring the clock, the caches and the heap to where training has
    # them
    batch = next(compare_modes.batches(comparison.text, options))
    for _ in range(3):
        compare_modes.timed_step(comparison.plain, batch)
    comparison.measure(progress)
    print(HEADER, flush=True)
    rows: list[Row] = []
    for limit, mode in [
        (1.0, "joint"),
        *[(part / 100, mode) for part in options.limits for mode in compare_modes.MODES],
    ]:
        row = measure(comparison, limit, mode, own.seconds, own.pairs)
        print(f"{limit:5.0%}  {mode:<7} does not fit" if row is None else line(row), flush=True)
        if row is not None:
            rows.append(row)
            if own.out:  # now, since there may be no time for the next one
                found = figures(comparison, kept, load, time.perf_counter() - start, rows)
                write_whole(own.out, json.dumps(found, indent=1) + "\n")
    comparison.model.close()
    print(json.dumps(summary(rows), indent=1))
    return rows


if __name__ == "__main__":
    main()

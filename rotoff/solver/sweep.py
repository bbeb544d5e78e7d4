"""Many limits from one call: step time against bytes, as rows, as a table and as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np

from ..bounds import MODES, check_mode, lower_bound, min_mem_limit
from ..chain import Chain
from ..errors import InfeasibleError, OptionError
from ..sequence import Sequence
from ..simulator import simulate
from ..sizes import format_bytes, parse_bytes
from ..whole_file import write_whole
from .plan import keep_all
from .policies import check_policy, run
from .refine import Budget
from .search import Candidate, Problem, as_sequence, best_candidate, parse_host_limit

STEPS = 12  # limits where none are given


@dataclass(frozen=True)
class Row:
    """One limit in one mode; makespan and what depends on it are None where nothing fits.

    mode: or the policy. limit, peak_bytes, host_peak_bytes: bytes. makespan, bound: seconds. overhead: makespan over the
    keep-all time, less 1.
    """

    limit: int
    mode: str
    makespan: float | None
    peak_bytes: int | None
    host_peak_bytes: int | None
    bound: float | None
    overhead: float | None


@dataclass(frozen=True)
class Sweep:
    """Rows by mode and rising limit, and the sequence of each row (None where nothing fits)."""

    rows: tuple[Row, ...]
    sequences: tuple[Sequence | None, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        lines = [f"{'limit':>12} {'mode':<8} {'step s':>11} {'overhead':>9} {'bound':>8} {'peak':>12} {'host':>12}"]
        for row in self.rows:
            head = f"{format_bytes(row.limit):>12} {row.mode:<8}"
            if row.makespan is None or row.bound is None or row.overhead is None:
                lines.append(f"{head} {'does not fit':>11}")
                continue
            scale = row.makespan / (1 + row.overhead) if row.overhead > -1 else 0.0
            bound = row.bound / scale - 1 if scale else 0.0
            held = f"{format_bytes(row.peak_bytes or 0):>12} {format_bytes(row.host_peak_bytes or 0):>12}"
            lines.append(f"{head} {row.makespan:>11.6g} {row.overhead:>9.2%} {bound:>8.2%} {held}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV to `path`; what does not fit is left empty."""
        names = [field.name for field in fields(Row)]
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in self.rows)
        write_whole(path, text.getvalue())


def sweep(
    chain: Chain,
    limits: Iterable[int | str] | None = None,
    modes: Iterable[str] = MODES,
    mem_slots: int = 50,
    refine: bool | float = True,
    host_limit: int | str | None = None,
    progress: Callable[[float, Row], None] | None = None,
    policies: Iterable[str] = (),
) -> Sweep:
    """Step time against bytes for several limits and modes.

    Limits are taken from the smallest up: the plan of one is known to the next, so step times never rise with the limit, and
    once a limit costs nothing the larger ones are not searched at all.

    Args:
        limits: bytes or sizes; by default evenly from the smallest limit of any mode to the peak of keeping everything.
        modes: any of "joint", "remat", "offload".
        mem_slots, refine, host_limit: as for `solve`.
        progress: called with (fraction done, row) after each row.
        policies: systems of the papers to show beside the modes, such as "vdnn"; each limit is planned by itself.
    """
    wanted = tuple(modes)
    for mode in wanted:
        check_mode(mode)
    systems = tuple(policies)
    for policy in systems:
        check_policy(policy)
    if not wanted:
        raise OptionError("modes is empty; give at least one of 'joint', 'remat', 'offload'")
    peak = simulate(chain, keep_all(chain)).peak_bytes
    if limits is None:
        least = max(1, min(min_mem_limit(chain, mode) for mode in wanted))
        sizes = sorted({round(size) for size in np.linspace(least, max(least, peak), STEPS)})
    else:
        sizes = sorted({parse_bytes(limit) for limit in limits})
    host = None if host_limit is None else parse_host_limit(host_limit)
    budget = Budget.of(refine)
    rows: list[Row] = []
    sequences: list[Sequence | None] = []
    for mode in wanted:
        best: Candidate | None = None
        for limit in sizes:
            if best is None or best.makespan > chain.compute_time * (1 + 1e-12):
                known = () if best is None or best.codes is None else (best.codes,)
                try:
                    found = best_candidate(Problem(chain, limit, host, mem_slots, budget, known), mode)
                    best = found if best is None or found.makespan <= best.makespan else best
                except InfeasibleError:
                    best = None
            sequences.append(None if best is None else as_sequence(chain, best, mode, limit))
            rows.append(_row(chain, limit, mode, sequences[-1]))
            if progress is not None:
                progress(len(rows) / (len(sizes) * (len(wanted) + len(systems))), rows[-1])
    for policy in systems:
        for limit in sizes:
            sequences.append(_by_policy(chain, limit, policy))
            rows.append(_row(chain, limit, policy, sequences[-1]))
            if progress is not None:
                progress(len(rows) / (len(sizes) * (len(wanted) + len(systems))), rows[-1])
    return Sweep(tuple(rows), tuple(sequences))


def _by_policy(chain: Chain, limit: int, policy: str) -> Sequence | None:
    try:
        return run(policy, chain, limit, {})
    except InfeasibleError:
        return None


def _row(chain: Chain, limit: int, mode: str, sequence: Sequence | None) -> Row:
    if sequence is None:
        return Row(limit, mode, None, None, None, None, None)
    makespan, least = sequence.meta["makespan"], chain.compute_time
    overhead = makespan / least - 1 if least else 0.0
    bound = lower_bound(chain, limit)
    return Row(limit, mode, makespan, sequence.meta["peak_bytes"], sequence.meta["host_peak_bytes"], bound, overhead)

"""Plans for many limits from one call: step time against bytes, as rows, as a table and as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import numpy as np

from ..core.chain import Chain, check_chain
from ..core.figures import Figures, overhead, percent, table
from ..core.modes import as_tuple, parse_modes
from ..core.sequence import MODES, Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes, parse_bytes
from ..core.steady_step import check_when
from ..errors import InfeasibleError
from ..io.files import write_whole
from .anneal import FLOAT_ERROR, Budget
from .bounds import lower_bound, min_mem_limit
from .plan_codes import keep_all
from .policies import check_policy, run
from .search import Candidate, Problem, as_sequence, best_candidate, parse_host_limit
from .slots import parse_slots

STEPS = 12  # number of limits, if none are given


@dataclass(frozen=True)
class Row:
    """One limit in one mode; makespan and what depends on it are None if nothing fits.

    mode: the mode or the policy.
    limit, peak_bytes, host_peak_bytes: bytes.
    makespan, bound: seconds.
    overhead: makespan over the keep-all time, less 1; both with the updates of the chain's parameters.
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
    """The result of `sweep`.

    rows: by mode and rising limit. sequences: of each row; None if nothing fits.
    """

    rows: tuple[Row, ...]
    sequences: tuple[Sequence | None, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        rows = []
        for row in self.rows:
            cells = [format_bytes(row.limit), row.mode, "does not fit", "", "", "", ""]
            if row.makespan is not None and row.bound is not None and row.overhead is not None:
                scale = row.makespan / (1 + row.overhead) if row.overhead > -1 else 0.0
                times = percent(row.overhead), percent(overhead(row.bound, scale))
                held = map(format_bytes, (row.peak_bytes or 0, row.host_peak_bytes or 0))
                cells[2:] = [f"{row.makespan:.6g}", *times, *held]
            rows.append(cells)
        return "\n".join(table(("limit", "mode", "step s", "overhead", "bound", "peak", "host"), rows, (1,)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV to `path`; fields of a limit that nothing fits are empty."""
        names = [field.name for field in fields(Row)]
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in self.rows)
        write_whole(path, text.getvalue())


def sweep(
    chain: Chain,
    limits: Iterable[int | str] | int | str | None = None,
    modes: Iterable[str] | str = MODES,
    mem_slots: int = 50,
    refine: bool | float = True,
    host_limit: int | str | None = None,
    progress: Callable[[float, Row], None] | None = None,
    policies: Iterable[str] | str = (),
    updates: str = "during",
) -> Sweep:
    """Plan for several limits and modes, to see what memory costs in time.

    Limits are planned in rising order, and each search starts from the plan of the limit before. So step times never
    rise with the limit, and once a limit costs nothing, larger ones are not searched.

    Args:
        chain: the costs of the stages.
        limits: bytes or sizes, or one of them; by default evenly spaced from the smallest limit of any mode to the
            keep-all peak.
        modes: any of "joint", "remat", "offload", or one of them.
        mem_slots, refine, host_limit, updates: as for `solve`; policies that place parameters get `updates` too.
        progress: called with (fraction done, row) after each row.
        policies: systems of the papers to compare with the modes, such as "vdnn"; each limit is planned separately.
    """
    check_chain(chain)
    wanted = parse_modes(modes)
    systems = as_tuple(policies)
    for policy in systems:
        check_policy(policy)
    check_when(updates)
    everything = simulate(chain, keep_all(chain, updates))
    if limits is None:
        least = max(1, min(min_mem_limit(chain, mode, updates) for mode in wanted))
        sizes = sorted({round(size) for size in np.linspace(least, max(least, everything.peak_bytes), STEPS)})
    else:
        sizes = sorted({parse_bytes(limit) for limit in as_tuple(limits)})
    host = None if host_limit is None else parse_host_limit(host_limit)
    slots, budget = parse_slots(mem_slots), Budget.of(refine)
    problems = [Problem(chain, limit, host, slots, budget, updates) for limit in sizes]
    made: dict[str, list[tuple[Row, Sequence | None]]] = {}
    # joint last, since it uses the results of the others
    names = dict.fromkeys((*sorted(wanted, key=lambda mode: mode == "joint"), *systems))
    bests: dict[str, list[Candidate | None]] = {}
    for name in names:
        made[name] = []
        for n, sequence in enumerate(_by_mode(problems, name, bests) if name in MODES else _by_policy(problems, name)):
            made[name].append((_row(chain, sizes[n], name, sequence, updates, everything.makespan), sequence))
            if progress is not None:
                progress(sum(map(len, made.values())) / (len(sizes) * len(names)), made[name][-1][0])
    pairs = [pair for name in (*wanted, *systems) for pair in made[name]]
    return Sweep(tuple(row for row, _ in pairs), tuple(sequence for _, sequence in pairs))


def _by_mode(problems: list[Problem], mode: str, bests: dict[str, list[Candidate | None]]) -> Iterator[Sequence | None]:
    """The sequence of each problem, in rising limits. `bests` has the candidates of earlier modes, and gets this one's.

    At each limit the candidates of the pure modes, which may be plans of smaller limits, compete with joint's.
    """
    bests[mode] = []
    best: Candidate | None = None
    for n, problem in enumerate(problems):
        rivals = [best, *(others[n] for others in bests.values() if mode == "joint" and len(others) > n)]
        if best is None or best.makespan > problem.chain.compute_time * (1 + FLOAT_ERROR):
            known = () if best is None or best.codes is None else (best.codes,)
            with suppress(InfeasibleError):
                rivals.insert(0, best_candidate(replace(problem, known=known), mode))
        best = min((made for made in rivals if made is not None), key=lambda made: made.makespan, default=None)
        bests[mode].append(best)
        yield None if best is None else as_sequence(problem, best, mode)


def _by_policy(problems: list[Problem], policy: str) -> Iterator[Sequence | None]:
    for problem in problems:
        made = None
        with suppress(InfeasibleError):
            options = {"updates": problem.updates} if problem.chain.parameters else {}
            made = run(policy, problem.chain, problem.limit, options)
        yield made


def _row(chain: Chain, limit: int, mode: str, sequence: Sequence | None, updates: str, whole: float) -> Row:
    """A row. whole: seconds of keeping everything."""
    if sequence is None:
        return Row(limit, mode, None, None, None, None, None)
    meta, bound = sequence.meta, lower_bound(chain, limit, updates=updates)
    step = Figures(limit, meta["peak_bytes"], meta["host_peak_bytes"], meta["makespan"], whole)
    return Row(limit, mode, step.step_time, step.peak_bytes, step.host_bytes, bound, step.overhead)

"""The search in a mode: collects proposals, compares and improves them on exact bytes; the machine checks the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..core.chain import Chain
from ..core.sequence import Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes, parse_bytes
from ..core.trace import figures
from ..errors import InfeasibleError
from . import joint, placed_search, remat
from .anneal import FLOAT_ERROR, Problem, Progress, least_compute, refined
from .arrays import arrays
from .bounds import host_plan, infeasible, min_mem_limit
from .plan_codes import MOVE, empty, evaluator, keep_all, moved, select, to_ops, without_forms
from .reorder import reordered

TABLE_WORK = 150_000_000  # states times choices of the recompute tables: about a tenth of a second
ORDER_SHARE = 0.4  # seconds of reordering where `refine` is 1: of all plans together, then of the best one
STARTS = 6  # of the search: the fastest proposals, and two that do not fit
FORMS_SHARE = 0.6  # share of the effort for the search with smaller forms after the one without


@dataclass(frozen=True)
class Candidate:
    """A sequence that fits: its step time in seconds, its plan if it has one, and its source."""

    makespan: float
    sequence: Sequence
    codes: np.ndarray | None
    source: str


def best_candidate(problem: Problem, mode: str, progress: Progress | None = None) -> Candidate:
    """The best candidate of `mode`; keeps everything if that fits and no update is faster on the host.

    Raises:
        InfeasibleError: if nothing fits.
    """
    problem = replace(problem, mode=mode)
    chain, limit, host = problem.chain, problem.limit, problem.host_limit
    everything = keep_all(chain, problem.updates)
    trace = simulate(chain, everything)
    seconds = trace.makespan if chain.parameters else chain.compute_time
    kept = Candidate(seconds, everything, None, "keep-all")
    # Only updates may be faster elsewhere: the host's lane is free.
    alone = not chain.parameters or mode == "remat" or seconds <= least_compute(chain) * (1 + FLOAT_ERROR)
    if trace.peak_bytes <= limit and alone:
        return kept
    least = min_mem_limit(chain, mode, problem.updates)
    if limit < least:
        raise infeasible(chain, mode, limit, problem.updates)
    best = _with_rivals(problem, progress)
    if trace.peak_bytes <= limit and (best is None or kept.makespan <= best.makespan):
        return kept
    if best is None:
        raise InfeasibleError(
            f"nothing found within {format_bytes(limit)} on the device and {format_bytes(host or 0)} on the host in"
            f" mode {mode}; without a host limit it needs at least {format_bytes(least)} ({least} bytes)",
            least,
        )
    return best


def _with_rivals(problem: Problem, progress: Progress | None) -> Candidate | None:
    """The best plan found; in joint also of those that `solve` finds in the pure modes, so it is never slower."""
    rivals: list[Candidate] = []
    for pure in ("offload", "remat") if problem.mode == "joint" else ():
        rival = replace(problem, mode=pure)
        if _fits(rival) and (made := _best(rival, None)) is not None:
            rivals.append(made)
            if made.makespan <= problem.budget.enough(problem.chain):
                return _fastest(rivals)
    return _fastest([*rivals, _best(problem, progress)])


def _fits(problem: Problem) -> bool:
    """Whether the mode has a plan within the limit on the device."""
    return problem.limit >= min_mem_limit(problem.chain, problem.mode, problem.updates)


def parse_host_limit(host_limit: int | str) -> int:
    """Read the option `host_limit`, in bytes; 0 is a limit too."""
    return 0 if not isinstance(host_limit, (bool, str)) and host_limit == 0 else parse_bytes(host_limit, "host_limit")


def _best(problem: Problem, progress: Progress | None) -> Candidate | None:
    """The best plan found. If the directions of the link slow each other down, the plan for a link whose directions do
    not competes; where it takes no longer on the real link, no search can gain anything."""
    chain, given = problem.chain, None
    if problem.mode != "remat" and min(chain.bidirectional_shares) < 1:
        ideal = replace(chain, d2h_bidirectional_bandwidth=None, h2d_bidirectional_bandwidth=None)
        given = _best(replace(problem, chain=ideal), progress)
    if given is not None:
        seconds = simulate(chain, given.sequence, updates=problem.updates).makespan
        hindered = seconds > given.makespan * (1 + FLOAT_ERROR)
        given = replace(given, makespan=seconds)
        if not hindered:
            return given
    return _fastest([given, (_placed if chain.parameters else _by_forms)(problem, progress)])


def _fastest(candidates: Iterable[Candidate | None]) -> Candidate | None:
    return min((made for made in candidates if made is not None), key=lambda made: made.makespan, default=None)


def _by_forms(problem: Problem, progress: Progress | None) -> Candidate | None:
    """If stages have smaller forms, a search without them runs first; its result competes and is a start of the second
    search, so forms never make a plan slower. The two searches share the effort."""
    chain, known = problem.chain, problem.known
    if not any(stage.forms for stage in chain.stages):
        return _searched(problem, progress)
    plain = replace(
        problem, chain=without_forms(chain), known=tuple(codes for codes in known if codes.max() < select(1))
    )
    best = _searched(plain, None) if _fits(plain) else None
    if problem.mode == "offload":  # which keeps all that autograd saves
        return best
    if best is not None:
        known = known if best.codes is None else (*known, best.codes)
        problem = replace(problem, known=known, budget=problem.budget.part(FORMS_SHARE))
    return _fastest([best, _searched(problem, progress)])


def _searched(problem: Problem, progress: Progress | None) -> Candidate | None:
    """The best of all proposals and of the search from them. A plan that is fast enough ends the search."""
    chain, limit, host = problem.chain, problem.limit, problem.host_limit
    enough = problem.budget.enough(chain)
    found: list[Candidate] = []
    others: list[np.ndarray] = []  # that do not fit
    for source, codes in _proposals(problem):
        made = judged(chain, limit, codes, source, host)
        if made is None:
            others.append(codes)
            continue
        found.append(made)
        if made.makespan <= enough:
            if progress is not None:
                progress(1.0, made.makespan)
            return made
    found.sort(key=lambda candidate: candidate.makespan)
    starts = [made.codes for made in found if made.codes is not None][:STARTS]
    starts += others[: STARTS + 2 - len(starts)]
    best = refined(problem, starts, progress)
    made = None if best is None else judged(chain, limit, best, "refined", host)
    found += [made] if made is not None else []
    if not found and problem.mode == "joint" and (away := host_plan(chain, limit)) is not None:
        return judged(chain, limit, away, "host", host)
    return _fastest(found)


def _proposals(problem: Problem) -> Iterator[tuple[str, np.ndarray]]:
    """(source, plan) of all kinds that `mode` allows, the fastest to make first. If a search follows, recompute has
    fewer slots, and the joint tables, which then gain next to nothing, are left out."""
    chain, limit, mode, quick = problem.chain, problem.limit, problem.mode, problem.budget.seconds > 0
    work = TABLE_WORK if quick else 20 * TABLE_WORK
    yield from (("known", codes) for codes in problem.known)
    if mode != "remat":
        yield from (("offload", codes) for codes in _moving(chain))
    if mode == "offload":
        return
    yield from remat.proposals(chain, limit, work)
    if mode == "remat":
        return
    yield from (("all-moving", codes) for codes in placed_search.all_moving(chain, limit))
    if not quick:
        yield from joint.proposals(chain, limit, problem.slots)
    for source, codes in remat.inflated(chain, limit, work):
        yield f"{source}-moved", moved(codes)


def _moving(chain: Chain) -> Iterator[np.ndarray]:
    """Plans that run every stage forward once and move the ā of the first stages (they are needed last), or of stages
    with the longest forward per byte, which hide their own copy.

    Values move only if they have to. So the plan that moves all of them fits whenever any plan of mode offload does.
    Sources: Euro-Par 2020 for the order of needs; the prefix is its GREEDY with the set chosen by size.
    """
    L, c = len(chain), arrays(chain)
    rank = np.argsort(-c.u_F[1:] / np.maximum(c.saved[1:, 0], 1), kind="stable") + 1
    first = sorted({L * part // 12 for part in range(1, 13)})
    for leaving in (*(np.arange(1, last + 1) for last in first), *(rank[: L * part // 12] for part in (3, 6, 9))):
        codes = empty(chain)
        codes[leaving] |= MOVE
        yield codes


def judged(chain: Chain, limit: int, codes: np.ndarray, source: str, host_limit: int | None = None) -> Candidate | None:
    """The plan as a candidate, or None if it does not fit."""
    L = len(chain)
    for most_ops in (16 * L + 64, 2 * L * L + 64):
        decoder = evaluator(chain, limit, codes.shape[1], host_limit, most_ops)
        makespan, *over = decoder.judge(codes.ravel())
        if math.isfinite(makespan):
            made = Sequence(to_ops(decoder.text(codes.ravel())))
            return None if any(over) else Candidate(makespan, made, codes, source)
    return None


def _placed(problem: Problem, progress: Progress | None) -> Candidate | None:
    """The best plan found for a chain with parameters."""
    plans = placed_search.searched(problem, progress)
    if not plans:
        return _fastest(_of_sequence(problem, *made) for made in placed_search.least(problem))
    text, plan = placed_search.sequence_of(problem, plans[0]), plans[0]
    if problem.budget.seconds:
        share = problem.budget.part(ORDER_SHARE / len(plans))
        texts = [(*reordered(problem, placed_search.sequence_of(problem, one), share), one) for one in plans]
        _, text, plan = min(texts, key=lambda one: one[0])
        text = reordered(problem, text, problem.budget.part(ORDER_SHARE))[1]
    return _of_sequence(problem, text, "placed", plan)


def _of_sequence(problem: Problem, sequence: Sequence, source: str, plan: np.ndarray | None = None) -> Candidate | None:
    """The sequence, which fits the limit, as a candidate; None where it does not fit the host's."""
    trace = simulate(problem.chain, sequence, problem.limit, problem.updates)
    if problem.host_limit is not None and trace.host_peak_bytes > problem.host_limit:
        return None
    return Candidate(trace.makespan, sequence, plan, source)


def as_sequence(problem: Problem, best: Candidate, mode: str) -> Sequence:
    """The candidate as a sequence that has passed the machine."""
    made = replace(best.sequence, mode=mode, mem_limit=problem.limit)
    trace = simulate(problem.chain, made, problem.limit, problem.updates)
    return replace(made, meta={**figures(trace), "source": best.source})

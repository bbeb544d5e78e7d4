"""`solve`: proposals of every kind, judged on exact bytes; the best sequence that the machine accepts is returned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bounds import check_mode, host_plan, infeasible, min_mem_limit
from ..chain import Chain
from ..errors import OptionError
from ..sequence import Op, Sequence
from ..simulator import simulate
from ..sizes import parse_bytes
from . import joint, offload, remat
from .host import host_sequence
from .plan import evaluator, keep_all, to_ops
from .refine import Budget, refined
from .slots import ROUNDINGS

REMAT_SLOTS = 500


@dataclass(frozen=True)
class Candidate:
    """A sequence that fits, its step time in seconds, its plan where it has one, and who proposed it."""

    makespan: float
    ops: tuple[Op, ...]
    codes: np.ndarray | None
    source: str


def solve(
    chain: Chain,
    mem_limit: int | str,
    mode: str = "joint",
    mem_slots: int = 50,
    refine: bool | float = True,
    progress: Callable[[float, float], None] | None = None,
) -> Sequence:
    """The fastest sequence found for one training step within `mem_limit`.

    Args:
        chain: the costs of the stages.
        mem_limit: bytes on the device, as a number or a size such as ``"6 GiB"``.
        mode: "joint" recomputes and moves, "remat" only recomputes, "offload" only moves.
        mem_slots: N, the slots of the joint dynamic program.
        refine: search on exact bytes after the dynamic programs; True for the default effort, a number for about that many
            seconds (the effort is a count of plans, so equal inputs give equal sequences), False for none.
        progress: called now and then with (fraction of the search done, best step time in seconds).

    Returns:
        A `Sequence` with `mode` and `mem_limit`; its `meta` holds the predicted makespan, peak_bytes, host_peak_bytes and
        the source of the plan. It passes ``simulate(chain, sequence, mem_limit)``.

    Raises:
        InfeasibleError: where nothing fits; its `min_mem_limit` does. LimitError, OptionError: for a bad argument.
    """
    limit = parse_bytes(mem_limit)
    check_mode(mode)
    if isinstance(mem_slots, bool) or not isinstance(mem_slots, (int, np.integer)) or mem_slots < 1:
        raise OptionError(f"mem_slots is {mem_slots!r}; give a whole number of at least 1")
    budget = Budget.of(refine)
    everything = keep_all(chain)
    if simulate(chain, everything).peak_bytes <= limit:
        return _sequence(chain, Candidate(0.0, everything.ops, None, "keep-all"), mode, limit)
    if limit < min_mem_limit(chain, mode):
        raise infeasible(chain, mode, limit)
    best = _best(chain, limit, mode, int(mem_slots), budget, progress)
    return _sequence(chain, best, mode, limit)


def _best(
    chain: Chain, limit: int, mode: str, mem_slots: int, budget: Budget, progress: Callable[[float, float], None] | None
) -> Candidate:
    found = candidates(chain, limit, mode, mem_slots, budget.seconds > 0)
    if mode == "joint":
        # The very results of the pure modes compete, so that joint is never slower than they are.
        for pure in ("remat", "offload"):
            if limit >= min_mem_limit(chain, pure):
                found.append(_best(chain, limit, pure, mem_slots, budget, None))
        found.sort(key=lambda candidate: candidate.makespan)
    return refined(chain, limit, mode, found, budget, progress)


def candidates(chain: Chain, limit: int, mode: str, mem_slots: int, quick: bool) -> list[Candidate]:
    """Every proposal that fits, best first; at least one where `min_mem_limit` says so."""
    proposals: list[tuple[str, np.ndarray]] = list(_proposals(chain, limit, mode, mem_slots, quick))
    found = [made for source, codes in proposals if (made := judged(chain, limit, codes, source)) is not None]
    if mode == "joint" and not found:
        plan = host_plan(chain, limit)
        if plan is not None:
            ops = host_sequence(chain, plan)
            found.append(Candidate(simulate(chain, ops, limit).makespan, ops, None, "host"))
    return sorted(found, key=lambda candidate: candidate.makespan)


def _proposals(chain: Chain, limit: int, mode: str, mem_slots: int, quick: bool) -> Iterator[tuple[str, np.ndarray]]:
    """quick: a search follows, so tables that take long are filled with fewer slots."""
    remat_slots = min(REMAT_SLOTS, remat.quick_slots(chain)) if quick else REMAT_SLOTS
    if mode != "offload":
        for rounding in ROUNDINGS:
            _, codes = remat.solve_slots(chain, limit, remat_slots, rounding)
            if codes is not None:
                yield f"remat-{rounding}", codes
        smallest = remat.smallest_plan(chain, limit)
        if smallest is not None:
            yield "remat-smallest", smallest
    if mode != "remat":
        for codes in offload.proposals(chain):
            yield "offload", codes
    if mode == "joint":
        slots = min(mem_slots, joint.quick_slots(chain)) if quick else mem_slots
        yield from joint.proposals(chain, limit, slots, min(remat_slots, remat.quick_slots(chain)))


def judged(chain: Chain, limit: int, codes: np.ndarray, source: str) -> Candidate | None:
    """The plan as a candidate, or None where it does not fit."""
    L = len(chain)
    for most_ops in (16 * L + 64, 2 * L * L + 64):
        decoder = evaluator(chain, limit, codes.shape[1], most_ops=most_ops)
        makespan, _, _, over = decoder.evaluate(codes)
        if math.isfinite(makespan):
            break
    if over or not math.isfinite(makespan):
        return None
    rows = decoder.operations(codes)
    assert rows is not None
    return Candidate(makespan, to_ops(rows), codes, source)


def _sequence(chain: Chain, best: Candidate, mode: str, limit: int) -> Sequence:
    trace = simulate(chain, best.ops, limit)  # what is returned has passed the machine
    meta: dict[str, Any] = {
        "makespan": trace.makespan,
        "peak_bytes": trace.peak_bytes,
        "host_peak_bytes": trace.host_peak_bytes,
        "source": best.source,
    }
    return Sequence(best.ops, mode=mode, mem_limit=limit, meta=meta)

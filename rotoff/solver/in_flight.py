"""Plans for several micro-batches under way at once, as in a pipeline.

A pipeline runs the forwards of several micro-batches before the backward of the first. Between its forward and its
backward a micro-batch *rests*, and holds the values that the plan has not moved or dropped by then. With k in flight,
one works and k - 1 rest, so a rank holds (k - 1) x resting bytes + the peak of one step. There is a trade-off: fewer
resting bytes leave more room for the working micro-batch. Each trade is solved on a chain with one more stage between
forward and backward, which takes no time and so many bytes that only the resting ones remain free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..core.chain import Chain, Stage
from ..core.modes import whole_number
from ..core.sequence import COMPUTES, FORWARDS, Op, OpKind
from ..core.sequence import Sequence as Plan
from ..core.simulator import Machine, simulate
from ..core.trace import figures
from ..errors import InfeasibleError, InvalidSequenceError
from .anneal import FLOAT_ERROR
from .bounds import min_mem_limit
from .plan_codes import keep_all
from .search import parse_host_limit
from .solve import solve

# Resting bytes to try, as shares of the way from the fewest to the most possible; the fastest plans first.
SHARES = (1.0, 0.85, 0.6, 0.3, 0.0)
QUICKLY = 0.01  # `refine` of each of these trades
SEARCHED = 2  # the fastest trades, which are searched again with the whole effort
# For each mode: the modes in which trades are solved, and whether ā_L rests whole (`_resting`).
_KINDS = {"joint": (("joint", True), ("remat", False)), "remat": (("remat", False),), "offload": (("offload", True),)}


parse_in_flight = partial(whole_number, name="in_flight")


def turn(operations: Sequence[Op], L: int) -> int:
    """How many of the operations run before a micro-batch rests: all up to the last forward, and the moves after it
    that free bytes."""
    index = next(n for n, op in enumerate(operations) if op.kind in FORWARDS and op.stage == L) + 1
    while index < len(operations) and operations[index].kind in (OpKind.OFFLOAD, OpKind.FREE, OpKind.DROP):
        index += 1
    return index


def resting_bytes(chain: Chain, operations: Sequence[Op]) -> int:
    """Bytes on the device between forward and backward, the chain's input and output included, without gradients."""
    machine = Machine(chain)
    for op in operations[: turn(operations, len(chain))]:
        machine.step(op)
    return machine.held_bytes - chain.grad_bytes(len(chain))


def needed_bytes(chain: Chain, operations: Sequence[Op], in_flight: int, beside: int = 0) -> int:
    """Bytes of `in_flight` micro-batches that each run `operations`. beside: as for `solve_in_flight`."""
    resting = (in_flight - 1) * (resting_bytes(chain, operations) + beside) if in_flight > 1 else 0
    return simulate(chain, operations).peak_bytes + resting


def least_in_flight(chain: Chain, mode: str, in_flight: int, beside: int = 0) -> int:
    """The smallest limit that `solve_in_flight` accepts."""
    if in_flight == 1:
        return min_mem_limit(chain, mode)
    found = [_least(chain, *kind) for kind in _KINDS[mode]]
    everything = needed_bytes(chain, keep_all(chain).ops, in_flight, beside)
    return min(everything, *(active + (in_flight - 1) * (rest + beside) for rest, active in found))


def solve_in_flight(
    chain: Chain, mem_limit: int, in_flight: int, beside: int = 0, mode: str = "joint", **options: Any
) -> Plan:
    """The fastest plan found for one micro-batch if `in_flight` of them share `mem_limit` bytes.

    Args:
        chain: without parameters. beside: bytes that a resting micro-batch holds in addition to the chain's.
        mode, options: as for `solve`; a `host_limit` is shared, too.

    Returns:
        A sequence whose `mem_limit` is the share of the working micro-batch. Its `meta` has "resting_bytes".

    Raises:
        InfeasibleError: if nothing fits; its `min_mem_limit` does.
    """
    others = in_flight - 1
    if not others:
        return solve(chain, mem_limit, mode=mode, **options)
    if options.get("host_limit") is not None:
        options["host_limit"] = parse_host_limit(options["host_limit"]) // in_flight
    progress, effort = options.pop("progress", None), options.pop("refine", True)
    shared = _Shared(chain, mem_limit, others, beside, options)
    everything = keep_all(chain)
    if simulate(chain, everything).peak_bytes <= shared.left(everything.ops):
        return shared.told(everything.ops, mode, "keep-all")
    least = least_in_flight(chain, mode, in_flight, beside)
    if mem_limit < least:
        raise InfeasibleError(f"{in_flight} micro-batches in flight need at least {least} bytes", least)
    most = (mem_limit - others * beside) // in_flight
    fastest = chain.compute_time * (1 + FLOAT_ERROR)
    trades = {}
    for kind in (*_KINDS[mode], *([("joint", False)] if mode == "joint" else [])):  # the last one's may be illegal
        fewest = _least(chain, *kind)[0]
        for share in SHARES:
            rest = fewest + int(share * max(0, most - fewest))
            trades[kind, rest] = seconds, ops = shared.traded(kind, rest, QUICKLY)
            if seconds <= fastest:
                return shared.told(ops, mode, "in-flight")
    ranked = sorted(trades, key=lambda trade: trades[trade][0])
    seconds, ops = trades[ranked[0]]
    for n, trade in enumerate(ranked[:SEARCHED] if effort else ()):
        seconds, ops = min((seconds, ops), shared.traded(*trade, effort), key=lambda found: found[0])
        if progress is not None:
            progress((n + 1) / SEARCHED, seconds)
    if not math.isfinite(seconds):  # a search may have moved to plans that rest with more
        alone = [shared.traded(kind, _least(chain, *kind)[0], False) for kind in _KINDS[mode]]
        seconds, ops = min(alone, key=lambda found: found[0])
    if not math.isfinite(seconds):
        told = f"nothing was found for {in_flight} micro-batches in flight within {mem_limit} bytes"
        raise InfeasibleError(told, max(least, mem_limit + 1))
    return shared.told(ops, mode, "in-flight")


@dataclass(frozen=True)
class _Shared:
    """A limit that a working micro-batch shares with `others` that rest. beside, options: as for `solve_in_flight`."""

    chain: Chain
    mem_limit: int
    others: int
    beside: int
    options: dict[str, Any]

    def left(self, ops: Sequence[Op]) -> int:
        """Bytes left for the working micro-batch if all run `ops`."""
        return self.mem_limit - self.others * (resting_bytes(self.chain, ops) + self.beside)

    def traded(self, kind: tuple[str, bool], rest: int, refine: bool | float) -> tuple[float, tuple[Op, ...]]:
        """(seconds, operations) with at most `rest` resting bytes; (infinity, ()) if nothing was found."""
        active, L = self.mem_limit - self.others * (rest + self.beside), len(self.chain)
        if active < max(1, rest):
            return math.inf, ()
        try:
            chain = _resting(self.chain, active - rest, kind[1])
            found = solve(chain, active, mode=kind[0], refine=refine, **self.options)
            ops = tuple(op for op in found.ops if op.stage < L or (op.stage == L and op.kind in COMPUTES))
            return simulate(self.chain, ops, self.left(ops)).makespan, ops
        except (InfeasibleError, InvalidSequenceError):
            return math.inf, ()

    def told(self, ops: Iterable[Op], mode: str, source: str) -> Plan:
        """`ops` as a sequence with the machine's figures in its meta."""
        made, chain = tuple(ops), self.chain
        active = self.left(made)
        trace = simulate(chain, made, active)
        meta = {**figures(trace), "resting_bytes": resting_bytes(chain, made), "source": source}
        return Plan(made, mode=mode, mem_limit=active, meta=meta)


def _resting(chain: Chain, nbytes: int, whole: bool) -> Chain:
    """`chain` with another last stage that takes `nbytes` beside the resting values; its output stands for a_L, which
    the caller keeps. whole: whether all of ā_L rests, since no operation may move it; if not, a_L may rest alone."""
    output, last = chain.output_bytes(len(chain)), chain.stages[-1]
    taken = max(0, nbytes - output)
    rest = Stage("rest", 0.0, 0.0, output, output, grad_bytes=0, forward_transient_bytes=taken)
    if whole:
        last = replace(last, output_bytes=last.saved_bytes, grad_bytes=chain.grad_bytes(len(chain)), forms=())
    return replace(chain, stages=(*chain.stages[:-1], last, rest))


def _least(chain: Chain, mode: str, whole: bool) -> tuple[int, int]:
    """(resting bytes, bytes of the working micro-batch) of the plans with the fewest resting bytes."""
    much = 4 * sum(stage.saved_bytes + stage.backward_transient_bytes for stage in chain.stages) + chain.input_bytes
    much += 4 * max(stage.forward_transient_bytes + (stage.checkpoint_transient_bytes or 0) for stage in chain.stages)
    output = chain.output_bytes(len(chain))
    rest = min_mem_limit(_resting(chain, much + output, whole), mode) - much - output
    active = max(rest, min_mem_limit(_resting(chain, 0, whole), mode))
    while (needed := min_mem_limit(_resting(chain, active - rest, whole), mode)) > active:
        active = needed
    return rest, active

"""Plans a step on a tape within a limit: the solver proposes on the chain, the exact levels decide."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

from ..core.chain import Chain
from ..core.sequence import FORWARDS, Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..errors import InfeasibleError
from ..profile.tape_chain import TapeChain
from ..solver import solve
from ..solver.bounds import min_mem_limit

ROUNDS = 12  # chains that are tried, each with more for the first runs that exceed the limit

Found = tuple[TapeChain, Sequence]


def plan(chains: Several[TapeChain], limit: int, mode: str = "joint", **options: Any) -> Found:
    """Return the fastest sequence that holds at most `limit` bytes, and its chain. chains: of the same step.

    Raises:
        InfeasibleError: if none does.
    """
    best: tuple[float, TapeChain, Sequence] | None = None
    for part, asked in [(mode, limit), *((part, 0) for part in _parts(mode))]:  # with more bytes a chain may hold more
        for found in chains if best is None else ():
            for sequence, most in _proposed(found, asked, part, options):
                seconds = simulate(found.chain, sequence).makespan
                if most <= limit and (best is None or seconds < best[0]):
                    best = seconds, found, sequence
    if best is None:
        least = least_limit(chains, mode)
        raise InfeasibleError(
            f"no plan in mode {mode} holds {format_bytes(limit)} ({limit} bytes); the smallest limit that works is"
            f" {format_bytes(least)} ({least} bytes)",
            least,
        )
    return best[1:]


def least_limit(chains: Several[TapeChain], mode: str = "joint") -> int:
    """Return the smallest limit within which a step can run: by `plan`, or as it is."""
    proposed = (_proposed(found, 0, part, {"refine": False}) for part in _parts(mode) for found in chains)
    return min(chains[0].trace.plain_bytes(), *(most for several in proposed for _, most in several))


def _parts(mode: str) -> tuple[str, ...]:
    """The modes whose sequences `mode` allows. The chain's least sequence in joint may hold more than one of these."""
    return ("joint", "remat", "offload") if mode == "joint" else (mode,)


def _proposed(found: TapeChain, limit: int, mode: str, options: dict[str, Any]) -> Iterator[tuple[Sequence, int]]:
    """Sequences for a limit, or for the smallest that the chain has, with the bytes that they hold. Where the first run
    of a stage exceeds it, the next is for a chain that charges the stage with more; where bytes are left, for a larger
    limit."""
    chain, asked = found.chain, limit
    for _ in range(ROUNDS):
        asked = max(asked, min_mem_limit(chain, mode))
        sequence = solve(chain, asked, mode=mode, **options)
        levels = found.levels(sequence)
        yield sequence, max(levels)
        if over := _first_runs_over(sequence, levels, max(limit, asked)):
            chain = _charging(chain, over)
        elif max(levels) < limit and asked < 2 * limit:
            asked += limit - max(levels)
            limit = 0  # once
        else:
            return


def _first_runs_over(sequence: Sequence, levels: list[int], limit: int) -> dict[int, int]:
    ran, over = 0, dict[int, int]()
    for op, level in zip(sequence, levels, strict=True):
        if op.kind in FORWARDS and op.stage > ran:
            ran = op.stage
            if level > limit:
                over[op.stage] = max(level - limit, limit // 64)
    return over


def _charging(chain: Chain, more: dict[int, int]) -> Chain:
    """Return `chain` with `more` bytes for forwards of these stages."""
    stages = list(chain.stages)
    for i, nbytes in more.items():
        stage = stages[i - 1]
        stages[i - 1] = replace(
            stage,
            forward_transient_bytes=stage.forward_transient_bytes + nbytes,
            checkpoint_transient_bytes=(stage.checkpoint_transient_bytes or 0) + nbytes,
            forms=tuple(
                replace(form, forward_transient_bytes=form.forward_transient_bytes + nbytes) for form in stage.forms
            ),
        )
    return replace(chain, stages=tuple(stages))

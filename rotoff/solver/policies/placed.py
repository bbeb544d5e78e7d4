"""Code that the policies for parameters share: placing each group, and planning the activations in the remaining bytes.

The machine tells the bytes of the groups: the most by which a step that keeps all activations holds more with them than
without. The activations get the limit less these bytes; the difference between the limit and the resulting peak is then
added, and they are planned again, at most `ROUNDS` times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...core.chain import Chain
from ...core.sequence import Op
from ...core.sequence import Sequence as Plan
from ...core.simulator import Trace, simulate
from ...errors import OptionError
from ..anneal import Budget
from ..bounds import min_mem_limit
from ..placement import Place, place
from ..plan_codes import keep_all
from ..search import Problem, best_candidate
from .choose import within

ROUNDS = 3  # of giving unused bytes to the activations
SLOTS = 50  # of the joint dynamic program
SHARES = 100  # most limits for which the activations are planned, so that placements share plans

Shape = Callable[[tuple[Op, ...]], tuple[Op, ...]]


class Placed:
    """Placements of one chain, each with the best plan for the activations in the remaining bytes of a limit.

    Args:
        updates: "during" or "after". refine: as for `rotoff.solve`, for the activations' plans. shape: changes the
            operations that `place` makes; by default they stay.
    """

    def __init__(
        self, chain: Chain, updates: str = "during", refine: bool | float = True, shape: Shape | None = None
    ) -> None:
        self.chain, self.updates, self.refine, self.shape = chain, updates, refine, shape
        self.activations = chain.without_parameters()
        self._keep_all = keep_all(self.activations).ops
        self._plain = simulate(self.activations, self._keep_all)
        self._least = min_mem_limit(self.activations, "joint")
        self._plans: dict[int, tuple[Op, ...]] = {}

    def within(self, mem_limit: int, places: Sequence[Place], ahead: int = 1) -> Plan | None:
        """One placement within `mem_limit` bytes, or None."""
        everything, trace = self.everything(places, ahead)
        if trace.peak_bytes <= mem_limit:
            return everything
        held = {event.op: event.memory for event in trace.events}
        room = mem_limit - max(held[event.op] - event.memory for event in self._plain.events)
        best: Plan | None = None
        for _ in range(ROUNDS):
            if room < self._least:
                break
            made, trace = self._placed(self._plan(room), places, ahead)
            left = mem_limit - trace.peak_bytes
            if left >= 0 and (best is None or trace.makespan < best.meta["makespan"]):
                best = made
            if 0 <= left <= self._plain.peak_bytes // SHARES:
                break
            room += left
        return best

    def everything(self, places: Sequence[Place], ahead: int = 1) -> tuple[Plan, Trace]:
        """One placement of a step that keeps all activations, without a limit."""
        return self._placed(self._keep_all, places, ahead)

    def _placed(self, ops: tuple[Op, ...], places: Sequence[Place], ahead: int) -> tuple[Plan, Trace]:
        made = place(self.chain, ops, places, self.updates, ahead)
        if self.shape is not None:
            made = replace(made, ops=self.shape(made.ops))
        trace = simulate(self.chain, made, updates=self.updates)
        return replace(made, meta={"makespan": trace.makespan}), trace

    def _plan(self, room: int) -> tuple[Op, ...]:

        step = max(1, self._plain.peak_bytes // SHARES)
        limit = max(self._least, min(room, self._plain.peak_bytes) // step * step)
        if limit not in self._plans:
            problem = Problem(self.activations, limit, None, SLOTS, Budget.of(self.refine))
            self._plans[limit] = best_candidate(problem, "joint").sequence.ops
        return self._plans[limit]


def best_of(
    policy: str,
    chain: Chain,
    mem_limit: int,
    placements: Mapping[str, Sequence[Place]],
    updates: str,
    refine: bool | float,
    shape: Shape | None = None,
    ahead: Sequence[int] = (1,),
) -> Plan:
    """The fastest of `placements` (by name) within `mem_limit` bytes.

    Several are compared without refinement, and with the first of `ahead` alone.

    Raises:
        OptionError: for a chain without parameters. InfeasibleError: if no placement fits.
    """
    if not chain.parameters:
        raise OptionError(f"policy {policy!r} places parameters, and the chain has none")
    quick = Placed(chain, updates, refine=False, shape=shape)

    def tried(limit: int) -> dict[str, Plan] | None:
        made = {name: quick.within(limit, places, ahead[0]) for name, places in placements.items()}
        return {name: plan for name, plan in made.items() if plan is not None} or None

    most = quick.everything(next(iter(placements.values())), ahead[0])[1].peak_bytes
    found = within(policy, mem_limit, tried, most)
    name = min(found, key=lambda name: found[name].meta["makespan"])
    finer = Placed(chain, updates, refine, shape) if refine else quick
    others = [found[name], *(finer.within(mem_limit, placements[name], n) for n in ahead)]
    made = min((one for one in others if one is not None), key=lambda one: one.meta["makespan"])
    return replace(made, meta={"source": f"{policy}, {name}"})

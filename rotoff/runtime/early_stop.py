"""Tails: what a stage's forward does after it has saved its last tensor for backward, and steps that leave them out.

The last product of a transformer block, say, is needed by the next stage and not by the block's own backward, so a
replay made for that backward alone ("closing") ends before it. The machine charges every ``F_all`` a whole
forward_time; here is what is expected instead, the tail less for each closing replay.

How the planner knows: the form that stores nothing is the same thing at the right price, since its redo ends there too;
where a replay is expected to take less still, `form_replays` puts it for the form. Stages without forms have the chain
with `tails_in_backward`, where closing replays are charged rightly, and too little those whose output is needed; plans
lean on these, so what it gives only competes. (With forms it is not asked for: on estimates of GPT, ViT and a U-Net, in
20 to 60 % of the memory, its plans were never better in what is expected of them, and up to 9 % slower.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..core.chain import Chain, Stage
from ..core.sequence import FORWARDS, UPDATES, Op, OpKind, Value
from ..core.simulator import Event, Machine, Trace


def closing_replays(operations: Iterable[Op], L: int) -> frozenset[int]:
    """Indices of the ``F_all i`` that run a stage again for its own backward alone: the one of stage i+1 is over, and
    ā_i stays where it is."""
    found: dict[int, int] = {}
    met: set[int] = set()
    following = L + 1  # stage whose B came last
    for n, op in enumerate(operations):
        if op.kind is OpKind.B:
            following = op.stage
        elif op.kind in FORWARDS:
            found.pop(op.stage - 1, None)
            if op.kind is OpKind.F_ALL and op.stage in met and following == op.stage + 1:
                found[op.stage] = n
            met.add(op.stage)
        elif not op.of and op.kind not in UPDATES:
            found.pop(op.stage, None)
    return frozenset(found.values())


def expected_trace(
    chain: Chain,
    operations: Sequence[Op],
    tail_times: Sequence[float] = (),
    mem_limit: int | None = None,
    longer: Sequence[float] = (),
) -> Trace:
    """What the machine sees of `operations`, closing replays without their tails.

    Args:
        tail_times: seconds of each stage's tail; none at all: as of 0 s. mem_limit: bytes, or None. longer: seconds
            that each operation takes of the compute lane beyond what the chain says (`upkeep`).

    Raises:
        InvalidSequenceError: where the machine refuses them.
    """
    closing = closing_replays(operations, len(chain)) if any(tail_times) else frozenset()
    more = {n: seconds for n, seconds in enumerate(longer) if seconds}
    for n in closing:
        more[n] = more.get(n, 0.0) - tail_times[operations[n].stage - 1]
    machine = _Expected(chain, mem_limit, more)
    for op in operations:
        machine.step(op)
    return machine.finish()


def tails_in_backward(chain: Chain, tail_times: Sequence[float]) -> Chain:
    """`chain` as if the tails were run in ``B``: once for each stage, in every plan."""

    def shifted(stage: Stage, tail: float) -> Stage:
        tail = min(tail, stage.forward_time)
        forms = tuple(replace(form, backward_time=form.backward_time + tail) for form in stage.forms)
        forward, backward = stage.forward_time - tail, stage.backward_time + tail
        return replace(stage, forward_time=forward, backward_time=backward, forms=forms)

    return replace(chain, stages=tuple(map(shifted, chain.stages, tail_times)))


class _Expected(Machine):
    """The machine, where operation n takes ``more[n]`` seconds more than the chain says; a move takes them of the
    compute lane, before its copy."""

    def __init__(self, chain: Chain, mem_limit: int | None, more: Mapping[int, float]) -> None:
        super().__init__(chain, mem_limit)
        self._more = more

    def step(self, op: Op) -> Event:
        if op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH):
            self._clock["compute"] += self._more.get(len(self.events), 0.0)
        return super().step(op)

    def _compute(self, duration: float, dropped: list[Value]) -> tuple[float, float]:
        return super()._compute(max(0.0, duration + self._more.get(len(self.events), 0.0)), dropped)

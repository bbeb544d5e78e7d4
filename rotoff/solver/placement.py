"""Sequences by rule: a fixed place for each group of parameters.

Other systems place parameters like this, and a search may start from it: each group is on the device or is copied in
one operation before each use; the device or the host updates it. Moves of activations stay where they are in the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.chain import Chain
from ..core.sequence import (
    COMPUTES,
    H,
    Op,
    OpKind,
    U,
    Value,
    drop,
    free,
    g,
    o,
    offload,
    prefetch,
    w,
    wait,
)
from ..core.sequence import Sequence as Plan
from ..core.steady_step import Readers, check_when, group_bytes
from ..errors import OptionError


@dataclass(frozen=True)
class Place:
    """Where a group is between steps. weights, state: whether ``w`` and ``o`` are resident. host: whether ``H`` updates
    it.
    """

    weights: bool
    state: bool
    host: bool = False

    def __post_init__(self) -> None:
        if self.host and self.state:
            raise OptionError("a group that the host updates has its state there; give state=False")


RESIDENT = Place(weights=True, state=True)
HOST_UPDATED = Place(weights=True, state=False, host=True)
STATE_STREAMED = Place(weights=True, state=False)
STREAMED = Place(weights=False, state=False)
STREAMED_HOST_UPDATED = Place(weights=False, state=False, host=True)


def place(
    chain: Chain, activations: Iterable[Op], places: Sequence[Place], updates: str = "during", ahead: int = 1
) -> Plan:
    """`activations`, a sequence for ``chain.without_parameters()``, with the groups of `chain` placed as `places` says.

    Args:
        places: one for each group.
        updates: "during", each as soon as its gradient is whole, or "after" ``B 1``, in the order of the next forward.
        ahead: how many compute operations before its use a value is prefetched.

    Returns:
        A legal sequence; the machine says whether it fits a limit.

    Raises:
        OptionError: if there is not one place for each group, or a group that the host should update has no
            host_update_time.
    """
    check_when(updates)
    if len(places) != len(chain.parameters):
        raise OptionError(f"there are {len(places)} places for {len(chain.parameters)} groups; give one for each")
    for k, (spot, group) in enumerate(zip(places, chain.parameters, strict=True), start=1):
        if spot.host and group.grad_bytes and group.host_update_time is None:
            raise OptionError(f"group {k} has no host_update_time, so the host cannot update it; give it one")
    return _Walk(chain, places, updates, ahead).run(tuple(activations))


class _Walk:
    """One pass over the operations of the activations; t counts those that occupy the compute lane."""

    def __init__(self, chain: Chain, places: Sequence[Place], updates: str, ahead: int) -> None:
        self.chain, self.updates, self.ahead = chain, updates, ahead
        self.places = dict(enumerate(places, start=1))
        self.readers = Readers(chain)
        self.ops: list[Op] = []
        spots = [pair for k, spot in self.places.items() for pair in ((w(k), spot.weights), (o(k), spot.state))]
        self.resident = [v for v, kept in spots if kept and group_bytes(chain, v)]
        self.on = set(self.resident)
        self.arriving = {w(k) for k, group in enumerate(chain.parameters, start=1) if self.returns(k)}
        self.due: list[tuple[int, Op]] = []  # what is issued once t is reached

    def returns(self, k: int) -> bool:
        """Whether w k leaves for an update on the host and is in flight between steps."""
        return self.places[k].host and self.places[k].weights and self.chain.group(k).grad_bytes > 0

    def exists(self, *values: Value) -> list[Value]:
        return [v for v in values if group_bytes(self.chain, v)]

    def run(self, activations: tuple[Op, ...]) -> Plan:
        computes = [op for op in activations if op.kind in COMPUTES]
        self.uses = [[v.stage for v in self.readers.weights.get(op.stage, ())] for op in computes]
        t = 0
        for op in activations:
            if op.kind not in COMPUTES:
                self.ops.append(op)
                continue
            self.issue(t)
            for u in range(t, min(t + self.ahead, len(computes) - 1) + 1):
                self.bring([w(k) for k in self.uses[u]])
                if computes[u].kind is OpKind.B and self.updates == "during":
                    self.bring([o(k) for k in self.finished(computes[u].stage) if not self.places[k].host])
            self.settle([w(k) for k in self.uses[t]])
            self.ops.append(op)
            finished = self.finished(op.stage) if op.kind is OpKind.B else []
            for k in finished:
                self.end_backward(k, t)
            soon = {k for use in self.uses[t + 1 : t + 1 + self.ahead] for k in use} | set(finished)
            for k in self.uses[t]:
                if not self.places[k].weights and k not in soon and w(k) in self.on:
                    self.leave(drop(w(k)))
            t += 1
        self.issue(None)
        if self.updates == "after":
            self.update_all(t)
        return Plan(tuple(self.ops), resident=[str(v) for v in self.resident])

    def finished(self, i: int) -> list[int]:
        """The groups whose gradient is whole after ``B i``."""
        return [v.stage for v in self.readers.whole.get(i, ())]

    def issue(self, t: int | None) -> None:
        """Issue what is due by t; everything if t is None."""
        now = [op for when, op in self.due if t is None or when <= t]
        self.due = [(when, op) for when, op in self.due if t is not None and when > t]
        for op in now:
            self.leave(op) if op.kind is OpKind.FREE else self.ops.append(op)

    def leave(self, op: Op) -> None:
        self.ops.append(op)
        self.on.discard(op.value)

    def bring(self, values: Iterable[Value]) -> None:
        for v in self.exists(*values):
            if v not in self.on:
                self.ops.append(prefetch(v))
                self.on.add(v)
                self.arriving.add(v)

    def settle(self, values: Iterable[Value]) -> None:
        for v in values:
            if v in self.arriving:
                self.ops.append(wait(v))
                self.arriving.discard(v)

    def end_backward(self, k: int, t: int) -> None:
        """The gradient of group k is whole: update it now, or see where it waits."""
        spot = self.places[k]
        self.on.add(g(k))
        if spot.host or (self.updates == "after" and not spot.weights):
            self.ops.append(offload(g(k)))
            self.due.append((t + 2, free(g(k))))
        if self.updates == "during":
            self.update(k, t)
        elif not spot.weights and w(k) in self.on:
            self.leave(drop(w(k)))

    def update(self, k: int, t: int) -> None:
        spot = self.places[k]
        if spot.host:
            if w(k) in self.on:
                self.leave(drop(w(k)))
            self.ops.append(H(k))
            if self.returns(k) and self.exists(w(k)):
                self.due.append((t + 2, prefetch(w(k))))
            return
        self.settle([w(k), g(k), o(k)])
        self.ops.append(U(k))
        self.on.discard(g(k))
        for v in self.exists(*(() if spot.weights else (w(k),)), *(() if spot.state else (o(k),))):
            self.ops.append(offload(v))
            self.due.append((t + 2, free(v)))

    def update_all(self, t: int) -> None:
        """All groups after ``B 1``, in the order in which the next forward needs them."""
        order = sorted(
            (min(group.stages), k) for k, group in enumerate(self.chain.parameters, start=1) if group.grad_bytes
        )
        for n, (_, k) in enumerate(order):
            self.issue(t + n)
            for _, other in order[n : n + 1 + self.ahead]:
                if not self.places[other].host:
                    self.bring([w(other), g(other), o(other)])
            self.update(k, t + n)
        self.issue(None)

"""Compiles a sequence for the interpreter: everything that can be decided before the step is decided here, once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from ..core.chain import Chain
from ..core.sequence import COMPUTES, FORWARDS, UPDATES, Op, OpKind, Sequence, Value
from ..core.simulator import Machine, Trace, early_stops, simulate
from ..solver.in_flight import resting_bytes, turn
from .placed.placed_plan import PlacedPlan


@dataclass(frozen=True)
class HostRange:
    """Where an offloaded value lies in the host slab: bytes `offset` to `offset + room`."""

    offset: int
    room: int


@dataclass(frozen=True)
class ExecutionPlan:
    """What the interpreter runs.

    chain: on which the sequence was planned.
    forward_end: number of ops that run in the user's forward; the rest waits for gradients.
    replayed: stages whose forward runs more than once (after ``F_sel``, in part).
    early: `early_stops` of the sequence.
    host: index of each ``offload`` -> its range in the host slab; host_bytes: size of the slab.
    trace: the predicted step.
    keeps_all: whether the plain model runs.
    lets_go: whether the caller holds only those outputs from which the backward starts; the chain of a plan that does
        not keep everything then has no others (`Profile.letting_go`).
    kept: numbers of the profile's skip connections that stay in place; the chain does not contain their bytes.
    compact: whether waiting gradients are copied out of larger storages.
    in_flight: number of micro-batches that share the limit; resting_bytes: what each holds between its forward and its
        backward, as the machine charges it.
    placed: the placement of the parameters, if the plan moves them.
    """

    chain: Chain
    sequence: Sequence
    forward_end: int
    replayed: frozenset[int]
    early: frozenset[int]
    host: dict[int, HostRange]
    host_bytes: int
    trace: Trace
    keeps_all: bool = False
    lets_go: bool = False
    kept: tuple[int, ...] = ()
    compact: bool = False
    in_flight: int = 1
    resting_bytes: int = 0
    placed: PlacedPlan | None = None

    @property
    def choices(self) -> tuple[tuple[int, ...], bool, bool]:
        """The arguments of `Profile.keeping` that give the plan's chain."""
        return self.kept, self.compact, self.lets_go and not self.keeps_all

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of the activations on the device after the forward phase, as the machine charges them."""
        machine = Machine(replace(self.chain, parameters=()))
        for op in self.sequence.ops[: self.forward_end]:
            if not op.of and op.kind not in UPDATES:
                machine.step(op)
        return sum(machine.device.values()) - self.chain.input_bytes

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The numbers of the parameter groups that each stage reads."""
        found: dict[int, list[int]] = {}
        for k, group in enumerate(self.chain.parameters, start=1):
            for i in group.stages:
                found.setdefault(i, []).append(k)
        return found


def compile_sequence(
    chain: Chain,
    sequence: Sequence,
    mem_limit: int | None = None,
    kept: tuple[int, ...] = (),
    compact: bool = False,
    in_flight: int = 1,
    lets_go: bool = False,
) -> ExecutionPlan:
    """Check `sequence` on the machine and lay out its host memory.

    kept, compact, in_flight, lets_go: as of `ExecutionPlan`. With several micro-batches, and if the caller lets go of
    outputs before the backward, nothing is prefetched until then.

    Raises:
        InvalidSequenceError: if the machine refuses it.
    """
    plan = replace(_laid_out(chain, sequence, simulate(chain, sequence, mem_limit)), kept=kept, compact=compact)
    if in_flight > 1 or lets_go:
        plan = replace(plan, forward_end=turn(sequence.ops, len(chain)), lets_go=lets_go)
    if in_flight == 1:
        return plan
    return replace(plan, in_flight=in_flight, resting_bytes=resting_bytes(chain, sequence.ops))


def compile_placed(chain: Chain, sequence: Sequence, trace: Trace, placed: PlacedPlan) -> ExecutionPlan:
    """Return a plan that places parameters; `trace` is the prediction of its steady step."""
    return replace(_laid_out(chain, sequence, trace), placed=placed)


def _laid_out(chain: Chain, sequence: Sequence, trace: Trace) -> ExecutionPlan:
    """Return the plan of `sequence`, with host ranges for what it moves."""
    runs = Counter(op.stage for op in sequence if op.kind in FORWARDS)
    redone = {op.stage for op in sequence if op.kind is OpKind.F_SEL}
    host = _host_ranges(chain, sequence)
    return ExecutionPlan(
        chain=chain,
        sequence=sequence,
        forward_end=_forward_end(sequence, len(chain)),
        replayed=frozenset(i for i, count in runs.items() if count > 1) | redone,
        early=early_stops(sequence),
        host=host,
        host_bytes=_slab_bytes(host),
        trace=trace,
    )


def slab_bytes(chain: Chain, sequence: Sequence) -> int:
    """Return the size in bytes of the host slab that `sequence` needs."""
    return _slab_bytes(_host_ranges(chain, sequence))


def _slab_bytes(host: dict[int, HostRange]) -> int:
    return max((r.offset + r.room for r in host.values()), default=0)


def _forward_end(sequence: Sequence, L: int) -> int:
    """Return the number of ops up to the one that first makes the output, and the moves right after it, which need not
    wait for a gradient."""
    index = next(n for n, op in enumerate(sequence) if op.kind in FORWARDS and op.stage == L) + 1
    while index < len(sequence) and sequence[index].kind not in COMPUTES:
        index += 1
    return index


def _host_ranges(chain: Chain, sequence: Sequence) -> dict[int, HostRange]:
    """First fit over the lifetimes: a value lives on the host from its ``offload`` to the ``B`` that drops it."""
    born: dict[Value, int] = {}
    form: dict[int, int] = {}
    lives: list[tuple[int, int, int]] = []  # (start, end, bytes)
    for n, op in enumerate(sequence):
        if op.kind in (OpKind.F_ALL, OpKind.F_SEL):
            form[op.stage] = op.form
        elif op.kind is OpKind.OFFLOAD and not op.of:
            born[op.value] = n
        elif op.kind is OpKind.B:
            for v in (Value(True, op.stage), Value(False, op.stage), Value(False, op.stage - 1)):
                if v in born:
                    size = (
                        chain.stage(v.stage).form(form[v.stage]).saved_bytes if v.saved else chain.output_bytes(v.stage)
                    )
                    lives.append((born.pop(v), n, size))
    ranges: dict[int, HostRange] = {}
    for start, end, size in sorted(lives):
        offset = 0
        taken = sorted((ranges[s].offset, ranges[s].room) for s, e, _ in lives if s in ranges and s < end and e > start)
        for other, room in taken:
            if offset + size <= other:
                break
            offset = max(offset, other + room)
        ranges[start] = HostRange(offset, size)
    return ranges


def describe(op: Op, index: int, sequence: Sequence) -> str:
    """Return the place of an op in its sequence, with its neighbours, for messages."""
    near = " | ".join(f">{o}<" if n == index else str(o) for n, o in enumerate(sequence) if abs(n - index) <= 3)
    return f"op {index} ({op}) of {len(sequence)}: {near}"

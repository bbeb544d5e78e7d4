"""Compiles a sequence for the interpreter: everything that can be decided before the step is decided here, once."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.chain import Chain
from ..core.sequence import COMPUTES, FORWARDS, Op, OpKind, Sequence, Value
from ..core.simulator import Trace, early_stops, simulate
from ..solver.in_flight import turn
from .links.base import Range
from .placed.placed_plan import PlacedPlan


@dataclass(frozen=True)
class ExecutionPlan:
    """What the interpreter runs.

    forward_end: number of ops that run in the user's forward; the rest waits for gradients.
    early: `early_stops` of the sequence.
    host: index of each ``offload`` -> its range in the host slab, the first byte and how many; host_bytes: size of the
    slab.
    trace: the predicted step.
    keeps_all: whether the plain model runs.
    in_flight: number of micro-batches that share the limit.
    placed: the placement of the parameters, if the plan moves them.
    """

    sequence: Sequence
    forward_end: int
    early: frozenset[int]
    host: dict[int, Range]
    host_bytes: int
    trace: Trace
    keeps_all: bool = False
    in_flight: int = 1
    placed: PlacedPlan | None = None


def compile_sequence(
    chain: Chain, sequence: Sequence, in_flight: int = 1, trace: Trace | None = None, placed: PlacedPlan | None = None
) -> ExecutionPlan:
    """Lay out the host memory of `sequence`. With several micro-batches in flight nothing is prefetched before the
    backward. trace: the machine's prediction, if it has checked the sequence; placed: where parameters are then.

    Raises:
        InvalidSequenceError: if the machine refuses it.
    """
    trace = simulate(chain, sequence) if trace is None else trace
    host = _host_ranges(chain, sequence)
    return ExecutionPlan(
        sequence=sequence,
        forward_end=_forward_end(sequence, len(chain)) if in_flight == 1 else turn(sequence.ops, len(chain)),
        early=early_stops(sequence),
        host=host,
        host_bytes=max(map(sum, host.values()), default=0),
        trace=trace,
        in_flight=in_flight,
        placed=placed,
    )


def _forward_end(sequence: Sequence, L: int) -> int:
    """Return the number of ops up to the one that first makes the output, and the moves right after it, which need not
    wait for a gradient."""
    index = next(n for n, op in enumerate(sequence) if op.kind in FORWARDS and op.stage == L) + 1
    while index < len(sequence) and sequence[index].kind not in COMPUTES:
        index += 1
    return index


def _host_ranges(chain: Chain, sequence: Sequence) -> dict[int, Range]:
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
    ranges: dict[int, Range] = {}
    for start, end, size in sorted(lives):
        offset = 0
        taken = sorted(ranges[s] for s, e, _ in lives if s in ranges and s < end and e > start)
        for other, room in taken:
            if offset + size <= other:
                break
            offset = max(offset, other + room)
        ranges[start] = offset, size
    return ranges


def describe(op: Op, index: int, sequence: Sequence) -> str:
    """Return the place of an op in its sequence, with its neighbours, for messages."""
    near = " | ".join(f">{o}<" if n == index else str(o) for n, o in enumerate(sequence) if abs(n - index) <= 3)
    return f"op {index} ({op}) of {len(sequence)}: {near}"

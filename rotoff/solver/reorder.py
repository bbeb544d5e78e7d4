"""The last search of a plan: the order of its operations. What moves, and who updates it, stays as the plan has it.

The decoders write one order for each plan: all frees of a position before its prefetches, every copy out as soon as its
value is made, copies in by need, and what is made again right before its use. Where values are large beside the limit,
other orders of the same operations are up to some percent faster. `kernels.order` moves single operations, as long as
the result is legal and fits, also from the end of a step with parameters to the start of the next: a copy out may wait
until nothing comes in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.chain import Chain
from ..core.sequence import COMPUTES, FORWARDS, Op, OpKind, Sequence, Value, a, abar, awaited
from ..core.simulator import Machine, early_stops, simulate
from ..core.steady_step import PERIODS, at_rest
from .anneal import THREADS, Budget, Problem, annealed
from .arrays import arrays
from .kernels.order import Order
from .plan_codes import KINDS, with_residents

# Rows of `kernels.order`, and of `kernels.lanes`.
OPERATION = np.dtype(
    [(name, np.int64) for name in ("need", "more", "host_more")]
    + [(name, np.int32) for name in ("first", "last", "crosses")],
    align=True,
)
EVENT = np.dtype(
    [("kind", np.int32), ("subject", np.int32), ("seconds", np.float64), ("waits", np.int32, 3)], align=True
)
OPERATIONS_PER_SECOND = 300e6  # of simulated steps; converts seconds of effort into a count of moves
MOST = 2**15 - 1  # operations
HEATS = (1e-4, 1e-3)  # at which each thread starts, as shares of the step's time; it ends a hundred times colder


def reordered(problem: Problem, sequence: Sequence, budget: Budget) -> tuple[float, Sequence]:
    """The seconds and the operations of `sequence`, or of a faster order, found in about the budget's seconds in each
    thread."""
    ops = tuple(sequence)
    if len(ops) > MOST:
        return simulate(problem.chain, sequence, updates=problem.updates).makespan, sequence
    kernels, first = _orders(problem, sequence)
    moves = any(op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH) for op in ops)
    tries = int(budget.seconds * OPERATIONS_PER_SECOND / (len(ops) * PERIODS)) if moves else 0
    order = annealed(problem, kernels, [first], [HEATS], tries, (0.0, 0.0))[0]
    return kernels[0].judge(order)[0], with_residents(problem.chain, (ops[n] for n in order[: len(ops)]))


def _orders(problem: Problem, sequence: Sequence) -> tuple[list[Order], np.ndarray]:
    """A kernel for each thread, and the order of the sequence."""
    chain, ops, L = problem.chain, tuple(sequence), len(problem.chain)
    machine, early = Machine(chain, None, at_rest(chain, ops, sequence.resident)), early_stops(ops)
    start = machine.held_bytes, machine.host_bytes
    rows, events, accesses = list[tuple[int, ...]](), list[tuple[Any, ...]](), list[int]()
    for n, op in enumerate(ops):
        held, on_host, begins = machine.held_bytes, machine.host_bytes, len(accesses)
        subject = op.stage - 1 if op.kind is OpKind.H else 0 if op.kind in COMPUTES else _number(chain, op.value)
        waits = [_number(chain, v) for v in awaited(op)] if op.kind in COMPUTES else []  # the kernel's subject else
        kind = KINDS.index(OpKind.F_ALL if op.kind is OpKind.F_SEL else op.kind)
        events.append((kind, subject, _seconds(machine, op, n in early), (*waits, -1, -1, -1)[:3]))
        accesses += _accesses(chain, op, problem.updates)
        need = machine.step(op, n in early).memory - held
        more = machine.held_bytes - held, machine.host_bytes - on_host
        rows.append((need, *more, begins, len(accesses), _crosses(op, problem.updates)))
    # What comes between a forward and its backward would let the forward run on to its end.
    fixed = COMPUTES if any(stage.tail_time for stage in chain.stages) else {OpKind.B}
    movable = np.array([n for n, op in enumerate(ops) if op.kind not in fixed], np.int32)
    access, first = np.array([*accesses, 0], np.int32), np.arange(len(ops), dtype=np.int16)
    costs = chain, arrays(chain), problem.limit, problem.host_limit
    tables = np.array(rows, OPERATION), np.array(events, EVENT)
    kernels = [Order(*costs, *tables, access, movable, 2 * L + 2) for _ in range(THREADS)]
    return kernels, np.concatenate([first, np.array(start, np.int64).view(np.int16)])


def _crosses(op: Op, updates: str) -> bool:
    """Whether the operation may move across the step's end; with `updates` "after" only w may be in flight there."""
    return op.of == "w" or (op.of == "o" and (updates == "during" or op.kind not in (OpKind.PREFETCH, OpKind.WAIT)))


def _number(chain: Chain, v: Value) -> int:
    L, K = len(chain), len(chain.parameters)
    if v.of:
        return 2 * L + 2 + "wgo".index(v.of) * K + v.stage - 1
    return v.stage + (L + 1 if v.saved else 0)


def _seconds(machine: Machine, op: Op, early: bool) -> float:
    chain = machine.chain
    if op.kind in FORWARDS:
        stage = chain.stage(op.stage)
        return stage.forward_time - (stage.tail_time if early else 0.0)
    if op.kind is OpKind.B:
        return chain.stage(op.stage).form(machine.form[op.stage]).backward_time
    if op.kind is OpKind.U:
        return chain.group(op.stage).update_time
    if op.kind is OpKind.H:
        return chain.group(op.stage).host_update_time or 0.0
    if op.kind is OpKind.OFFLOAD:
        return machine.device[op.value] / chain.d2h_bandwidth
    return machine.host[op.value] / chain.h2d_bandwidth if op.kind is OpKind.PREFETCH else 0.0


def _accesses(chain: Chain, op: Op, updates: str) -> list[int]:
    """What the operation reads and writes, as `kernels.order` has it. The machine's state after ``B 1``, which updates
    may have to await, is a value too."""
    i, after = op.stage, _number(chain, abar(0))
    reads, writes = list[int](), list[int]()
    if op.kind is OpKind.OFFLOAD:
        reads.append(_number(chain, op.value))
    elif op.kind not in COMPUTES and op.kind is not OpKind.H:
        writes.append(_number(chain, op.value))
    elif op.kind in (OpKind.U, OpKind.H):
        writes += [_number(chain, Value(False, i, of)) for of in "wgo"]
        reads += [after] if updates == "after" else []
    else:
        groups = [(k, group) for k, group in enumerate(chain.parameters, start=1) if i in group.stages]
        reads += [_number(chain, abar(i - 1))] + [_number(chain, Value(False, k, "w")) for k, _ in groups]
        (writes if op.kind in (OpKind.B, OpKind.F_NONE) else reads).append(_number(chain, a(i - 1)))
        writes += [_number(chain, abar(i))]
        if op.kind is OpKind.B:
            ends = [k for k, group in groups if i in (min(group.stages), max(group.stages))]
            writes += [_number(chain, a(i)), *(_number(chain, Value(False, k, "g")) for k in ends)]
            writes += [after] if i == 1 else []
        elif op.kind in (OpKind.F_CK, OpKind.F_NONE):
            writes.append(_number(chain, a(i)))
    return sorted({2 * v + 1 for v in writes} | {2 * v for v in reads if v not in writes})

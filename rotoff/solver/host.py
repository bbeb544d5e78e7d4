"""Plans and the sequence at the joint minimum, where only the operands of the running operation are on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..core.chain import Chain
from ..core.sequence import (
    COMPUTES,
    B,
    F_all,
    F_ck,
    F_sel,
    H,
    Op,
    OpKind,
    Sequence,
    U,
    Value,
    a,
    abar,
    drop,
    free,
    g,
    o,
    offload,
    prefetch,
    w,
    wait,
)
from ..core.steady_step import Readers, group_bytes
from .arrays import arrays
from .bounds import HostPlan, host_plan
from .group_needs import update_moments
from .plan_codes import APART, EARLY, MOVE, empty, select


def host_sequence(chain: Chain, plan: HostPlan) -> tuple[Op, ...]:
    """The operations of `plan` (`bounds.host_plan`), with one copy at a time; they fit the limit it was made for."""
    L = len(chain)
    inputs = [a(i) if plan.output_input[i] else abar(i) for i in range(L)]  # the input that B i + 1 uses
    forwards = [F_sel(i, form) if form else F_all(i) for i, form in enumerate(plan.form)]
    ops: list[Op] = []
    for i in range(1, L):
        ops += [forwards[i], offload(abar(i))]
        if plan.output_input[i]:
            ops += [free(abar(i)), F_ck(i), offload(a(i))]
        if i > 1:
            ops.append(free(inputs[i - 1]))
    ops += [forwards[L], B(L)]  # B drops its input if that is an a
    for i in range(L - 1, 0, -1):
        if plan.output_input[i]:
            ops += [prefetch(abar(i)), wait(abar(i))]
        if i > 1:
            ops += [prefetch(inputs[i - 1]), wait(inputs[i - 1])]
        ops.append(B(i))
    return tuple(ops)


def host_step(chain: Chain, plan: HostPlan, updates: str) -> Sequence:
    """`host_sequence` for a chain with parameters: they are copied in for every operation, and none is resident.

    The host updates the groups that it can. The device updates the others one by one, at the moments when it holds
    least (`update_moments`); the input of the next backward then goes to the host once more.
    """
    activations = host_sequence(chain.without_parameters(), plan)
    readers = Readers(chain)
    moments = update_moments(chain, updates)
    ops: list[Op] = []
    on: Value | None = None  # the activation that was prefetched last
    for op in activations:
        weights = readers.weights.get(op.stage, []) if op.kind in COMPUTES else []
        ops += [step for v in weights for step in (prefetch(v), wait(v))]
        ops.append(op)
        ops += [drop(v) for v in weights]
        if op.kind is OpKind.WAIT:
            on = op.value
        if op.kind is not OpKind.B:
            continue
        for v in readers.whole.get(op.stage, ()):
            ops += [offload(v), free(v)]
        here = [k for k, stage in moments.items() if stage == op.stage]
        on_device = any(chain.group(k).host_update_time is None for k in here)
        aside = on if on_device and on == abar(op.stage - 1) else None
        ops += [free(aside)] if aside is not None else []
        for k in here:
            ops += _update(chain, k)
        ops += [prefetch(aside), wait(aside)] if aside is not None else []
    return Sequence(tuple(ops))


def _update(chain: Chain, k: int) -> list[Op]:
    if chain.group(k).host_update_time is not None:
        return [H(k)]
    moved = [v for v in (w(k), o(k)) if group_bytes(chain, v)]
    there = [step for v in (g(k), *moved) for step in (prefetch(v), wait(v))]
    return [*there, U(k), *(step for v in moved for step in (offload(v), free(v)))]


def all_moving(chain: Chain, mem_limit: int) -> Iterator[np.ndarray]:
    """Plans in which every value may move, for limits at which some ā_i and ā_{i+1} do not fit together.

    For these i, B i+1 takes a_i and not ā_i. Other values move only to make room, so these plans are far faster than
    `host_sequence`, and a search can start from them. The first plan makes a_i again in the backward phase if the
    forward fits beside ā_i; the second always makes it right after ā_i, and so fits more often.
    """
    plan = host_plan(chain, mem_limit)
    if plan is None:
        return
    c, form, after = arrays(chain), np.array(plan.form), np.arange(2, len(chain) + 1)
    kept = c.out[0] + c.saved[after - 1, form[after - 1]]  # beside ā_i run F_all i+1 and B i+1
    forward, backward = kept + c.M_all[after, form[after]], kept + c.M_B[after, form[after]]
    tight = np.maximum(forward, backward) > mem_limit
    if not tight.any():
        return
    base = empty(chain)
    base[1:] = np.array([[select(form) | MOVE] for form in plan.form[1:]], dtype=np.int16)
    for late in (tight & (forward <= mem_limit), np.zeros_like(tight)):
        codes = base.copy()
        codes[1:-1][late] |= APART
        codes[1:-1][tight & ~late] |= EARLY
        yield codes

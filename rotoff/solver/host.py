"""The sequence at the joint minimum: everything that is not an operand of the running operation waits on the host."""

from __future__ import annotations

from ..bounds import HostPlan
from ..chain import Chain
from ..sequence import Op, OpKind, Value, a, abar


def host_sequence(chain: Chain, plan: HostPlan) -> tuple[Op, ...]:
    """Operations that hold no more than `plan` was checked for (see `bounds.host_plan`), copy after copy."""
    L, ops = len(chain), []

    def move(kind: OpKind, v: Value) -> None:
        ops.append(Op(kind, v.stage, saved=v.saved))

    source = a(0)
    for i in range(1, L):
        form = plan.form[i]
        ops.append(Op(OpKind.F_SEL if form else OpKind.F_ALL, i, form))
        move(OpKind.OFFLOAD, abar(i))
        if plan.output_input[i]:
            move(OpKind.FREE, abar(i))
            ops.append(Op(OpKind.F_CK, i))
            move(OpKind.OFFLOAD, a(i))
        if source != a(0):
            move(OpKind.FREE, source)
        source = a(i) if plan.output_input[i] else abar(i)
    form = plan.form[L]
    ops.append(Op(OpKind.F_SEL if form else OpKind.F_ALL, L, form))
    ops.append(Op(OpKind.B, L))
    on_device = source  # dropped by B where it is an output
    for i in range(L - 1, 0, -1):
        if on_device != abar(i):
            move(OpKind.PREFETCH, abar(i))
            move(OpKind.WAIT, abar(i))
        if i > 1:
            on_device = a(i - 1) if plan.output_input[i - 1] else abar(i - 1)
            move(OpKind.PREFETCH, on_device)
            move(OpKind.WAIT, on_device)
        ops.append(Op(OpKind.B, i))
    return tuple(ops)

"""Bytes of a planned step in the terms of the user's limit: simulated (what the machine charges) and expected."""

from __future__ import annotations

from collections.abc import Collection

from ..core.sequence import FORWARDS, Op, OpKind
from ..profile.profile import Profile
from ..runtime.execution_plan import ExecutionPlan
from .sharing import shared_bytes


def reported_bytes(profile: Profile, plan: ExecutionPlan) -> int:
    """The peak of `plan` to compare with a limit: the simulated one, or the plain model's if it keeps everything."""
    return expected_bytes(profile, plan) if plan.keeps_all else simulated_bytes(profile, plan)


def simulated_bytes(profile: Profile, plan: ExecutionPlan) -> int:
    """The machine's peak in the terms of the user's limit."""
    return max(*simulated_levels(profile, plan), profile.prefix_peak_bytes)


def simulated_levels(profile: Profile, plan: ExecutionPlan) -> list[int]:
    """What the machine charges for each operation, in the terms of the user's limit."""
    return _in_user_terms(profile, plan, [event.memory for event in plan.trace.events])


def expected_bytes(profile: Profile, plan: ExecutionPlan) -> int:
    """The expected peak: the highest of `expected_levels`, or the peak of the prefix."""
    return max(*expected_levels(profile, plan), profile.prefix_peak_bytes)


def expected_levels(profile: Profile, plan: ExecutionPlan) -> list[int]:
    """The expected peak during each operation: what the machine charges, less what is sure not to be allocated.

    Subtracted are:
    - in a ``B`` whose stage saved everything: what the stage has freed before it begins;
    - in the user's forward: δ_L, which the loss has yet to allocate;
    - bytes that several values share and that are charged more than once;
    - casts of weights that autocast keeps, but for those that the open region has made and that are in no ā, and, in
      the backward, for sums of their gradients;
    - in the plain model: values that autograd did not save, once it has freed them, less what it holds longer; and in
      its forwards what the chain charges for code outside of the stages.
    """
    L = len(profile.chain)
    made, whole = False, set()
    alone = set[int]()  # stages that have run and whose casts are in no ā
    open_stage = 0
    levels = []
    carried = [skip for n, skip in enumerate(profile.skips) if n not in plan.kept]
    chosen = profile.keeping(*plan.choices)
    shared = shared_bytes(chosen.chain, carried, plan.sequence)
    without = profile.letting_go().chain if plan.choices[2] else profile.chain
    still_held = profile.chain.output_bytes(L) - without.output_bytes(L)
    for n, event in enumerate(plan.trace.events):
        op, less = event.op, shared[n]
        if op.kind is OpKind.B:
            less += chosen.freed_before_backward[op.stage - 1] if op.stage in whole else 0
        elif made and n < plan.forward_end:
            less += profile.chain.grad_bytes(L)
        if op.kind in FORWARDS:
            open_stage = max(open_stage, op.stage)
            (alone.discard if op.kind is OpKind.F_ALL else alone.add)(op.stage)
        if not plan.keeps_all:
            forward = n < plan.forward_end
            less += profile.cast_bytes - (_casts(profile, open_stage, alone) if forward else _sums(profile, op))
        if op.kind is OpKind.F_ALL:
            whole.add(op.stage)
        elif op.kind is OpKind.F_SEL:
            whole.discard(op.stage)
        elif op.kind in (OpKind.FREE, OpKind.DROP) and op.saved:
            alone.add(op.stage)
        if plan.keeps_all:
            less += _passed(profile, op) + (_let_go(profile, op) if plan.lets_go else 0)
            less += profile.outside_bytes[op.stage - 1] if profile.outside_bytes and op.kind in FORWARDS else 0
        if made and n < plan.forward_end:
            less -= still_held  # by the caller, until the forward has returned
        made = made or (op.kind in FORWARDS and op.stage == L)
        levels.append(event.memory - less)
    return _in_user_terms(profile, plan, levels)


def _casts(profile: Profile, stage: int, alone: Collection[int]) -> int:
    """Bytes that autocast within the model keeps beside all values in the forward of `stage`, once those `alone` have
    run and have no ā."""
    kept = (
        min(one.nbytes, one.unsaved + sum(nbytes for i, nbytes in enumerate(one.saved, start=1) if i in alone))
        for one in profile.casts
        if one.first <= stage <= one.last
    )
    return max(kept, default=0)


def _sums(profile: Profile, op: Op) -> int:
    """Bytes of gradients of casts that may wait while `op` runs in the backward."""
    return max((one.shared for one in profile.casts if one.first <= op.stage <= one.last), default=0)


def _passed(profile: Profile, op: Op) -> int:
    """Bytes charged beyond what the plain model holds when `op` begins: values that it has freed already, and values
    charged twice; less the bytes that it holds in an ``F`` and that are not charged."""
    i = op.stage
    if op.kind is OpKind.B:
        return sum(one.nbytes for one in profile.freed_early if one.first < i) + sum(profile.twice_bytes[: i - 1])
    held = sum(one.nbytes for one in profile.held_late if one.first < i <= one.until)
    return sum(one.nbytes for one in profile.freed_early if one.until < i) - held + sum(profile.twice_bytes)


def _let_go(profile: Profile, op: Op) -> int:
    """Bytes charged in a ``B`` for returned outputs that the caller has freed by then."""
    if op.kind is not OpKind.B:
        return 0
    gone = profile.freed_before_backward[op.stage - 1]  # of which the output of the stage may be a part
    made = sum(one.nbytes for one in profile.returned if one.first == op.stage)
    return sum(one.nbytes for one in profile.returned if one.first < op.stage) + max(0, made - gone)


def resting_memory(profile: Profile, plan: ExecutionPlan) -> int:
    """Bytes that a micro-batch holds between its forward and its backward, if several are in flight."""
    return plan.resting_bytes + _constant(profile, plan)


def _constant(profile: Profile, plan: ExecutionPlan) -> int:
    """Bytes of each step that the machine does not charge."""
    constant = profile.unmanaged_bytes + profile.kept_bytes(plan.kept) - profile.resident_input_bytes
    return constant + (0 if plan.keeps_all else profile.snapshot_bytes)


def _in_user_terms(profile: Profile, plan: ExecutionPlan, levels: list[int]) -> list[int]:
    """The machine's `levels` in the terms of the user's limit, with the micro-batches that rest meanwhile."""
    constant = _constant(profile, plan) + (plan.in_flight - 1) * resting_memory(profile, plan)
    beside, forms, again = profile.replay_extra(plan.replayed), dict[int, int](), []
    for event in plan.trace.events:
        redone = event.recompute
        if event.op.kind in FORWARDS:
            forms[event.op.stage] = event.op.form
        elif event.op.kind is OpKind.B:
            redone = forms[event.op.stage] > 0
        again.append(beside[event.op.stage] if redone else 0)
    return [level + more + constant for level, more in zip(levels, again, strict=True)]

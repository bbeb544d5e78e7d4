"""A chain from a model, measured on its device: bytes and seconds of every stage, never holding more than one stage.

Bytes come from the allocator's own events (`allocations`), so they include kernels' temporaries and whatever a stage
keeps past autograd's hooks. The user's gradients, buffers, generators and memory statistics are left as they were:
gradients are taken with ``torch.autograd.grad``, which adds to no ``.grad``.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from ..capture.aliasing import merge_aliases
from ..capture.backward_roots import BackwardStarts
from ..capture.unsaved import merge_unsaved
from ..core.chain import Chain, Stage
from ..errors import MeasureError
from ..tensors.buffers import preserved
from ..tensors.stage import StageModule
from ..tensors.storage import block_bytes, storage_key
from ..tensors.tree import flatten
from .memory.eager_memory import find_lingering, find_passing, find_returned
from .memory.gradients import Charge, charge
from .memory.skips import find_skips
from .profile import Compact, Profile, replay_bytes
from .stage_meter import Measured, Meter
from .timing.timing_cache import KnownTimes

logger = logging.getLogger("rotoff")
Progress = Callable[[int, int, str], None]  # stages done, stages in all, name of the next


def measure(
    stages: Sequence[StageModule],
    value: Any,
    meter: Meter,
    bandwidth: Callable[[int, int], tuple[float, float, bool]],
    progress: Progress | None = None,
    known: KnownTimes | None = None,
    named: bool = False,
    merged: Sequence[str] = (),
) -> Profile:
    """Measure `stages` on the sample input `value`.

    Args:
        stages: in order; those that alias or overwrite their input are merged with their predecessor, and so are most
            whose input no backward needs (`capture.unsaved`).
        value: a tensor, or a tuple of them, on the device of `meter`.
        bandwidth: given the bytes that typically move at once, and in all, the link's (d2h B/s, h2d B/s, duplex).
        known: times that need not be measured, where they are of the same stages.
        named: whether the user named the stages, so that they stay apart unless they alias.
        merged: what stages were called once they had been merged, on an input of other sizes.

    Raises:
        MeasureError: where no parameter or input needs a gradient, or a stage cannot be measured.
        TimesChanged: where `known` are no longer the times of these stages.
    """
    device = meter.bench.device
    if not flatten(value)[0]:
        raise MeasureError("the model's input holds no tensor")
    for tensor in flatten(value)[0]:
        if not meter.plain(tensor):
            raise MeasureError(f"the model's input is a {type(tensor).__name__}; rotoff takes plain tensors only")
    groups = _merged_as(stages, merged)
    if not groups:
        groups = merge_aliases(stages, value, device)
        if not named:
            groups = merge_unsaved(groups, value, device)
    meter.begin(value)
    meter.samples_upkeep = known is None or known.upkeep is None
    meter.checked = known.heaviest if known is not None else None
    meter.warm = device.type == "cpu" and known is not None and not known.checked
    waiting = {(row.name, n): row for n, row in enumerate(known.stages if known else ())}
    measured: list[Measured] = []
    prefix = 0  # groups up to the last one whose output needs no gradient
    start = batch = value
    for n, group in enumerate(groups):
        if progress is not None:
            progress(n, len(groups), group.name)
        if meter.bench.lender is not None:
            meter.bench.lender.keep(p for module in group.modules for p in module.parameters())
        with preserved(list(group.buffers()), device), torch.enable_grad():
            result, value = meter.stage(group, value, n + 1 == len(groups), waiting.get((group.name, n - prefix)))
        if result is None:
            prefix, measured, start = n + 1, [], value
            meter.begin(value)
        else:
            measured.append(result)
    if progress is not None:
        progress(len(groups), len(groups), "")
    if not measured:
        raise MeasureError("nothing in the model needs a gradient: there is no backward to plan for")
    measured = _with_buffers_read([one.timed() for one in measured], groups[prefix:])
    shared = _shared_parameters(groups[prefix:])
    measured = [
        replace(m, grad_accumulation_bytes=n) for m, n in zip(measured, _joining(groups[prefix:], shared), strict=True)
    ]
    sizes = [m.costs.saved_bytes for m in measured]
    typical = statistics.median(sizes)
    d2h, h2d, duplex = known.link if known and known.link else bandwidth(max(1, int(typical)), sum(sizes))
    tables = {storage_key(buffer) for group in groups[:prefix] for *_, buffer in group.buffers()}
    starts = [t for t in flatten(start)[0] if storage_key(t) not in tables]  # of which a view takes nothing
    input_bytes = meter.storage_bytes(starts)
    given = {storage_key(t) for t in flatten(batch)[0]}
    lying = [(m.gradients, m.own_gradient_bytes) for m in measured]
    gradients, compact = charge(lying), charge(lying, compact=True)
    for charges in gradients, compact:
        charges[0] = charges[0]._replace(nbytes=max(charges[0].nbytes, meter.gradient_bytes(starts)))
    costs = [_charged(m, *pair) for m, pair in zip(measured, pairwise(gradients), strict=True)]
    returned = measured[-1].own_gradient_bytes
    losses = [_loss_bytes(nbytes, device) for nbytes in returned]
    runs = [(m.lies, m.behaviour) for m in measured]
    copies = any(one.copied for one in compact)
    copy_bandwidth = (known and known.copy_bandwidth) or meter.copy_bandwidth(typical) if copies else None
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what stages took one by one lies in other pieces than a step needs
    return Profile(
        device=device,
        chain=Chain(
            stages=tuple(costs),
            d2h_bandwidth=d2h,
            h2d_bandwidth=h2d,
            duplex=duplex,
            input_bytes=input_bytes,
            input_grad_bytes=gradients[0].nbytes,
        ),
        prefix=tuple(groups[:prefix]),
        stages=tuple(groups[prefix:]),
        behaviours=tuple(m.behaviour for m in measured),
        unmanaged_bytes=sum(m.held_bytes for m in measured)
        + sum(meter.allocator.rounded(one.nbytes) for group in groups for one in group.lives.held)
        + sum(parameter.nbytes for parameter in shared)
        + _casts(measured)
        + sum(losses),
        replay_bytes=replay_bytes([m.behaviour for m in measured], meter.rng_bytes),
        rng_bytes=meter.rng_bytes,
        freed_before_backward=tuple(
            _gone(m, c, *pair) for m, c, pair in zip(measured, costs, pairwise(gradients), strict=True)
        ),
        made_input_bytes=input_bytes - meter.storage_bytes([t for t in starts if storage_key(t) in given]),
        prefix_peak_bytes=_prefix_peak(groups[:prefix], batch, meter),
        no_forms=tuple(m.no_forms for m in measured),
        skips=find_skips(runs),
        passing=find_passing(runs, groups[prefix:]),
        returned=find_returned(runs, _others(groups[-1])),
        lingering=find_lingering(groups[:prefix], groups[prefix:], meter.allocator.rounded),
        spare_bytes=tuple(m.lies.spare for m in measured),
        output_retention=tuple(
            _staying(m, c, *pair) for m, c, pair in zip(measured, costs, pairwise(gradients), strict=True)
        ),
        compact=_compact(measured, compact, copy_bandwidth) if copy_bandwidth else None,
        copy_bandwidth=copy_bandwidth,
        tail_times=tuple(m.tail_time for m in measured),
        upkeep_times=(known and known.upkeep) or meter.upkeep_times(),
        host_bound=_host_bound(measured) if device.type == "cuda" else (),
        beside_loss_bytes=sum(returned) - sum(losses) if any(losses) else 0,
        twice_bytes=_twice(measured, groups[prefix:], meter),
    )


def _others(last: StageModule) -> tuple[int, ...]:
    """The outputs of the last stage from which no backward starts, where the user says so."""
    module = last.modules[-1]
    return module.others if isinstance(module, BackwardStarts) else ()


def _merged_as(stages: Sequence[StageModule], names: Sequence[str]) -> list[StageModule]:
    """`stages` merged so that they have these names; none where they do not come to that."""
    groups: list[StageModule] = []
    rest = iter(stages)
    for name in names:
        group = next(rest, None)
        while group is not None and group.name != name:
            following = next(rest, None)
            group = following and group.merged(following)
        if group is None:
            return []
        groups.append(group)
    return groups if next(rest, None) is None else []


def _twice(measured: Sequence[Measured], stages: Sequence[StageModule], meter: Meter) -> tuple[int, ...]:
    """Of each stage, bytes of its values that are charged as staying, too."""
    handed_on = {storage for stage in stages for storage in stage.storages}
    found = []
    for one, stage in zip(measured, stages, strict=True):
        recorded = [held.nbytes for held in stage.lives.held if held.saved or held.storage in handed_on]
        more = 0 if handed_on else max(0, one.held_bytes - one.behaviour.unmanaged_bytes)
        found.append(more + sum(map(meter.allocator.rounded, recorded)))
    return tuple(found)


def _host_bound(measured: Sequence[Measured]) -> tuple[bool, ...]:
    """Of each stage, whether the device waits for the host there; says so in the log."""
    found = tuple(one.host_bound for one in measured)
    if any(found):
        names = [one.costs.name for one in measured if one.host_bound]
        logger.info(
            "rotoff: launching the kernels of %d of %d stages takes as long as running them, so that planned steps are slower by what the"
            " interpreter takes there: %s%s",
            len(names),
            len(found),
            ", ".join(names[:5]),
            ", ..." if len(names) > 5 else "",
        )
    return found


def _with_buffers_read(measured: Sequence[Measured], stages: Sequence[StageModule]) -> list[Measured]:
    """The same where each stage also notes the buffers that it reads and that another one changes: its replay comes
    after that."""
    changed = {buffer for one in measured for buffer in one.behaviour.changed_buffers}
    found = []
    for one, stage in zip(measured, stages, strict=True):
        own = one.behaviour.changed_buffers
        others = tuple(b for b in stage.buffers_read() if b in changed and b not in own) if changed else ()
        behaviour = replace(one.behaviour, changed_buffers=own + others)
        found.append(replace(one, behaviour=behaviour) if others else one)
    return found


def _compact(measured: Sequence[Measured], charges: Sequence[Charge], bandwidth: float) -> Compact:
    """bandwidth: at which the device copies its own memory, B/s."""
    stages = [
        _charged(m, *pair, pair[0].copied_bytes / bandwidth)
        for m, pair in zip(measured, pairwise(charges), strict=True)
    ]
    rows = list(zip(measured, stages, pairwise(charges), strict=True))
    return Compact(
        tuple(stages),
        tuple(one.copied for one in charges[:-1]),
        output_retention=tuple(_staying(m, c, *pair) for m, c, pair in rows),
        freed_before_backward=tuple(_gone(m, c, *pair) for m, c, pair in rows),
    )


def _charged(measured: Measured, made: Charge, own: Charge, copying: float = 0.0) -> Stage:
    """The costs of `measured` with the gradients charged that the backward makes and that it is given (δ_i).

    copying: seconds that it takes to copy those of `made` that are copies, beside what they are copied from.
    """

    costs = measured.costs

    def transient(peak: int | None) -> int:
        assert peak is not None
        return max(0, _while_copying(peak, made) + _beside(measured, own) - made.nbytes)

    def charged(one: Any, **more: int) -> Any:
        peak, time = transient(one.backward_transient_bytes), one.backward_time + copying
        return replace(one, backward_time=time, backward_transient_bytes=peak, **more)

    charged_stage: Stage = charged(costs, grad_bytes=own.nbytes)
    return replace(charged_stage, forms=tuple(charged(form) for form in costs.forms))


def _gone(measured: Measured, costs: Stage, made: Charge, own: Charge) -> int:
    """Bytes by which ``B`` stays below what the machine charges for it."""
    assert costs.backward_transient_bytes is not None
    most = _while_copying(measured.begun_bytes, made)
    return max(0, made.nbytes + costs.backward_transient_bytes - most - _beside(measured, own))


def _staying(measured: Measured, costs: Stage, made: Charge, own: Charge) -> int:
    """Bytes that ``B`` needs more where nothing gives the outputs back."""
    assert costs.backward_transient_bytes is not None
    most = _while_copying(measured.output_retention, made)
    return max(0, most + _beside(measured, own) - made.nbytes - costs.backward_transient_bytes)


def _beside(measured: Measured, own: Charge) -> int:
    """Bytes that ``B`` holds beside what it does by itself: of δ_i what stays, copies of what is not contiguous, and
    sums."""
    return own.shared + (measured.noncontiguous_grad_bytes if own.strange else 0) + measured.grad_accumulation_bytes


def _while_copying(peak: int, made: Charge) -> int:
    """The peak of a backward, or its end, where what is copied and the copies are there."""
    return max(peak, made.fresh_bytes + made.copied_bytes) if made.copied else peak


def _shared_parameters(stages: Sequence[StageModule]) -> set[torch.nn.Parameter]:
    """Those that several stages use: autograd holds such a gradient from its first part to its last."""
    users = Counter(parameter for stage in stages for parameter in stage.parameters())
    return {parameter for parameter, count in users.items() if count > 1}


def _joining(stages: Sequence[StageModule], shared: Collection[torch.nn.Parameter]) -> list[int]:
    """Of each stage the bytes of the largest sum that its backward makes of a part that waits and its own: autograd
    adds the two into a third tensor, one parameter after the other."""
    waiting: set[torch.nn.Parameter] = set()
    found = []
    for stage in reversed(stages):
        own = {parameter for parameter in stage.parameters() if parameter in shared}
        found.append(max((parameter.nbytes for parameter in own & waiting), default=0))
        waiting |= own
    return found[::-1]


def _casts(measured: Sequence[Measured]) -> int:
    """Bytes of the casts that autocast keeps, of weights that several stages use once."""
    return sum({weight: nbytes for one in measured for weight, nbytes in one.casts.items()}.values())


def _loss_bytes(output_bytes: int, device: torch.device) -> int:
    """What a loss takes that the model returns: its caller holds it to the end, where the machine frees it with the
    last stage. Larger outputs are dropped by whoever makes a loss of them."""
    return output_bytes if output_bytes <= max(8, block_bytes(device)) else 0


def _prefix_peak(prefix: Sequence[StageModule], value: Any, meter: Meter) -> int:
    if not prefix:
        return 0

    def run() -> Any:
        result = value
        for stage in prefix:
            result = stage.run(result)
        return result

    with preserved([found for stage in prefix for found in stage.buffers()], meter.bench.device), torch.enable_grad():
        return meter.allocator.log(run)[1].peak()

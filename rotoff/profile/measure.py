"""A chain from a model, measured on its device: bytes and seconds of every stage, never holding more than one stage.

Bytes come from the allocator's own events (`allocations`), so they include kernels' temporaries and whatever a stage
keeps past autograd's hooks. The user's gradients, buffers, generators and memory statistics are left as they were:
gradients are taken with ``torch.autograd.grad``, which adds to no ``.grad``.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..capture.aliasing import merge_aliases
from ..capture.backward_roots import BackwardStarts
from ..capture.unsaved import merge_unsaved
from ..core.chain import Chain, LinkRates, Stage
from ..errors import MeasureError
from ..runtime.overhead import NO_UPKEEP
from ..tensors.buffers import preserved
from ..tensors.stage import StageModule
from ..tensors.storage import block_bytes, storage_key
from ..tensors.tree import flatten
from .charged import charged_stages
from .measured import Measured
from .memory.eager_memory import find_lingering, find_passing, find_returned
from .memory.gradients import Charge, charge
from .memory.skips import find_skips
from .profile import Compact, Profile, replay_bytes
from .stage_meter import Meter
from .timing.timing_cache import KnownTimes

logger = logging.getLogger("rotoff")
Progress = Callable[[int, int, str], None]  # stages done, stages in all, name of the next
UNKNOWN = LinkRates(1.0, 1.0)  # of a profile that is not timed, whose rates nobody reads


class Walk(NamedTuple):
    """The model's stages, run one after the other. prefix: those before the chain. stages, measured: of the chain.
    starts: the tensors of its input that are no buffers."""

    prefix: list[StageModule]
    stages: list[StageModule]
    measured: list[Measured]
    starts: list[torch.Tensor]


def measure(
    stages: Sequence[StageModule],
    value: Any,
    meter: Meter,
    bandwidth: Callable[[int, int], LinkRates],
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
        bandwidth: given the bytes that typically move at once, and in all, what the link does.
        known: times that need not be measured, where they are of the same stages.
        named: whether the user named the stages, so that they stay apart unless they alias.
        merged: what stages were called once they had been merged, on an input of other sizes.

    Raises:
        MeasureError: where no parameter or input needs a gradient, or a stage cannot be measured.
        TimesChanged: where `known` are no longer the times of these stages.
    """
    walk = _walked(_groups(stages, value, meter, named, merged), value, meter, known, progress)
    return _profile(walk, value, meter, known, _link(walk.measured, bandwidth, known))


def measure_bytes(
    stages: Sequence[StageModule],
    value: Any,
    meter: Meter,
    progress: Progress | None = None,
    named: bool = False,
    merged: Sequence[str] = (),
) -> tuple[Walk, Profile]:
    """As `measure`, but no times, and so no smaller forms; also returns what `measure_times` takes.

    It tells what keeping everything takes. Where that fits, a step needs no more.
    """
    walk = _walked(_groups(stages, value, meter, named, merged), value, meter, None, progress, timed=False)
    return walk, _profile(walk, value, meter, None, UNKNOWN, timed=False)


def measure_times(
    walk: Walk,
    value: Any,
    meter: Meter,
    bandwidth: Callable[[int, int], LinkRates],
    progress: Progress | None = None,
    known: KnownTimes | None = None,
) -> Profile:
    """What `measure` would have found, where `measure_bytes` made the `walk`."""
    meter.trust(known)
    output, found = value, []
    every = [*zip(walk.prefix, [None] * len(walk.prefix), strict=True), *zip(walk.stages, walk.measured, strict=True)]
    waiting = {(row.name, n): row for n, row in enumerate(known.stages if known else (), start=len(walk.prefix))}
    for n, (stage, measured) in enumerate(every):
        if progress is not None:
            progress(n, len(every), stage.name)
        with _running(stage, meter):
            one, output = meter.times(stage, output, n + 1 == len(every), measured, waiting.get((stage.name, n)))
        found += [one] if one is not None else []
    if progress is not None:
        progress(len(every), len(every), "")
    walk = walk._replace(measured=[one.timed() for one in found])
    return _profile(walk, value, meter, known, _link(walk.measured, bandwidth, known))


def _profile(
    walk: Walk, batch: Any, meter: Meter, known: KnownTimes | None, link: LinkRates, timed: bool = True
) -> Profile:
    device, measured = meter.bench.device, walk.measured
    gradients = _gradients(walk, meter)
    chain = charged_stages(measured, gradients)
    compact, copy_bandwidth = _compact(walk, meter, known) if timed else (None, None)
    starts = walk.starts
    given = {storage_key(t) for t in flatten(batch)[0]}
    returned = measured[-1].own_gradient_bytes
    losses = [_loss_bytes(nbytes, device) for nbytes in returned]
    runs = [(m.lies, m.behaviour) for m in measured]
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what stages took one by one lies in other pieces than a step needs
    return Profile(
        device=device,
        chain=Chain(
            tuple(one.costs for one in chain),
            input_bytes=meter.storage_bytes(starts),
            input_grad_bytes=gradients[0].nbytes,
            **link._asdict(),
        ),
        prefix=tuple(walk.prefix),
        stages=tuple(walk.stages),
        behaviours=tuple(m.behaviour for m in measured),
        unmanaged_bytes=_unmanaged_bytes(walk, meter) + 2 * sum(losses),  # and their gradients
        replay_bytes=replay_bytes([m.behaviour for m in measured], meter.rng_bytes),
        rng_bytes=meter.rng_bytes,
        freed_before_backward=tuple(one.freed_before_backward for one in chain),
        made_input_bytes=meter.storage_bytes([t for t in starts if storage_key(t) not in given]),
        prefix_peak_bytes=_prefix_peak(walk.prefix, batch, meter),
        no_forms=tuple(m.no_forms for m in measured),
        skips=find_skips(runs),
        passing=find_passing(runs, walk.stages),
        returned=find_returned(runs, _others(walk.stages[-1])),
        lingering=find_lingering(walk.prefix, walk.stages, meter.allocator.rounded),
        spare_bytes=tuple(m.lies.spare for m in measured),
        output_retention=tuple(one.output_retention for one in chain),
        compact=compact,
        copy_bandwidth=copy_bandwidth,
        upkeep_times=((known and known.upkeep) or meter.upkeep_times()) if timed else NO_UPKEEP,
        host_bound=_host_bound(measured) if timed and device.type == "cuda" else (),
        beside_loss_bytes=sum(returned) - sum(losses) if any(losses) else 0,
        twice_bytes=_twice(walk, meter),
        timed=timed,
    )


def _groups(
    stages: Sequence[StageModule], value: Any, meter: Meter, named: bool, merged: Sequence[str]
) -> list[StageModule]:
    """`stages` as they are measured; arguments as of `measure`."""
    for tensor in flatten(value)[0]:
        if not meter.plain(tensor):
            raise MeasureError(f"the model's input is a {type(tensor).__name__}; rotoff takes plain tensors only")
    if groups := merged_as(stages, merged):
        return groups
    groups = merge_aliases(stages, value, meter.bench.device)
    return groups if named else merge_unsaved(groups, value, meter.bench.device)


def _walked(
    groups: list[StageModule],
    value: Any,
    meter: Meter,
    known: KnownTimes | None,
    progress: Progress | None,
    timed: bool = True,
) -> Walk:
    """Measure each stage on the output of the one before. timed: as of `Meter.stage`."""
    meter.begin(value)
    meter.trust(known)
    waiting = {(row.name, n): row for n, row in enumerate(known.stages if known else ())}
    measured: list[Measured] = []
    prefix, start = 0, value  # groups up to the last one whose output needs no gradient, and that output
    for n, group in enumerate(groups):
        if progress is not None:
            progress(n, len(groups), group.name)
        with _running(group, meter):
            row = waiting.get((group.name, n - prefix))
            result, value = meter.stage(group, value, n + 1 == len(groups), row, timed)
        if result is None:
            prefix, measured, start = n + 1, [], value
            meter.begin(value)
        else:
            measured.append(result)
    if progress is not None:
        progress(len(groups), len(groups), "")
    if not measured:
        raise MeasureError(
            "nothing in the model needs a gradient, so there is no backward to plan for; let some parameters be trained"
            " (model.requires_grad_()), or run the model without rotoff"
        )
    stages = groups[prefix:]
    read = _with_buffers_read([one.timed() for one in measured], stages)
    joined = zip(read, _joining(stages, _shared_parameters(stages)), strict=True)
    tables = {storage_key(buffer) for group in groups[:prefix] for *_, buffer in group.buffers()}
    starts = [t for t in flatten(start)[0] if storage_key(t) not in tables]  # a view of which takes nothing
    return Walk(groups[:prefix], stages, [replace(m, grad_accumulation_bytes=n) for m, n in joined], starts)


@contextmanager
def _running(stage: StageModule, meter: Meter) -> Iterator[None]:
    """Within, `stage` can be run; its buffers and the generators are then as they were before."""
    if meter.bench.lender is not None:
        meter.bench.lender.keep(p for module in stage.modules for p in module.parameters())
    with preserved(list(stage.buffers()), meter.bench.device), torch.enable_grad():
        yield


def _link(
    measured: Sequence[Measured], bandwidth: Callable[[int, int], LinkRates], known: KnownTimes | None
) -> LinkRates:
    return known.link if known and known.link else link_of([m.costs for m in measured], bandwidth)


def link_of(stages: Sequence[Stage], bandwidth: Callable[[int, int], LinkRates]) -> LinkRates:
    """What the link does in steps of `stages`; bandwidth: as of `measure`."""
    sizes = [stage.saved_bytes for stage in stages]
    return bandwidth(max(1, int(statistics.median(sizes))), sum(sizes))


def _gradients(walk: Walk, meter: Meter, compact: bool = False) -> list[Charge]:
    """What δ_0 to δ_L keep alive. compact: whether those that wait in a part of a storage are copied."""
    charges = charge([(m.gradients, m.own_gradient_bytes) for m in walk.measured], compact)
    nbytes = max(charges[0].nbytes, meter.gradient_bytes(walk.starts))
    return [charges[0]._replace(nbytes=nbytes), *charges[1:]]


def _compact(walk: Walk, meter: Meter, known: KnownTimes | None) -> tuple[Compact | None, float | None]:
    """The chain whose waiting gradients are copied, and at how many B/s; None where none wait."""
    charges = _gradients(walk, meter, compact=True)
    if not any(one.copied for one in charges):
        return None, None
    typical = statistics.median(m.costs.saved_bytes for m in walk.measured)
    bandwidth = (known and known.copy_bandwidth) or meter.copy_bandwidth(typical)
    chain = charged_stages(walk.measured, charges, bandwidth)
    found = Compact(
        tuple(one.costs for one in chain),
        tuple(one.copied for one in charges[:-1]),
        output_retention=tuple(one.output_retention for one in chain),
        freed_before_backward=tuple(one.freed_before_backward for one in chain),
    )
    return found, bandwidth


def _unmanaged_bytes(walk: Walk, meter: Meter) -> int:
    """What stays throughout a step whatever is dropped, a loss that the model returns aside."""
    held = sum(meter.allocator.rounded(one.nbytes) for g in (*walk.prefix, *walk.stages) for one in g.lives.held)
    shared = sum(parameter.nbytes for parameter in _shared_parameters(walk.stages))
    return sum(m.held_bytes for m in walk.measured) + held + shared + _casts(walk.measured)


def _others(last: StageModule) -> tuple[int, ...]:
    """The outputs of the last stage from which no backward starts, where the user says so."""
    module = last.modules[-1]
    return module.others if isinstance(module, BackwardStarts) else ()


def merged_as(stages: Sequence[StageModule], names: Sequence[str]) -> list[StageModule]:
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


def _twice(walk: Walk, meter: Meter) -> tuple[int, ...]:
    """Of each stage, bytes of its values that are charged as staying, too."""
    handed_on = {storage for stage in walk.stages for storage in stage.storages}
    found = []
    for one, stage in zip(walk.measured, walk.stages, strict=True):
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
            "rotoff: launching the kernels of %d of %d stages takes as long as running them, so that planned steps are"
            " slower by what the interpreter takes there: %s%s",
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
    """What a loss takes that the model returns: its caller holds it to the end, as ``backward()`` holds its gradient,
    where the machine frees them with the last stage. Larger outputs are dropped by whoever makes a loss of them."""
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

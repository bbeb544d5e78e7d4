"""Measures a model on its device: bytes and seconds of each stage, holding one stage at a time.

Bytes come from the allocator's events (`memory.allocator`), so they include temporaries inside kernels and whatever a
stage keeps out of reach of autograd's hooks. The user's gradients, buffers, generators and memory statistics stay as
they were: ``torch.autograd.grad`` adds to no ``.grad``.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..accelerator import block_bytes, empty_cache, is_accelerator
from ..capture.aliasing import merge_aliases
from ..capture.backward_roots import without_backward
from ..capture.unsaved import merge_unsaved
from ..core.chain import Chain, LinkRates, Stage
from ..errors import MeasureError
from ..runtime.overhead import NO_OVERHEAD
from ..tensors.buffers import preserved
from ..tensors.stage import StageModule, users_of_parameters
from ..tensors.storage import storage_key
from ..tensors.tree import flatten
from .charged import charged_stages
from .measured import Measured
from .memory.eager_memory import find_freed_early, find_held_late, find_returned
from .memory.gradients import Charge, charge
from .memory.skips import find_skips
from .profile import Compact, Profile, replay_bytes
from .stage_meter import Meter
from .timing.timing_cache import KnownTimes, known_times

logger = logging.getLogger("rotoff")
Progress = Callable[[int, int, str], None]  # stages done, stages in all, name of the next
UNKNOWN = LinkRates(1.0, 1.0)  # of a profile that is not timed; never read


class UsedForm(NamedTuple):
    """A smaller form of a stage that a plan uses. stage: its number in the chain. identity: `Recipe.identity`."""

    stage: int
    identity: Any


class Walk(NamedTuple):
    """The model's stages, run one after the other.

    Attributes:
        prefix: the stages before the chain.
        stages, measured: those of the chain.
        starts: the tensors of the chain's input, without buffers.
    """

    prefix: list[StageModule]
    stages: list[StageModule]
    measured: list[Measured]
    starts: list[torch.Tensor]


def measure(
    stages: Sequence[StageModule],
    value: Any,
    meter: Meter,
    bandwidth: Callable[[int], LinkRates],
    progress: Progress | None = None,
    known: KnownTimes | None = None,
    named: bool = False,
    merged: Sequence[str] = (),
) -> tuple[Walk, Profile]:
    """Measure `stages` on the sample input `value`. Also returns the input of `measure_forms`.

    Args:
        stages: in order. A stage that aliases or overwrites its input is merged with the one before it, and so are most
            whose input no backward needs (`capture.unsaved`).
        value: a tensor, or a structure of tensors, on the device of `meter`.
        bandwidth: given the bytes that typically move at once, returns the rates of the link.
        known: times that need not be measured if they are of the same stages, and which gradients have the layouts of
            their tensors; if others do here, all is measured again.
        named: whether the user named the stages; then they are merged only if they alias.
        merged: the names of the merged stages for an input of another size.

    Raises:
        MeasureError: if no parameter or input needs a gradient, or a stage cannot be measured.
        TimesChanged: if the stages no longer take the `known` times.
    """
    groups = _groups(stages, value, meter, named, merged)
    walk = _walked(groups, value, meter, known, progress)
    profile = _profile(walk, value, meter, known, _link(walk.measured, bandwidth, known))
    if known is not None and any(row.alike and not now for row, now in zip(known.stages, profile.alike, strict=False)):
        return measure(groups, value, meter, bandwidth, progress, known.trying_layouts(), named, merged)
    return walk, profile


def measure_bytes(
    stages: Sequence[StageModule],
    value: Any,
    meter: Meter,
    progress: Progress | None = None,
    named: bool = False,
    merged: Sequence[str] = (),
) -> tuple[Walk, Profile]:
    """Measure bytes but no times, and so no smaller forms. Also returns the input of `measure_times`.

    The profile says what keeping everything takes; if that fits, no more is needed.
    """
    walk = _walked(_groups(stages, value, meter, named, merged), value, meter, None, progress, timed=False)
    return walk, _profile(walk, value, meter, None, UNKNOWN, timed=False)


def measure_times(
    walk: Walk,
    value: Any,
    meter: Meter,
    bandwidth: Callable[[int], LinkRates],
    progress: Progress | None = None,
    known: KnownTimes | None = None,
) -> tuple[Walk, Profile]:
    """Complete the measurement that `measure_bytes` began; return what `measure` would have returned."""
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
    return walk, _profile(walk, value, meter, known, _link(walk.measured, bandwidth, known))


def measure_forms(walk: Walk, value: Any, meter: Meter, profile: Profile, used: Collection[UsedForm]) -> Profile:
    """Return `profile`, whose forms were estimated, with those of `used` measured and without others."""
    batch, wanted = value, dict[Any, dict[Any, None]]()  # by kind of stage: stages of one kind share forms
    kinds = [n if one.kind is None else one.kind for n, one in enumerate(walk.measured, start=1)]
    for form in used:
        wanted.setdefault(kinds[form.stage - 1], {})[form.identity] = None
    found: list[Measured] = []
    last = max((n for n, kind in enumerate(kinds) if kind in wanted), default=-1)
    for stage, one in zip((*walk.prefix, *walk.stages), [*[None] * len(walk.prefix), *walk.measured], strict=True):
        if len(found) > last:
            break
        with _running(stage, meter):
            forms = () if one is None else wanted.get(kinds[len(found)], ())
            more, value = meter.forms(stage, value, stage is walk.stages[-1], one, tuple(forms))
        found += [more] if more is not None else []
    found += [one.without_forms("the limit does not need them") for one in walk.measured[len(found) :]]
    return _profile(walk._replace(measured=found), batch, meter, known_times(profile), profile.chain.link)


def _profile(
    walk: Walk, batch: Any, meter: Meter, known: KnownTimes | None, link: LinkRates, timed: bool = True
) -> Profile:
    device, measured = meter.context.device, walk.measured
    gradients = _gradients(walk, meter)
    chain = charged_stages(measured, gradients)
    compact, copy_bandwidth = _compact(walk, meter, known) if timed else (None, None)
    starts = walk.starts
    batch_tensors = flatten(batch)[0]
    given = {storage_key(t) for t in batch_tensors}
    returned = measured[-1].own_gradient_bytes
    losses = [_loss_bytes(nbytes, device) for nbytes in returned]
    runs = [(m.aliasing, m.behaviour) for m in measured]
    empty_cache(device)  # blocks of single stages do not fit the needs of a step
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
        placed=tuple(one.placed for one in chain),
        made_input_bytes=meter.storage_bytes([t for t in starts if storage_key(t) not in given]),
        batch_bytes=meter.storage_bytes(batch_tensors),
        prefix_peak_bytes=_prefix_peak(walk.prefix, batch, meter),
        no_forms=tuple(m.no_forms for m in measured),
        skips=find_skips(runs),
        freed_early=find_freed_early(runs, walk.stages),
        returned=find_returned(runs, without_backward(walk.stages[-1])),
        held_late=find_held_late(walk.prefix, walk.stages, meter.allocator.rounded),
        spare_bytes=tuple(m.aliasing.spare for m in measured),
        output_retention=tuple(one.output_retention for one in chain),
        compact=compact,
        copy_bandwidth=copy_bandwidth,
        overhead_times=((known and known.overhead) or meter.overhead_times()) if timed else NO_OVERHEAD,
        host_bound=_host_bound(measured) if timed and is_accelerator(device) else (),
        beside_loss_bytes=sum(returned) - sum(losses) if any(losses) else 0,
        twice_bytes=_twice_bytes(walk, meter),
        timed=timed,
        alike=tuple(one.alike for one in gradients[1:]),
    )


def _groups(
    stages: Sequence[StageModule], value: Any, meter: Meter, named: bool, merged: Sequence[str]
) -> list[StageModule]:
    """Return the stages as they are measured; the arguments are those of `measure`."""
    for tensor in flatten(value)[0]:
        if not meter.plain(tensor):
            raise MeasureError(f"the model's input is a {type(tensor).__name__}; rotoff accepts plain tensors only")
    if groups := merged_as(stages, merged):
        return groups
    groups = merge_aliases(stages, value, meter.context.device)
    return groups if named else merge_unsaved(groups, value, meter.context.device)


def _walked(
    groups: list[StageModule],
    value: Any,
    meter: Meter,
    known: KnownTimes | None,
    progress: Progress | None,
    timed: bool = True,
) -> Walk:
    """Measure each stage on the output of the stage before it. timed: as in `Meter.stage`."""
    meter.begin(value)
    meter.trust(known)
    waiting = {(row.name, n): row for n, row in enumerate(known.stages if known else ())}
    measured: list[Measured] = []
    prefix, start = 0, value  # the number of groups up to the last whose output needs no gradient, and that output
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
    tables = {storage_key(buffer) for group in groups[:prefix] for *_, buffer in group.buffers()}
    starts = [t for t in flatten(start)[0] if storage_key(t) not in tables]  # a view of a buffer takes no bytes
    return Walk(groups[:prefix], stages, _with_sums(read, stages), starts)


@contextmanager
def _running(stage: StageModule, meter: Meter) -> Iterator[None]:
    """Make `stage` runnable; restore its buffers and the generators afterwards. Its parameters have no ``.grad``, to
    which the backward of a custom Function may add; the caller restores them."""
    parameters = [p for module in stage.modules for p in module.parameters()]
    if meter.context.lender is not None:
        meter.context.lender.keep(parameters)
    _without_gradients(parameters)
    try:
        with preserved(list(stage.buffers()), meter.context.device), torch.enable_grad():
            yield
    finally:
        _without_gradients(parameters)


def _without_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _link(measured: Sequence[Measured], bandwidth: Callable[[int], LinkRates], known: KnownTimes | None) -> LinkRates:
    return known.link if known and known.link else link_of([m.costs for m in measured], bandwidth)


def link_of(stages: Sequence[Stage], bandwidth: Callable[[int], LinkRates]) -> LinkRates:
    """Return the rates of the link in steps of `stages`. bandwidth: as in `measure`."""
    return bandwidth(max(1, int(statistics.median(stage.saved_bytes for stage in stages))))


def _gradients(walk: Walk, meter: Meter, compact: bool = False) -> list[Charge]:
    """Return what δ_0 to δ_L keep alive. compact: whether gradients that wait in a part of a storage are copied."""
    charges = charge([(m.gradients, m.own_gradient_bytes) for m in walk.measured], compact)
    nbytes = max(charges[0].nbytes, meter.gradient_bytes(walk.starts))
    charges = [charges[0]._replace(nbytes=nbytes), *charges[1:]]
    for parameter, users in users_of_parameters(walk.stages).items():
        size = meter.gradient_bytes([parameter])
        for i in range(users[0], users[-1]):
            charges[i] = charges[i]._replace(nbytes=charges[i].nbytes + size, waiting=charges[i].waiting + size)
    return charges


def _compact(walk: Walk, meter: Meter, known: KnownTimes | None) -> tuple[Compact | None, float | None]:
    """Return the chain in which waiting gradients are copied, and the bandwidth of the copies in B/s; None if none
    wait."""
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
    """Return what stays throughout a step whatever is dropped, without a loss that the model returns."""
    held = sum(meter.allocator.rounded(one.nbytes) for g in (*walk.prefix, *walk.stages) for one in g.lives.held)
    return sum(m.held_bytes for m in walk.measured) + held + _casts(walk.measured)


def merged_as(stages: Sequence[StageModule], names: Sequence[str]) -> list[StageModule]:
    """Return `stages`, merged so that they have these names; an empty list if that is impossible."""
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


def _twice_bytes(walk: Walk, meter: Meter) -> tuple[int, ...]:
    """Return, for each stage, the bytes of its values that are also charged as staying."""
    handed_on = {storage for stage in walk.stages for storage in stage.storages}
    found = []
    for one, stage in zip(walk.measured, walk.stages, strict=True):
        recorded = [held.nbytes for held in stage.lives.held if held.saved or held.storage in handed_on]
        more = 0 if handed_on else max(0, one.held_bytes - one.behaviour.unmanaged_bytes)
        found.append(more + sum(map(meter.allocator.rounded, recorded)))
    return tuple(found)


def _host_bound(measured: Sequence[Measured]) -> tuple[bool, ...]:
    """Return whether the device waits for the host in each stage, and log the stages in which it does."""
    found = tuple(one.host_bound for one in measured)
    if any(found):
        names = [one.costs.name for one in measured if one.host_bound]
        logger.info(
            "rotoff: in %d of %d stages, launching kernels takes as long as running them; the interpreter's overhead"
            " slows planned steps there: %s%s",
            len(names),
            len(found),
            ", ".join(names[:5]),
            ", ..." if len(names) > 5 else "",
        )
    return found


def _with_buffers_read(measured: Sequence[Measured], stages: Sequence[StageModule]) -> list[Measured]:
    """Return `measured`, in which each stage also notes the buffers that it reads and another stage changes, since its
    replay comes after that change."""
    changed = {buffer for one in measured for buffer in one.behaviour.changed_buffers}
    found = []
    for one, stage in zip(measured, stages, strict=True):
        own = one.behaviour.changed_buffers
        others = tuple(b for b in stage.buffers_read() if b in changed and b not in own) if changed else ()
        behaviour = replace(one.behaviour, changed_buffers=own + others)
        found.append(replace(one, behaviour=behaviour) if others else one)
    return found


def _with_sums(measured: Sequence[Measured], stages: Sequence[StageModule]) -> list[Measured]:
    """Return `measured` with the parameters whose gradients are added to those of later stages, and those that wait for
    earlier ones. Autograd adds the first two into a third tensor; others to that one in place, unless they are sparse
    or those of a cast, which it adds up first."""
    users, found = users_of_parameters(stages), []
    for i, (one, stage) in enumerate(zip(measured, stages, strict=True), start=1):
        shared = [(n, users[parameter]) for n, parameter in enumerate(stage.parameters()) if parameter in users]
        adding, waiting = (frozenset(n for n, by in shared if by[end] != i) for end in (-1, 0))
        found.append(replace(one, adding=adding, waiting=waiting))
    return found


def _casts(measured: Sequence[Measured]) -> int:
    """Return the bytes of autocast's casts, counting the cast of a weight that several stages use once."""
    return sum({weight: nbytes for one in measured for weight, nbytes in one.casts.items()}.values())


def _loss_bytes(output_bytes: int, device: torch.device) -> int:
    """Return the bytes of a loss that the model returns. The caller holds it to the end, and ``backward()`` holds its
    gradient; the machine frees both with the last stage. A larger output is dropped by the code that makes a loss of
    it."""
    return output_bytes if output_bytes <= max(8, block_bytes(device)) else 0


def _prefix_peak(prefix: Sequence[StageModule], value: Any, meter: Meter) -> int:
    if not prefix:
        return 0

    def run() -> Any:
        result = value
        for stage in prefix:
            result = stage.run(result)
        return result

    with preserved([found for stage in prefix for found in stage.buffers()], meter.context.device), torch.enable_grad():
        return meter.allocator.log(run)[1].peak()

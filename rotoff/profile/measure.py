"""A chain from a model, measured on its device: bytes and seconds of every stage, never holding more than one stage.

Bytes come from the allocator's own events (`allocations`), so they include kernels' temporaries and whatever a stage keeps
past autograd's hooks. The user's gradients, buffers, generators and memory statistics are left as they were: gradients are
taken with ``torch.autograd.grad``, which adds to no ``.grad``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..capture.aliasing import merge_aliases
from ..capture.stage import Behaviour, StageModule, flatten, storage_key
from ..capture.unsaved import merge_unsaved
from ..chain import Chain, Form, Stage
from ..errors import MeasureError
from ..runtime.convolutions import Algorithms
from ..runtime.replay import preserved
from .forms import Policy
from .gradients import Charge, charge
from .known_times import KnownTimes
from .meter import CUDA_BLOCK, Measured, Meter
from .skips import Skip, behave_in_place, find_skips, keep_in_place

Progress = Callable[[int, int, str], None]  # stages done, stages in all, name of the next


class StageForms(NamedTuple):
    """Smaller forms of the stage `name`, as ``F_sel i 1``, ``F_sel i 2``, ... make them.

    forms: their costs. keeps: of each, the tensors that it keeps, as the operations that made them and shapes. reason: why
    there are none. algorithms: of each, by which its convolutions run, where that is not the flags' choice.
    """

    name: str
    forms: tuple[Form, ...]
    keeps: tuple[tuple[str, ...], ...]
    reason: str
    algorithms: tuple[Algorithms | None, ...] = ()


class Compact(NamedTuple):
    """What becomes of the chain where gradients that wait in a part of a larger storage are copied, so that the rest can go.

    stages: its costs. copied: of each stage, the inputs whose gradients are. staying_bytes: as of `Profile`.
    """

    stages: tuple[Stage, ...]
    copied: tuple[tuple[int, ...], ...]
    staying_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """A measured model.

    device: where it was measured. chain: costs of the stages that have a backward. prefix: stages before them, through
    which no gradient flows. stages, behaviours: of the chain. stuck_bytes: what autograd keeps past all hooks, in every
    step. replay_bytes: the most that snapshots take in a step that runs stages twice. prefix_peak_bytes: the most that the prefix holds,
    its output (the chain's input) included. resident_input_bytes: those of a_0 that were there before the step: all of it,
    or what a prefix hands on of the batch. skips: bytes that several values carry. spare_bytes: of each
    stage, by how much the charge while it runs is above what it takes, as ``F_all`` and as ``F_ck`` (`skips.Lying.spare`).
    tail_times: of each stage, the seconds that a replay for its own backward alone leaves out (`runtime.tails`); none given: 0.
    gone_bytes: of each stage, what the machine charges in its ``B`` and is not there: an output, say, that only the next stage's
    backward needed. staying_bytes: of each stage, what its ``B`` needs more where nothing gives its outputs back. rng_bytes: of one
    state of the generators, on the device. compact: the same with gradients that wait copied, where there are any.
    copy_bandwidth: of those copies, B/s.
    """

    device: torch.device
    chain: Chain
    prefix: tuple[StageModule, ...]
    stages: tuple[StageModule, ...]
    behaviours: tuple[Behaviour, ...]
    stuck_bytes: int
    replay_bytes: int
    prefix_peak_bytes: int = 0
    resident_input_bytes: int = 0
    no_forms: tuple[str, ...] = ()
    rng_bytes: int = 0
    gone_bytes: tuple[int, ...] = ()
    skips: tuple[Skip, ...] = ()
    spare_bytes: tuple[tuple[int, int], ...] = ()
    staying_bytes: tuple[int, ...] = ()
    compact: Compact | None = None
    copy_bandwidth: float | None = None
    tail_times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.tail_times:
            object.__setattr__(self, "tail_times", (0.0,) * len(self.chain))

    def keeping(self, kept: Collection[int], compact: bool = False) -> Profile:
        """The same stages where the `skips` of these numbers are kept in place: constants of the step, and in no value.

        compact: whether gradients that wait are copied.
        """
        if compact and self.compact is not None:
            copying = zip(self.behaviours, self.compact.copied, strict=True)
            return replace(
                self,
                chain=replace(self.chain, stages=self.compact.stages),
                behaviours=tuple(replace(one, copied=copied) for one, copied in copying),
                staying_bytes=self.compact.staying_bytes,
                compact=None,
            ).keeping(kept)
        if not kept:
            return self
        staying = [self.skips[n] for n in sorted(kept)]
        return replace(
            self,
            chain=keep_in_place(self.chain, staying, self.spare_bytes, self.staying_bytes),
            behaviours=behave_in_place(self.behaviours, staying),
            stuck_bytes=self.stuck_bytes + self.kept_bytes(kept),
            skips=(),
            compact=None,
        )

    def kept_bytes(self, kept: Collection[int]) -> int:
        """Bytes of the `skips` of these numbers."""
        return sum(self.skips[n].nbytes for n in kept)

    @property
    def forms(self) -> tuple[StageForms, ...]:
        """Of each stage its smaller forms and what they keep, or why it has none."""
        reasons = self.no_forms or ("",) * len(self.stages)
        rows = zip(self.chain.stages, self.behaviours, reasons, strict=True)
        return tuple(
            StageForms(s.name, s.forms, tuple(r.keeps for r in b.forms), why, tuple(r.algorithms for r in b.forms))
            for s, b, why in rows
        )

    def replay_extra(self, replayed: Collection[int]) -> tuple[int, dict[int, int]]:
        """What `replay_bytes` is where just the stages in `replayed` run twice: bytes held throughout, and while each does."""
        behaviours = {i: self.behaviours[i - 1] for i in replayed}
        states = min(len(behaviours), 1 + sum(b.draws for b in self.behaviours))
        held = states * self.rng_bytes + sum(sum(_buffer_bytes(b)) for b in behaviours.values())
        beside = {i: 2 * self.rng_bytes + sum(_buffer_bytes(b)) + b.stuck_bytes for i, b in behaviours.items()}
        return held, beside


def measure(
    stages: Sequence[StageModule],
    value: Any,
    device: torch.device,
    bandwidth: Callable[[int], tuple[float, float, bool]],
    repeats: int | None = None,
    progress: Progress | None = None,
    meter: Meter | None = None,
    known: KnownTimes | None = None,
    forms: bool | Policy = True,
    named: bool = False,
    algorithms: Sequence[Algorithms] = (),
) -> Profile:
    """Measure `stages` on the sample input `value`.

    Args:
        stages: in order; those that alias or overwrite their input are merged with their predecessor, and so are most whose
            input no backward needs (`capture.unsaved`).
        value: a tensor, or a tuple of them, on `device`.
        bandwidth: given the bytes that typically move, the link's (d2h B/s, h2d B/s, duplex).
        repeats: timed runs of each stage, of which the median counts; None: until it is steady (`steady.Repeats`). meter: what measures one stage; default: on `device`.
        known: times that need not be measured, where they are of the same stages.
        forms: whether to find and measure smaller forms (`profile.forms`); a policy says what they keep.
        named: whether the user named the stages, so that they stay apart unless they alias.
        algorithms: other ones that convolutions may run by (`profile.conv_forms`).

    Raises:
        MeasureError: where no parameter or input needs a gradient, or a stage cannot be measured.
    """
    if not flatten(value)[0]:
        raise MeasureError("the model's input holds no tensor")
    meter = meter or Meter(device, repeats, forms, algorithms)
    for tensor in flatten(value)[0]:
        if not meter.plain(tensor):
            raise MeasureError(f"the model's input is a {type(tensor).__name__}; rotoff takes plain tensors only")
    groups = merge_aliases(stages, value, device)
    if not named:
        groups = merge_unsaved(groups, value, device)
    meter.begin(value)
    waiting = {(row.name, n): row for n, row in enumerate(known.stages if known else ())}
    measured: list[Measured] = []
    prefix = 0  # groups up to the last one whose output needs no gradient
    start = batch = value
    for n, group in enumerate(groups):
        if progress is not None:
            progress(n, len(groups), group.name)
        meter.known_time = waiting.get((group.name, n - prefix))
        with preserved(list(group.buffers()), device), torch.enable_grad():
            result, value = meter.stage(group, value, n + 1 == len(groups))
        if result is None:
            prefix, measured, start = n + 1, [], value
            meter.begin(value)
        else:
            measured.append(result)
    if progress is not None:
        progress(len(groups), len(groups), "")
    if not measured:
        raise MeasureError("nothing in the model needs a gradient: there is no backward to plan for")
    typical = statistics.median(m.costs.saved_bytes for m in measured)
    d2h, h2d, duplex = known.link if known and known.link else bandwidth(max(1, int(typical)))
    starts = flatten(start)[0]
    given = {storage_key(t) for t in flatten(batch)[0]}
    lying = [(m.gradients, m.own_gradient_bytes) for m in measured]
    gradients, compact = charge(lying), charge(lying, compact=True)
    for charges in gradients, compact:
        charges[0] = charges[0]._replace(nbytes=max(charges[0].nbytes, meter.gradient_bytes(starts)))
    costs = [_charged(m, *pair) for m, pair in zip(measured, pairwise(gradients), strict=True)]
    copies = any(one.copied for one in compact)
    copy_bandwidth = (known and known.copy_bandwidth) or meter.copy_bandwidth(typical) if copies else None
    return Profile(
        device=device,
        chain=Chain(
            stages=tuple(costs),
            d2h_bandwidth=d2h,
            h2d_bandwidth=h2d,
            duplex=duplex,
            input_bytes=meter.storage_bytes(starts),
            input_grad_bytes=gradients[0].nbytes,
        ),
        prefix=tuple(groups[:prefix]),
        stages=tuple(groups[prefix:]),
        behaviours=tuple(m.behaviour for m in measured),
        stuck_bytes=sum(m.behaviour.stuck_bytes for m in measured)
        + _shared_gradients(groups[prefix:])
        + sum(_loss_bytes(nbytes, device) for nbytes in measured[-1].own_gradient_bytes),
        replay_bytes=_replay_bytes([m.behaviour for m in measured], meter.rng_bytes),
        rng_bytes=meter.rng_bytes,
        gone_bytes=tuple(_gone(m, c, *pair) for m, c, pair in zip(measured, costs, pairwise(gradients), strict=True)),
        resident_input_bytes=meter.storage_bytes([t for t in starts if storage_key(t) in given]),
        prefix_peak_bytes=_prefix_peak(groups[:prefix], batch, meter),
        no_forms=tuple(m.no_forms for m in measured),
        skips=find_skips([(m.lies, m.behaviour) for m in measured]),
        spare_bytes=tuple(m.lies.spare for m in measured),
        staying_bytes=tuple(_staying(m, c, *pair) for m, c, pair in zip(measured, costs, pairwise(gradients), strict=True)),
        compact=_compact(measured, compact, copy_bandwidth) if copy_bandwidth else None,
        copy_bandwidth=copy_bandwidth,
        tail_times=tuple(m.tail_time for m in measured),
    )


def _compact(measured: Sequence[Measured], charges: Sequence[Charge], bandwidth: float) -> Compact:
    """bandwidth: at which the device copies its own memory, B/s."""
    stages = [
        _charged(m, *pair, pair[0].copied_bytes / bandwidth) for m, pair in zip(measured, pairwise(charges), strict=True)
    ]
    staying = [_staying(m, c, *pair) for m, c, pair in zip(measured, stages, pairwise(charges), strict=True)]
    return Compact(tuple(stages), tuple(one.copied for one in charges[:-1]), tuple(staying))


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
    return max(0, made.nbytes + costs.backward_transient_bytes - measured.begun_bytes - _beside(measured, own))


def _staying(measured: Measured, costs: Stage, made: Charge, own: Charge) -> int:
    """Bytes that ``B`` needs more where nothing gives the outputs back."""
    assert costs.backward_transient_bytes is not None
    most = _while_copying(measured.staying_bytes, made)
    return max(0, most + _beside(measured, own) - made.nbytes - costs.backward_transient_bytes)


def _beside(measured: Measured, own: Charge) -> int:
    """Bytes that ``B`` holds beside what it does by itself: of δ_i what stays, and copies of what is not contiguous."""
    return own.shared + (measured.strange_bytes if own.strange else 0)


def _while_copying(peak: int, made: Charge) -> int:
    """The peak of a backward, or its end, where what is copied and the copies are there."""
    return max(peak, made.fresh_bytes + made.copied_bytes) if made.copied else peak


def _shared_gradients(stages: Sequence[StageModule]) -> int:
    """Bytes of the parameters that several stages use: autograd holds such a gradient from its first part to its last."""
    users: dict[torch.nn.Parameter, int] = {}
    for stage in stages:
        for parameter in stage.parameters():
            users[parameter] = users.get(parameter, 0) + 1
    return sum(parameter.nbytes for parameter, count in users.items() if count > 1)


def _loss_bytes(output_bytes: int, device: torch.device) -> int:
    """What a loss takes that the model returns: its caller holds it to the end, where the machine frees it with the last stage.
    Larger outputs are dropped by whoever makes a loss of them."""
    most = CUDA_BLOCK if device.type == "cuda" else 8
    return output_bytes if output_bytes <= most else 0


def _replay_bytes(behaviours: Sequence[Behaviour], rng_bytes: int) -> int:
    """What replays hold beside values: every stage's snapshots; the clones that one replay at a time runs on, and what
    its graph keeps past all hooks, beside what that of the first run does."""
    snapshots = [sum(_buffer_bytes(b)) for b in behaviours]
    states = sum(b.draws for b in behaviours) + 3  # the first; a replay's own, and the one that it puts back
    stuck = max(b.stuck_bytes for b in behaviours)
    return sum(snapshots) + max(snapshots) + stuck + states * rng_bytes


def _buffer_bytes(behaviour: Behaviour) -> list[int]:
    """Of each buffer that the forward changes, what a copy of it takes."""
    found = (module._buffers[name] for module, name in behaviour.changed_buffers)
    return [
        -(-buffer.nbytes // CUDA_BLOCK) * CUDA_BLOCK if buffer.is_cuda else buffer.nbytes
        for buffer in found
        if buffer is not None
    ]


def _prefix_peak(prefix: Sequence[StageModule], value: Any, meter: Meter) -> int:
    if not prefix:
        return 0

    def run() -> Any:
        result = value
        for stage in prefix:
            result = stage.run(result)
        return result

    with preserved([found for stage in prefix for found in stage.buffers()], meter.device), torch.enable_grad():
        return meter.record(run)[1].peak()

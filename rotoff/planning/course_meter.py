"""Measures one course of a model's forward: records it, cuts it into stages, and runs each stage alone.

The bytes of keeping everything are measured first. If those suffice, no stage is timed and no smaller form is tried.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..capture import strategy
from ..capture.course import Course, expected
from ..capture.interception import custom_function, without_checkpoints
from ..capture.partition.weight_casts import cast_again
from ..capture.recording import same_calls
from ..capture.sharding import collectives_waited_for, tensor_parallel
from ..capture.tape import Tape
from ..capture.undo import undone
from ..capture.unrepeatable import takes_fast_path
from ..core.backward_from import read_backward_from
from ..core.chain import LinkRates, Stage
from ..errors import MeasureError, RotoffError
from ..io.cache import Cache
from ..io.progress import Bar
from ..profile.measure import (
    UNKNOWN,
    Progress,
    UsedForm,
    Walk,
    link_of,
    measure,
    measure_bytes,
    measure_forms,
    measure_times,
)
from ..profile.memory.eager_memory import HeldLate
from ..profile.profile import Profile
from ..profile.profile_cache import bytes_are_portable, find_profile, keep_profile
from ..profile.provenance import provenance
from ..profile.selective.variants import read_forms
from ..profile.stage_meter import Meter
from ..profile.timing.context import MeasurementContext
from ..profile.timing.timing_cache import KnownTimes, TimesChanged, known_times, profile_key
from ..runtime.links.pool import LinkPool
from ..runtime.placed.lending import Lender, settle_buffers
from ..runtime.taped_forward import TapedForward, UntapedError
from ..tensors.autocast import casts_dropped
from ..tensors.buffers import contents_preserved
from ..tensors.convolutions import other_algorithms, read_conv_algorithms
from ..tensors.tree import flatten
from .distributed import agree_on_profile, refuse_root_shards
from .options import Options

logger = logging.getLogger("rotoff")
# Measuring watches calls and allocations of the whole process, so only one thread may measure at a time.
_MEASURING = threading.RLock()
# Devices for which a cached profile replaces all measuring. On others the stages run anyway, so that the libraries have
# allocated their workspaces before the first planned step.
KNOWN_WHOLE = frozenset({"cpu"})
BETWEEN = "interpolated between those measured at other sizes"  # where a chain's times come from


class OtherSizes(NamedTuple):
    """What was measured at other sizes.

    Attributes:
        tape: the recorded forward.
        names: names of the stages.
        times: interpolated for the new size; None: not known.
    """

    tape: Tape
    names: Sequence[str] = ()
    times: KnownTimes | None = None


class FormUse(NamedTuple):
    """What smaller forms are measured for.

    Attributes:
        limit: as text; profiles with the forms for another one are no use.
        forms: given a profile with estimated forms, returns those worth measuring; None: all.
    """

    limit: str
    forms: Callable[[Profile], Collection[UsedForm] | None]


@dataclass(frozen=True)
class MeasureRequest:
    """What to measure.

    Attributes:
        value: the chain's input.
        progress, repeats: as for `Checkpointable.measure`.
        also: tapes of other forwards that the stages must cover, too.
        known: what was measured at other sizes, if anything.
        taped: the current step's forward; it is recorded in place of a separate one.
        captured: an earlier recording on an input of the same signature; None: record the forward now.
        use: what the forms are for, if not all are to be measured.
    """

    value: Any
    progress: Progress | bool | None = None
    repeats: int | None = None
    also: Sequence[Tape] = ()
    known: OtherSizes | None = None
    taped: TapedForward | None = None
    captured: strategy.Captured | None = None
    use: FormUse | None = None


class CourseMeter:
    """Measures courses of `model`, in all processes of `group` alike.

    Attributes:
        plain: runs the unplanned model, if calling `model` does not (`rotoff.attach`).
        device: where steps run, if not where the parameters are.

    Args:
        root: the module that the user calls; `model`, if nothing wraps it.
        options: the options of `Checkpointable`.
        links: links to the host, whose bandwidth is measured.
        cache: keeps profiles.
    """

    def __init__(
        self, root: nn.Module, model: nn.Module, options: Options, links: LinkPool, group: Any, cache: Cache
    ) -> None:
        self.plain: Callable[..., Any] | None = None
        self.device = options.device
        self.model = model
        self.options = options
        self.links = links
        self.cache = cache
        self.group = group
        self._root = weakref.ref(root)  # weak, since root owns this object
        self._told_whole = False
        self._waiting: weakref.finalize[..., Any] | None = None  # makes each collective wait where it is issued

    def device_for(self, value: Any) -> torch.device:
        """Where a step on the chain's input `value` runs."""
        return self.device or device_of(self.model, value)

    def measure(
        self, wanted: MeasureRequest, enough: Callable[[Profile], bool] | None = None
    ) -> tuple[strategy.Captured, Profile]:
        """Record and profile a course.

        Args:
            enough: called with a profile without times; if true, that profile is returned. None: always measure times.

        Raises:
            MeasureError: if it cannot be measured here, or in another process of the group.
        """
        began = time.perf_counter()
        if self.device is not None:
            settle_buffers(self.model, self.device)
        with _MEASURING, casts_dropped(), self._surroundings(wanted) as (lender, progress):
            one = _Measurement(self, wanted, lender, progress)
            with _as_one(one) if wanted.also else nullcontext():
                profile = self._agreed(one.bytes) if enough is not None else None
                if profile is None or not (enough is not None and enough(profile)):
                    profile = whole = self._agreed(one.whole)
                    if self.group is not None or self.links.share is not None:
                        profile = self._agreed(lambda: one.with_link(whole))
        what = "stages" if profile.timed else "stages' bytes"
        stages, took = profile.chain.stages, time.perf_counter() - began
        names = stages[0].name, stages[-1].name
        logger.info("rotoff: measured %d %s (%s to %s) in %.1f s", len(stages), what, *names, took)
        return one.captured, profile

    def _agreed(self, measure: Callable[[], Profile]) -> Profile:
        return measure() if self.group is None else agree_on_profile(measure, self.group)

    @contextmanager
    def _surroundings(self, wanted: MeasureRequest) -> Iterator[tuple[Lender | None, Progress | None]]:
        """Prepare the model for measuring within the block, and restore it after."""
        with ExitStack() as stack:
            stack.callback(_put_back, [(p, p.grad) for p in self.model.parameters() if p.is_leaf])
            if wanted.taped is None:
                stack.enter_context(undone(self.model))
            if wanted.captured is not None:
                stack.enter_context(torch.enable_grad())
            elif wanted.taped is None and not self.model.training:  # a step runs in the modes that the caller has set
                self.model.train()
                stack.callback(self.model.eval)
            stack.enter_context(without_checkpoints())
            lender = stack.enter_context(self._lender())
            bar = stack.enter_context(Bar("measuring"))
            if wanted.progress is None or wanted.progress is True:
                yield lender, lambda done, of, name: bar(done / max(1, of), name)
            else:
                yield lender, wanted.progress or None

    def _lender(self) -> AbstractContextManager[Lender | None]:
        """A context that brings parameters to the step's device while the model is measured."""
        if self.device is None:
            return nullcontext()
        lender = Lender(self.model.parameters(), self.device, 0)
        return lender if lender else nullcontext()

    def record(self, value: Any, taped: TapedForward, also: Sequence[Tape] = ()) -> strategy.Captured:
        """Record the forward of a step on `value` without measuring it. also: as for `MeasureRequest`."""
        with _MEASURING, casts_dropped(), without_checkpoints(), self._lender():
            return self.captured(MeasureRequest(value, taped=taped, also=also))

    def captured(self, wanted: MeasureRequest) -> strategy.Captured:
        """Record the model's forward and cut it into stages."""
        taped, value, device = wanted.taped, wanted.value, self.device_for(wanted.value)
        forward: Callable[..., Any] = self.plain or self.model
        like = None if wanted.known is None else wanted.known.tape
        if taped is None:
            return strategy.capture(self.model, value, device, self.options.stages, forward, wanted.also, like)

        def run(*_args: Any, **_kwargs: Any) -> Any:
            args, kwargs = taped.value
            taped.result = forward(*args, **kwargs)
            return taped.result

        captured = strategy.capture(self.model, value, device, self.options.stages, run, wanted.also, like, taped)
        try:
            taped.let_go(captured.tape)
        except UntapedError as error:
            logger.warning("rotoff: the forward runs once more to measure this step, since %s", error)
            taped.put_back()
            with undone(self.model):
                return self.captured(replace(wanted, taped=None))
        return captured

    @property
    def root(self) -> nn.Module:
        """The module that is called."""
        root = self._root()
        return self.model if root is None else root

    def check_sharding(self) -> None:
        """Raise MeasureError if tensor parallel processes would not follow one plan."""
        if self.group is None and tensor_parallel(self.root, self.model):
            raise MeasureError(
                "parameters of the model are DTensors, and processes with plans of their own would wait for each other;"
                " give Checkpointable process_group=True, so that all follow one plan"
            )
        if self.group is not None and self._waiting is None:
            collectives_waited_for().__enter__()
            self._waiting = weakref.finalize(self, collectives_waited_for().__exit__)

    def say_called_again(self, tape: Tape) -> None:
        """Log once which modules and Functions run their own code more often than in the plain model."""
        names = {one: repr(name) for name, one in self.model.named_modules() if not takes_fast_path(one)}
        functions = {one.function for op in tape.operations for one in tape.inner.get(id(op), (op,))}
        told = sorted({names.get(one, "") if isinstance(one, nn.Module) else custom_function(one) for one in functions})
        told = [name for name in told if name]
        if not told or self._told_whole:
            return
        self._told_whole = True
        logger.warning(
            "rotoff: the code of %s%s (compiled, sharded, mapped by torch.func, or a torch.autograd.Function) runs"
            " again when it is measured and in replays; what it changes outside of the model (globals, iterators,"
            " files) changes more often than in the plain model",
            ", ".join(told[:4]),
            ", ..." if len(told) > 4 else "",
        )


class _Measurement:
    """The measurement of one course. progress: called after each stage, unless it is None."""

    def __init__(
        self, of: CourseMeter, wanted: MeasureRequest, lender: Lender | None, progress: Progress | None
    ) -> None:
        self._of = of
        self._wanted = wanted
        self._lender = lender
        self._progress = progress
        self._walk: Walk | None = None
        self._device = of.device_for(wanted.value)

    @cached_property
    def captured(self) -> strategy.Captured:
        """The course, recorded on first use."""
        if self._wanted.captured is not None:
            strategy.check_measurable(self._of.model, self._wanted.value)
            return self._wanted.captured
        self._of.check_sharding()
        captured = self._of.captured(self._wanted)
        self._of.say_called_again(captured.tape)
        captured = captured.starting(read_backward_from(self._of.options.backward_from))
        refuse_root_shards(self._of.root, captured.stages)
        return captured

    @cached_property
    def _known(self) -> OtherSizes | None:
        known = self._wanted.known
        return known if known is not None and same_calls(known.tape, self.captured.tape) else None

    @cached_property
    def _key(self) -> dict[str, Any] | None:
        """The cache key; None in a group, whose processes must all measure, whatever one of them has cached."""
        if self._of.group is not None:
            return None
        options = self._of.options
        chosen = self._of.links.staging_bytes, options.forms, options.conv_algorithms
        return profile_key(self.captured.stages, self._wanted.value, self._device, self._wanted.repeats, *chosen)

    @cached_property
    def _kept(self) -> Profile | None:
        """The cached profile, if any: with all forms, or else with those for the limit."""
        keys = [self._key, self._key_for_limit]
        found = [find_profile(self._of.cache, key, self.captured.stages) for key in keys if key is not None]
        return next((one for one in found if one is not None and one.timed), next(iter(found), None))

    @property
    def _key_for_limit(self) -> dict[str, Any] | None:
        use, key = self._wanted.use, self._key
        return None if use is None or key is None else {**key, "limit": use.limit}

    @cached_property
    def _kept_holds(self) -> bool:
        """Whether the cached profile's bytes can be used without measuring them again."""
        return self._device.type in KNOWN_WHOLE and bytes_are_portable(self.captured.stages)

    def bytes(self) -> Profile:
        """The profile without times, or a cached one with times."""
        captured, kept = self.captured, self._kept
        if kept is not None and self._kept_holds:
            self._say_kept("bytes and times" if kept.timed else "bytes", kept)
            return self._described(kept)
        with _unchanged(self._of.model, captured):
            self._walk, profile = measure_bytes(
                captured.stages, self._wanted.value, self._meter(), self._progress, self._named, self._names
            )
        if kept is None:
            keep_profile(self._of.cache, self._key, captured.stages, profile)
        return self._described(profile)

    def whole(self) -> Profile:
        """The profile with times and smaller forms."""
        kept = self._kept if self._kept is not None and self._kept.timed else None
        busy = busy_with_others() if self._device.type == "cpu" else ""
        between = self._known.times if self._known is not None and kept is None else None
        if kept is not None:
            self._say_kept("bytes and times" if self._kept_holds else "times", kept)
        if kept is not None and self._kept_holds:
            return self._described(kept)
        try:
            profile = self._measured(between or (None if kept is None else known_times(kept, checked=True)))
        except TimesChanged as changed:
            logger.info("rotoff: times from the cache are not used, since %s", changed)
            kept, profile = None, self._measured(None)
        if times := BETWEEN if between is not None else busy if kept is None else kept.chain.meta.get("times"):
            profile = replace(profile, chain=replace(profile.chain, meta={"times": times}))
        if kept is None:
            # with times of other sizes, it has those forms alone that plans for this limit use
            key = self._key_for_limit if profile.formed_for or between is not None else self._key
            keep_profile(self._of.cache, key, self.captured.stages, profile)
        return self._described(profile)

    def _measured(self, times: KnownTimes | None) -> Profile:
        """Measure now; `times`, if given, are not measured again."""
        if times is not None and self._of.group is not None:
            times = times.trying_layouts()  # all processes must measure equally often
        value, stages, meter = self._wanted.value, self.captured.stages, self._meter()
        use, more = self._wanted.use, (self._bandwidth, self._progress, times)
        found = times is not None and all(row.forms is not None for row in times.stages)
        estimated = use is not None and not found and meter.estimate_forms()
        with _unchanged(self._of.model, self.captured):
            if self._walk is not None:
                walk, profile = measure_times(self._walk, value, meter, *more)
            else:
                walk, profile = measure(stages, value, meter, *more, self._named, self._names)
            if use is None or not estimated:
                return profile
            if (forms := use.forms(profile)) is None:
                return measure_times(walk, value, self._meter(), *more)[1]
            profile = measure_forms(walk, value, self._meter(), profile, forms)
            return replace(profile, formed_for=use.limit)

    def _meter(self) -> Meter:
        options = self._of.options
        others = other_algorithms(self._device) if read_conv_algorithms(options.conv_algorithms) else ()
        context = MeasurementContext.on(self._device, self._wanted.repeats, self._lender)
        return Meter(context, read_forms(options.forms), others, self._of.group is None)

    def with_link(self, profile: Profile) -> Profile:
        """`profile` with the rates of a link that other processes use, too. In a group all measure it at the same time,
        as they copy in training."""
        rates = profile.chain.link
        if self._of.group is not None:
            rates = link_of(profile.chain.stages, partial(self._of.links.bandwidth, self._device))
        return replace(profile, chain=replace(profile.chain, **self._of.links.shared(rates)._asdict()))

    def _bandwidth(self, nbytes: int) -> LinkRates:
        if self._of.group is not None:
            return UNKNOWN  # until all processes of the group measure it (`with_link`)
        return self._of.links.bandwidth(self._device, nbytes)

    @property
    def _named(self) -> bool:
        return bool(strategy.named(self._of.model, self._of.options.stages))

    @property
    def _names(self) -> Sequence[str]:
        return () if self._known is None else self._known.names

    def _say_kept(self, what: str, kept: Profile) -> None:
        stages = kept.chain.stages
        first, last, directory = stages[0].name, stages[-1].name, self._of.cache.directory
        logger.info(
            "rotoff: %s of %d stages (%s to %s) from the cache in %s", what, len(stages), first, last, directory
        )

    def _described(self, profile: Profile) -> Profile:
        """Add to `profile` the bytes that a step holds outside of its stages, and the provenance."""
        meta = provenance(self._of.model, self._wanted.value, self._device)
        if (times := profile.chain.meta.get("times")) is not None:
            meta["times"] = times
        tape = self.captured.tape
        course = expected(tape, profile.stages, profile.prefix)
        profile = replace(
            _with_outside(profile, course),
            casts=course.casts,
            cast_again=cast_again(tape),
        )
        stuck = profile.unmanaged_bytes + self._of.links.staging_bytes + tape.changed_bytes
        kept = (HeldLate(one.first - 1, one.last, one.unsaved) for one in course.casts if one.unsaved)
        profile = replace(profile, held_late=(*profile.held_late, *kept))
        return replace(profile, unmanaged_bytes=stuck).described(type(self._of.model).__name__, meta)


def busy_with_others() -> str:
    """What to say of times measured now, if other programs use the processors, too; otherwise nothing."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"measured while the machine was busy (load {load:.1f} on {cores} cores)" if load > cores else ""


@contextmanager
def _as_one(several: _Measurement) -> Iterator[None]:
    """Raise MeasureError if several courses, once recorded as one, fail in it: a forward that catches an error takes
    either the call that fails on some data or the one that replaces it."""
    several.captured  # noqa: B018  (what the model's own code raises passes)
    try:
        yield
    except (RotoffError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise MeasureError(f"several courses of the forward cannot run as one ({type(error).__name__})") from error


def _put_back(gradients: list[tuple[nn.Parameter, torch.Tensor | None]]) -> None:
    for parameter, gradient in gradients:
        if parameter.grad is not gradient:
            parameter.grad = gradient


@contextmanager
def _unchanged(model: nn.Module, captured: strategy.Captured) -> Iterator[None]:
    """Restore the model, and the generators and tensors that its forward uses, after the block."""
    generators = [generator for generator, _ in captured.tape.generators]
    states = [generator.get_state() for generator in generators]
    try:
        with undone(model), contents_preserved([*captured.tape.changed.values()]):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _with_outside(profile: Profile, course: Course) -> Profile:
    """`profile` whose forwards are also charged for what the model's own code runs outside of all stages: parts of the
    prefix, and results that nothing uses."""
    beside = max(0, profile.prefix_peak_bytes - profile.made_input_bytes) if profile.prefix else 0
    outside = tuple(
        nbytes + (beside if i in course.beside else 0) for i, nbytes in enumerate(course.dead_bytes, start=1)
    )

    def more(one: Any, nbytes: int) -> Any:
        return replace(one, forward_transient_bytes=one.forward_transient_bytes + nbytes)

    def charged(stage: Stage, nbytes: int) -> Stage:
        assert stage.checkpoint_transient_bytes is not None
        forms = tuple(more(form, nbytes) for form in stage.forms)
        checkpoint = stage.checkpoint_transient_bytes + nbytes
        return replace(more(stage, nbytes), checkpoint_transient_bytes=checkpoint, forms=forms)

    def all_of(costs: tuple[Stage, ...]) -> tuple[Stage, ...]:
        return tuple(map(charged, costs, outside))

    compact = profile.compact and profile.compact._replace(stages=all_of(profile.compact.stages))
    chain = replace(profile.chain, stages=all_of(profile.chain.stages))
    return replace(profile, chain=chain, compact=compact, outside_bytes=outside)


def device_of(model: nn.Module, value: Any) -> torch.device:
    found = {p.device for p in model.parameters()} or {t.device for t in flatten(value)[0]}
    if len(found) > 1:
        raise MeasureError(
            f"the model's parameters are on {', '.join(sorted(map(str, found)))}; rotoff runs on one device"
        )
    return found.pop() if found else torch.device("cpu")

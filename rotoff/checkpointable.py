"""`Checkpointable`: the public class that trains a model inside a limit.

``rotoff.Checkpointable(model).compute_sequence(mem_limit)`` is used like the model. A training forward whose inputs
have a new signature (shapes, strides, dtypes, `requires_grad`, autocast) is measured and planned on first use. The
plans of the last signatures are kept.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.optim import Optimizer

from .capture import strategy
from .core.backward_from import BackwardFrom
from .core.chain import Chain
from .core.modes import check_mode
from .core.sequence import Sequence
from .core.sizes import is_auto, parse_bytes
from .errors import ExecutionError, MeasureError, OptionError
from .io.cache import Cache
from .module_proxy import ModuleProxy
from .planning.course_meter import device_of
from .planning.distributed import agree_on_limit, agree_on_sample
from .planning.link_share import with_host_share
from .planning.measured_courses import PlannedSize
from .planning.memory_account import expected_levels, reported_bytes
from .planning.options import Options, check_flag, check_module, read_device
from .planning.placed import PlacedPlanner, read_optimizers
from .planning.planner import least_limit, plan_everything
from .planning.request import Request, check_limits, check_options
from .planning.specialization import Specialization
from .planning.specializations import Specializations
from .planning.step_runner import StepRunner
from .profile.measure import Progress
from .profile.profile import Profile
from .profile.selective.variants import Forms
from .profile.timing.convergence import Repeats
from .report.expected_step import with_expected
from .report.rotor_names import NO_LIMIT, RotorNames
from .runtime.execution_plan import ExecutionPlan
from .runtime.links.free_memory import free_memory
from .runtime.links.pool import LinkPool
from .runtime.placed.lending import all_on, settle_buffers
from .runtime.step_times import Recording
from .solver.in_flight import parse_in_flight

logger = logging.getLogger("rotoff")
# The key under which `rotoff.attach` marks a model: in its __dict__, so that no state dict contains it.
ATTACHED = "_rotoff_attachment"


class Checkpointable(RotorNames, ModuleProxy):
    """Wraps a model so that its training steps stay inside a memory limit.

    Call `measure` and `compute_sequence`, or only `compute_sequence`, and train as before. In `eval` mode (but for a
    frozen model) and without gradients the plain model runs. `state_dict`, `named_parameters` and attributes are the
    model's own.

    Args:
        model: any module. Its forward is recorded and cut into stages: of an ``nn.Sequential`` they are its modules
            (nested ones are flattened).
        host_directory: directory of the file for offloaded values, on the CPU; it must be on a real disk. Default: the
            first of the usual temporary directories that is on one and is writable.
        check: compare the bytes held with the bytes charged after every operation; slow, for tests and for finding
            errors.
        process_group: a group of ``torch.distributed``, or True for the default one. All of its processes follow one
            plan. The first process makes it, for the largest costs that any of them measured and the smallest limit.
            All must call `measure` and `compute_sequence`. If one gets a new input signature in a step, all must, and
            likewise when a signature recurs; the signatures may differ. Needed if stages communicate (FSDP); otherwise
            it keeps step times equal.
        stages: about how many stages to cut the model into (default 40; more make finer plans, and planning slower), or
            a list of modules of the model, or of their dotted names: each becomes one stage.
        backward_from: the output that your backward starts from: its key (``"loss"``) or its index (``0``), or a list
            of those. Gradients of other outputs (a language model's logits) are then not charged, and a backward from
            them raises an error. None: any.
        offload_dtype: ``torch.float16`` or ``torch.bfloat16``: the dtype of offloaded float32 values on the link and
            on the host. *Lossy*: gradients are no longer those of the plain model (float16 also overflows above
            65504). CUDA only; takes 40 MiB of the limit. None, the default: offload them unchanged.
        cache_directory: where plans and profiles are kept for the next process. True: the environment variable
            ROTOFF_CACHE ("off", or a directory), otherwise ``rotoff`` in the user's cache directory. None or False:
            nowhere.
        forms: whether plans may keep a part of what a stage saves and recompute the rest. Names of operations, such as
            ``["addmm", "bmm"]``: their results are always kept. A function of an
            `rotoff.profile.selective.variants.Operation`: True if its results are always kept, False if never, None if
            the planner decides.
        interpolate: whether to plan inputs of new sizes from measurements at other sizes, if these suffice
            (`rotoff.profile.between_sizes`). Otherwise each new size is measured, which takes as long as several steps.
        conv_algorithms: "any": plans may run a stage's convolutions by other CUDA algorithms than those of
            ``torch.backends.cudnn``; they are slower and take less workspace. Gradients are then *not bit for bit*
            those of the plain model. No effect on a CPU. "plain", the default: never.
        device: where steps run, such as ``"cuda"``, for a model that is on the host because it does not fit there.
            None: where the parameters are.

    Raises:
        MeasureError: if `model` is not a module, or empty, or planned already. OptionError: if another option is
            invalid.
    """

    _own = frozenset(
        {"_options", "_check", "_group", "_cache", "_links", "_specializations", "_steps", "_warned", "_shown"}
    )

    def __init__(
        self,
        model: nn.Module,
        *,
        host_directory: str | os.PathLike[str] | None = None,
        check: bool = False,
        process_group: Any = None,
        stages: strategy.StagesOption = None,
        backward_from: BackwardFrom = None,
        offload_dtype: torch.dtype | None = None,
        cache_directory: str | os.PathLike[str] | bool | None = True,
        forms: Forms = True,
        interpolate: bool = True,
        conv_algorithms: str = "plain",
        device: torch.device | str | int | None = None,
    ) -> None:
        check_module(model)
        refuse_planned(model)
        super().__init__(model)
        self._options = Options(
            stages=stages,
            backward_from=backward_from,
            forms=forms,
            conv_algorithms=conv_algorithms,
            interpolate=interpolate,
            offload_dtype=offload_dtype,
            host_directory=host_directory,
            cache_directory=cache_directory,
            device=read_device(device),
        )
        self._options.check(model)
        check_flag("check", check)
        self._check = check
        self._group = _group(process_group)
        self._begin()

    def _begin(self) -> None:
        """Create the state that copies do not share: threads, files, measurements and plans."""
        self._cache = Cache.of(self._options.cache_directory)
        self._links = LinkPool(self._options.host_directory, self._options.offload_dtype)
        self._specializations = Specializations(self, self._model, self._options, self._links, self._group, self._cache)
        self._steps = StepRunner(self._specializations, self._links, self._options, self._check)
        self._warned: set[str] = set()
        self._shown: tuple[ExecutionPlan, Sequence] | None = None
        weakref.finalize(self, self._links.close)

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy or a pickle: the model, the options and the request. The copy is measured and planned
        again."""
        own = ("_cache", "_links", "_specializations", "_steps", "_shown")
        state = {k: v for k, v in vars(self).items() if k not in own}
        if self._group is not None and self._group is torch.distributed.group.WORLD:
            state["_group"] = True
        request = self._specializations.request
        if request is not None and request.planner is not None:
            request = None  # it holds the optimizer of this model, not of the copy
        return state | {"_asked": None if request is None else replace(request, cache=Cache(None))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        asked = state.pop("_asked")
        super().__setstate__(state)
        self._group = _group(self._group) if self._group is True else self._group
        self._begin()
        if asked is not None:
            self._specializations.request = replace(asked, cache=self._cache)

    @property
    def _plain(self) -> Callable[..., Any] | None:
        return self._specializations.meter.plain

    @_plain.setter
    def _plain(self, plain: Callable[..., Any]) -> None:
        self._specializations.meter.plain = plain

    # -- planning

    def measure(
        self, *sample: Any, progress: Progress | bool | None = None, repeats: int | None = None, **kwargs: Any
    ) -> Checkpointable:
        """Measure bytes and times of every stage on a sample batch; returns the module.

        At most one stage is held at a time. Gradients, buffers, generators and memory statistics are restored.

        Args:
            sample, kwargs: arguments of the model, on its device; a single dict holds named arguments.
            progress: called with (stages done, total, next stage). None: a progress line on standard error, if that is
                a terminal; False: no progress.
            repeats: timed runs of each stage; their median is used. None: until the median is known to 2 %, at least 3
                and at most 15 runs or a twentieth of a second more (always 5 among several processes).

        Raises:
            MeasureError: if the model cannot be measured on this input.
        """

        def sample_here() -> Any:
            Repeats.read(repeats)  # raises for an invalid number
            given = strategy.read_sample(self._model, sample, kwargs)
            return strategy.chain_input(self._model, *given)

        value = sample_here() if self._group is None else agree_on_sample(sample_here, self._group)
        self._specializations.measure(value, progress, repeats)
        return self

    def compute_sequence(
        self,
        mem_limit: int | str | None = None,
        mode: str = "joint",
        mem_slots: int = 50,
        policy: str | None = None,
        up_to: Any = None,
        *,
        device_limit: int | str | None = None,
        optimizer: Optimizer | Several[Optimizer] | None = None,
        in_flight: int = 1,
        **options: Any,
    ) -> Checkpointable:
        """Plan training steps that allocate at most `mem_limit` bytes on the device; returns the module.

        If nothing has been measured yet, the first training forward is measured and planned.

        Args:
            mem_limit: bytes, as a number or a size such as ``"6 GiB"``, for all that a step allocates beyond what was
                there before it (parameters, optimizer state, parameter gradients, the batch). ``"auto"``: what the
                device has free now, less a margin.
            mode: "joint", "remat" (recompute only) or "offload" (move only).
            mem_slots, options: as for `rotoff.solve`; all processes of this host share a `host_limit`.
            policy: instead of a mode, a system of the papers, such as "vdnn"; it runs even if everything fits.
            up_to: the largest input of the training, as the tuple of the model's arguments or the dict of its named
                ones. It is measured now, with inputs of half its batch and of half its length. If this returns, every
                smaller input fits, too, and sizes in between are not measured.
            device_limit: in place of `mem_limit`, bytes for all that the device holds: parameters, gradients, optimizer
                states, buffers, the batch and the step. What does not fit stays on the host between its uses. For a
                CPU the host is a file.
            optimizer: with `device_limit`, the optimizer of the parameters, or a list of them; a frozen model needs
                none. With the option
                ``updates="during"`` it updates each group of parameters within the backward, once its gradient is
                complete; ``"after"``, the default: in ``optimizer.step()``.
            in_flight: how many forwards run before the backward of the first, as in a pipeline or with
                ``(model(x) + model(y)).backward()``; `mem_limit` is for all of them together, but for the parameter
                gradients that autograd gathers beside `.grad` where one backward is for several of them.
                `rotoff.attach_schedule` finds it for a pipeline.

        Raises:
            LimitError: if `mem_limit` is no number of bytes. OptionError: for an unknown mode or invalid options.
            InfeasibleError: if nothing fits; `min_mem_limit` is the smallest limit that works in this mode. With
                `up_to` and a `mem_limit`, the message names smaller inputs that fit.
        """
        grouped, updates = self._group is not None, options.get("updates")
        check_limits(mem_limit, device_limit, optimizer, policy, up_to, in_flight, grouped, updates)
        if self._steps.placement is not None:
            self._steps.placement.gradients.refuse_before_step("compute_sequence")
        if device_limit is not None:
            return self._place(device_limit, mode, mem_slots, policy, up_to, optimizer, options)

        def limit_here() -> int:
            check_options(mode, mem_slots, policy, options)
            return self._free_memory() if is_auto(mem_limit) else parse_bytes(mem_limit)

        limit = limit_here() if self._group is None else agree_on_limit(limit_here, self._group)
        how = not self._check, self._specializations.lets_go, True, in_flight
        request = Request(limit, mode, mem_slots, with_host_share(options), policy, *how, cache=self._cache)
        self._measure_up_to(up_to, request)
        return self._ask(request)

    def _free_memory(self) -> int:
        """Return what steps may take where they run, once the model is there."""
        device = self._options.device or device_of(self._model, None)
        parameters = list(self._model.parameters())
        held = (*parameters, *(p.grad for p in parameters if p.grad is not None), *self._model.buffers())
        return max(free_memory(device) - sum(one.nbytes for one in held if one.device != device), 0)

    def _measure_up_to(self, up_to: Any, request: Request) -> None:
        if up_to is not None:
            named = up_to if isinstance(up_to, dict) else {}
            args = () if named is up_to else up_to if isinstance(up_to, tuple) else (up_to,)
            self._specializations.measure_up_to(strategy.chain_input(self._model, args, named), request)

    def _ask(self, request: Request) -> Checkpointable:
        """Plan for `request`, with the model moved to the option `device`, if given."""
        self._specializations.meter.device = device = self._options.device
        if device is not None:
            settle_buffers(self._model, device)
            self._model.to(device)
        self._specializations.ask(request)
        self._steps.unplace()
        return self

    def _place(
        self,
        device_limit: int | str,
        mode: str,
        mem_slots: int,
        policy: str | None,
        up_to: Any,
        optimizer: Any,
        options: dict[str, Any],
    ) -> Checkpointable:
        """`compute_sequence` for a `device_limit`."""
        check_options(mode, mem_slots, policy, options)
        limit = parse_bytes(device_limit, "device_limit")
        if self._check:
            raise OptionError("check=True needs a mem_limit; leave it out with a device_limit")
        if self._group is not None or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise OptionError(
                "device_limit is for a single process; among several, shard the parameters with FSDP2 and its"
                " CPUOffloadPolicy, and give a mem_limit"
            )
        if self._options.offload_dtype is not None:
            raise OptionError("offload_dtype needs a mem_limit; with a device_limit nothing is converted")
        optimizers = read_optimizers(optimizer, self._model)
        if (placed := self._steps.placement) is not None and not placed.here:
            placed.gradients.marks.remove()
            self._steps.unplace(resident=False)  # by the process that this one was forked from
        # a new one, since the optimizers may have changed
        planner = PlacedPlanner(self._model, optimizers, self._specializations.update_times)
        if self._specializations.meter.device is None:
            self._specializations.meter.device = device_of(self._model, None)
        request = Request(limit, mode, mem_slots, options, here=True, planner=planner)
        self._measure_up_to(up_to, request)
        self._specializations.ask(request)
        plan = None if self._specializations.latest is None else self._specializations.latest.plan
        if plan is None or plan.placed is None:
            self._steps.unplace()
            if plan is not None:
                all_on(self._model, optimizers, self._specializations.meter.device)
            if plan is None or options.get("updates") == "during":  # a step's closure may call the forward to plan
                with suppress(ExecutionError):  # no place for a file; a plan that needs one says so
                    self._steps.placement_for(optimizers)
        else:
            self._steps.placement_for(optimizers).begin(plan.placed)
        return self

    def min_mem_limit(self, mode: str = "joint", in_flight: int = 1) -> int:
        """The smallest limit that `compute_sequence` accepts in `mode`, in bytes: it refuses one byte less.

        Call it before you choose a limit, or to see whether the model fits a device at all; it plans nothing. It refers
        to the last measurement. All processes of a group must call it, and get the same result.
        `rotoff.min_mem_limit` of the ``chain`` differs: the chain counts the batch, and neither constants of a step nor
        skip connections kept in place. On CUDA the host is assumed to have room for what the plan offloads; if it has
        not, the error of `compute_sequence` names a limit that needs no host memory.

        Args:
            mode: "joint", "remat" (recompute only) or "offload" (move only). in_flight: as for `compute_sequence`.

        Raises:
            OptionError: for an unknown mode. MeasureError: if nothing has been measured.
        """
        check_mode(mode)
        many = parse_in_flight(in_flight)
        request = Request(
            NO_LIMIT, mode, 50, {}, plain=not self._check, lets_go=self._specializations.lets_go, in_flight=many
        )
        return least_limit(self._specializations.timed(self._latest, together=True, forms=True).profile, request)

    # -- what is planned

    @property
    def profile(self) -> Profile:
        """The last measurement. If keeping everything fits, times and smaller forms are measured on first use, here or
        elsewhere.

        Raises:
            MeasureError: if nothing has been measured, or only bytes in a group of processes.
        """
        return self._timed.profile

    @property
    def chain(self) -> Chain:
        """The chain that the last plan was made for: without skip connections kept in place, and with the runtime's
        overhead in its times. Without a plan, the chain measured last."""
        plan = self._timed.plan
        return self._latest.profile.chain if plan is None else plan.chain

    @property
    def strategy(self) -> str:
        """How the last measured model was cut into stages, as text."""
        return self._latest.captured.strategy

    @property
    def sequence(self) -> Sequence:
        """The last planned sequence. Its meta has the expected bytes and seconds of the step."""
        plan = self._timed_plan
        if self._shown is not None and self._shown[0] is plan:
            return self._shown[1]
        levels = expected_levels(self.profile, plan) if plan.placed is None else plan.placed.levels
        peak = self.get_expected_memory()
        self._shown = (
            plan,
            with_expected(self.chain, plan.sequence, levels, peak, self.mem_limit, self.profile.chain.compute_time),
        )
        return self._shown[1]

    @property
    def kept_skips(self) -> tuple[int, ...] | None:
        """Numbers of the ``profile.skips`` that the plan keeps in place; None without a plan."""
        plan = self._latest.plan
        return None if plan is None else plan.kept

    @property
    def mem_limit(self) -> int | None:
        """The requested limit in bytes, or None."""
        request = self._specializations.request
        return None if request is None or request.mem_limit >= NO_LIMIT else request.mem_limit

    @property
    def in_flight(self) -> int:
        """How many micro-batches share the limit."""
        return 1 if self._specializations.request is None else self._specializations.request.in_flight

    @property
    def mem_slots(self) -> int | None:
        """The requested slots, or None."""
        return None if self._specializations.request is None else self._specializations.request.mem_slots

    @property
    def _plan(self) -> ExecutionPlan:
        return self._plan_of(self._latest)

    def _plan_of(self, course: Specialization) -> ExecutionPlan:
        if (plan := course.plan) is None:
            raise MeasureError("nothing has been planned yet; call compute_sequence(mem_limit)")
        return plan

    @property
    def _timed(self) -> Specialization:
        """The latest course, with times."""
        return self._specializations.timed(self._latest)

    @property
    def _timed_plan(self) -> ExecutionPlan:
        """The plan, with times."""
        return self._plan_of(self._timed if self._latest.plan is not None else self._latest)

    @property
    def _latest(self) -> Specialization:
        if self._specializations.latest is None:
            raise MeasureError(
                "nothing has been measured yet; call measure(*sample), or train a step after compute_sequence"
            )
        return self._specializations.latest

    def get_expected_makespan(self) -> float:
        """Expected seconds of the planned step: the makespan that `rotoff.simulate` finds for `chain` and `sequence`.

        If keeping everything fits, stages are timed when this is first called."""
        return self._timed_plan.trace.makespan

    def get_expected_memory(self) -> int:
        """Expected peak of the planned step in bytes, in the terms of the limit: the simulated peak, less bytes known
        to be freed by then or to be charged to several values. If everything fits a `device_limit`, it is the plain
        model's in a loop that sets gradients to None between steps."""
        plan, request = self._plan, self._specializations.request
        assert request is not None
        return request.expected_bytes(self._latest.profile, plan)

    def get_expected_host_memory(self) -> int:
        """Most bytes that the planned steps in flight keep on the host."""
        placed = self._plan.placed
        return self._plan.in_flight * self._plan.host_bytes + (0 if placed is None else placed.host_bytes)

    @property
    def keep_all_memory(self) -> int:
        """Bytes of keeping everything, in the terms of the requested limit; with at least this limit the plain model
        runs.

        With `backward_from`, other outputs (logits) are counted as held through the backward, until the first backward
        shows that your loop holds none: ``model(...).loss.backward()``.
        """
        request = self._specializations.request
        if request is not None and isinstance(request.planner, PlacedPlanner):
            return request.planner.keep_all_bytes(self._latest.profile)
        profile = self._latest.profile
        everything = plan_everything(profile, not self._check, self._specializations.lets_go, self.in_flight)
        return reported_bytes(profile, everything)

    def plans(self) -> list[PlannedSize]:
        """The plans so far: one row for each kind and size of input that a training step had.

        Use it if inputs vary, to see which sizes were measured, and the expected bytes and seconds of each.
        """
        return self._specializations.plans()

    # -- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; in training mode, with gradients and a limit, run the step as planned."""
        plain = self._specializations.meter.plain or self._model
        if torch.is_grad_enabled() and (self.training or self._is_frozen):
            if torch.compiler.is_compiling():
                if self._specializations.request is not None:
                    return _left_alone(self, plain, args, kwargs)
            elif self._specializations.request is None:
                self._warn_once(
                    "rotoff: this Checkpointable trains as the plain model, since it has no limit; call"
                    " compute_sequence(mem_limit)"
                )
            elif peek_interpreter_stack() is None:
                return self._planned(plain, args, kwargs)
            else:
                self._warn_once(
                    "rotoff: inside torch.func (grad, vmap, jvp, ...) this model runs plain, without its limit"
                )
        return self._steps.unplanned(plain, args, kwargs)

    @property
    def _is_frozen(self) -> bool:
        """Whether there is a limit and no parameter needs a gradient: its steps serve other models, in any mode."""
        return self._specializations.request is not None and not any(p.requires_grad for p in self._model.parameters())

    def streamed(self) -> AbstractContextManager[object]:
        """Within this context, parameters that a `device_limit` keeps on the host are fetched as the model's calls need
        them. Forwards without gradients use it by themselves; use it around other methods, such as ``generate``."""
        return self._steps.streamed()

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    def _planned(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a planned training step, or `plain` if nothing needs a plan."""
        return self._steps.forward(plain, strategy.chain_input(self._model, args, kwargs), args, kwargs)

    @contextmanager
    def record_step(self) -> Iterator[Recording]:
        """Record the first planned step whose forward runs in this block: its times, to compare with the predicted
        ones::

            with model.record_step() as recorded:
                model(x).sum().backward()
            figure = rotoff.plot.timeline(model.chain, model.sequence, measured=recorded.trace)

        Recording costs a few microseconds for each operation. Stages run under rotoff even if everything is kept.
        """
        self._steps.recording = recording = Recording()
        try:
            yield recording
        finally:
            self._steps.recording = None

    def _use_links_of(self, other: Checkpointable) -> None:
        """Take links to the host from those of `other`, with the same options."""
        self._links = self._specializations.meter.links = self._steps.links = other._links

    def close(self) -> None:
        """Release host memory, files and threads; the next step takes new ones. Parameters stay where they are."""
        self._links.close()
        self._steps.unplace(resident=False)


# Under ``torch.compile`` of a `Checkpointable`, planned steps run eagerly, since its graphs support neither hooks nor
# replays. `torch.compiler.disable` is the public way, but imports the compiler at once, which takes a second.
_left_alone = getattr(torch, "_disable_dynamo", torch.compiler.disable)(Checkpointable._planned)


def refuse_planned(model: nn.Module) -> None:
    """Raise MeasureError if `model`, or a part of it, is planned already."""
    if isinstance(model, Checkpointable):
        raise MeasureError(
            "the model is a rotoff.Checkpointable already; for another limit call its compute_sequence again, and for"
            " other options wrap the original model"
        )
    for name, module in model.named_modules():
        attached = vars(module).get(ATTACHED) is not None
        if attached and module is model:
            raise MeasureError(
                "the model is planned already, by rotoff.attach; rotoff.detach(model) frees it, and for another limit"
                " call compute_sequence of what attach returned"
            )
        if attached or isinstance(module, Checkpointable):
            raise MeasureError(
                f"{name!r} of the model is planned by rotoff already; plan the outermost module alone, since one limit"
                " holds for a whole step"
            )


def _group(process_group: Any) -> Any:
    if process_group is None or process_group is False:
        return None
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise OptionError("process_group needs torch.distributed.init_process_group to have been called before")
    return torch.distributed.group.WORLD if process_group is True else process_group

"""`Checkpointable`: the public class that trains a model inside a limit.

``rotoff.Checkpointable(model).compute_sequence(mem_limit)`` is used like the model. A training step whose inputs have a
new signature (shapes, strides, dtypes, `requires_grad`, autocast) is recorded; the next one follows a plan. The plans
of the last signatures are kept.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.optim import Optimizer

from .accelerator import empty_cache
from .core.backward_from import BackwardFrom
from .core.chain import Chain
from .core.figures import Figures
from .core.modes import check_mode
from .core.sequence import Sequence
from .core.simulator import simulate
from .core.sizes import NO_LIMIT, format_bytes, is_auto, parse_bytes
from .errors import InfeasibleError, MeasureError, OptionError
from .io.progress import Bar
from .module_proxy import ModuleProxy
from .planning.agreement import agree_on_least, agree_on_limit, shards_of, together
from .planning.inputs import (
    chain_input,
    check_measurable,
    family_of,
    lazy,
    read_sample,
    signature,
)
from .planning.link_share import with_host_share
from .planning.options import Options, check_flag, check_module, read_device
from .planning.request import Request, check_limits, check_options, read_optimizers
from .planning.stages import StagesOption
from .planning.step_courses import Course, PlannedSize, StepRunner
from .planning.step_planner import StepPlan
from .planning.tape_placed_runner import PlacedRunner
from .profile.tape_profile import TapeProfile
from .report.expected_step import with_expected
from .report.terminal import render
from .runtime.links.pinned import free_memory
from .runtime.links.pool import LinkPool
from .runtime.sharded import Shards
from .runtime.step_times import Recording
from .solver.in_flight import parse_in_flight
from .tensors.caches import caches, switched_off
from .tensors.tree import tensor_leaves
from .tensors.undo import Originals, undone

logger = logging.getLogger("rotoff")
# The key under which `rotoff.attach` marks a model: in its __dict__, so that no state dict contains it.
ATTACHED = "_rotoff_attachment"
REPEATS = 2  # steps that are recorded on a sample; the first one also pays for what happens once


class Checkpointable(ModuleProxy):
    """Wraps a model so that its training steps stay inside a memory limit.

    Call `measure` and `compute_sequence`, or only `compute_sequence`, and train as before. In `eval` mode (but for a
    frozen model) and without gradients the plain model runs. `state_dict`, `named_parameters` and attributes are the
    model's own.

    Args:
        model: any module. Its first step is recorded and cut into stages: of an ``nn.Sequential`` they are its modules
            (nested ones are flattened).
        host_directory: directory of the file for offloaded values, on the CPU; it must be on a real disk. Default: the
            first of the usual temporary directories that is on one and is writable.
        check: compare the bytes held with the bytes charged after every operation; slow, for tests and for finding
            errors.
        process_group: a group of ``torch.distributed``, or True for the default one. All of its processes follow one
            plan. The first process makes it, for the largest costs that any of them recorded and the smallest limit.
            All must call `measure` and `compute_sequence`. If one gets a new input signature in a step, all must, and
            likewise when a signature recurs; the signatures may differ. Needed if stages communicate (FSDP); otherwise
            it keeps step times equal.
        stages: about how many stages to cut the model into (default 40; more make finer plans, and planning slower), or
            a list of modules of the model, or of their dotted names: each becomes one stage.
        backward_from: the output that your backward starts from: its key (``"loss"``) or its index (``0``), or a list
            of those. `measure` then runs its backward from these alone, so that gradients of other outputs (a language
            model's logits) are not charged. A training step that is recorded shows it by itself. None: any.
        forms: whether plans may keep a part of what a stage saves and recompute the rest.
        device: where steps run, such as ``"cuda"``, for a model that is on the host because it does not fit there.
            None: where the parameters are.
        cache_directory: not used, since nothing is kept on disk; earlier versions kept plans there.

    Raises:
        MeasureError: if `model` is not a module, or empty, or planned already. OptionError: if another option is
            invalid.
    """

    _own = frozenset(["_options", "_check", "_group", "_links", "_steps", "_warned", "_shown", "_plain", "_caches"])

    def __init__(
        self,
        model: nn.Module,
        *,
        host_directory: str | os.PathLike[str] | None = None,
        check: bool = False,
        process_group: Any = None,
        stages: StagesOption = None,
        backward_from: BackwardFrom = None,
        forms: bool = True,
        device: torch.device | str | int | None = None,
        cache_directory: Any = None,
    ) -> None:
        check_module(model)
        refuse_planned(model)
        super().__init__(model)
        self._options = Options(stages, backward_from, forms, host_directory, read_device(device))
        self._options.check(model)
        check_flag("check", check)
        self._check = check
        self._group = _group(process_group)
        self._begin()

    def _begin(self) -> None:
        """Create the state that copies do not share: threads, files, measurements and plans."""
        self._links = LinkPool(self._options.host_directory)
        self._plain: Callable[..., Any] | None = None  # runs the unplanned model, if calling it does not
        self._steps = self._runner()
        self._warned: set[str] = set()
        self._caches: list[dict[str, Any]] | None = None  # settings of the model that steps switch off
        self._shown: tuple[Any, Sequence] | None = None
        weakref.finalize(self, self._links.close)

    def _runner(self) -> StepRunner:
        return StepRunner(self._model, self._options, self._links, self._check, self._group, weakref.ref(self))

    @property
    def _placed(self) -> PlacedRunner | None:
        """What runs the steps, if there is a `device_limit`."""
        return self._steps if isinstance(self._steps, PlacedRunner) else None

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy or a pickle: the model, the options and the request. The copy is measured and planned
        again."""
        own = ("_links", "_steps", "_shown", "_plain", "_caches")
        state = {k: v for k, v in vars(self).items() if k not in own}
        if self._group is not None and self._group is torch.distributed.group.WORLD:
            state["_group"] = True
        request = self._steps.request
        copied = request is not None and not request.placed  # else it is for the optimizer of this model
        return state | {"_asked": request if copied else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        asked = state.pop("_asked")
        super().__setstate__(state)
        self._group = _group(self._group) if self._group is True else self._group
        self._begin()
        self._steps.request = asked

    # -- planning

    def measure(self, *sample: Any, repeats: int | None = None, **kwargs: Any) -> Checkpointable:
        """Record a step on a sample batch: its bytes and times; returns the module.

        Nothing of it is left: gradients, buffers, generators and attributes are restored. What the step saves leaves
        the device at once. A training forward with no measurement records itself, so a loop needs no call of this.

        Args:
            sample, kwargs: arguments of the model, on its device; a single dict holds named arguments.
            repeats: how many steps are recorded; each operation takes its shortest time. None: 2.

        Raises:
            MeasureError: if the model cannot run on this input.
        """

        def sample_here() -> Any:
            if repeats is not None and (isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1):
                raise MeasureError(f"repeats is {repeats!r}; give a whole number of at least 1")
            given = read_sample(self._model, sample, kwargs)
            return chain_input(self._model, *given)

        self._caches = None
        value = together(sample_here, "take the sample", self._group)
        graphs = any(t.grad_fn is not None for t in tensor_leaves(value))  # of the caller's, for one backward each
        many = (1 if graphs else REPEATS) if repeats is None else repeats
        with Bar("measuring") as bar:
            for n in range(many):
                self._measured(value)
                bar((n + 1) / many)
        empty_cache(self._steps.device_for(tensor_leaves(value)))  # its blocks suit no plan
        return self

    def _measured(self, value: Any) -> None:
        """Record a step on the input `value`, and restore all that it changes."""
        args, kwargs = value
        check_measurable(self._model, value)
        given = [*self._model.parameters(), *tensor_leaves(value)]
        originals, before = Originals(given), self._model.training
        torch.clear_autocast_cache()  # of casts that a step before has made
        try:
            with (
                _as_they_are(given),
                undone(self._model, value, self._steps.device_for(tensor_leaves(value))),
                torch.enable_grad(),
                self._without_caches(kwargs),
            ):
                if not before and any(p.requires_grad for p in self._model.parameters()):
                    self._model.train()
                self._recorded(args, kwargs, originals)
        except (MeasureError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the model's own code may raise anything
            told = str(error).strip().splitlines()
            raise MeasureError(
                f"the model's step cannot be measured ({type(error).__name__}: {told[0] if told else ''}); check that"
                " model(*sample) and its backward run by themselves"
            ) from error
        finally:
            torch.clear_autocast_cache()
            if not before:
                self._model.train(before)
            originals.put_back()

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any], originals: Originals) -> None:
        steps, device, request = self._steps, self._options.device, self._steps.request
        steps.settle()  # a step that training has recorded before is not the latest one
        if self._placed is None and any(p.device != device for p in self._model.parameters() if device is not None):
            steps = PlacedRunner(self._steps)
        run = partial(self._plain or self._model, *args, **kwargs)
        steps.measure(run, originals.keep)
        if steps is not self._steps:
            steps.close(resident=False)
            self._steps = self._runner().take_over(steps)
            self._steps.request = request

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

        Args:
            mem_limit: bytes, or a size such as ``"6 GiB"``, for all that a step allocates beyond parameters, their
                gradients, optimizer state and the batch. ``"auto"``: what the device has free now, less a margin.
            mode: "joint", "remat" (recompute only) or "offload" (move only). policy: in its place, a system of the
                papers, such as "vdnn"; it runs even if everything fits.
            mem_slots, options: as for `rotoff.solve`; all processes of this host share a `host_limit`.
            up_to: the largest input of the training, as the tuple of the model's arguments or the dict of its named
                ones. It is recorded now; a larger one is logged when it comes.
            device_limit: in place of `mem_limit`, bytes for all that the device holds: parameters, gradients, optimizer
                states, buffers, the batch and the step. What does not fit stays on the host, for a CPU in a file. In
                several processes it is for each, whose parameters FSDP2 has sharded.
            optimizer: with `device_limit`, that of the parameters, or a list; a frozen model needs none. Its updates
                come in ``optimizer.step()``, or with the option ``updates="during"`` within the backward.
            in_flight: how many forwards run before the first backward, as in a pipeline (`attach_schedule` finds it).
                `mem_limit` is for all together, without gradients that one backward for several gathers beside `.grad`.

        Raises:
            LimitError: if `mem_limit` is no number of bytes. OptionError: for an unknown mode or invalid options.
            InfeasibleError: if nothing fits; it names the smallest limit that does.
        """
        asked = mem_limit, device_limit, optimizer, policy, up_to, in_flight
        check_limits(*asked, self._group is not None, options.get("updates"))
        if self._placed is not None and self._placed.placement is not None:
            self._placed.placement.gradients.refuse_before_step("compute_sequence")
        plain, placed = not self._check, device_limit is not None
        request = Request(NO_LIMIT, mode, mem_slots, options, policy, plain, placed, in_flight)
        self._ask(device_limit if placed else mem_limit, request, up_to, optimizer)
        return self

    def _ask(self, limit: Any, request: Request, up_to: Any, optimizer: Any) -> None:
        """Plan for a request whose limit is `limit`."""
        optimizers: tuple[Optimizer, ...] = ()
        shards: Shards | None = None

        def limit_here() -> int:
            nonlocal optimizers, shards
            check_options(request.mode, request.mem_slots, request.policy, request.options)
            if not request.placed:
                return self._free_memory() if is_auto(limit) else parse_bytes(limit)
            if self._check:
                raise OptionError("check=True needs a mem_limit; leave it out with a device_limit")
            nbytes = parse_bytes(limit, "device_limit")
            shards = shards_of(self, self._group)
            every = self._model.parameters() if shards is None else shards.every(self._model)
            optimizers = read_optimizers(optimizer, every)
            return nbytes

        nbytes = agree_on_limit(limit_here, self._group)
        options = request.options if request.placed else with_host_share(request.options)
        request = replace(request, mem_limit=nbytes, options=options)
        if (device := self._options.device) is not None and not request.placed:
            self._model.to(device)
        self._caches = None
        self._measure_up_to(up_to)
        steps = self._steps
        if request.placed:
            steps = PlacedRunner(steps, optimizers, shards)
        elif self._placed is not None:
            steps = self._runner().take_over(self._placed)
        try:
            steps.ask(request)
        except InfeasibleError as error:
            raise error if request.placed else self._with_cures(error, up_to is not None) from None
        if self._placed is not None and not request.placed:
            self._placed.close()
        self._steps = steps

    def _measure_up_to(self, up_to: Any) -> None:
        """Measure the largest input, if there is one."""
        self._steps.ceiling = None
        if up_to is None:
            return
        named = up_to if isinstance(up_to, dict) else {}
        args = () if named is up_to else up_to if isinstance(up_to, tuple) else (up_to,)
        largest = chain_input(self._model, args, named)
        self._measured(largest)
        self._steps.ceiling = family_of(signature(largest, self._model))

    def _with_cures(self, error: InfeasibleError, announced: bool) -> InfeasibleError:
        """Return the error with what `backward_from` would save. announced: whether the input is that of `up_to`."""
        latest, told = self._latest, str(error)
        if latest.beside and self._options.backward_from is None:
            told += (
                f", {format_bytes(latest.beside)} of it for gradients of outputs beside the loss; if no backward starts"
                " from those, name the output that it starts from: Checkpointable(model,"
                ' backward_from="loss")'
            )
        if announced:
            told = f"on the input of up_to, {[list(shape) for shape in latest.profile.shapes]}, {told}"
        return InfeasibleError(told, error.min_mem_limit)

    def _free_memory(self) -> int:
        """Return what steps may take where they run, once the model is there."""
        device = self._steps.device_for([])
        parameters = list(self._model.parameters())
        held = (*parameters, *(p.grad for p in parameters if p.grad is not None), *self._model.buffers())
        return max(free_memory(device) - sum(one.nbytes for one in held if one.device != device), 0)

    def min_mem_limit(self, mode: str = "joint", in_flight: int = 1) -> int:
        """The smallest limit that `compute_sequence` accepts in `mode`, in bytes: it refuses one byte less.

        Call it before you choose a limit, or to see whether the model fits a device at all; it plans nothing. It refers
        to the last measurement. All processes of a group must call it, and get the same result.
        `rotoff.min_mem_limit` of the ``chain`` differs: the chain counts the batch, and charges each value by itself.
        On CUDA the host is assumed to have room for what the plan offloads; if it has not, the error of
        `compute_sequence` names a limit that needs no host memory.

        Args:
            mode: "joint", "remat" (recompute only) or "offload" (move only). in_flight: as for `compute_sequence`.

        Raises:
            OptionError: for an unknown mode. MeasureError: if nothing has been measured.
        """
        check_mode(mode)
        many = parse_in_flight(in_flight)
        asked = Request(NO_LIMIT, mode, 50, {}, plain=not self._check, in_flight=many)
        self._steps.settle()
        return agree_on_least(self._latest.profile, asked, self._group)

    # -- what is planned

    @property
    def profile(self) -> TapeProfile:
        """What the last step that was recorded, or is planned, has shown.

        Raises:
            MeasureError: if nothing has been measured.
        """
        return self._latest.profile

    @property
    def chain(self) -> Chain:
        """The chain that the last plan was made for. Without a plan, the chain measured last."""
        return self._latest.profile.chain if self._steps.request is None else self._plan.chain

    @property
    def strategy(self) -> str:
        """How the last measured step was cut into stages, as text."""
        return self._latest.profile.strategy

    @property
    def sequence(self) -> Sequence:
        """The last planned sequence. Its meta has the expected bytes and seconds of the step."""
        plan = self._plan
        if self._shown is None or self._shown[0] is not plan:
            self._shown = plan, with_expected(plan.chain, plan.sequence, plan.levels, self._figures)
        return self._shown[1]

    @property
    def mem_limit(self) -> int | None:
        """The requested limit in bytes, or None."""
        request = self._steps.request
        return None if request is None or request.mem_limit >= NO_LIMIT else request.mem_limit

    @property
    def in_flight(self) -> int:
        """How many micro-batches share the limit."""
        return 1 if self._steps.request is None else self._steps.request.in_flight

    @property
    def mem_slots(self) -> int | None:
        """The requested slots, or None."""
        return None if self._steps.request is None else self._steps.request.mem_slots

    @property
    def _plan(self) -> StepPlan:
        latest = self._latest
        if self._steps.request is None:
            raise MeasureError("nothing has been planned yet; call compute_sequence(mem_limit)")
        return self._steps.shown(latest)

    @property
    def _figures(self) -> Figures:
        """Those of the step that was planned last."""
        return self._plan.figures(self.mem_limit)

    @property
    def _latest(self) -> Course:
        if (latest := self._steps.seen()) is None:
            raise MeasureError(
                "nothing has been measured yet; call measure(*sample), or train a step after compute_sequence"
            )
        return latest

    def get_expected_makespan(self) -> float:
        """Expected seconds of the planned step: the makespan that `rotoff.simulate` finds and, on a CPU, what following
        the plan costs."""
        return self._figures.step_time

    def get_expected_memory(self) -> int:
        """Expected peak of the planned step in bytes, in the terms of the limit."""
        return self._figures.peak_bytes

    def get_expected_host_memory(self) -> int:
        """Most bytes that the planned steps in flight keep on the host."""
        return self._figures.host_bytes

    @property
    def keep_all_memory(self) -> int:
        """Bytes of keeping everything, in the terms of the requested limit: a `device_limit` counts the batch, and
        parameters, gradients and states too. With at least this limit the model runs as it is."""
        if self._placed is None:
            return self._latest.profile.keep_all_bytes(self.in_flight)
        return int(self._figures.keep_all_bytes or 0)

    def plans(self) -> list[PlannedSize]:
        """The plans so far: one row for each kind and size of input that a training step had.

        Use it if inputs vary, to see which sizes were measured, and the expected bytes and seconds of each.
        """
        return self._steps.plans()

    # -- rotor's names; docs/migrating-from-rotor.md has the table

    def compute_pytorch_sequence(self) -> Checkpointable:
        """Keep everything, as plain PyTorch does, without a limit; returns the module."""
        return self.compute_sequence(NO_LIMIT)

    def compute_seq_sequence(self, segments: int | None = None) -> Checkpointable:
        """Plan `segments` equal segments as ``checkpoint_sequential`` does, without a limit; returns the module.

        segments: ⌈√L⌉ if None (Chen et al., 2016).
        """
        if segments is None:
            return self.compute_sequence(NO_LIMIT, policy="chen")
        return self.compute_sequence(NO_LIMIT, policy="periodic", segments=segments)

    def compute_homogeneous_sequence(self, mem_limit: int | str, mem_slots: int | None = None) -> Checkpointable:
        """Plan as if all stages were equal (Griewank and Walther's Revolve); returns the module.

        mem_slots: outputs held at a time; the fastest count that fits if None.
        """
        return self.compute_sequence(mem_limit, policy="revolve", slots=mem_slots)

    def compute_min_sequence(self) -> Checkpointable:
        """Keep nothing but the input and recompute everything from it, without a limit; returns the module."""
        return self.compute_sequence(NO_LIMIT, policy="revolve", slots=1)

    def check_sequence(self) -> None:
        """Run the planned sequence on the machine once more.

        Raises:
            MeasureError: if there is no plan. InvalidSequenceError: if the machine refuses it.
        """
        simulate(self.chain, self.sequence, self.sequence.mem_limit)

    def display(self) -> None:
        """Print the planned step on one screen: limit, peak and step time as in the log."""
        print(render(self.chain, self.sequence))

    # -- running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; in training mode, with gradients and a limit, run the step as planned."""
        plain = self._plain or self._model
        if torch.is_grad_enabled() and (self.training or self._is_frozen):
            if torch.compiler.is_compiling():
                if self._steps.request is not None:
                    return _left_alone(self, plain, args, kwargs)
            elif self._steps.request is None:
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
        return self._steps.unplanned(partial(plain, *args, **kwargs))

    @property
    def _is_frozen(self) -> bool:
        """Whether there is a limit and no parameter needs a gradient: its steps serve other models, in any mode."""
        return self._steps.request is not None and not any(p.requires_grad for p in self._model.parameters())

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
        args, kwargs = chain_input(self._model, args, kwargs)
        if self._steps.latest is None and (name := lazy(self._model)) is not None:
            self._steps.say_plain(f"{name!r} gets its shape in it (a lazy module)")
            return plain(*args, **kwargs)
        if self._placed is not None and self._steps.recording is not None:
            raise OptionError(
                "record_step needs a plan with a mem_limit; with a device_limit the updates come after the step"
            )
        with self._without_caches(kwargs):
            return self._steps.forward(partial(plain, *args, **kwargs))

    def _without_caches(self, kwargs: dict[str, Any]) -> AbstractContextManager[object]:
        """A context for a step, in which settings ``use_cache`` of the model are off, unless its caller asks for it."""
        if kwargs.get("use_cache"):
            return nullcontext()
        if self._caches is None:
            self._caches = caches(self._model)
        return switched_off(self._model, self._caches)

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
        self._links = self._steps.links = other._links

    def close(self) -> None:
        """Release host memory, files and threads; the next step takes new ones."""
        self._steps.close(resident=False)
        self._links.close()


# Under ``torch.compile`` of a `Checkpointable`, planned steps run eagerly, since its graphs support neither hooks nor
# replays. `torch.compiler.disable` is the public way, but imports the compiler at once, which takes a second.
_left_alone = getattr(torch, "_disable_dynamo", torch.compiler.disable)(Checkpointable._planned)


@contextmanager
def _as_they_are(tensors: Several[torch.Tensor]) -> Iterator[None]:
    """Give leaf tensors their gradients back at the end, and call no hook of theirs meanwhile."""
    names = "grad", "_backward_hooks", "_post_accumulate_grad_hooks"
    leaves = {id(t): t for t in tensors if t.is_leaf and t.requires_grad}.values()
    before = [(t, name, getattr(t, name)) for t in leaves for name in names]
    try:
        for t, name, _ in before:
            setattr(t, name, None)
        yield
    finally:
        for t, name, had in before:
            setattr(t, name, had)


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

"""Cuts a model into stages: records its forward (`recording`) and chooses the cuts (`partition.cuts`).

The modules of an ``nn.Sequential``, and those that the user names, end stages; any other model is cut where few bytes
cross. Modules that cannot be recorded are called as a whole: named ones, and the innermost ones whose work depends on
data (a loop over the experts in use, a computed number that sets a shape). The chain's input is (args, kwargs) of the
call.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as calls
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..accelerator import is_capturing
from ..errors import MeasureError, OptionError
from ..tensors.saved_tensors import foreign_hooks
from ..tensors.stage import StageModule
from ..tensors.storage import storage_key
from ..tensors.tree import flatten, look_into, refuse_packed
from .backward_roots import BackwardStarts
from .caches import caches, switched_off, tell
from .module_recorder import one_call
from .partition import cuts
from .recorder import UnrecordableError
from .recording import Call, InStep, record, same_calls
from .tape import Tape
from .unrepeatable import IN_A_SUBMODULE, UncuttableError

CURE = 'name its stages, Checkpointable(model, stages=["blocks.0", ...]), which are then called as a whole'
StagesOption = int | Sequence[str | nn.Module] | None  # about how many stages, or the modules that are stages


@dataclass(frozen=True)
class Captured:
    """The stages of a model.

    Attributes:
        stages: in order.
        strategy: how they were found, for people.
        tape: the recording.
        cached: where ``use_cache`` was switched off.
        with_attributes: whether the last stage also returns tensors that modules keep in attributes.
        starts: the last module, if the user says from which outputs a backward starts.
    """

    stages: list[StageModule]
    strategy: str
    tape: Tape
    cached: tuple[dict[str, Any], ...]
    with_attributes: bool
    starts: BackwardStarts | None = None

    def starting(self, names: tuple[str | int, ...]) -> Captured:
        """Return this for a backward that starts from the outputs of these `names` alone; from any by default."""
        if not names:
            return self
        starts = BackwardStarts(names, self.with_attributes)
        last = replace(self.stages[-1], modules=(*self.stages[-1].modules, starts))
        return replace(self, stages=[*self.stages[:-1], last], starts=starts)

    def own(self, forward: Callable[..., Any], value: Any) -> Any:
        """Return what the model's own `forward` returns for the chain's input `value`, with caches switched off as in
        the stages."""
        args, kwargs = value
        with switched_off(self.cached):
            return forward(*args, **kwargs)

    def started(self, output: Any) -> Any:
        """Return the model's `output`, of which only the outputs from which a backward starts keep their graph."""
        return output if self.starts is None else self.starts.watched(output)


def is_sequential(model: nn.Module) -> bool:
    """Whether the model's forward is that of ``nn.Sequential``."""
    # static, because a scripted module has no attribute forward
    return inspect.getattr_static(type(model), "forward", None) is nn.Sequential.forward


def modules(model: nn.Module) -> list[str]:
    """Return the dotted names of the modules of `model`, an ``nn.Sequential``, in order; nested ones are flattened.

    A nested one counts as one module if it is of a subclass (whose forward may differ), or if its call is one call.

    Raises:
        MeasureError: if there are none.
    """
    names = {module: name for name, module in model.named_modules()}
    found: list[str] = []
    todo = list(model.children())[::-1]
    while todo:
        module = todo.pop()
        if type(module) is nn.Sequential and len(module) > 0 and not one_call(module):
            todo += list(module.children())[::-1]
        else:
            found.append(names[module])
    if not found:
        raise MeasureError("the model is an empty nn.Sequential; it needs at least one module")
    return found


def chain_input(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the input of the first stage when `model` is called with `args` and `kwargs`.

    If the caller does not set ``use_cache``, it is switched off: training does not need cached keys and values (see
    also `caches`).

    Raises:
        MeasureError: if the arguments do not fit forward, or the model has no forward in Python.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise MeasureError(
            f"the model is scripted or traced ({model.original_name}), so its forward runs as one piece; give the"
            " module that it was made from, parts of which may be scripted"
        )
    look_into((args, kwargs))
    signature = _signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise MeasureError(
            f"forward of {type(model).__name__} cannot be called like this: {error}; give what you call the model with"
        ) from error
    if "use_cache" in signature.parameters and bound.arguments.get("use_cache") is None:
        bound.arguments["use_cache"] = False
    return bound.args, bound.kwargs


_SIGNATURES: weakref.WeakKeyDictionary[FunctionType, inspect.Signature] = weakref.WeakKeyDictionary()


def _signature(forward: Any) -> inspect.Signature:
    """Return the cached signature, because `inspect.signature` is slow and needed in every step."""
    function = getattr(forward, "__func__", None)
    if type(function) is not FunctionType:
        return inspect.signature(forward)
    if (known := _SIGNATURES.get(function)) is None:
        known = _SIGNATURES[function] = inspect.signature(forward)
    return known


def read_sample(
    model: nn.Module, sample: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that a sample stands for: a single dict is passed as keywords if forward accepts those
    names."""
    scripted = isinstance(model, torch.jit.ScriptModule)
    if len(sample) == 1 and not kwargs and isinstance(sample[0], Mapping) and not scripted:
        with suppress(TypeError):
            inspect.signature(model.forward).bind(**sample[0])
            return (), dict(sample[0])
    return sample, kwargs


def refuse_passed_by() -> None:
    """Raise MeasureError if hooks are registered that a planned step would not call, or if a CUDA graph is being
    captured, whose replays would repeat one step's random numbers and leave the host's copies out."""
    if is_capturing():
        raise MeasureError(
            "the model cannot be measured or run as planned while a CUDA graph is captured, because each step resets"
            " random numbers and schedules its copies; capture the plain model, or give a limit that keeps everything,"
            " which runs the plain model"
        )
    if _has_any_global_hook():
        every = [name for name in vars(calls) if re.fullmatch(r"_global_(forward|backward)(_pre)?_hooks", name)]
        hooks = [hook for name in every for hook in getattr(calls, name).values()]
        modes = [type(mode).__name__.strip("_") for mode in _get_current_dispatch_mode_stack()]
        told = dict.fromkeys([*modes, *(getattr(hook, "__qualname__", type(hook).__name__) for hook in hooks)])
        raise MeasureError(
            f"a hook for all modules is registered ({', '.join([*told][:3])}), but replays do not call the modules and"
            " would leave it out; run steps outside of what registers it, or register it on the modules that need it"
        )
    if (said := foreign_hooks()) is not None:
        raise MeasureError(f"the model {''.join(said)}")


def lazy(model: nn.Module) -> str | None:
    """Return the name of a parameter or buffer whose shape the first forward finds; None if there is none."""
    every = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in every if is_lazy(tensor)), None)


def refuse_lazy(model: nn.Module) -> None:
    """Raise MeasureError if a parameter or buffer has no shape yet."""
    if (name := lazy(model)) is not None:
        raise MeasureError(
            f"{name!r} of the model has no shape before the first forward (a lazy module); run the plain model once on"
            " a sample, or train a step, and measure then"
        )


def check_measurable(model: nn.Module, value: Any) -> None:
    """Raise MeasureError if `model` cannot be measured on `value`, whatever its forward does."""
    refuse_passed_by()
    if torch.is_inference_mode_enabled():
        raise MeasureError("the model cannot be measured within torch.inference_mode(); measure it outside")
    tensors = flatten(value)[0]
    if any(t.is_meta for t in (*model.parameters(), *tensors)):
        raise MeasureError(
            "the model or its input is on the meta device, where nothing can be measured; give real ones, or use"
            ' rotoff.estimate(model, sample, device="H200") or rotoff.plan, which calculate'
        )
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise MeasureError(
            "the model cannot be measured under other saved-tensor hooks (such as torch.utils.checkpoint or save_on_cpu"
            " around the whole model); leave those out, since rotoff recomputes and offloads, or call measure(*sample)"
            " before"
        )
    refuse_lazy(model)
    for _, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) in (torch.Tensor, nn.Parameter):
            storage_key(tensor)  # refuses a sparse tensor
    refuse_packed(value, "the model's input")
    if not tensors:
        raise MeasureError(
            "the model's input holds no tensor that rotoff can see; pass tensors, or tuples, lists, dicts and"
            " dataclasses of them"
        )
    for tensor in tensors:
        if type(tensor) is torch.Tensor:
            storage_key(tensor)


def capture(
    model: nn.Module,
    value: Any,
    device: torch.device,
    wanted: StagesOption = None,
    forward: Callable[..., Any] | None = None,
    known: Sequence[Tape] = (),
    like: Tape | None = None,
    in_step: InStep | None = None,
) -> Captured:
    """Return the stages of `model` for inputs like `value`, a result of `chain_input`; the model stays as it was.

    Args:
        wanted: about how many stages, or modules of the model (or their dotted names) that are to be stages. None: an
            ``nn.Sequential``'s modules, or about 40 stages.
        forward: what to call instead of `model`, whose own forward it is.
        known: what other forwards did; the stages serve them, too.
        like: what a forward did for inputs of other sizes.
        in_step: set if `forward` belongs to a training step.

    Raises:
        MeasureError: if the forward cannot be recorded; the message names the cause and the cure.
    """
    check_measurable(model, value)
    names, how = named(model, wanted), "recorded operations, cut where few bytes cross"
    if names:
        how = "recorded operations, cut where the named modules end"
    elif wanted is None and is_sequential(model):
        names, how = modules(model), "the modules of an nn.Sequential"
    args, kwargs = value
    cached = () if kwargs.get("use_cache") else tuple(caches(model))
    if cached:
        tell(model)
    try:
        with switched_off(cached):
            call = Call(model, forward or model, args, kwargs, device, known, like, in_step)
            tape = record(call, [model.get_submodule(name) for name in names])
    except (UncuttableError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own forward may raise anything
        if in_step is not None and not isinstance(error, MeasureError):
            raise  # as the plain model's step does
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        cure = IN_A_SUBMODULE if isinstance(error, UnrecordableError) else CURE
        if not isinstance(error, MeasureError):  # most often the sample does not fit the model
            reason = f"{type(error).__name__}: {reason}"
            cure = f"check that model(*sample) runs by itself; if it does, {CURE}"
        raise MeasureError(f"the model's forward cannot be recorded ({reason}); {cure}") from error
    count = wanted if isinstance(wanted, int) else cuts.STAGES
    if any(tape.variables[n].sharded for n in (*tape.inputs, *tape.result_variables())):
        raise MeasureError(
            "the model takes or returns a DTensor, whose bytes and gradients rotoff cannot follow; have it take and"
            " return local tensors (use_local_output=True in its plan, or to_local())"
        )
    found = cuts.stages(tape, count, names, like if like is not None and same_calls(like, tape) else None)
    return Captured(found, how, tape, cached, bool(tape.attributes))


def named(model: nn.Module, wanted: StagesOption) -> list[str]:
    """Return the dotted names of the wanted modules."""
    if wanted is None or (isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0):
        return []
    if isinstance(wanted, str) or not (isinstance(wanted, Iterable) and isinstance(wanted, Sized) and len(wanted)):
        raise OptionError(
            f"stages is {wanted!r}; give a number of stages, or a list of the model's modules or their names"
        )
    known = dict(model.named_modules())
    names = []
    for item in wanted:
        name = next((n for n, m in known.items() if m is item), None) if isinstance(item, nn.Module) else item
        if not isinstance(name, str) or name not in known or not name:
            shown = f"a {type(item).__name__}" if isinstance(item, nn.Module) else repr(item)
            raise OptionError(f"stages names {shown}, which is no module of the model; see model.named_modules()")
        names.append(name)
    return names

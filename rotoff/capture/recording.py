"""One forward of a model, written down operation by operation: what the model's own Python code calls, in its order.

The model's forward runs as it is, on a sample. A ``TorchFunctionMode`` sees each call of torch (``F.dropout``, ``x + y``,
``x[i] = y``, ``torch.arange``) before it happens; custom autograd Functions, scripted functions and calls of modules are seen by
a wrapper that is there meanwhile. Everything between those calls is Python that gives the same again for the same shapes,
modes and numbers, so the calls are all that a replay needs. What could differ is not baked in silently:

- a Python value made from a tensor's contents (``if mask.all():``) is noted, and each later run compares;
- numbers from Python's or NumPy's generators, and generators set by hand, are refused;
- the forward is recorded twice, and what is not the same both times is refused;
- modules with hooks of the user's, sharded, compiled or scripted ones, and those that the user names as stages are not looked
  into: a call of theirs is one operation, so that their hooks and their Python code run in every step and replay.

Gradients are on, but nothing is kept for a backward: autograd's saved tensors are thrown away, and tensors are known by
weak references, so recording takes about what a forward without gradients does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import MeasureError
from ..runtime.replay import preserved
from . import chance, counters
from .outside import other_generators, put_other_generators, seen_calls
from .recorder import Recorder, UnrecordableError, check_arguments
from .stage import copied, flatten
from .tape import Tape, same
from .unrepeatable import UncuttableError, UnrepeatableError
from .weight_casts import share

TRIES = 4  # recordings, two of which in a row must be equal


class Call(NamedTuple):
    """A call of `forward`, which is that of `model`, with `args` and `kwargs` on `device`."""

    model: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device


def record(call: Call, whole: Collection[nn.Module] = (), varying: Collection[nn.Module] = ()) -> Tape:
    """What `call` does; the model and all generators are left as they were.

    Args:
        whole: modules that are not to be looked into. varying: others of that sort, whose work depends on data.

    Raises:
        MeasureError: where its forward fails, or depends on what a replay could not give back. An `UnrecordableError` where that
            might be well if some modules were taken whole.
    """
    model = call.model
    before: Tape | None = None
    difference: str | None = None
    modules: Collection[nn.Module] = ()
    counts: list[counters.Attribute] = []
    first = counters.numbers(model)
    begun = [(m, name, buffer) for m in model.modules() for name, buffer in m._buffers.items()]
    for attempt in range(TRIES):  # the first runs may fill caches
        numbers = counters.numbers(model)
        tape, replaced = _once(call, (whole, varying), attempt)
        if replaced:
            names = dict.fromkeys(f"buffer {name!r} of {type(m).__name__}" for m, name in replaced)
            before, difference = None, f"it replaces {', '.join(names)}; change it in place"
            modules = [m for m, _ in replaced if m is not model]
        elif counted := counters.readers(tape, model):
            before, modules = None, counted
            difference = f"a {type(counted[0]).__name__} goes on with a number from a buffer that it changes in each step"
            break
        elif attempt and (counts := counters.counts(model, numbers, (*whole, *varying))):
            difference, modules = counters.described(counts), counters.around(counts, model, tape)
            break
        elif before is None:
            chance.check(tape, type(model).__name__, call.device)
            before, difference = tape, ""
        else:
            difference, place = _difference(before, tape)
            if difference is None:
                share(tape)
                return tape
            if tape.chances:
                raise chance.refusal(type(model).__name__, tape.chances[-1])
            before, modules = tape, [model.get_submodule(place)] if place else []
    for module, name, buffer in begun:
        module._buffers[name] = buffer
    if counts and model in modules:
        counters.put(first)
        raise counters.refusal(model, counts)
    raise UnrecordableError(
        f"the forward of {type(model).__name__} is not the same in each call: {difference}", modules, counts
    )


def _once(
    call: Call, whole: tuple[Collection[nn.Module], Collection[nn.Module]], attempt: int
) -> tuple[Tape, list[tuple[nn.Module, str]]]:
    """A tape, and which buffers the forward replaced by others; those stay, being caches or a reason to give up."""
    model, forward, args, kwargs, device = call
    given, rebuild = flatten((args, kwargs))
    check_arguments((args, kwargs))
    given = [copied(t).requires_grad_(t.requires_grad) for t in given]  # the forward may change them
    buffers = [(m, name, b) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    drawn = other_generators()
    with preserved(buffers, device), torch.enable_grad():
        torch.rand(attempt, device=device)  # what follows from numbers drawn differs between recordings
        recorder = Recorder(model, device, *whole, most=attempt % 2 == 1)
        recorder.begin(given)
        copied_args, copied_kwargs = rebuild(given)
        try:
            with (
                saved_tensors_hooks(recorder.saves, _never),
                seen_calls(recorder.called, recorder.applied),
                recorder.casts.counting(),
                recorder,
            ):
                result = forward(*copied_args, **copied_kwargs)
        except MeasureError:
            raise
        except Exception as error:
            if recorder.trouble is not None:
                raise recorder.trouble from error
            raise
        recorder.end(result)
        recorder.put_back()
        now_there = [(m, name, m._buffers.get(name)) for m, name, buffer in buffers]
        replaced = [(m, name, new) for (m, name, new), (_, _, old) in zip(now_there, buffers, strict=True) if new is not old]
    depends = {m for outer in whole[1] for m in outer.modules()}  # they replace theirs in every step and replay
    replaced = [entry for entry in replaced if entry[0] not in depends]
    for module, name, new in replaced:
        module._buffers[name] = new
    now = other_generators()
    if now != drawn:
        put_other_generators(drawn)
        raise UncuttableError(
            f"the forward of {type(model).__name__} draws from Python's or NumPy's random numbers, which cannot be drawn again"
            " for a replay; switch that off (LayerDrop, masking of inputs), or draw with torch"
        )
    return recorder.tape, [(m, name) for m, name, _ in replaced]


def _difference(first: Tape, second: Tape) -> tuple[str | None, str]:
    """What two recordings of one forward do not have in common; and the name of the module where that shows."""
    for a, b in zip(first.operations, second.operations, strict=False):
        common = [x[0] for x, y in zip(a.place, b.place, strict=False) if x == y]
        place = common[-1] if common else ""
        if a.name != b.name or (a.place[-1:] and a.place[-1][0] != b.place[-1][0]):
            return f"{a.name} in one, {b.name} in the next", place
        if not same(a.expected, b.expected):
            says = f"gives {a.expected!r} in one and {b.expected!r} in the next"
            return f"{a.name} of a tensor {says} (it branches on data)", place
        if not same((a.args, a.kwargs, a.outputs, a.returned), (b.args, b.kwargs, b.outputs, b.returned)):
            return f"{a.name} gets other values in the next", place
    if len(first.operations) != len(second.operations):
        return f"{len(first.operations)} operations in one, {len(second.operations)} in the next", ""
    return None, ""


def _never(_: Any) -> torch.Tensor:
    raise UnrepeatableError(
        "the model differentiates within its forward (torch.autograd.grad, backward), which rotoff cannot record: have the training loop"
        " do that, outside of the model that is planned"
    )

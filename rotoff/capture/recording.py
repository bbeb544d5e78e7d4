"""Records one forward of a model: what the model's own Python code calls, in order.

The model's forward runs on a sample. A ``TorchFunctionMode`` sees each call of torch (``F.dropout``, ``x + y``, ``x[i]
= y``, ``torch.arange``) before it runs; wrappers see custom autograd Functions, scripted functions and calls of
modules. The recording serves to find stages, to measure them, and to know what a step is expected to do (`course`). A
training step runs the model's own code (`runtime.live`).

The call of some modules is one operation: modules with backward hooks, sharded, compiled or scripted modules, those
that the user names as stages if they cannot be recorded, and those whose work depends on data.

Gradients are on, but nothing is kept for a backward: saved tensors are dropped, and tensors are known by weak
references, so recording takes about as much memory as a forward without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ..errors import MeasureError
from ..tensors.buffers import buffers_of, buffers_preserved, preserved
from ..tensors.rng import Generators
from ..tensors.saved_tensors import saved_hooks
from ..tensors.storage import copied
from ..tensors.tree import flatten, tensor_leaves
from .collectives import collectives_visible, several_processes
from .interception import Patches, intercept_calls, other_generators, put_other_generators
from .module_recorder import ModuleRecorder
from .tape import NOTHING, Tape
from .union import union
from .unrepeatable import UnrepeatableError, derivatives_refused

TRIES = 2  # recordings after the first, until one equals the one before it
DRAWS = 32  # the most recordings of a forward with random branches
SETTLED = 6  # recordings in a row without a new call, after which recording stops


class InStep(Protocol):
    """The forward of a training step, which runs once and whose side effects stay."""

    def watched(self, recorded: Tape) -> AbstractContextManager[None]:
        """Return the context in which its calls are made. recorded: the tape, which is written meanwhile."""


class Call(NamedTuple):
    """A call of `forward`, which belongs to `model`, with `args` and `kwargs` on `device`.

    Attributes:
        known: what other such calls did, and this one may do, too.
        like: what a call with inputs of other sizes did; a forward that does the same is run once.
        in_step: set if this is the forward of a training step.
    """

    model: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    known: Sequence[Tape] = ()
    like: Tape | None = None
    in_step: InStep | None = None


def record(call: Call, named: Collection[nn.Module] = ()) -> Tape:
    """Return what `call` does; generators stay as they were.

    Args:
        named: modules that are called as a whole if what they do cannot be recorded.

    Raises:
        MeasureError: if the forward fails, or does what cannot be measured. It is an `UnrecordableError` if a submodule
            may do the same.
    """
    drawn = other_generators()
    if call.in_step:
        tape = _once(call, named)
        tape.random = _has_random_branches(tape) or drawn != other_generators()
        return _with_known(call, tape)
    with preserved((), call.device):
        try:
            return _every_call(call, named)
        finally:
            put_other_generators(drawn)


def _every_call(call: Call, named: Collection[nn.Module]) -> Tape:
    """Return what the forward does, including everything that it may do at random."""
    generators = Generators(call.device)
    python = other_generators()
    tape = _once(call, named)
    if call.like is not None and not call.like.random and same_calls(call.like, tape):
        return tape
    for _ in range(TRIES):  # early runs may fill caches
        drawn = generators.copies(), other_generators()
        before, tape = tape, _once(call, named)
        if alike := same_calls(before, tape):
            break
    if not alike:
        generators.put(drawn[0])
        put_other_generators(drawn[1])
        again = _once(call, named)
        if not same_calls(tape, again):
            return again  # it depends on what earlier runs left, and not on random numbers
    tape = _with_known(call, tape)
    tape.random |= not alike or _has_random_branches(tape) or python != other_generators()
    unchanged = 0 if tape.random else SETTLED
    draws = 0
    while unchanged < SETTLED and draws < DRAWS:
        draws += 1
        both = union(tape, _once(call, named), _order(call.model))
        if both is None:
            break
        if same_calls(tape, both):
            unchanged += 1
        else:
            unchanged, tape = 0, both
    return tape


def _with_known(call: Call, tape: Tape) -> Tape:
    """Return the union of `tape` and what other calls did."""
    for other in call.known:
        if (both := union(other, tape, _order(call.model))) is not None:
            both.random = True
            tape = both
    return tape


def _order(model: nn.Module) -> dict[str, int]:
    return {name: n for n, (name, _) in enumerate(model.named_modules())}


def _has_random_branches(tape: Tape) -> bool:
    """Whether the forward reads numbers that depend on random draws."""
    random: set[int] = set()
    for op in tape.operations:
        if op.draws or not random.isdisjoint(op.reads):
            if op.expected is not NOTHING:
                return True
            random.update(op.made)
    return False


def same_calls(one: Tape, other: Tape) -> bool:
    return [op.function for op in one.operations] == [op.function for op in other.operations]


def _once(call: Call, named: Collection[nn.Module]) -> Tape:
    model, forward, args, kwargs, device, *_ = call
    given, rebuild = flatten((args, kwargs))
    if not call.in_step:  # the forward may change its arguments
        given = [copied(t).requires_grad_(t.requires_grad) for t in given]
        args, kwargs = rebuild(given)
    with nullcontext() if call.in_step else buffers_preserved(buffers_of(model)), torch.enable_grad():
        recorder = ModuleRecorder(model, device, given, named, call.in_step is not None)
        try:
            with (
                nullcontext() if call.in_step is None else call.in_step.watched(recorder.tape),
                saved_hooks(recorder.saves, _never),
                intercept_calls(recorder.called, recorder.applied),
                Patches((torch, "seed", recorder.seeding)),
                derivatives_refused(),
                recorder.casts.counting(),
                collectives_visible() if several_processes() else nullcontext(),
                recorder,
            ):
                result = forward(*args, **kwargs)
        except MeasureError:
            raise
        except Exception as error:
            if recorder.trouble is not None:
                raise recorder.trouble from error
            raise
        try:
            recorder.end(result)
            graph = [tensor.grad_fn for tensor in tensor_leaves(result)]
            del result
            recorder.finish()
            del graph
        finally:
            if call.in_step:
                recorder.forget()
    return recorder.tape


def _never(_: Any) -> torch.Tensor:
    raise UnrepeatableError(
        "the model differentiates within its forward (torch.autograd.grad, backward), which rotoff cannot record; do"
        " that in the training loop, outside of the planned model"
    )

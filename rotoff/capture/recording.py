"""One forward of a model, written down operation by operation: what the model's own Python code calls, in its order.

The model's forward runs as it is, on a sample. A ``TorchFunctionMode`` sees each call of torch (``F.dropout``, ``x +
y``, ``x[i] = y``, ``torch.arange``) before it happens; custom autograd Functions, scripted functions and calls of
modules are seen by a wrapper that is there meanwhile. What is written down serves to find stages, to measure them and
to know what a step is expected to do (`course`). In a training step the model's own code runs (`runtime.live`).

Modules with backward hooks, sharded, compiled or scripted ones, those that the user names as stages, and those
whose work depends on data are not looked into: a call of theirs is one operation.

Gradients are on, but nothing is kept for a backward: autograd's saved tensors are thrown away, and tensors are known by
weak references, so recording takes about what a forward without gradients does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import MeasureError
from ..tensors.buffers import buffers_of, buffers_preserved, preserved
from ..tensors.rng import Generators
from ..tensors.saved_tensors import saved_hooks
from ..tensors.storage import copied
from ..tensors.tree import flatten
from .collectives import collectives_visible, in_company
from .outside import other_generators, put_other_generators, seen_calls
from .recorder import Recorder
from .tape import NOTHING, Tape
from .union import union
from .unrepeatable import UnrepeatableError

TRIES = 2  # recordings after the first, until one is as that before it
DRAWS = 32  # recordings of a forward that goes by chance, at most
CALM = 6  # of those in a row that show nothing new, after which there are no more


class InStep(Protocol):
    """The forward of a step, which is run once and leaves what it leaves."""

    def watched(self) -> AbstractContextManager[None]:
        """What its calls are made in."""

    def put_back(self) -> None:
        """Have all as it was before."""


class Call(NamedTuple):
    """A call of `forward`, which is that of `model`, with `args` and `kwargs` on `device`. known: what other such calls
    did, which this one may do, too. like: what one with inputs of other sizes did: a forward that does the same is run
    once. in_step: what is to be done where this is the forward of a step."""

    model: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    known: Sequence[Tape] = ()
    like: Tape | None = None
    in_step: InStep | None = None


def record(call: Call, named: Collection[nn.Module] = ()) -> Tape:
    """What `call` does; generators are left as they were.

    Args:
        named: modules that are called as a whole where what they do cannot be written down.

    Raises:
        MeasureError: where its forward fails, or does what cannot be measured. An `UnrecordableError` where that would
            be well in a submodule.
    """
    drawn = other_generators()
    if call.in_step:
        try:
            tape = _once(call, named)
        except BaseException:
            call.in_step.put_back()
            raise
        tape.random = _goes_by_chance(tape) or drawn != other_generators()
        return _with_known(call, tape)
    with preserved((), call.device):
        try:
            return _every_call(call, named)
        finally:
            put_other_generators(drawn)


def _every_call(call: Call, named: Collection[nn.Module]) -> Tape:
    """What the forward does, with all that it may do by chance."""
    generators = Generators(call.device)
    python = other_generators()
    tape = _once(call, named)
    if call.like is not None and not call.like.random and same_calls(call.like, tape):
        return tape
    for _ in range(TRIES):  # the first runs may fill caches
        drawn = generators.copies(), other_generators()
        before, tape = tape, _once(call, named)
        if alike := same_calls(before, tape):
            break
    if not alike:
        generators.put(drawn[0])
        put_other_generators(drawn[1])
        again = _once(call, named)
        if not same_calls(tape, again):
            return again  # it goes by what the runs before have left, and not by chance
    tape = _with_known(call, tape)
    tape.random |= not alike or _goes_by_chance(tape) or python != other_generators()
    calm = 0 if tape.random else CALM
    draws = 0
    while calm < CALM and draws < DRAWS:
        draws += 1
        both = union(tape, _once(call, named), _order(call.model))
        if both is None:
            break
        if same_calls(tape, both):
            calm += 1
        else:
            calm, tape = 0, both
    return tape


def _with_known(call: Call, tape: Tape) -> Tape:
    """`tape` with what other calls did."""
    for other in call.known:
        if (both := union(other, tape, _order(call.model))) is not None:
            both.random = True
            tape = both
    return tape


def _order(model: nn.Module) -> dict[str, int]:
    return {name: n for n, (name, _) in enumerate(model.named_modules())}


def _goes_by_chance(tape: Tape) -> bool:
    """Whether the forward asks for numbers that follow from what it has drawn."""
    random: set[int] = set()
    for op in tape.operations:
        if op.draws or not random.isdisjoint(op.reads):
            if op.expected is not NOTHING:
                return True
            random.update(n for n in op.outputs if n is not None)
    return False


def same_calls(one: Tape, other: Tape) -> bool:
    return [op.function for op in one.operations] == [op.function for op in other.operations]


def _once(call: Call, named: Collection[nn.Module]) -> Tape:
    model, forward, args, kwargs, device, *_ = call
    given, rebuild = flatten((args, kwargs))
    if not call.in_step:  # the forward may change them
        given = [copied(t).requires_grad_(t.requires_grad) for t in given]
        args, kwargs = rebuild(given)
    with nullcontext() if call.in_step else buffers_preserved(buffers_of(model)), torch.enable_grad():
        recorder = Recorder(model, device, named, call.in_step is not None)
        recorder.begin(given)
        try:
            with (
                nullcontext() if call.in_step is None else call.in_step.watched(),
                saved_hooks(recorder.saves, _never),
                seen_calls(recorder.called, recorder.applied),
                recorder.casts.counting(),
                collectives_visible() if in_company() else nullcontext(),
                recorder,
            ):
                result = forward(*args, **kwargs)
        except MeasureError:
            raise
        except Exception as error:
            if recorder.trouble is not None:
                raise recorder.trouble from error
            raise
        recorder.end(result)
        graph = [leaf.grad_fn for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        del result
        recorder.finish()
        del graph
    return recorder.tape


def _never(_: Any) -> torch.Tensor:
    raise UnrepeatableError(
        "the model differentiates within its forward (torch.autograd.grad, backward), which rotoff cannot record: have"
        " the training loop do that, outside of the model that is planned"
    )

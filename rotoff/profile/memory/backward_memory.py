"""Measures what the backward of a stage holds, and where it leaves the gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...tensors.storage import pieces, storage_key
from ...tensors.tree import flatten
from ..timing.harness import Run, backward, handed_over, ones
from .allocator import AllocationLog, Allocator
from .gradients import GradientPlace, Layout

Gradients = tuple[torch.Tensor | None, ...]


def log_backward(
    allocator: Allocator, parameters: Sequence[torch.nn.Parameter], step: Callable[[], Gradients]
) -> tuple[Gradients, AllocationLog, dict[int, str]]:
    """Log `step`, which runs a backward and returns gradients; those of `parameters` come last.

    The third result is the argument of `AllocationLog.peak`. A parameter's gradient belongs to the resident bytes, but
    the new value that is added to it exists until its hook leaves a mark, and counts until then.
    """
    hooks = [p.register_hook(lambda _, n=n: allocator.mark(str(n))) for n, p in enumerate(parameters)]
    try:
        grads, log = allocator.log(step)
    finally:
        for hook in hooks:
            hook.remove()
    fresh = grads[len(grads) - len(parameters) :]
    ends = {allocator.address(piece): str(n) for n, g in enumerate(fresh) if g is not None for piece in pieces(g)}
    return grads, log, ends


class BackwardBytes(NamedTuple):
    """Bytes of a backward above ā and δ_i.

    Attributes:
        peak: from the start of ``B``.
        begun: the peak once the outputs are freed; may be negative.
        staying: the peak if the outputs are not freed.
        places: where the gradient of each input lies; None if there is none.
    """

    peak: int
    begun: int
    staying: int
    places: tuple[GradientPlace | None, ...]


def backward_bytes(
    allocator: Allocator, run: Run, given: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = ones
) -> BackwardBytes:
    """Run the backward of `run`'s stage. given: makes the gradients of its outputs."""
    leaves = run.leaves()
    targets = run.targets(leaves)
    held: list[torch.Tensor] = []
    incoming: list[tuple[int, int]] = []  # (storage, output) of the given gradients
    entering = {storage_key(t) for t in leaves}
    untouched: list[int] = []  # outputs that are inputs
    watches: list[StorageWeakRef] = []  # of the given gradients: no other storage gets the key of a freed one
    made: set[int] = set()

    def step() -> Gradients:
        outputs = flatten(run.forward(leaves))[0]
        gradients = given(outputs)
        held.extend(t.detach() for t in outputs if run.last)
        held.extend(g for g in gradients if run.last)  # the caller may hold δ_L; autograd frees other δ_i as it goes
        needing = [n for n, t in enumerate(outputs) if t.requires_grad]
        incoming.extend((storage_key(g), n) for g, n in zip(gradients, needing, strict=True))
        watches.extend(StorageWeakRef(g.untyped_storage()) for g in gradients)
        untouched.extend(n for n, t in enumerate(outputs) if storage_key(t) in entering)
        made.update(allocator.address(t) for t in outputs)
        start = handed_over(outputs, gradients)
        allocator.mark("backward")
        del outputs  # as the interpreter does when B begins
        allocator.mark("begun")
        return backward(*start, targets)

    grads, log, ends = log_backward(allocator, run.parameters, step)
    log = allocator.as_requested(log, [piece for g in grads if g is not None for piece in pieces(g)])
    rest = log.after("backward")
    begun = rest.after("begun")
    given_back = rest.level() - begun.level()
    staying = rest.without_release(made).peak(ends)
    places = tuple(_places(allocator, leaves, grads, dict(incoming), untouched))
    return BackwardBytes(rest.peak(ends), given_back + begun.peak(ends), staying, places)


def _places(
    allocator: Allocator,
    leaves: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    incoming: Mapping[int, int],
    untouched: Collection[int],
) -> Iterator[GradientPlace | None]:
    found = iter(grads)
    for leaf in leaves:
        gradient = next(found) if leaf.requires_grad else None
        if gradient is None:
            yield None
        else:
            key = storage_key(gradient)
            nbytes = allocator.rounded(gradient.untyped_storage().nbytes())
            came = incoming.get(key)
            yield GradientPlace(key, nbytes, came, Layout.of(gradient, leaf), untouched=came in untouched)

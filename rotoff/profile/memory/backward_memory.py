"""Measures what the backward of a stage holds, and where it leaves the gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...tensors.storage import pieces, storage_key
from ...tensors.tree import flatten
from ..timing.harness import MakeGradients, Run, backward, handed_over, ones
from .allocator import AllocationLog, Allocator
from .gradients import GradientPlace, Layout

Gradients = tuple[torch.Tensor | None, ...]


class Levels(NamedTuple):
    """The bytes that a backward holds from moment to moment.

    Attributes:
        spans: for each time up to the moment at which a parameter's gradient is complete, the most bytes, the bytes at
            its end, and the parameter's number (None: the backward's end). They count every gradient to the end.
        sizes: bytes of the gradients, by the parameter's number.
    """

    spans: tuple[tuple[int, int, int | None], ...]
    sizes: Mapping[int, int]

    @classmethod
    def of(cls, log: AllocationLog, ends: Mapping[int, int], start: int = 0) -> Levels:
        """Return those of a log. ends: of `log_backward`. start: the level at its start."""
        alive, sizes, spans = log.live(), dict[int, int](), []
        for ptr, n in ends.items():
            sizes[n] = sizes.get(n, 0) + alive.get(ptr, 0)
        level = most = start
        for event in log.events:
            level += event.size
            most = max(most, level)
            if event.mark.isdecimal():
                spans.append((most, level, int(event.mark)))
                most = level
        return cls((*spans, (most, level, None)), sizes)

    def peak(self, staying: Collection[int] = (), summed: Collection[int] = ()) -> int:
        """Return the most bytes.

        Args:
            staying: parameters whose gradients stay to the end. Any other belongs to the resident bytes once it is
                complete: what is new is added to these.
            summed: parameters whose gradients are added to others in a third tensor.
        """
        gone, most = 0, self.spans[0][0]
        for top, end, n in self.spans:
            most = max(most, top - gone)
            if n is not None and n in summed:
                most = max(most, end - gone + self.sizes.get(n, 0))
            if n is not None and n not in staying:
                gone += self.sizes.get(n, 0)
        return most

    def shifted(self, nbytes: int) -> Levels:
        """Return these `nbytes` higher."""
        return self._replace(spans=tuple((top + nbytes, end + nbytes, n) for top, end, n in self.spans))


def log_backward(
    allocator: Allocator, parameters: Sequence[torch.nn.Parameter], step: Callable[[], Gradients]
) -> tuple[Gradients, AllocationLog, dict[int, int]]:
    """Log `step`, which runs a backward and returns gradients; those of `parameters` come last. A hook leaves a mark
    when one of these is complete. Also returns the address of each, with the parameter's number."""
    hooks = [p.register_hook(lambda _, n=n: allocator.mark(str(n))) for n, p in enumerate(parameters)]
    try:
        grads, log = allocator.log(step)
    finally:
        for hook in hooks:
            hook.remove()
    fresh = grads[len(grads) - len(parameters) :]
    return grads, log, {allocator.address(p): n for n, g in enumerate(fresh) if g is not None for p in pieces(g)}


class BackwardBytes(NamedTuple):
    """Bytes of a backward above ā and δ_i.

    Attributes:
        levels: once the outputs are freed; may be negative. Several if gradients of other layouts take other bytes.
        staying: the same if the outputs are not freed.
        places: where the gradient of each input lies; None if there is none.
    """

    levels: tuple[Levels, ...]
    staying: tuple[Levels, ...]
    places: tuple[GradientPlace | None, ...]

    @property
    def peak(self) -> int:
        """The peak from the start of ``B``."""
        return max(0, *(one.peak() for one in self.levels))


def backward_bytes(allocator: Allocator, run: Run, given: MakeGradients = ones) -> BackwardBytes:
    """Run the backward of `run`'s stage. given: makes the gradients of its outputs."""
    leaves = run.leaves()
    held: list[torch.Tensor] = []
    incoming: list[tuple[int, int]] = []  # (storage, output) of the given gradients
    entering = {storage_key(t) for t in leaves}
    untouched: list[int] = []  # outputs that are inputs
    watches: list[StorageWeakRef] = []  # of the given gradients: no other storage gets the key of a freed one
    made: set[int] = set()
    gaps: dict[int, int] = {}  # of the given gradients, by address

    def step() -> Gradients:
        outputs = flatten(run.forward(leaves))[0]
        gradients = given(outputs)
        held.extend(t.detach() for t in outputs if run.last)
        held.extend(g for g in gradients if run.last)  # the caller may hold δ_L; autograd frees other δ_i as it goes
        needing = [n for n, t in enumerate(outputs) if t.requires_grad]
        incoming.extend((storage_key(g), n) for g, n in zip(gradients, needing, strict=True))
        watches.extend(StorageWeakRef(g.untyped_storage()) for g in gradients)
        gaps.update((allocator.address(g), _gaps(allocator, g)) for g in gradients)
        untouched.extend(n for n, t in enumerate(outputs) if storage_key(t) in entering)
        made.update(allocator.address(t) for t in outputs)
        start = handed_over(outputs, gradients)
        allocator.mark("backward")
        del outputs  # as the interpreter does when B begins
        allocator.mark("begun")
        return backward(*start, run.targets(leaves, start[0]))

    grads, log, ends = log_backward(allocator, run.parameters, step)
    log = allocator.as_requested(log, [piece for g in grads if g is not None for piece in pieces(g)])
    rest = log.after("backward").releasing_less(gaps)
    begun = rest.after("begun")
    staying = Levels.of(rest.without_release(made), ends)
    places = tuple(_places(allocator, leaves, grads, dict(incoming), untouched))
    return BackwardBytes((Levels.of(begun, ends, rest.level() - begun.level()),), (staying,), places)


def _gaps(allocator: Allocator, tensor: torch.Tensor) -> int:
    """Return the bytes of the storage of `tensor` beyond those that it would take by itself."""
    own = tensor.numel() * tensor.element_size()
    return max(0, allocator.rounded(tensor.untyped_storage().nbytes()) - allocator.rounded(own))


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

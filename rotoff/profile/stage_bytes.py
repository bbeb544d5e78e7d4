"""Measures the bytes of one stage: runs it with everything kept and with nothing kept, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..capture.mutations import ChangedAttributes, ChangedBuffers
from ..core.chain import Stage
from ..errors import MeasureError
from ..tensors.rng import Generators
from ..tensors.stage import Behaviour, Copy, SavedKind, StageModule
from ..tensors.storage import storage_key
from ..tensors.tree import flatten
from .measured import Forward, Measured
from .memory.backward_memory import BackwardBytes, backward_bytes
from .memory.casts import kept_casts
from .memory.dropped import Dropped, dropped
from .memory.forward_memory import Kept, keep_everything
from .memory.skips import storage_aliasing
from .timing.context import MeasurementContext
from .timing.harness import MakeGradients, Run, contiguous, expanded, permuted

# The thread of a collective may be the last to release a buffer, and the log of this thread misses that. Stages that
# communicate are run a few more times, equally often in all processes, and the run that leaves the fewest bytes counts.
COLLECTIVE_TRIES = 3
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})  # types whose bytes are those of one storage


class ByteMeter:
    """Measures the bytes of stages."""

    def __init__(self, context: MeasurementContext) -> None:
        self.context = context
        self.allocator = context.allocator
        self._lasting: set[int] = set()  # storages that exist throughout the step
        self._counted: set[int] = set()  # storages of the input that stay whatever is dropped, and are counted

    def begin(self, value: Any) -> None:
        """Start the chain with the input `value`, which exists throughout the step."""
        self._lasting = {storage_key(t) for t in flatten(value)[0]}
        self._counted = set()

    def _costs(self, run: Run, changes: ChangedBuffers, alike: bool = False) -> tuple[Measured, list[torch.Tensor]]:
        """Return the bytes of a stage that keeps everything, and of one that keeps nothing; and its outputs. alike:
        whether its backward will receive no gradient of another layout than its tensor's."""
        generators = Generators(self.context.device)
        drawn = generators.copies()
        casts = kept_casts(run, self.allocator)
        generators.put(drawn)
        forward = self._forward(run, changes, generators)
        unmanaged = forward.behaviour.unmanaged_bytes
        back, other_layout_bytes = self._backward(run, forward, alike)
        generators.put(drawn)  # if the next run saves other tensors, that is not because of random numbers
        dropping = self._dropping(run, forward.shapes)
        kept_above = forward.log.peak() - forward.saved_bytes - unmanaged
        dropped_above = dropping.log.peak() - forward.output_bytes - unmanaged
        costs = Stage(
            name=run.stage.name,
            output_bytes=forward.output_bytes,
            saved_bytes=forward.saved_bytes,
            grad_bytes=sum(forward.own_gradient_bytes),
            forward_transient_bytes=max(0, kept_above),
            checkpoint_transient_bytes=max(0, dropped_above),
            backward_transient_bytes=back.peak,
        )
        measured = Measured(
            costs=costs,
            behaviour=replace(forward.behaviour, cast_bytes=sum(casts.values())),
            gradients=back.places,
            own_gradient_bytes=forward.own_gradient_bytes,
            aliasing=forward.aliasing._replace(spare=(max(0, -kept_above), max(0, -dropped_above))),
            levels=back.levels,
            staying=back.staying,
            other_layout_bytes=other_layout_bytes,
            held_bytes=self._held_bytes(run, dropping, unmanaged),
            holds_others=bool(dropping.held_inputs or dropping.held_outputs),
            casts=casts,
            carried_bytes=forward.carried_bytes,
            collective=run.collective,
        )
        return measured, dropping.outputs

    def _forward(self, run: Run, changes: ChangedBuffers, generators: Generators) -> Forward:
        """Run the forward with everything kept. None of the tensors that it makes outlives this call."""
        drawn = generators.states()
        changes.look()
        attributes = ChangedAttributes(run.stage)
        leaves = run.leaves()
        versions = [t._version for t in leaves]
        kept = self._keep_everything(run, leaves, generators)
        outputs = kept.outputs
        self._refuse_subclasses(run.stage, kept.tensors)
        log = self.allocator.as_requested(kept.log, [*outputs, *kept.tensors])
        live = log.live()
        inputs = {storage_key(t) for t in leaves}
        kinds = kept.kinds(inputs)
        own = {one.address for one, kind in zip(kept.saved, kinds, strict=True) if kind is SavedKind.OWN and one.alive}
        made = {self.allocator.address(t) for t in outputs}
        tables = {storage_key(t) for t in outputs if self.allocator.address(t) not in live} - inputs  # a module's own
        self._lasting |= tables
        carried_bytes = self.storage_bytes([t for t in outputs if storage_key(t) in inputs - self._lasting])
        saved_bytes = sum(size for ptr, size in live.items() if ptr in own | made)
        written = [n for n, (t, version) in enumerate(zip(leaves, versions, strict=True)) if t._version != version]
        behaviour = Behaviour(
            saved=kinds,
            own_outputs=tuple(storage_key(t) not in self._lasting for t in outputs),
            changed_buffers=changes.look(),
            changed_attributes=attributes.look(),
            draws=log.drew or generators.states() is not drawn,
            unmanaged_bytes=sum(live.values()) - saved_bytes,
            varying=run.stage.varying,
            modes=run.stage.modes(),
            for_nothing=frozenset(n for n, one in enumerate(kept.saved) if not one.alive),
            overwritten_bytes=self.storage_bytes(leaves) if isinstance(run.stage.modules[0], Copy) else 0,
        )
        return Forward(
            layouts=_other_layouts(outputs),
            output_bytes=sum(size for ptr, size in live.items() if ptr in made) + carried_bytes,
            saved_bytes=saved_bytes + carried_bytes,
            carried_bytes=carried_bytes,
            own_gradient_bytes=tuple(self.gradient_bytes([t]) for t in outputs),
            aliasing=storage_aliasing(
                leaves, outputs, [self.storage_bytes([t]) for t in outputs], kept.keys(inputs), written
            ),
            behaviour=behaviour,
            shapes=[(one.shape, one.dtype) for one in kept.saved],
            log=log,
        )

    def _keep_everything(self, run: Run, leaves: list[torch.Tensor], generators: Generators) -> Kept:
        drawn = generators.copies()
        kept = keep_everything(run, leaves, self.allocator)
        for _ in range(COLLECTIVE_TRIES if run.collective else 0):
            generators.put(drawn)
            again = keep_everything(run, leaves, self.allocator)
            kept = again if again.live_bytes < kept.live_bytes else kept
            del again
        return kept

    def _backward(self, run: Run, forward: Forward, alike: bool) -> tuple[BackwardBytes, int]:
        """Return the bytes of the backward, and how many more it holds if gradients have another layout than their
        tensors. alike: as in `_costs`."""
        back = backward_bytes(self.allocator, run)
        if run.last:  # a loss may give expanded gradients, which take no bytes until a kernel copies them
            alone = backward_bytes(self.allocator, run, expanded)
            expected = sum(forward.own_gradient_bytes)
            levels, staying = (
                (*ours, *(one.shifted(-expected) for one in theirs))
                for ours, theirs in zip(back[:2], alone[:2], strict=True)
            )
            pairs = zip(back.places, alone.places, strict=True)
            places = tuple(a and a._replace(layout=max(a.layout, (b or a).layout)) for a, b in pairs)
            return BackwardBytes(levels, staying, places), 0
        if alike or not forward.layouts:
            return back, 0
        noncontiguous = [backward_bytes(self.allocator, run, layout) for layout in forward.layouts]
        rows = zip(back.places, *(one.places for one in noncontiguous), strict=True)
        places = tuple(
            a and a._replace(from_permuted=max(b.layout if b else a.layout for b in row)) for a, *row in rows
        )
        return back._replace(places=places), max(0, *(one.peak - back.peak for one in noncontiguous))

    def _dropping(self, run: Run, shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> Dropped:
        """Run a forward that keeps its outputs alone. shapes: of what autograd saved when everything was kept."""
        shapes_again: list[tuple[torch.Size, torch.dtype]] = []
        found = dropped(run, self.allocator, lambda t: shapes_again.append((t.shape, t.dtype)))
        if shapes_again != shapes:
            raise MeasureError(
                f"stage {run.stage.name!r} saves other tensors for backward each time it runs on the same input,"
                " because it keeps state (a growing cache, a counter); switch that off, for example with"
                " use_cache=False"
            )
        return found

    def _held_bytes(self, run: Run, found: Dropped, unmanaged: int) -> int:
        """Return the bytes that stay whatever is dropped; a tensor that several stages hold counts once."""
        if run.collective:
            return unmanaged  # see `COLLECTIVE_TRIES`
        inputs = [run.tensors[n] for n in found.held_inputs if storage_key(run.tensors[n]) not in self._lasting]
        nbytes = found.staying + self.storage_bytes([t for t in inputs if storage_key(t) not in self._counted])
        keys = [storage_key(t) for t in found.outputs]
        counted = self._counted | {storage_key(t) for t in inputs} | {keys[n] for n in found.held_outputs}
        self._counted = counted & {*keys}
        return nbytes

    def gradient_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the bytes of the gradients of those `tensors` that need one."""
        return sum(self.allocator.rounded(t.numel() * t.element_size()) for t in tensors if t.requires_grad)

    def storage_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the bytes of the storages of `tensors`, each counted once."""
        return sum(
            self.allocator.rounded(n) for n in {storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values()
        )

    def plain(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of `tensor` are those of one storage."""
        return type(tensor) in PLAIN

    def _refuse_subclasses(self, stage: StageModule, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not self.plain(tensor):
                raise MeasureError(
                    f"stage {stage.name!r} makes or saves a {type(tensor).__name__}, whose bytes rotoff cannot move;"
                    " use plain tensors for what it returns and saves"
                )


def _other_layouts(outputs: Sequence[torch.Tensor]) -> tuple[MakeGradients, ...]:
    """Return what makes gradients of `outputs` in the other layouts in which they may arrive."""
    if all(sum(size > 1 for size in t.shape) < 2 for t in outputs):  # one dimension has one layout
        return ()
    return (permuted,) if all(t.is_contiguous() for t in outputs) else (permuted, contiguous)

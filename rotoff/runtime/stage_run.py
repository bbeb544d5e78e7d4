"""One stage in one step: its first run in the user's graph, and the runs that fill the same slots again.

The first run is under autograd's saved-tensor hooks. What autograd would save becomes a slot of its own, a reference into the
stage's input, or stays where it is (`SavedKind`); a later run on detached inputs saves the same tensors in the same order, so
their number is all that is needed to find a slot again. A run that saves anything else is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..capture.stage import Behaviour, SavedKind, StageModule, flatten, storage_key
from ..errors import ExecutionError
from .replay import ReplayState
from .selective import OtherOperations, Recipe, Redone, redo
from .values import Slot, View

BESIDE = (
    "a gradient entered the graph of a stage's replay: a tensor that a stage leaves beside its output (in an attribute, a list)"
    " was made again by that replay; return it from the stage, or take it in a forward hook the first time"
)

Rebuild = Callable[[list[torch.Tensor]], Any]  # a value from its tensors


class InputRef(NamedTuple):
    """A saved view of the stage's input, found anew when it is needed."""

    place: int  # of the tensor among the inputs
    view: View | None  # None: all of it


class Resident(NamedTuple):
    """A saved tensor that was there before the stage ran, or that stays in place."""

    tensor: torch.Tensor
    version: int


Packed = Slot | InputRef | Resident


class Backward(Protocol):
    """What autograd's hooks ask of the step. They hold it, so that it lives as long as the graph; a `StageRun` never does."""

    def gradient_arrived(self, i: int, _gradient: torch.Tensor) -> None:
        """A gradient of one of stage i's outputs is there."""

    def advance_to(self, i: int) -> None:
        """Run all operations up to ``B i``."""

    def input_slots(self, i: int) -> list[Slot]:
        """Where the tensors of stage i's input are now."""

    def hooks(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> saved_tensors_hooks:
        """What a stage's first run is under."""


class StageRun:
    """What a step remembers of stage i between its first forward and its backward.

    in_backward: whether its ``B`` runs, so that what it saved may be read. recipe: of the form in which ā exists, where it is a
    smaller one. stored: what that form stores, whatever becomes of the graph that saved it. kept: by number, outputs that lie
    in skip connections kept in place. handed_on: outputs of the first run that an earlier stage made.

    Args:
        rebuild: makes the stage's input. requires_grad: of the input's tensors. replay: for a stage that runs again.
    """

    def __init__(
        self,
        i: int,
        stage: StageModule,
        behaviour: Behaviour,
        rebuild: Rebuild,
        requires_grad: list[bool],
        replay: ReplayState | None,
    ) -> None:
        self.i = i
        self.in_backward = False
        self.recipe: Recipe | None = None
        self.stored: dict[int, Slot] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self.handed_on: list[weakref.ref[torch.Tensor]] = []
        self._stage = stage
        self._behaviour = behaviour
        self._rebuild = rebuild
        self._requires_grad = requires_grad
        self._replay = replay
        self._slots: list[weakref.ref[Slot] | None] = []  # one for each tensor saved; None where it is not the stage's own
        self._shapes: list[tuple[torch.Size, torch.dtype] | None] = []  # of those
        self._made: list[tuple[torch.Size, torch.dtype]] = []  # of its outputs
        self._kept_saved: dict[int, torch.Tensor] = {}  # tensors that autograd saved in skip connections kept in place

    def saved(self) -> list[weakref.ref[Slot]]:
        """The slots that make up ā beside the outputs."""
        if self.recipe is not None:
            return [weakref.ref(slot) for slot in self.stored.values()]
        return [ref for ref in self._slots if ref is not None]

    def end(self) -> None:
        """Forget all tensors; the graph may hold the run itself for longer."""
        self.in_backward = False
        self.stored.clear()
        self.kept.clear()
        self._kept_saved.clear()

    # -- the first run, in the user's graph

    def plain(self, inputs: list[torch.Tensor], step: Backward) -> tuple[list[torch.Tensor], Rebuild]:
        """Run as in the plain model: all that is saved stays where it is. Returns the outputs, and what makes them one value."""
        return self._hooked(inputs, self._stage.run(self._rebuild(inputs)), step)

    def first(
        self, inputs: list[torch.Tensor], staying: Collection[int], keep: bool, recipe: Recipe | None, step: Backward
    ) -> tuple[list[torch.Tensor], Rebuild]:
        """Run under hooks; what autograd saves is kept where `keep`, in part where a `recipe` says which part.

        staying: numbers of the inputs that lie in skip connections kept in place. Returns as `plain` does.
        """
        self.recipe = recipe
        places = {storage_key(t): n for n, t in enumerate(inputs) if n not in staying}
        slots, shapes, replayed = self._slots, self._shapes, self._replay is not None
        now = KindsNow(self._stage, inputs, staying) if self._behaviour.varying else None
        kinds: Sequence[SavedKind] = self._behaviour.saved if now is None else now
        whole = [View.of(t) for t in inputs]
        own, reference, whole_kept = SavedKind.OWN, weakref.ref, keep and recipe is None

        # Autograd calls these two once for each tensor saved, so the usual case comes first and calls little.
        def pack(tensor: torch.Tensor) -> Packed:
            n = len(slots)
            place = places.get(tensor.untyped_storage()._cdata)
            if n >= len(kinds) or (place is not None) != (kinds[n] is SavedKind.INPUT):
                raise self._changed()
            if kinds[n] is own:
                if replayed:
                    shapes.append((tensor.shape, tensor.dtype))
                # A stage's results come with their graph, which must neither keep itself nor the stage's input alive.
                tensor = tensor.detach() if tensor.requires_grad else tensor
                slot = Slot(tensor if whole_kept else None)
                if recipe is not None:
                    self._store(recipe, n, tensor, slot)
                slots.append(reference(slot))
                return slot
            slots.append(None)
            shapes.append(None)
            if place is None:
                if kinds[n] is SavedKind.KEPT:
                    tensor = tensor.detach()
                    self._kept_saved[n] = tensor
                return Resident(tensor, tensor._version)
            view = View.of(tensor)
            return InputRef(place, None if view == whole[place] else view)

        def unpack(packed: Packed) -> torch.Tensor:
            if self.in_backward and type(packed) is Slot:
                tensor = packed.tensor
                if tensor is not None and tensor._version == packed.version:
                    return tensor
            return self._read(packed, step)

        with step.hooks(pack if now is None else partial(now.pack, pack), unpack):
            result = self._stage.run(self._rebuild(inputs))
        if len(slots) != len(kinds):
            raise self._changed()
        return self._hooked(inputs, result, step)

    def _hooked(self, inputs: list[torch.Tensor], result: Any, step: Backward) -> tuple[list[torch.Tensor], Rebuild]:
        """The tensors of the first run's `result`, which tell the step when their gradient arrives."""
        outputs, rebuild = flatten(result)
        if len(outputs) != len(self._behaviour.own_outputs):
            raise self._changed()
        for n, own in enumerate(self._behaviour.own_outputs):
            if any(outputs[n] is given for given in inputs):
                if not own and n not in self._behaviour.kept:
                    continue  # the batch's, say: its gradient is whole much later
                outputs[n] = outputs[n].view_as(outputs[n])  # a skip connection: its bytes may come and go on their own
                self.handed_on.append(weakref.ref(outputs[n]))
            if outputs[n].grad_fn is not None:
                outputs[n].register_hook(partial(step.gradient_arrived, self.i))
        self._made = [(tensor.shape, tensor.dtype) for tensor in outputs]
        self.kept = {n: outputs[n].detach() for n in self._behaviour.kept}
        return outputs, rebuild

    def _read(self, packed: Packed, step: Backward) -> torch.Tensor:
        """The tensor that autograd saved as `packed`, for a reader in the backward of stage i."""
        if not self.in_backward:
            if torch._C._current_graph_task_id() == -1:
                raise ExecutionError(f"what stage {self._stage.name!r} saved can only be read by its backward under rotoff")
            step.advance_to(self.i)  # no hook fired: the gradient entered within the stage
        slot = step.input_slots(self.i)[packed.place] if isinstance(packed, InputRef) else packed
        tensor = slot.tensor
        assert tensor is not None, f"the machine made no value for what stage {self.i} saved"
        if tensor._version != slot.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor"
                f" that stage {self._stage.name!r} saved; clone it before changing it"
            )
        if isinstance(packed, InputRef) and packed.view is not None:
            return packed.view.into(tensor)
        return tensor

    # -- later runs, on detached inputs

    def again(self, given: list[torch.Tensor], keep: bool, recipe: Recipe | None, alone: bool) -> list[torch.Tensor]:
        """Run on the input's tensors `given` and fill the slots of the first run where `keep`; returns the outputs.

        alone: for the stage's own backward. Nobody takes its outputs then; it ends at the last tensor that autograd saved
        and returns none.
        """
        enough = self._behaviour.enough if alone else 0
        inputs, places = self._detached(given)
        slots, shapes, count = self._slots, self._shapes, 0
        if keep:
            self.recipe = recipe
            self.stored.clear()

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            n, count = count, count + 1
            if n >= len(slots):
                raise self._changed()
            if (ref := slots[n]) is None:
                return
            if shapes[n] != (tensor.shape, tensor.dtype) or storage_key(tensor) in places:
                raise self._changed()
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if recipe is not None:
                self._store(recipe, n, tensor, ref())
            elif keep and (slot := ref()) is not None:
                slot.tensor, slot.version = tensor, tensor._version
            if count == enough:
                raise Redone

        assert self._replay is not None
        try:
            with self._replay, saved_tensors_hooks(pack, _never):
                made, _ = flatten(self._stage.run(self._rebuild(inputs)))
        except Redone:
            return []
        if count != len(slots) or [(tensor.shape, tensor.dtype) for tensor in made] != self._made:
            raise self._changed()
        outputs = [tensor.detach() for tensor in made]
        for n, tensor in self.kept.items():
            outputs[n] = tensor  # a skip connection kept in place is there already
        return outputs

    def redo(self, given: list[torch.Tensor]) -> None:
        """Make again what the form that `recipe` describes did not store; the slots are full then, as after ``F_all``."""
        assert self.recipe is not None
        assert self._replay is not None
        inputs, places = self._detached(given)
        stored = {n: slot.tensor for n, slot in self.stored.items() if slot.tensor is not None} | self._kept_saved
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            n, count = count, count + 1
            if (ref := self._slots[n]) is None:
                return
            if self._shapes[n] != (tensor.shape, tensor.dtype) or storage_key(tensor) in places:
                raise self._changed()
            if n not in stored and (slot := ref()) is not None:
                slot.put(tensor.detach() if tensor.requires_grad else tensor)

        try:
            redo(self.recipe, lambda: self._stage.run(self._rebuild(inputs)), stored, pack, self._replay)
        except OtherOperations:
            raise self._changed() from None
        self.stored.clear()

    def _detached(self, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], set[int]]:
        """Inputs of a run apart from the user's graph, and where their bytes are."""
        inputs = [t.detach().requires_grad_(needs) for t, needs in zip(given, self._requires_grad, strict=True)]
        return inputs, {storage_key(t) for t in inputs}

    def _store(self, recipe: Recipe, n: int, tensor: torch.Tensor, slot: Slot | None) -> None:
        """Fill and hold slot `n` where form `recipe` stores it; `slot` is it, where the graph still has it."""
        if n in recipe.kept:
            if View.of(tensor) != recipe.views[n]:
                raise self._changed()
            slot = slot or Slot(None)
            slot.put(tensor)
            self.stored[n] = slot

    def _changed(self) -> ExecutionError:
        return ExecutionError(
            f"stage {self._stage.name!r} saved other tensors for backward than when it was measured (its forward depends"
            " on data or state); call measure() again, or merge it with its neighbours into one stage"
        )


def _never(_: None) -> torch.Tensor:
    raise ExecutionError(BESIDE)


class KindsNow(list[SavedKind]):
    """Whose bytes the tensors are that a stage saves in this run, where they are others in each (`Behaviour.varying`).

    What such a stage saves in the host's memory where it computes on a device (attention on CUDA keeps its random state there) is
    nobody's: it stays where it is.

    Args:
        inputs: of the run. staying: numbers of those that lie in skip connections kept in place.
    """

    def __init__(self, stage: StageModule, inputs: Sequence[torch.Tensor], staying: Collection[int]) -> None:
        super().__init__()
        lasting = [*(p for module in stage.modules for p in module.parameters()), *(b for _, _, b in stage.buffers())]
        lasting += [
            t
            for module in stage.every_module()
            for t in vars(module).values()
            if isinstance(t, torch.Tensor) and not t.is_sparse
        ]
        self._kinds = {storage_key(t): SavedKind.RESIDENT for t in lasting}
        self._on_host = all(t.is_cpu for t in (*lasting, *inputs))
        for n, t in enumerate(inputs):
            self._kinds[storage_key(t)] = SavedKind.KEPT if n in staying else SavedKind.INPUT

    def pack(self, pack: Callable[[torch.Tensor], Packed], tensor: torch.Tensor) -> Packed:
        """What `pack` makes of the next tensor saved, told its kind."""
        other = SavedKind.RESIDENT if tensor.is_cpu and not self._on_host else SavedKind.OWN
        self.append(self._kinds.get(storage_key(tensor), other))
        return pack(tensor)

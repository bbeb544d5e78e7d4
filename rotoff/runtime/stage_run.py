"""One stage in one step: its first run in the user's graph, and the runs that fill the same slots again.

The first run is under autograd's saved-tensor hooks. Each saved tensor becomes a slot or a reference into the stage's
input, or it stays where it is (`SavedKind`). A later run on detached inputs saves the same tensors in the same order,
so a tensor's position in this order identifies its slot. A run that saves anything else raises an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import ExecutionError
from ..tensors.recipe import Recipe
from ..tensors.saved_tensors import saved_hooks
from ..tensors.stage import Behaviour, SavedKind, stage_inputs
from ..tensors.storage import View, storage_key
from ._follow import Var
from .hollowing import current_key
from .live import LiveForward
from .placed.tensor import PlacedTensor
from .replay import ReplayState
from .selective import OtherOperations, Redone, redo
from .stage_tape import StageTape
from .values import Slot, as_made

BESIDE = (
    "a gradient entered the graph of a stage's replay: the replay made a tensor again that the stage leaves outside of"
    " its output (in an attribute, a list); return this tensor from the stage, or read it in a forward hook during the"
    " first run"
)


current_task = torch._C._current_graph_task_id  # -1 outside of a backward


class InputRef(NamedTuple):
    """A saved view of the stage's input, looked up when the backward reads it."""

    place: int  # of the tensor among the inputs
    view: View | None  # None: all of it


class Resident(NamedTuple):
    """A saved tensor that existed before the stage ran, or that stays in place."""

    tensor: torch.Tensor
    version: int


# the constructor of a NamedTuple is Python code
_input_ref: Callable[[tuple[int, View | None]], InputRef] = partial(tuple.__new__, InputRef)
_resident: Callable[[tuple[torch.Tensor, int]], Resident] = partial(tuple.__new__, Resident)


class Dead(NamedTuple):
    """A saved tensor of a dead call; it was dropped."""

    number: int  # position among those of the stage


class BroughtRef(NamedTuple):
    """A saved view of a parameter that the plan moves, looked up in its copy on the device when the backward reads
    it."""

    weight: PlacedTensor
    view: View
    version: int  # of the caller's parameter


Saved = tuple[weakref.ref[Slot], torch.Size, torch.dtype]  # of a tensor that autograd saved
Packed = Slot | InputRef | Resident | Dead | BroughtRef


class Backward(Protocol):
    """What autograd's hooks need from the step. They hold it, so that it lives as long as the graph; a `StageRun` never
    does."""

    device: torch.device

    def advance_to(self, i: int) -> None:
        """Run all operations before ``B i``."""

    def input_slots(self, i: int) -> list[Slot]:
        """Return the slots of stage i's input tensors."""

    def hooks(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> saved_tensors_hooks:
        """Return the saved-tensor hooks for a stage's first run."""


class StageRun:
    """State of stage i in a step, from its first forward to its backward.

    task: autograd's number of the backward in which its ``B`` runs, so that its saved tensors may be read. frees:
    whether a slot is emptied when it has been read, because autograd keeps the graph. brought: by storage, the
    parameters that the plan moved to the device for its first run. recipe: of the smaller form in which ā exists, if
    any. stored: by number, the slots that this form stores, held here in case the graph releases them. kept: by number,
    outputs in skip connections that are kept in place. own: for each output, whether the stage made its bytes.

    Args:
        tape: records the calls. requires_grad: of each input tensor. replay: restores random numbers and buffers.
    """

    task: int | None = None
    frees = False
    recipe: Recipe | None = None
    own: Sequence[bool] = ()
    _open_hooks: saved_tensors_hooks | None = None
    _graph: Callable[[], object] = staticmethod(lambda: None)  # alive as long as autograd has a saved tensor
    _as_measured = False  # whether autograd saved the same tensors as when the stage was measured
    _taken = False  # whether a tensor stays in place only because one in its position did when the stage was measured

    def __init__(
        self,
        i: int,
        tape: StageTape,
        behaviour: Behaviour,
        requires_grad: list[bool],
        replay: ReplayState,
    ) -> None:
        self.i = i
        self.stored: dict[int, Slot] = {}
        self.kept: dict[int, Slot] = {}
        self.tape = tape
        self._behaviour = behaviour
        self._requires_grad = requires_grad
        self._replay = replay
        self._saved: list[Saved | None] = []  # for each saved tensor; None if it is not the stage's own
        self._made: list[tuple[torch.Size, torch.dtype]] = []  # of each output
        self._kept_saved: dict[int, torch.Tensor] = {}  # tensors that autograd saved in skip connections kept in place
        self.brought: dict[int, PlacedTensor] = {}

    def saved(self) -> list[weakref.ref[Slot]]:
        """Return the slots that make up ā in addition to the outputs."""
        if self.recipe is not None:
            return [weakref.ref(slot) for slot in self.stored.values()]
        return [one[0] for one in self._saved if one is not None]

    def has_graph(self) -> bool:
        """Whether autograd still has tensors that it saved in the first run, which a backward may read."""
        return self._graph() is not None

    def pause(self) -> None:
        """End a backward; another one through the same graph may follow."""
        self.task = None
        self.stored.clear()
        for one in self._saved:
            if one is not None and (slot := one[0]()) is not None:
                slot.tensor = None

    def end(self) -> None:
        """Release all tensors; the graph may hold this object for longer."""
        self.pause()
        self.kept.clear()
        self._kept_saved.clear()

    # -- the first run, in the user's graph

    def open(
        self,
        live: LiveForward,
        given: Sequence[torch.Tensor],
        staying: Collection[int],
        keep: bool,
        recipe: Recipe | None,
        step: Backward,
    ) -> None:
        """Begin the first run on the inputs `given`; of these, `staying` are in skip connections kept in place."""
        self.recipe = recipe
        live.reads.places = places = {current_key(t): n for n, t in enumerate(given) if n not in staying}
        kept_keys, whole = {current_key(given[n]) for n in staying}, [View.of(t) for t in given]
        live.saved, live.dropped = saved, dropped = self._saved, list[None]()
        resident, brought, for_nothing = live.reads.resident, self.brought, self._behaviour.for_nothing
        staying_kinds, device, keeps = self._behaviour.staying, step.device, keep and recipe is None

        def pack(tensor: torch.Tensor) -> Packed:
            if not live.seen:  # no replay will run this code
                return Resident(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
            if live.dead:
                dropped.append(None)
                return Dead(len(dropped) - 1)
            n = len(saved)
            try:
                key = tensor.untyped_storage()._cdata
            except NotImplementedError:  # a sparse tensor
                saved.append(None)
                return _resident((tensor.detach(), tensor._version))
            place, kind = places.get(key), staying_kinds.get(n) if live.as_measured else None
            stays = key in resident or key in kept_keys or tensor.device != device  # such as a seed on the host
            if place is None and kind is None and not (stays or key in brought):
                slot = Slot(tensor.detach() if keeps and not (n in for_nothing and live.as_measured) else None)
                saved.append((weakref.ref(slot), tensor.shape, tensor.dtype))
                if recipe is not None:
                    self._store(recipe, n, tensor.detach(), slot)
                return slot
            saved.append(None)
            if key in brought:
                return BroughtRef(brought[key], View.of(tensor), brought[key].version)
            if place is None:
                self._taken |= not stays
                if type(tensor) is torch.Tensor or not (tensor.is_leaf and isinstance(tensor, torch.nn.Parameter)):
                    tensor = tensor.detach()
                if kind is SavedKind.KEPT or key in kept_keys:
                    self._kept_saved[n] = tensor
                return _resident((tensor, tensor._version))
            view = View.of(tensor)
            return _input_ref((place, None if view == whole[place] else view))

        def unpack(packed: Packed) -> torch.Tensor:
            if type(packed) is Slot and not self.frees and self.task == current_task():
                tensor = packed.tensor
                if tensor is not None and tensor._version == packed.version:
                    return tensor
            return self._read(packed, step)

        self._graph = weakref.ref(unpack)
        self._open_hooks = step.hooks(pack, unpack)
        self._open_hooks.__enter__()

    def close(self, outputs: Sequence[torch.Tensor], kept: Collection[int]) -> None:
        """End the first run. kept: positions of `outputs` in skip connections that are kept in place."""
        self.cease()
        self._as_measured = [one is not None for one in self._saved] == self._behaviour.own_saved
        self._made = [(tensor.shape, tensor.dtype) for tensor in outputs]
        self.kept = {n: Slot(outputs[n]) for n in kept}

    @property
    def holds_more(self) -> bool:
        """Whether a tensor of the stage's own may stay in place: autograd saved others than when it was measured, since
        a part ran without gradients."""
        return self._taken and not self._as_measured

    def cease(self) -> None:
        """Remove the saved-tensor hooks."""
        if self._open_hooks is not None:
            hooks, self._open_hooks = self._open_hooks, None
            hooks.__exit__(None, None, None)

    def restored(self, given: list[torch.Tensor], wanted: Sequence[Var]) -> list[torch.Tensor]:
        """Return the contents of tensors that the stage made, by a replay."""
        inputs, _ = self._detached(given)
        with self._replay.again(), saved_hooks(lambda _: None, _never):
            return [tensor.detach() for tensor in self.tape.run(inputs, wanted)]

    def _read(self, packed: Packed, step: Backward) -> torch.Tensor:
        """Return the tensor that autograd saved as `packed`."""
        if self.task != (task := current_task()):
            if task == -1:
                raise ExecutionError(
                    f"what stage {self.tape.name!r} saved can only be read by its backward under rotoff"
                )
            step.advance_to(self.i)  # no hook fired: the gradient entered inside the stage
        if isinstance(packed, Dead):
            return self._made_for_nothing(packed, step)
        if isinstance(packed, BroughtRef):
            now = packed.weight.get() if packed.weight.device is None else packed.weight.device
            assert now is not None
            if packed.weight.version != packed.version:
                raise self._modified()
            return packed.view.into(now)
        slot = step.input_slots(self.i)[packed.place] if isinstance(packed, InputRef) else packed
        if (tensor := slot.tensor) is None:  # it was not kept, because its graph was gone in the measured run
            self._make_all(as_made(step.input_slots(self.i), self.tape.name))
            tensor = slot.tensor
        assert tensor is not None, f"the machine made no value for what stage {self.i} saved"
        if tensor._version != slot.version or (isinstance(packed, InputRef) and slot.stale):  # type: ignore[union-attr]
            raise self._modified()
        if isinstance(packed, InputRef):
            return tensor if packed.view is None else packed.view.into(tensor)
        if self.frees and type(packed) is Slot:
            packed.tensor = None
        return tensor

    def _modified(self) -> RuntimeError:
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a"
            f" tensor that stage {self.tape.name!r} saved; clone it before changing it"
        )

    def _made_for_nothing(self, packed: Dead, step: Backward) -> torch.Tensor:
        """Return a saved tensor of a dead call, by a replay of the whole stage."""
        inputs, _ = self._detached(as_made(step.input_slots(self.i), self.tape.name))
        found: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> None:
            if self.tape.running_dead:
                found.append(tensor.detach())

        with self._replay.again(), saved_hooks(pack, _never):
            self.tape.run(inputs, everything=True)
        return found[packed.number]

    # -- later runs, on detached inputs

    def again(self, given: list[torch.Tensor], keep: bool, recipe: Recipe | None, alone: bool) -> list[torch.Tensor]:
        """Run on the input tensors `given`; if `keep`, fill the slots of the first run. Returns the outputs.

        alone: the run serves only the stage's own backward, so it stops at the last saved tensor and returns none.
        """
        enough = self._behaviour.early_stop if alone and self._as_measured else 0
        inputs, places = self._detached(given)
        saved, count = self._saved, 0
        if keep:
            self.recipe = recipe
            self.stored.clear()

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            if self.tape.running_dead:
                return
            n, count = count, count + 1
            if n >= len(saved):
                raise self._changed()
            if (one := saved[n]) is None:
                return
            ref, shape, dtype = one
            if shape != tensor.shape or dtype is not tensor.dtype or storage_key(tensor) in places:
                raise self._changed()
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if recipe is not None:
                self._store(recipe, n, tensor, ref())
            elif keep and (slot := ref()) is not None:
                slot.tensor, slot.version = tensor, tensor._version
            if count == enough:
                raise Redone

        try:
            with self._replay.again(), saved_hooks(pack, _never):
                made = self.tape.run(inputs)
        except (Redone, RuntimeError):  # TorchScript raises the latter in place of what is raised within
            if not 0 < count == enough:
                raise
            return []
        if count != len(saved) or [(tensor.shape, tensor.dtype) for tensor in made] != self._made:
            raise self._changed()
        outputs = [tensor.detach() for tensor in made]
        for n, slot in self.kept.items():
            (outputs[n],) = as_made([slot], self.tape.name)  # a skip connection kept in place is there already
        return outputs

    def redo(self, given: list[torch.Tensor]) -> None:
        """Make the tensors again that the stage's smaller form did not store; then all slots are full, as after
        ``F_all``."""
        assert self.recipe is not None
        inputs, places = self._detached(given)
        stored = {n: slot.tensor for n, slot in self.stored.items() if slot.tensor is not None} | self._kept_saved
        if not (self._as_measured and self.recipe.kept <= stored.keys()):
            self._make_all(given)
            return
        count = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal count
            n, count = count, count + 1
            if (one := self._saved[n]) is None:
                return
            ref, shape, dtype = one
            if shape != tensor.shape or dtype is not tensor.dtype or storage_key(tensor) in places:
                raise self._changed()
            if n not in stored and (slot := ref()) is not None:
                slot.put(tensor.detach() if tensor.requires_grad else tensor)

        try:
            redo(
                self.recipe,
                self.tape.ready(inputs),
                stored,
                pack,
                self._replay.again(),
                beside=lambda: self.tape.running_dead,
            )
        except OtherOperations:
            self._make_all(given)
        self.stored.clear()

    def _make_all(self, given: list[torch.Tensor]) -> None:
        """Make all saved tensors again: the form does not fit this course."""
        self.again(given, True, None, alone=False)

    def _detached(self, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], set[int]]:
        """Return `given` detached from the user's graph, and the keys of their storages."""
        inputs = stage_inputs(given, self._requires_grad)
        return inputs, {storage_key(t) for t in inputs}

    def _store(self, recipe: Recipe, n: int, tensor: torch.Tensor, slot: Slot | None) -> None:
        """Fill and hold slot `n` if `recipe` stores it. slot: this slot; None if the graph has released it."""
        if recipe.stores(n, tensor):
            slot = slot or Slot(None)
            slot.put(tensor)
            self.stored[n] = slot

    def _changed(self) -> ExecutionError:
        return ExecutionError(
            f"stage {self.tape.name!r} saved other tensors for backward than when it was measured (its forward depends"
            " on data or state); call measure() again, or merge it with its neighbours into one stage"
        )


def _never(_: None) -> torch.Tensor:
    raise ExecutionError(BESIDE)

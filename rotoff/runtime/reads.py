"""Tensors from before a stage that its calls read (constants), and changes to them: a replay needs the old content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..capture.course import OUTSIDE
from ..errors import ExecutionError
from ..tensors.storage import View, copied, copy_of, version_of
from ._follow import Var
from .hollowing import current_key, whole_base
from .stage_tape import StageTape
from .torch_calls import WRITERS, FunctionProperties


class Reads:
    """Follows what the calls of one forward read and change.

    Attributes:
        tape: the tape of the open stage.
        resident: storages from before the stages, by key, with weak references, so that no new storage gets the same
            key. Those of parameters and of buffers that a stage changes stay from step to step.
        places: by key of a storage, the position of the open stage's input that lies there.
        changing: ids of the buffers that the open stage changes.
        detaches: whether constants are detached from the graph before the stages.
    """

    detaches = True

    def __init__(self, resident: dict[int, Any]) -> None:
        self.tape = StageTape("")
        self.resident = resident
        self._brief: list[int] = []  # keys in `resident` to remove when this forward ends
        self._lasting = len(resident)
        self.places: dict[int, int] = {}
        self.changing: set[int] = set()
        self._all: list[tuple[StageTape, int]] = []  # the id of each constant, with the tape that reads it
        self._readers: dict[int, list[tuple[StageTape, Tensor]]] = {}  # the same by storage, filled on demand

    def note_resident(self, tensor: Tensor) -> None:
        if (key := current_key(tensor)) not in self.resident:
            strided = tensor.layout is torch.strided
            if is_functorch_wrapped_tensor(tensor):
                raise ExecutionError(
                    "the forward calls torch under a transform of torch.func (vmap, jvp), which it did not when it was"
                    " measured; call model.measure(*sample) again, now that it does"
                )
            self.resident[key] = StorageWeakRef(tensor.untyped_storage()) if strided else None
            if not strided or (type(tensor) is not nn.Parameter and id(tensor) not in self.changing):
                self._brief.append(key)

    def forget(self) -> None:
        """End the forward: keep only the storages that a later one is likely to meet."""
        for key in self._brief:
            self.resident.pop(key, None)
        if len(self.resident) > self._lasting:  # modules that gather their parameters make others in each step
            for key in [key for key, storage in self.resident.items() if storage is not None and storage.expired()]:
                del self.resident[key]

    def before_writing(
        self, known: FunctionProperties, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], stage: int
    ) -> Sequence[Tensor]:
        """Return the tensors that a call is known to change. Copies of these, and of the measured buffers that it may
        change, are kept for replays."""
        written: Sequence[Tensor] = known.written(args, kwargs) if known.written is not None else ()
        watched: Sequence[Tensor] = ()
        if known.vague and stage != OUTSIDE:
            written = [*written, *self.may_write(known, given)]
            if self.changing:
                watched = [t for t in given if id(t) in self.changing]  # the call may change or only read these
        if written or watched:
            for tensor in (*written, *watched) if known.content else ():
                whole_base(tensor)
                self._keep_before(tensor)
        return written

    def are_changing(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the open stage changes one of these."""
        return any(id(one) in self.changing for one in tensors)

    def may_write(self, known: FunctionProperties, given: list[Tensor]) -> list[Tensor]:
        """Return the tensors of a custom Function's call in those places that an earlier call of it changed."""
        places = WRITERS.get(known.owner, ()) if known.owner is not None else ()
        return [tensor for n, tensor in enumerate(given) if n in places]

    def constant(self, tensor: Tensor) -> Tensor:
        """Return what the tape holds for a tensor from before the stage, and note that the stage reads it."""
        constants = self.tape.constants
        if tensor.grad_fn is not None and self.detaches:  # a replay must not reach its graph
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        if id(tensor) not in constants:
            is_parameter = type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)  # isinstance is slow
            version = 0 if tensor.is_inference() else tensor._version
            constants[id(tensor)] = tensor, version, tensor.requires_grad if is_parameter else None
            self._all.append((self.tape, id(tensor)))
            if type(tensor) is not nn.Parameter or tensor.untyped_storage()._cdata not in self.resident:
                self.note_resident(tensor)
        return tensor

    def _readers_of(self, key: int) -> list[tuple[StageTape, Tensor]]:
        """Return the constants that lie in a storage, each with the tape that reads it."""
        for tape, number in self._all:
            if number in tape.constants:
                tensor = tape.constants[number][0]
                self._readers.setdefault(current_key(tensor), []).append((tape, tensor))
        self._all.clear()
        return self._readers.get(key, [])

    def _keep_before(self, tensor: Tensor) -> None:
        """Copy, for the replays that read them, all tensors in the storage of `tensor`, which a call will change."""
        key = current_key(tensor)
        found: dict[StageTape, dict[int | Var, tuple[Any, Tensor]]] = {}
        for tape, constant in self._readers_of(key):
            if id(constant) not in tape.before:
                found.setdefault(tape, {})[id(constant)] = constant, constant
        self.places.pop(key, None)
        for var in self.tape.inputs:
            if (one := var()) is not None and current_key(one) == key and var not in self.tape.before:
                found.setdefault(self.tape, {})[var] = var, one
        whole: torch.UntypedStorage | None = None
        alone: list[tuple[Tensor, Tensor]] = []  # tensors that a tape reads by themselves, and their copies
        for tape, every in found.items():
            for name, (what, one) in every.items():
                if len(every) > 1:  # tensors that share a storage share it in a replay, too
                    whole = whole or copy_of(tensor.untyped_storage())
                    content = View.of(one).on(whole)
                elif (copy := next((copy for other, copy in alone if _lie_alike(one, other)), None)) is not None:
                    content = copy
                else:
                    content = copied(one)
                    alone.append((one, content))
                tape.before[name] = what, content.requires_grad_(one.requires_grad)

    def note_changed(
        self, known: FunctionProperties, given: list[Tensor], versions: Sequence[int], expected: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return all tensors that a call has changed. If some of these were not `expected`, there is no copy of their
        old content: the tapes that read them are marked `lost`."""
        places = [n for n, version in enumerate(versions) if version_of(given[n]) != version]
        changed = [given[n] for n in places]
        copied_before = self.changing if known.vague else ()
        unknown = [t for t in changed if not is_among(t, expected) and id(t) not in copied_before]
        if unknown and known.owner is not None:
            WRITERS.setdefault(known.owner, set()).update(places)
        for key in {current_key(t) for t in unknown}:
            for tape in (*([self.tape] if key in self.places else ()), *(tape for tape, _ in self._readers_of(key))):
                tape.lost = known.name
        return [*expected, *changed]


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have the same content, and may have the same copy."""
    return one is other or (one.layout is torch.strided and View.of(one) == View.of(other))


def is_among(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether `tensors` contains this very object."""
    for one in tensors:  # noqa: SIM110  (a generator takes several times as long)
        if one is tensor:
            return True
    return False

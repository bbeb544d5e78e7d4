"""What the calls of stages read that was there before them, and what calls change of that: a replay must find it as it
was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..capture.course import OUTSIDE
from ..tensors.storage import copied, version_of
from .hollowing import key_of, whole_base
from .stage_tape import StageTape
from .torch_calls import WRITERS, Known


class Reads:
    """Of one forward.

    Attributes:
        tape: of the stage that is open.
        resident: storages that were there before the stages, with weak references, which keep an address from being
            given to another. Those of parameters stay from step to step.
        places: of the open stage, for each storage the number of the input that lies there.
        changing: of the open stage, buffers that some call changes, by id.
        pending: what the call under way reads, with its version and, of parameters, whether they need a gradient.
        detaches: whether replays know nothing of the graph before the stages.
    """

    detaches = True

    def __init__(self, resident: dict[int, Any]) -> None:
        self.tape = StageTape("")
        self.resident = resident
        self._brief: list[int] = []  # of those, what this forward alone has met
        self._lasting = len(resident)
        self.places: dict[int, int] = {}
        self.changing: set[int] = set()
        self.pending: list[tuple[Tensor, int, bool | None]] = []
        self._all: list[tuple[StageTape, Tensor]] = []  # by calls of all stages
        # of those, by storage, in so far as somebody asked
        self._readers: dict[int, list[tuple[StageTape, Tensor]]] = {}

    def note_resident(self, tensor: Tensor) -> None:
        if (key := key_of(tensor)) not in self.resident:
            strided = tensor.layout is torch.strided
            self.resident[key] = StorageWeakRef(tensor.untyped_storage()) if strided else None
            if not strided or type(tensor) is not nn.Parameter:
                self._brief.append(key)

    def forget(self) -> None:
        """The forward has ended."""
        for key in self._brief:
            self.resident.pop(key, None)
        if len(self.resident) > self._lasting:  # where modules gather their parameters, each step has others
            for key in [key for key, storage in self.resident.items() if storage is not None and storage.expired()]:
                del self.resident[key]

    def before_writing(
        self, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], stage: int
    ) -> Sequence[Tensor]:
        """The tensors that a call is known to change; what was in them is kept for replays, and what is in those that
        it may change."""
        written: Sequence[Tensor] = known.written(args, kwargs) if known.written is not None else ()
        watched: Sequence[Tensor] = ()
        if known.vague and stage != OUTSIDE:
            written = [*written, *self.may_write(known, given)]
            if self.changing:
                watched = [t for t in given if id(t) in self.changing]  # which the call may change, or only read
        if written or watched:
            if stage != OUTSIDE:
                self.note()
            for tensor in (*written, *watched) if known.content else ():
                whole_base(tensor)
                self._keep_before(tensor)
        return written

    def may_write(self, known: Known, given: list[Tensor]) -> list[Tensor]:
        """What a call may change without being told to: of a custom Function, what it was seen to change."""
        places = WRITERS.get(known.owner, ()) if known.owner is not None else ()
        return [tensor for n, tensor in enumerate(given) if n in places]

    def constant(self, tensor: Tensor) -> Tensor:
        """A tensor that was there before the stage."""
        if tensor.grad_fn is not None and self.detaches:  # of a graph that the replay must not reach
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        if id(tensor) not in self.tape.constants:
            is_parameter = type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter)  # the latter takes long
            self.pending.append((tensor, version_of(tensor), tensor.requires_grad if is_parameter else None))
            self.note_resident(tensor)
        return tensor

    def note(self) -> None:
        """What the call read that was there before the stage, its replay reads, too."""
        tape = self.tape
        for read in self.pending:
            tape.constants.setdefault(id(read[0]), read)
            self._all.append((tape, read[0]))

    def _readers_of(self, key: int) -> list[tuple[StageTape, Tensor]]:
        """The stages that read what lies in a storage, and the tensors by which."""
        for one in self._all:
            self._readers.setdefault(key_of(one[1]), []).append(one)
        self._all.clear()
        return self._readers.get(key, [])

    def _keep_before(self, tensor: Tensor) -> None:
        """A call is about to change `tensor`: replays of all who read what lies there need it as it is."""
        key = key_of(tensor)
        content = None
        for tape, constant in self._readers_of(key):
            if id(constant) not in tape.before:
                content = copied(constant) if content is None or content.shape != constant.shape else content
                tape.before[id(constant)] = constant, content.requires_grad_(constant.requires_grad)
        if key in self.places:
            del self.places[key]
            for var in self.tape.inputs:
                one = var.tensor()
                if one is not None and key_of(one) == key and var not in self.tape.before:
                    self.tape.before[var] = var, copied(one).requires_grad_(one.requires_grad)

    def note_changed(
        self, known: Known, given: list[Tensor], versions: Sequence[int], expected: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """A call has changed some of the tensors that it was given; returns all that it wrote. What was in those that
        nobody `expected` it to change, replays may miss."""
        places = [n for n, version in enumerate(versions) if version_of(given[n]) != version]
        changed = [given[n] for n in places]
        unknown = [t for t in changed if not is_among(t, expected)]
        if unknown and known.owner is not None:
            WRITERS.setdefault(known.owner, set()).update(places)
        for key in {key_of(t) for t in unknown}:
            for tape in (self.tape, *(tape for tape, _ in self._readers_of(key))):
                if tape is not self.tape or key in self.places or any(key_of(t) == key for t, *_ in self.pending):
                    tape.lost = known.name
        return [*expected, *changed]


def is_among(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether it is one of them."""
    for one in tensors:  # noqa: SIM110  (a generator takes several times as long)
        if one is tensor:
            return True
    return False

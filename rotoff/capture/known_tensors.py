"""Classifies the tensors that a recording meets: the model's own, variables of the tape, and tables made before."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensors.storage import key_of, local, storage_key
from .tape import Owned, Ref, Variable


class KnownTensors:
    """The tensors met so far. It holds weak references, so that recording keeps no tensor alive.

    Args:
        model: whose parameters and buffers are known from the start.

    Attributes:
        variables: of the tape, by number.
        tables: tensors made before that are neither the model's own nor the batch's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.variables: list[Variable] = []
        self.tables: list[torch.Tensor] = []
        self._owned: dict[int, Owned] = {}
        for module in model.modules():
            for table in ("_parameters", "_buffers"):
                for name, tensor in getattr(module, table).items():
                    if tensor is not None:
                        self._owned.setdefault(id(tensor), Owned(module, table, name))
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._alive: dict[int, StorageWeakRef] = {}  # by number, storages not known to be freed
        self._owners: dict[int | None, list[Owned]] = {}  # by storage
        for owned in self._owned.values():
            self._owners.setdefault(storage_key(owned.tensor), []).append(owned)
        self._lasting: set[int | None] = set(self._owners)
        self._batch: frozenset[int] = frozenset()  # storages of the forward's inputs

    def inputs(self, given: Sequence[torch.Tensor]) -> list[int]:
        """Return the variables of the forward's inputs, before any call is recorded."""
        numbers = [self.variable(t) for t in given]
        self._batch = frozenset(self._storages)
        return numbers

    def reference(self, tensor: torch.Tensor, detached: bool) -> Owned | Ref | torch.Tensor | None:
        """Return what stands for `tensor` in an argument: the tensor itself if it was made before, None if nobody saw
        it made, or it was made before and its graph would be continued. detached: whether no graph is."""
        owned = self._owned.get(id(tensor))
        if owned is not None:
            return owned
        if (number := self.number(tensor)) is not None:  # ``set_``, which no mode sees, may have moved it
            return Ref(number) if self.variables[number].storage == self.storage(tensor) else None
        storage = storage_key(tensor)
        of_batch = storage in self._batch  # such as a part of the last batch, which an attribute holds
        made_here = storage in self._storages and not of_batch and not isinstance(tensor, nn.Parameter)
        if made_here or not (detached or tensor.grad_fn is None):
            return None
        if not of_batch:
            self._lasting.add(storage)
        if not any(tensor is table for table in self.tables):
            self.tables.append(tensor)
        return tensor  # a table that is not a buffer

    def forget(self) -> None:
        """Drop the references to the tensors."""
        self._known.clear()

    def owners(self, tensor: torch.Tensor) -> tuple[Owned, ...]:
        """Return the model's own tensors that share the storage of `tensor`."""
        return tuple(self._owners.get(key_of(tensor), ()))

    def lasts(self, tensor: torch.Tensor) -> bool:
        """Whether its storage existed before the forward and does not belong to the batch."""
        return key_of(tensor) in self._lasting

    def output(self, tensor: torch.Tensor) -> int | None:
        """Return the variable of an operation's result, a new one if it has none; None for the model's own tensors."""
        if id(tensor) in self._owned or any(tensor is table for table in self.tables):
            return None
        return self.variable(tensor)

    def variable(self, tensor: torch.Tensor) -> int:
        """Return the tensor's variable, a new one if it has none."""
        if (known := self.number(tensor)) is not None:
            return known
        number = len(self.variables)
        self._known[id(tensor)] = (weakref.ref(tensor), number)
        storage = self.storage(tensor, new=True)
        one = Variable(storage, _nbytes(tensor), tensor.requires_grad, self.owners(tensor), local(tensor) is not tensor)
        self.variables.append(one)
        return number

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the tensor's variable, if it has one."""
        entry = self._known.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def storage(self, tensor: torch.Tensor, new: bool = False) -> int | None:
        """Return the number of the tensor's storage, a new one if it has none and `new`; None if it has none, or if the
        storage existed before the forward."""
        try:
            key = storage_key(tensor)
        except (NotImplementedError, RuntimeError):  # a sparse tensor is refused, others without a storage are not
            return None
        if key in self._lasting:
            return None
        if key not in self._storages:
            if not new:
                return None
            # a weak reference keeps the address from being given to another storage
            watch = StorageWeakRef(local(tensor).untyped_storage())
            self._storages[key] = (watch, len(self._storages))
            self._alive[self._storages[key][1]] = watch
        return self._storages[key][1]

    def moved(self, tensor: torch.Tensor) -> None:
        """Note that a tensor may lie in another storage than before."""
        if (number := self.number(tensor)) is not None:
            self.variables[number] = self.variables[number]._replace(storage=self.storage(tensor, new=True))

    def knows(self, storage: StorageWeakRef) -> bool:
        """Whether the storage has a number."""
        return storage.cdata in self._storages

    def alive(self) -> frozenset[int]:
        """Return the numbers of the storages that still exist."""
        return frozenset(number for number, watch in self._alive.items() if not watch.expired())

    def freed(self) -> tuple[int, ...]:
        """Return the numbers of the storages freed since the last call."""
        found = tuple(number for number, watch in self._alive.items() if watch.expired())
        for number in found:
            del self._alive[number]
        return found


def _nbytes(tensor: torch.Tensor) -> int:
    try:
        return local(tensor).untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0

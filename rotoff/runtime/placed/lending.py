"""Moves parameters from the host to the device for calls that no plan covers: forwards without gradients, measuring,
a forward that takes another course."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ...tensors.eager_mode import EagerFunctionMode
from ...tensors.storage import STANDS_FOR, storage_key
from .brought import Arrival, bring

_ASKED = frozenset({"device", "is_cuda", "is_cpu"})
_FACTS = frozenset({"__get__", "__set__", "get_device", "untyped_storage"})


class Lender(EagerFunctionMode):
    """Context in which calls of torch find the parameters on `device`: each is moved there for a time, and `close`
    moves all back.

    Args:
        parameters: those that may be lent. room: bytes to lend at once; one call may need more.
        gradients: what receives the gradients that reach a `stand_in`, by id of the parameter.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        device: torch.device,
        room: float = float("inf"),
        gradients: Mapping[int, Arrival] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._gradients = gradients
        self._copies: dict[int, torch.Tensor] = {}  # by id, of parameters that `stand_in` stands for
        self._device = device
        self._room = room
        self._taken = 0
        self._away = {id(p) for p in parameters if p.device != device and not p.is_meta}
        self._kept: Collection[int] = frozenset()
        self._lent: OrderedDict[int, tuple[nn.Parameter, torch.Tensor]] = OrderedDict()
        self._standing: list[StorageWeakRef] = []  # storages on the device that are keys of `STANDS_FOR`

    def __bool__(self) -> bool:
        """Whether there is anything to lend."""
        return bool(self._away)

    def keep(self, wanted: Iterable[nn.Parameter]) -> None:
        """Hold the parameters `wanted` on the device until the next call of `keep`."""
        own = {id(p): p for p in wanted}
        self._kept = own.keys()
        self.lend(own.values())

    def lend(self, wanted: Iterable[nn.Parameter]) -> None:
        """Move the parameters `wanted` to the device, at least until the next call."""
        own = {id(p): p for p in wanted if id(p) in self._away}
        for key in own:
            if key in self._lent:
                self._lent.move_to_end(key)
        new = {key: p for key, p in own.items() if key not in self._lent}
        more = sum(p.nbytes for p in new.values())
        for key in [key for key in self._lent if key not in own and key not in self._kept]:
            if self._taken + more <= self._room:
                break
            self._take_back(key)
        if len(self._standing) > len(self._lent) + len(self._copies):
            self._forget(every=False)
        for key, p in new.items():
            self._lent[key] = p, self._bring(p)
            self._taken += p.nbytes

    def stand_in(self, parameter: nn.Parameter, earlier: torch.Tensor | None) -> torch.Tensor | None:
        """Return a copy on the device for one call, whose gradient goes to the parameter, which stays where it is; None
        if the parameter is on the device. earlier: see `bring`."""
        key = id(parameter)
        if key not in self._away or key in self._lent:
            return None
        if key not in self._copies:
            self._copies[key] = self._copy(parameter)
        return bring(parameter, self._copies[key], earlier, self._gradients.get(key))

    def answer(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a query about a tensor; asked for the device of a parameter that may be lent, it answers `device`."""
        if args and id(args[0]) in self._away:
            asked = getattr(getattr(function, "__self__", None), "__name__", "")
            if asked in _ASKED or function is torch.Tensor.get_device:
                with torch._C.DisableTorchFunction():
                    return function(torch.empty(0, device=self._device))
        return function(*args, **kwargs)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of torch."""
        if getattr(function, "__name__", "") in _FACTS:
            return self.answer(function, args, kwargs)
        self.lend(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, nn.Parameter))
        return function(*args, **kwargs)

    def close(self) -> None:
        """Move all back."""
        for key in list(self._lent):
            self._take_back(key)
        self._copies.clear()
        self._forget(every=True)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.close()

    def _bring(self, parameter: nn.Parameter) -> torch.Tensor:
        """Move a parameter to the device; returns its data on the host."""
        own: torch.Tensor = parameter.data
        parameter.data = self._copy(parameter)
        return own

    def _copy(self, parameter: nn.Parameter) -> torch.Tensor:
        there = parameter.data.to(self._device)
        self._standing.append(StorageWeakRef(there.untyped_storage()))
        STANDS_FOR[self._standing[-1].cdata] = storage_key(parameter)
        return there

    def _take_back(self, key: int) -> None:
        parameter, own = self._lent.pop(key)
        self._taken -= parameter.nbytes
        parameter.data = own

    def _forget(self, every: bool) -> None:
        """Remove storages from `STANDS_FOR`: all if `every`, else those that are gone, since views may outlive a
        loan."""
        standing, self._standing = self._standing, []
        for one in standing:
            if every or one.expired():
                del STANDS_FOR[one.cdata]
            else:
                self._standing.append(one)


class Streamed(Lender):
    """Context in which calls of torch get copies on the device of parameters on the host, and gradients go back there.
    For forwards without a plan, such as those without gradients. The parameters themselves are not moved."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of torch."""
        if getattr(function, "__name__", "") in _FACTS:
            return self.answer(function, args, kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if id(t) in self._away]
        if not given:
            return function(*args, **kwargs)
        self.lend(given)
        grad = torch.is_grad_enabled()
        lent = [(p, self._lent[id(p)][1]) for p in given]
        copies = {id(p): bring(p, data, None, _Home(p)) if grad else data.detach() for p, data in lent}
        args, kwargs = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))
        return function(*args, **kwargs)

    def _bring(self, parameter: nn.Parameter) -> torch.Tensor:
        return parameter.data.to(self._device)

    def _take_back(self, key: int) -> None:
        parameter, _ = self._lent.pop(key)
        self._taken -= parameter.nbytes


class _Home:
    """Moves the gradient of a parameter on the host there."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def take(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(self._parameter.device)


def settle_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of `model` to `device` for good."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)  # as ``nn.Module.to`` does


def all_on(model: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move a whole model and the states of its optimizers to `device`."""
    settle_buffers(model, device)
    for parameter in model.parameters():
        move(parameter, device)
    for optimizer in optimizers:
        for updated, state in optimizer.state.items():
            move_state(updated, state)


def move(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter and its gradient to `device`."""
    if parameter.device != device:
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(device)
        parameter.grad = None if gradient is None else gradient.to(device)


def move_state(parameter: torch.Tensor, state: dict[str, Any], scalars: bool = False) -> None:
    """Move an optimizer's state of a parameter to the parameter's device. scalars: move step counts, too."""
    for key, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.device != parameter.device and (scalars or tensor.numel() > 1):
            state[key] = tensor.to(parameter.device)

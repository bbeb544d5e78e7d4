"""Lets a replay run in the state that the first run had, and restores the present state afterwards.

Before its first run, a stage saves the states of the random number generators, the buffers that its forward changes,
the autocast settings and the flags that choose kernels. What the code of a module that is called as a whole finds is
saved at the call (`ModuleState`), and its replay finds the same.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..capture.interception import DRAWERS, may_draw, other_generators, put_other_generators
from ..capture.sharding import shards
from ..capture.undo import FIXED, OF_EVERY_MODULE, note, note_scripted, put_back
from ..errors import ExecutionError
from ..tensors.autocast import autocast_as, autocast_now, in_region
from ..tensors.kernel_flags import kernel_flags, kernels_as
from ..tensors.rng import Generators
from ..tensors.stage import TRAINING
from ..tensors.storage import View, version_of
from .arguments import replaced, tensors_in

_Mode = tuple[nn.Module, str, bool]  # of `StageModule.modes`
_Named = tuple[nn.Module, str]  # a buffer or parameter
# of hooks and submodules, by the name of the attribute
_TABLES = (
    "_modules",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_EMPTY: dict[str, Any] = {}
# names of the buffers that calls of a module as a whole have changed, and no measured run had
_CHANGED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class ModuleState:
    """What the code of `modules` finds: their modes, hooks, submodules and attributes, what these hold (containers,
    objects, generators), and the generators of Python and NumPy. The numbers in tensors are not part of it; of
    parameters, only tensors that ``functional_call`` puts in their places are.

    holds: whether tensors with a graph in attributes are held. If not, and they are gone later, a replay that reads
    them raises. None: these attributes are not part of it.
    """

    def __init__(self, modules: Iterable[nn.Module], holds: bool | None = False) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any], Set[str]]] = []  # where, which, all names
        self._held: dict[int, tuple[Any, Any]] = {}
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._modes: list[_Mode] = []
        self.instead: dict[_Named, torch.Tensor] = {}  # of parameters
        self.buffers: dict[_Named, torch.Tensor] = {}  # in whose places there may be others later
        modules = [*modules]
        sharded = any(map(shards, modules))  # whether others set tables and attributes around each run
        for module in modules:
            own = vars(module)
            names, every = own.keys() - OF_EVERY_MODULE, {}
            for name in names:
                if type(value := own[name]) not in FIXED:
                    if not holds and _has_graph(value):
                        if holds is False and not sharded:
                            every[name] = _Unheld(value, f"{name!r} of {type(module).__name__}")
                        continue
                    note(value, self._held, tensors=False)
                every[name] = value
            self._attributes.append((own, every, names | OF_EVERY_MODULE))
            note_scripted(module, self._held)
            self._modes.append((module, TRAINING, module.training))
            placed: dict[str, Any] = module._parameters
            for name, parameter in placed.items():
                if type(parameter) is nn.Parameter or isinstance(parameter, nn.Parameter):  # the latter is slow
                    self._modes.append((module, name, parameter.requires_grad))
                elif parameter is not None and not sharded:
                    alias = parameter if holds else parameter.detach().requires_grad_(parameter.requires_grad)
                    self.instead[module, name] = alias
            if not sharded:
                for name in _TABLES:
                    table: Any = own.get(name)
                    if type(table) in (dict, OrderedDict):
                        self._tables.append((table, dict(table) if table else _EMPTY))
        self._others = other_generators()

    def put(self) -> None:
        for held, every, names in self._attributes:
            for name in held.keys() - names:
                del held[name]
            for name, value in every.items():
                if held.get(name, held) is not value:
                    held[name] = value.get() if type(value) is _Unheld else value
        for held, content in self._held.values():
            put_back(held, content)
        for table, content in self._tables:
            if table != content:
                table.clear()
                table.update(content)
        for (module, name), tensor in self.instead.items():
            module._parameters[name] = tensor  # type: ignore[assignment]
        for (module, name), buffer in self.buffers.items():
            if _entry(module._buffers, name) is not buffer:
                module._buffers[name] = buffer
        _switch(self._modes)
        put_other_generators(self._others)


class _Unheld:
    """The value of an attribute without its tensors that have a graph, whose bytes a step must not hold."""

    def __init__(self, value: Any, where: str) -> None:
        self._where = where
        self._value = replaced(value, _weakly)

    def get(self) -> Any:
        return replaced(self._value, self._found)

    def _found(self, leaf: Any) -> Any:
        if type(leaf) is not _Weak:
            return leaf
        return _Gone(self._where) if (tensor := leaf.get()) is None else tensor


def _weakly(leaf: Any) -> Any:
    plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided
    return _Weak(leaf) if plain and leaf.requires_grad else leaf


class _Weak:
    """Refers to the bytes of a tensor, not to the tensor: a step that measures swaps tensors, which must have no weak
    references."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._view = View.of(tensor)

    def get(self) -> torch.Tensor | None:
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return None if storage is None else self._view.on(storage).requires_grad_()


class _Gone(torch.Tensor):
    """Stands for a tensor of `_Unheld` that is gone."""

    attribute: str

    def __new__(cls, where: str) -> _Gone:
        gone: _Gone = torch.Tensor._make_subclass(cls, torch.empty(0, device="cpu"))
        gone.attribute = where
        return gone

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        where = next(one.attribute for one in tensors_in(args, kwargs or {}) if isinstance(one, _Gone))
        raise ExecutionError(
            f"the attribute {where}, which runs as a whole, held a tensor of an earlier forward with its graph; a"
            " replay reads it, but it is gone: keep tensor.detach() in the attribute"
        )


class ReplayState:
    """The state in which a stage's first run begins.

    Args:
        generators: the random number generators that the stage may use.
        buffers: (module, name) of every buffer that the stage's forward changes.
        changing: those that modules may change which it calls as a whole; they are saved at the call.
        modes: as of `StageModule.modes`.
        modules: those that replays find as they are now.
    """

    def __init__(
        self,
        generators: Generators,
        buffers: Sequence[_Named] = (),
        modes: Sequence[_Mode] = (),
        modules: Sequence[nn.Module] = (),
        changing: Collection[_Named] = (),
    ) -> None:
        self._modes = modes
        self._changing = changing
        self._called: dict[nn.Module, None] = {}
        self._instead: dict[tuple[str, nn.Module, str], None] = {}  # where a replay may find other tensors
        self._functions: set[Any] = set()  # that have not been run again yet
        self.others = False  # whether a replay changes the generators of Python and NumPy
        self._generators = generators
        self._rng = generators.begin()
        self._buffers = {key: _buffer(key).clone() for key in buffers}
        self._versions: dict[_Named, tuple[torch.Tensor, int]] = {}
        self.autocast, self._cached = autocast_now(), torch.is_autocast_cache_enabled()
        self.kernels = kernel_flags()
        self._first = [self.calls(module) for module in modules]

    def runs(self, code: Any) -> bool:
        """Note that the stage makes a call that runs `code_of` its own; returns whether that may draw from Python's and
        NumPy's generators."""
        if may_draw(code):
            return True
        self._functions.add(code)
        return False

    def calls(self, outer: nn.Module, buffers: bool = False) -> ModuleState:
        """Note that code that a replay runs again is about to call a module; returns its state. buffers: whether it is
        not known which of its buffers that changes, so that all are saved."""
        state = ModuleState(every := [*outer.modules()])
        for module in every:
            self._called[module] = None
            for name, buffer in module._buffers.items():
                if buffer is None or (key := (module, name)) in self._buffers:
                    continue
                if buffers or key in self._changing or name in _CHANGED.get(module, ()):
                    self._buffers[key] = _buffer(key).clone()
                else:
                    self._versions[key] = buffer, version_of(buffer)
                    state.buffers[key] = buffer.detach() if buffer.requires_grad else buffer
        self._instead.update(dict.fromkeys(("_parameters", *key) for key in state.instead))
        self._instead.update(dict.fromkeys(("_buffers", *key) for key in state.buffers))
        return state

    def changed(self) -> bool:
        """Whether calls have changed buffers that are not saved. From now on they are."""
        found = [
            (module, name)
            for (module, name), (buffer, version) in self._versions.items()
            if version_of(buffer) != version or _entry(module._buffers, name) is not buffer
        ]
        for module, name in found:
            _CHANGED.setdefault(module, set()).add(name)
        return bool(found)

    def mark(self) -> tuple[object, ...]:
        """Return the mark of the generators before the first run."""
        return self._generators.mark(self._rng)

    @contextmanager
    def again(self, graph: bool = False) -> Iterator[None]:
        """Set the state from before the first run; at the end, restore the present one.

        Args:
            graph: whether the run makes a graph; if not, autocast keeps no casts in a region that is open now, where
                they would stay to its end.

        Raises:
            ExecutionError: if a custom Function or operator draws from Python's or NumPy's generator, and did not when
                measured.
        """
        rng, grad_enabled = self._generators.copies(), torch.is_grad_enabled()
        buffers = {key: key[0]._buffers[key[1]] for key in self._buffers}
        called = ModuleState(self._called, holds=True) if self._called else None
        now = {key: _entry(getattr(key[1], key[0]), key[2]) for key in self._instead}
        modes: Sequence[_Mode] = ()
        others = other_generators() if self.others or self._functions else None
        try:
            # clones, because the run changes them and another replay may follow
            _put_buffers({key: saved.clone() for key, saved in self._buffers.items()})
            modes = _switch(self._modes)
            for one in self._first:
                one.put()
            self._generators.put(self._rng)
            # the setter, because a context manager costs as much as all else here
            torch._C._set_grad_enabled(True)
            with autocast_as(self.autocast, self._cached and (graph or not in_region())), kernels_as(self.kernels):
                yield
        finally:
            torch._C._set_grad_enabled(grad_enabled)
            _switch(modes)
            _put_buffers(buffers)
            if called is not None:
                called.put()
            for (table, module, name), tensor in now.items():
                if _entry(getattr(module, table), name) is not tensor:
                    getattr(module, table)[name] = tensor
            self._generators.put(rng)
            if others is not None and (self.others or other_generators() != others):
                put_other_generators(others)
                self._refuse_new_drawers()
            self._functions.clear()

    def _refuse_new_drawers(self) -> None:
        if not self.others:
            DRAWERS.update(self._functions)
            names = " or ".join(sorted(getattr(one, "__name__", type(one).__name__) for one in self._functions))
            raise ExecutionError(
                f"{names}, a custom Function or operator, draws from the generator of Python or NumPy, which it did not"
                " when it was measured, so a replay cannot draw the same numbers; run the step again: rotoff then saves"
                " the generator before each call"
            )


def _has_graph(value: Any, depth: int = 4) -> bool:
    """Whether it is, or a container of, tensors with a graph, whose bytes a step must not hold. depth: of containers
    that are looked into."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, deque)):
        return False
    return depth > 0 and any(type(one) not in FIXED and _has_graph(one, depth - 1) for one in value)


def _entry(table: Any, name: str) -> Any:
    """Return a module's parameter or buffer; None if it has none. The tables of scripted modules have no ``get``."""
    return table[name] if name in table else None  # noqa: SIM401


def _buffer(key: _Named) -> torch.Tensor:
    module, name = key
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer.detach()


def _put_buffers(buffers: Mapping[_Named, torch.Tensor | None]) -> None:
    for (module, name), buffer in buffers.items():
        module._buffers[name] = buffer


def _switch(modes: Sequence[_Mode]) -> list[_Mode]:
    """Set all `modes`; returns the old values of those that differed."""
    before = []
    for module, name, value in modes:
        if name == TRAINING:
            if module.training is not value:
                before.append((module, name, not value))
                module.training = value
        elif (parameter := getattr(module, name, None)) is not None and parameter.requires_grad is not value:
            before.append((module, name, not value))
            parameter.requires_grad_(value)
    return before

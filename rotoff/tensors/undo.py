"""Undoes what a run that must leave no trace has changed: tensors, counters, lists, caches and generators."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from ..accelerator import generator_of
from .storage import is_plain, version_of

_DEPTH = 4  # nesting of containers and objects that is followed
FIXED = frozenset({type(None), bool, int, float, complex, str, bytes})  # types of values that cannot change
OTHERS: tuple[Any, ...] = random._inst, np.random.mtrand._rand  # generators of all code but PyTorch's


@contextmanager
def others_undone() -> Iterator[None]:
    """Restore the generators of Python and NumPy after the block."""
    states = [(generator, content_of(generator)) for generator in OTHERS]
    try:
        yield
    finally:
        for generator, state in states:
            put_back(generator, state)


class Originals:
    """What a run overwrites of `tensors`, if `keep` is called with each storage before it is written; `put_back`
    restores it, with the version counters, and the storages that ``.data`` has replaced."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [(one, one.data, version_of(one)) for one in tensors if is_plain(one)]
        self._storages = {data.untyped_storage()._cdata for _, data, _ in self._tensors}
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Copy a storage, if it is one of theirs and was not copied yet."""
        if (key := storage._cdata) in self._storages and key not in self._copies:
            self._copies[key] = storage, storage.clone()

    def put_back(self) -> None:
        for storage, copy in self._copies.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for tensor, data, version in self._tensors:
            if tensor.untyped_storage()._cdata != data.untyped_storage()._cdata or tensor.shape != data.shape:
                tensor.data = data
            if version_of(tensor) != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


@contextmanager
def undone(model: nn.Module, value: Any, device: torch.device) -> Iterator[None]:
    """Restore, after the block, the attributes of `model`'s modules, the contents of the containers, objects and
    tensors in them, the containers and objects in `value`, and the generators of the CPU, of `device`, of Python and of
    NumPy."""
    own = (one for one in (torch.default_generator, generator_of(device)) if one is not None)
    states = [(generator, generator.clone_state()) for generator in own]  # which allocates no tensors
    given: dict[int, tuple[Any, Any]] = {}
    note(value, given, tensors=False)
    noted = [given]
    for module in model.modules():
        noted.append({})
        note(vars(module), noted[-1])
        note_scripted(module, noted[-1])
    try:
        with others_undone():
            yield
    finally:
        for held, content in chain.from_iterable(before.values() for before in noted):
            put_back(held, content)
        for generator, state in states:
            generator.set_state(state.get_state())


def note(value: Any, before: dict[int, tuple[Any, Any]], tensors: bool = True, depth: int = 0) -> None:
    """Note in `before` the content of `value` and of what it holds. tensors: whether numbers in tensors are copied."""
    kind = type(value)
    if kind in FIXED or id(value) in before or depth > _DEPTH or isinstance(value, nn.Module):
        return
    content = None if not tensors and isinstance(value, torch.Tensor) else content_of(value)
    if content is not None:
        before[id(value)] = value, content
    for one in _held_by(value):
        note(one, before, tensors, depth + 1)


def note_scripted(module: nn.Module, before: dict[int, tuple[Any, Any]]) -> None:
    """Note in `before` the attributes of a scripted module, which lie outside of Python; without those that have a
    graph."""
    if not isinstance(module, torch.jit.ScriptModule) or (kind := vars(module).get("_concrete_type")) is None:
        return
    tables = module._parameters, module._buffers, module._modules
    names = set(kind.get_attributes()).difference(*(table.keys() for table in tables))
    content = {name: getattr(module, name) for name in names}
    before[id(module)] = module, {name: v for name, v in content.items() if not getattr(v, "requires_grad", False)}


def content_of(value: Any) -> Any:
    """Return what `put_back` needs to restore `value`; None if it cannot change or must not be restored."""
    if isinstance(value, torch.Tensor):
        own = not isinstance(value, nn.Parameter) and value.is_leaf
        dense = value.layout is torch.strided and not value.is_meta
        return (value.detach().clone(), version_of(value)) if own and dense else None
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if _is_generator(value):
        return value.get_state()
    for kind, copied in ((dict, dict), (list, list), (deque, list), (set, set)):
        if isinstance(value, kind):
            return copied(value)
    if type(value) is np.ndarray:
        return value.copy()
    if type(value).__module__ in ("builtins", "torch", "numpy") or isinstance(value, type):
        return None
    return value.getstate() if _is_random(value) else _slots(value) or None


def _slots(value: Any) -> dict[str, Any]:
    """Return what an object holds in ``__slots__``, by name."""
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if name[:2] != "__"]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _held_by(value: Any) -> tuple[Any, ...]:
    """Return what must be noted with `value`."""
    if isinstance(value, dict):
        return (*value.values(),)
    if isinstance(value, (list, deque)) or type(value) is tuple:
        return (*value,)
    if isinstance(value, (torch.Tensor, set, type)) or is_generator(value):
        return ()
    of = type(value).__module__.partition(".")[0]
    if of in ("builtins", "torch", "numpy"):
        return ()
    held = getattr(value, "__dict__", None)
    return (*([held] if isinstance(held, dict) else ()), *_slots(value).values())


def is_generator(value: Any) -> bool:
    """Whether it is a random generator of torch, NumPy or Python."""
    return _is_generator(value) or _is_random(value)


def _is_generator(value: Any) -> bool:
    """Whether it is a generator of torch or NumPy, without the metaclass's own ``isinstance``, which is slow."""
    return issubclass(type(value), (torch.Generator, np.random.RandomState, np.random.Generator))


def _is_random(value: Any) -> bool:
    """Whether it is a ``random.Random`` or has the same methods."""
    return hasattr(value, "getstate") and hasattr(value, "setstate")


def put_back(held: Any, content: Any) -> None:
    """Restore the `content_of` what is `held`."""
    if isinstance(held, torch.Tensor):
        put_back_tensor(held, *content)
    elif isinstance(held, np.random.Generator):
        held.bit_generator.state = content
    elif _is_generator(held):
        held.set_state(content)
    elif isinstance(held, (dict, set)):
        if held != content if isinstance(held, set) else _differs(held, content):
            held.clear()
            held.update(content)
    elif isinstance(held, deque):
        held.clear()
        held.extend(content)
    elif hasattr(held, "setstate"):
        held.setstate(content)
    elif isinstance(content, dict):  # `_slots`, or attributes of a scripted module
        for name, value in content.items():
            if getattr(held, name, None) is not value:
                setattr(held, name, value)
    else:
        held[:] = content


def put_back_tensor(tensor: torch.Tensor, content: torch.Tensor, version: int) -> None:
    """Restore the `content` of a tensor, which may have been resized since, and its version counter."""
    if not torch.equal(tensor, content):
        with torch.no_grad():
            (tensor if tensor.shape == content.shape else tensor.resize_(content.shape)).copy_(content)
    if version_of(tensor) != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def is_as_before(held: Any, content: Any) -> bool:
    """Whether a container, generator or tensor holds the `content` that it held before."""
    if isinstance(held, torch.Tensor):
        return bool(version_of(held) == content[1])
    now = content_of(held)
    if isinstance(held, dict):
        return not _differs(now, content)
    if isinstance(held, (list, deque)):
        return len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True))
    if isinstance(held, torch.Generator):
        return torch.equal(now, content)
    return now == content if isinstance(held, set) else pickle.dumps(now) == pickle.dumps(content)


def _differs(held: dict[Any, Any], content: dict[Any, Any]) -> bool:
    return len(held) != len(content) or any(
        a is not b or held[a] is not content[b] for a, b in zip(held, content, strict=True)
    )

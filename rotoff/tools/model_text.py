"""Describes a model as text, to recognise it in another process: classes, settings, shapes and sharing, no contents."""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..tensors.storage import storage_key
from ..tensors.tree import flatten

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
_NAMED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)  # known by their names
_FUNCTIONS = 200  # the most that a digest follows
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement
_SKIPPED = frozenset({"_parameters", "_buffers", "_modules"})


def describe(value: Any, lasting: Iterable[int] = ()) -> str:
    """Return a text that is equal for values of the same shapes, sharing and constants.

    Args:
        lasting: keys of storages that are marked as existing throughout the step.
    """
    kept = set(lasting)
    tensors, rebuild = flatten(value)
    numbers: dict[int, int] = {}
    seen = []
    for t in tensors:
        key = storage_key(t)
        number = numbers.setdefault(key, len(numbers))
        seen.append((*_tensor(t), tuple(t.stride()), t.untyped_storage().nbytes(), number, key in kept))
    return repr((seen, repr(rebuild([0] * len(tensors)))))  # type: ignore[list-item]


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


def described_whole(model: nn.Module, sample: Any) -> str:
    """Return a text that is equal for models and samples with which the same operations run on tensors of the same
    shapes. Objects of Python classes, such as configurations, are written as their attributes. An attribute that cannot
    be compared is written as its identity, so that a difference is never missed."""
    return f"{_Walk().module(model)}\n{describe(sample)}"


class _Walk:
    """Numbers the objects that it meets, so that the text shows sharing."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._digests: dict[type, str] = {}  # of the forward of a class
        self._closures: set[int] = set()  # ids of those already written

    def module(self, module: nn.Module) -> str:
        first = id(module) not in self._numbers
        head = f"{type(module).__module__}.{type(module).__qualname__}#{self._number(module)}"
        if not first:
            return head
        if isinstance(module, torch.jit.ScriptModule):
            stored = [self._stored(tensor) for tensor in (*module.parameters(), *module.buffers())]
            return f"{head} {module.inlined_graph} training={module.training} {stored}"
        parts = [head, self._forward(type(module)), f"training={module.training}"]
        parts += [f"{name}:{self._stored(t)}" for name, t in module._parameters.items()]
        parts += [f"{name}={self._stored(t)}" for name, t in module._buffers.items()]
        settings = {k: v for k, v in vars(module).items() if k not in _SKIPPED}
        parts += [f"{k}={self._setting(v)}" for k, v in sorted(settings.items())]
        parts += [f"{name}({self.module(m)})" for name, m in module._modules.items() if m is not None]
        return " ".join(parts)

    def _forward(self, kind: type) -> str:
        if kind not in self._digests:
            self._digests[kind] = _code(kind.forward, kind)  # type: ignore[attr-defined]
        return self._digests[kind]

    def _number(self, thing: Any) -> int:
        return self._numbers.setdefault(id(thing), len(self._numbers))

    def _stored(self, tensor: torch.Tensor | None) -> str:
        if tensor is None:
            return "None"
        layout = tensor.stride() if tensor.layout is torch.strided else ""
        return f"{_tensor(tensor)}{layout}#{self._number(tensor)}"

    def _setting(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return self._stored(value)
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, dict):
            return "{" + ",".join(f"{k!r}:{self._setting(v)}" for k, v in value.items()) + "}"
        if isinstance(value, (list, tuple, set, frozenset)):
            parts = map(self._setting, value)
            ordered = sorted(parts) if isinstance(value, (set, frozenset)) else parts  # each process has its own order
            return f"{type(value).__name__}[{','.join(ordered)}]"
        if isinstance(value, (type, *_NAMED)) or (isinstance(value, types.FunctionType) and value.__closure__ is None):
            return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        if isinstance(value, types.FunctionType):
            return self._closure(value)
        if isinstance(value, pytree.TreeSpec) and " at 0x" not in repr(value):
            return repr(value)
        if isinstance(value, types.MethodWrapperType):  # x.T is the __get__ of a descriptor
            return f"{value.__qualname__} of {value.__self__!r}"
        if getattr(type(value), "__reduce_ex__", None) is object.__reduce_ex__ and hasattr(value, "__dict__"):
            return self._attributes(value)
        return f"{type(value).__qualname__}@{id(value)}"

    def _attributes(self, value: Any) -> str:
        kind, known = type(value), id(value) in self._numbers
        head = f"{kind.__module__}.{kind.__qualname__}#{self._number(value)}"
        if known:
            return head
        slots = any(vars(base).get("__slots__") for base in kind.__mro__)
        of_python = all(base is object or base.__flags__ & HEAP_TYPE for base in kind.__mro__)
        if slots or not of_python or isinstance(value, types.ModuleType):
            return f"{kind.__qualname__}@{id(value)}"
        # each process has its own hashes, of which transformers' GenerationConfig keeps one
        settings = sorted((name, one) for name, one in vars(value).items() if not name.endswith("_hash"))
        return f"{head}({','.join(f'{name}={self._setting(one)}' for name, one in settings)})"

    def _closure(self, function: types.FunctionType) -> str:
        """Describe a closure, such as ``torch.nn.functional.max_pool2d``: its code and what it closes over."""
        head = f"{function.__module__}.{function.__qualname__}#{self._number(function)}"
        if id(function) in self._closures:
            return head
        self._closures.add(id(function))
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a cell that is still empty
            return f"{head}@{id(function)}"
        return f"{head} {_code(function, type(function))} [{','.join(map(self._setting, cells))}]"


def _code(forward: Any, owner: type) -> str:
    """Return a digest of the instructions and constants of `forward` and of what it calls, as far as it is found by
    name: methods of its class `owner`, and functions in the package of the calling function."""
    digest = hashlib.sha256()
    seen: set[int] = set()
    todo = [forward]
    while todo:
        function = inspect.unwrap(todo.pop()) if callable(todo[-1]) else todo.pop()
        code = getattr(function, "__code__", None)
        if code is None or id(code) in seen or len(seen) == _FUNCTIONS:
            continue
        seen.add(id(code))
        names = _instructions(code, digest)
        package = function.__module__.partition(".")[0] if function.__module__ else ""
        for name in names:
            own = inspect.getattr_static(owner, name, None)
            if isinstance(own, (staticmethod, classmethod)):
                own = own.__func__
            elif isinstance(own, property):
                own = own.fget
            around = function.__globals__.get(name)
            for found in (own, around):
                if isinstance(found, (int, float, str, bytes)):
                    digest.update(f"{name}={found!r}".encode())
                module = getattr(found, "__module__", None) or ""
                if isinstance(found, types.FunctionType) and module.partition(".")[0] == package != "torch":
                    todo.append(found)
    return digest.hexdigest()[:16]


def _instructions(code: types.CodeType, digest: Any) -> list[str]:
    """Feed `digest` the instructions of `code` and of nested functions; return the names that they use."""
    names = list(code.co_names)
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _instructions(constant, digest)
        elif isinstance(constant, (int, float, complex, str, bytes, tuple, type(None))):
            digest.update(repr(constant).encode())
    return names

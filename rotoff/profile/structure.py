"""What two modules that cost the same have in common: their classes, settings, shapes and sharing, but no contents.

Used to measure equal stages of a model once, and to know a model again in another process.
"""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..capture.segment import Segment
from ..capture.stage import flatten, storage_key

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
_NAMED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)  # told by their names
_SKIPPED = frozenset({"_parameters", "_buffers", "_modules"})


def structure(modules: Iterable[nn.Module]) -> str:
    """A text that is equal for modules which run the same operations on tensors of the same shapes.

    What cannot be compared (an attribute of an unknown class, a closure) is told by its identity, so that no two differ
    unseen; the text then holds within this process only.
    """
    walk = _Walk()
    return "\n".join(walk.module(module) for module in modules)


def describe(value: Any, lasting: Iterable[int] = ()) -> str:
    """A text that is equal for values of the same shapes, sharing and constants.

    lasting: keys of storages that are told from others.
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


class _Walk:
    """Numbers what it meets, so that sharing shows."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def module(self, module: nn.Module) -> str:
        first = id(module) not in self._numbers
        head = f"{type(module).__module__}.{type(module).__qualname__}#{self._number(module)}"
        if not first:
            return head
        parts = [head, _code(type(module).forward), f"training={module.training}"]
        parts += [f"{name}:{self._stored(t)}" for name, t in module._parameters.items()]
        parts += [f"{name}={self._stored(t)}" for name, t in module._buffers.items()]
        if isinstance(module, Segment):
            parts.append(self._segment(module))
        else:
            settings = {k: v for k, v in vars(module).items() if k not in _SKIPPED}
            parts += [f"{k}={self._setting(v)}" for k, v in sorted(settings.items())]
            parts += [f"{name}({self.module(m)})" for name, m in module._modules.items() if m is not None]
        return " ".join(parts)

    def _number(self, thing: Any) -> int:
        return self._numbers.setdefault(id(thing), len(self._numbers))

    def _stored(self, tensor: torch.Tensor | None) -> str:
        return "None" if tensor is None else f"{_tensor(tensor)}#{self._number(tensor)}"

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
            return f"{type(value).__name__}[{','.join(map(self._setting, value))}]"
        if isinstance(value, (type, *_NAMED)) or (isinstance(value, types.FunctionType) and value.__closure__ is None):
            return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        if isinstance(value, types.MethodWrapperType):  # x.T is the __get__ of a descriptor
            return f"{value.__qualname__} of {value.__self__!r}"
        return f"{type(value).__qualname__}@{id(value)}"

    def _segment(self, module: Segment) -> str:
        """Its source with variables numbered as they come, and its constants spelt out."""
        source, names = module.written()
        variables: dict[str, str] = {}

        def told(match: re.Match[str]) -> str:
            name = match[0]
            if name[0] == "v":
                return variables.setdefault(name, f"v{len(variables)}")
            table = re.match(r"\['(\w+)'\]", source[match.end() :])
            if table is not None:  # of a module's parameters or buffers
                return self._stored(names[name][table[1]])
            return self._setting(names[name])

        return re.sub(r"\b[vc]\d+\b", told, source)


def _code(function: Any) -> str:
    """A digest of a function's instructions; those that it calls are not looked into."""
    code = getattr(function, "__code__", None)
    return "" if code is None else hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:16]

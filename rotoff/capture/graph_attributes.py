"""Finds the attributes of modules in which a forward leaves tensors of its graph, such as the losses of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from ..tensors.tree import tensor_leaves
from .tape import NOTHING
from .undo import OF_EVERY_MODULE, scripted_attributes
from .unrepeatable import UncuttableError

_TABLES = frozenset(["_parameters", "_buffers", "_modules"])  # attributes of nn.Module itself


def tensors_within(outer: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that are attributes of a module and its submodules, or lie in a dict, list or tuple that is
    one; and those that are buffers, or in the places of parameters."""
    for module in outer.modules():
        for name, value in (*vars(module).items(), *scripted_attributes(module).items()):
            if name in OF_EVERY_MODULE and name not in ("_parameters", "_buffers"):
                continue
            held = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else (value,)
            yield from (one for one in held if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter))


class GraphAttributes:
    """The attributes of a model's modules, as they are before a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {module: dict(vars(module)) for module in model.modules()}
        self._names = {module: name for name, module in model.named_modules()}

    def find(self, made: Callable[[torch.Tensor], bool], in_step: bool) -> list[tuple[nn.Module, str]]:
        """Return (module, name) of the attributes that now hold tensors of the graph that were `made` by operations.

        Raises:
            UncuttableError: if the forward added them to an existing object, unless this is a training step, which
                replaces them.
        """
        return [(module, name) for module in self._names for name in self._find(module, made, in_step)]

    def _find(self, module: nn.Module, made: Callable[[torch.Tensor], bool], in_step: bool) -> Iterator[str]:
        for name, value in vars(module).items():
            if name in _TABLES or _torch_hooks(module):
                continue
            try:
                tensors = tensor_leaves(value)
            except RecursionError:  # it contains itself
                continue
            if not any(t.requires_grad and made(t) for t in tensors):
                continue
            if value is not self._before[module].get(name, NOTHING):
                yield name
            elif not in_step:
                raise UncuttableError(
                    f"module {self._names[module]!r} ({type(module).__name__}) adds tensors of the graph to its"
                    f" attribute {name!r}; have its forward assign a new value, or have the model return them"
                )

    def put_back(self, attributes: Iterable[tuple[nn.Module, str]]) -> None:
        """Restore these `attributes`."""
        for module, name in attributes:
            before = self._before[module]
            if name in before:
                vars(module)[name] = before[name]
            else:
                del vars(module)[name]


def _torch_hooks(module: nn.Module) -> bool:
    """Whether all hooks are torch's own that compute a weight (weight norm, spectral norm) by recorded operations."""
    every = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    own = all(str(getattr(type(h), "__module__", "")).startswith("torch.nn.utils") for h in every)
    return bool(every) and own and not module._backward_hooks and not module._backward_pre_hooks

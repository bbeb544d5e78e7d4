"""Stages of an ``nn.Sequential``: its modules, nested Sequentials flattened.

A nested Sequential stays one stage where it is of a subclass (its forward may be another) or where someone hooked it
(running its children alone would pass the hooks by).
"""

from __future__ import annotations

from torch import nn

from ..errors import MeasureError
from ..tensors.stage import StageModule


def stages(model: nn.Module) -> list[StageModule]:
    """The stages of `model` in order.

    Raises:
        MeasureError: where `model` is not an ``nn.Sequential`` or has no modules.
    """
    if type(model).forward is not nn.Sequential.forward:
        raise MeasureError(f"the model is a {type(model).__name__}; rotoff takes an nn.Sequential of its stages")
    found: list[StageModule] = []
    # _modules, not named_children: a module may stand in several places
    todo = [(name, module) for name, module in reversed(list(model._modules.items())) if module is not None]
    while todo:
        name, module = todo.pop()
        if type(module) is nn.Sequential and len(module) > 0 and not hooked(module):
            todo.extend(
                (f"{name}.{child}", inner)
                for child, inner in reversed(list(module._modules.items()))
                if inner is not None
            )
        else:
            found.append(StageModule(name, (module,)))
    if not found:
        raise MeasureError("the model is an empty nn.Sequential; it needs at least one module")
    return found


def hooked(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks of its own."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)

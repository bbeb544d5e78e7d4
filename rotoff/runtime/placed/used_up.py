"""What a backward that updates parameters leaves in ``parameter.grad``, and what is refused then.

With ``updates="during"`` each gradient is gone as soon as it is complete. What needs all gradients at once (clipping,
scaling, steps of other optimizers) would silently do nothing, or harm.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from ...errors import ExecutionError

ZEROING = torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default
CLIPPING = "mul", "div", "clamp"  # parts of the names of operators that clip and scale


class UsedUp(torch.Tensor):
    """Stands for a gradient that a backward has used up. It reads NaN, has no memory, and may only be zeroed.

    cleared: whether it has been. owner: weakly, what checks steps of the parameter's optimizers.
    awaited: optimizers whose step has yet to find that nothing is left to do.
    """

    cleared: bool
    owner: weakref.ref[Any]
    awaited: MutableMapping[Optimizer, Any]

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, owner: Any, awaited: Any) -> Any:
        how = {"dtype": parameter.dtype, "device": parameter.device}
        made: Any = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, parameter.stride(), **how)  # type: ignore[arg-type]
        made.cleared, made.owner, made.awaited = False, weakref.ref(owner), awaited
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in ZEROING:
            given = [args[0]] if isinstance(args[0], torch.Tensor) else args[0]
            for one in given:
                if isinstance(one, cls):
                    one.cleared = True
                else:
                    one.zero_()
            return args[0] if func is torch.ops.aten.zero_.default else None
        if func._schema.is_mutable:
            name = func._schema.name.removeprefix("aten::")
            if any(part in name for part in CLIPPING):
                raise _refusing("clipping")
            raise ExecutionError(
                f'{name} would change a gradient that updates="during" has used up within the backward; clear it by'
                ' zero_grad(), or plan with updates="after"'
            )
        return func(*tree_map_only(cls, _nothing, args), **tree_map_only(cls, _nothing, kwargs or {}))


def _nothing(gradient: torch.Tensor) -> torch.Tensor:
    return torch.full((), math.nan, dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)


def is_used_up(parameter: nn.Parameter) -> bool:
    """Whether a gradient is gone, and its parameter has none since."""
    return isinstance(parameter.grad, UsedUp)


_owners: weakref.WeakSet[Any] = weakref.WeakSet()  # of the gradients of models


def watch(owner: Any) -> None:
    """Refuse, for as long as `owner` lives, scaling a loss whose backward updates parameters; and, for all, steps that
    would take what is used up for gradients."""
    _owners.add(owner)
    _watch()


@functools.cache
def _watch() -> None:
    """Have each loss to scale, and each step of an optimizer, come by: a hook cannot be removed while steps run."""
    register_optimizer_step_pre_hook(_before_step)
    own = torch.amp.GradScaler.scale

    @functools.wraps(own)
    def scale(self: Any, outputs: Any) -> Any:
        given = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        owners = [one for one in _owners if one.during] if self.is_enabled() else []
        if owners and any(one.has(leaf) for leaf in _leaves(given) for one in owners):
            raise _refusing("a GradScaler")
        return own(self, outputs if isinstance(outputs, torch.Tensor) else given)

    torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if (gradient := parameter.grad) is None or not isinstance(gradient, UsedUp):
            continue
        owner = gradient.owner()
        if owner is None and optimizer in gradient.awaited:
            parameter.grad = None  # the model has gone
        elif owner is None or not owner.are_known_to(optimizer):
            raise ExecutionError(
                'updates="during" has used up gradients of this optimizer\'s parameters; call zero_grad() before its'
                " step, or give it to compute_sequence"
            )


def _refusing(what: str) -> ExecutionError:
    return ExecutionError(
        f'{what} needs all gradients at once, and updates="during" updates each parameter within the backward; plan'
        ' with updates="after"'
    )


def _leaves(outputs: list[Any]) -> Iterator[Any]:
    """Yield the leaves that a backward of `outputs` would give gradients to, each as soon as it is found."""
    seen: set[Any] = set()
    todo = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor)]
    while todo:
        if (node := todo.pop()) is not None and node not in seen:
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf
            todo += [of for of, _ in node.next_functions]

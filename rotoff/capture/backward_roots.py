"""Lets the user say from which of its outputs a model's backward starts.

A caller may ask for the gradient of every output, so each is charged in the last ``B``. A language model that returns
its logits beside its loss is charged for a gradient of the logits that is never made, often the largest tensor of all.
With ``backward_from="loss"`` only the loss keeps its graph within the stages. The other outputs look as those of the
plain model, but a backward that starts from one of them is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..core.backward_from import output_named
from ..errors import ExecutionError, MeasureError
from ..tensors.stage import StageModule
from ..tensors.tree import flatten


class BackwardStarts(nn.Module):
    """Placed after the last stage; only the outputs with these `names` keep their graph.

    Args:
        names: from `read_backward_from`, at least one.
        with_attributes: whether the value is (what the model returns, what it leaves in attributes), as while a
            recorded model is measured; the attributes keep their graph.
    """

    def __init__(self, names: tuple[str | int, ...], with_attributes: bool = False) -> None:
        super().__init__()
        self.names = names
        self.with_attributes = with_attributes
        self.others: tuple[int, ...] = ()  # in the last run with gradients, outputs that were detached
        self.lets_go: bool | None = None  # whether nothing held them when a backward began; None: none began

    def forward(self, value: Any) -> Any:
        if not torch.is_grad_enabled():
            return value
        output, *rest = value if self.with_attributes else (value,)
        starts = {id(tensor) for name in self.names for tensor in self._named(output, name)}
        tensors, rebuild = flatten(output)
        self.others = tuple(n for n, t in enumerate(tensors) if t.requires_grad and id(t) not in starts)
        output = rebuild([t.detach() if n in self.others else t for n, t in enumerate(tensors)])
        return (output, *rest) if self.with_attributes else output

    def guarded(self, output: Any) -> Any:
        """Return `output` of the last run, in which detached tensors need a gradient again and refuse one."""
        tensors, rebuild = flatten(output)
        for n in self.others:
            tensors[n] = tensors[n].detach().requires_grad_()
            tensors[n] = tensors[n].view_as(tensors[n])  # not a leaf, like the model's own output
            tensors[n].register_hook(self._refuse)
        return rebuild(tensors)

    def watched(self, output: Any) -> Any:
        """Return `guarded` of the plain model's `output`; each backward from it sets `lets_go`."""
        starts = BackwardStarts(self.names)
        without = starts(output)
        tensors = flatten(output)[0]
        others = [StorageWeakRef(tensors[n].untyped_storage()) for n in starts.others]
        # the runtime's own references are counted here, too; it drops them by itself
        held = [_uses(one) - 2 * [o.cdata for o in others].count(one.cdata) for one in others]
        output = starts.guarded(without)

        def look(_gradient: torch.Tensor) -> None:
            self.lets_go = all(_uses(one) <= most for one, most in zip(others, held, strict=True))

        for n, tensor in enumerate(flatten(output)[0]):
            if others and tensor.requires_grad and n not in starts.others:
                tensor.register_hook(look)
        return output

    def _refuse(self, _gradient: torch.Tensor) -> NoReturn:
        raise ExecutionError(
            f"a gradient arrived for an output that backward_from={_shown(self.names)} does not name, so none is"
            " planned; name that output too, or leave backward_from out"
        )

    def _named(self, output: Any, name: str | int) -> list[torch.Tensor]:
        tensors = [t for t in flatten(output_named(output, name))[0] if t.requires_grad]
        if not tensors:
            raise MeasureError(
                f"backward_from names {name!r}, which needs no gradient on this input; call the model as in training"
                " (for example with labels), or name the output that the backward starts from"
            )
        return tensors


def without_backward(last: StageModule) -> tuple[int, ...]:
    """Return the outputs of the `last` stage, as it ran last, from which no backward starts, as the user says."""
    module = last.modules[-1] if last.modules else None
    return module.others if isinstance(module, BackwardStarts) else ()


def _uses(storage: StorageWeakRef) -> int:
    """Return how many tensors share the storage."""
    return torch._C._storage_Use_Count(storage.cdata)


def _shown(names: tuple[str | int, ...]) -> str:
    return repr(names[0] if len(names) == 1 else list(names))

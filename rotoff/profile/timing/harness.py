"""Runs one stage on its sample input, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from ...tensors.stage import StageModule


@dataclass(frozen=True)
class Run:
    """How one stage is run, as often as needed.

    Attributes:
        collective: whether other processes must run it equally often, since a run waits for them.
    """

    stage: StageModule
    tensors: list[torch.Tensor]
    rebuild: Callable[[list[torch.Tensor]], Any]
    last: bool
    collective: bool = False

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self.stage.parameters()

    def leaves(self) -> list[torch.Tensor]:
        return [t.detach().requires_grad_(t.requires_grad) for t in self.tensors]

    def forward(self, leaves: list[torch.Tensor]) -> Any:
        return self.stage.run(self.rebuild(leaves))

    def targets(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors whose gradients the backward computes; parameters come last."""
        return [t for t in leaves if t.requires_grad] + self.parameters


def backward(
    edges: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `targets`, added to no ``.grad``. This calls the engine as ``torch.autograd.grad`` does,
    which would spend a second on importing sympy if given gradients."""
    found: tuple[torch.Tensor | None, ...] = _engine_run_backward(
        tuple(edges), tuple(gradients), False, False, tuple(targets), True, accumulate_grad=False
    )
    return found


def get_edges(outputs: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Return where gradients of `outputs` enter the graph, without keeping the outputs' bytes."""
    return [get_gradient_edge(t) for t in outputs if t.requires_grad]


def ones(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients of ones with the layouts of the outputs, as autograd most often gives them."""
    return [torch.ones_like(t) for t in outputs if t.requires_grad]


def like_values(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of the outputs as their gradients: kernels are faster on constant numbers than on those of
    training."""
    return [t.detach().clone() for t in outputs if t.requires_grad]


def contiguous(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous gradients of ones."""
    return [torch.ones_like(t, memory_format=torch.contiguous_format) for t in outputs if t.requires_grad]


def expanded(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return expanded gradients, as the backward of a sum or a mean gives them."""
    return [torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape) for t in outputs if t.requires_grad]


def permuted(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients of ones in a layout that is not contiguous."""
    return [_permuted(t) for t in outputs if t.requires_grad]


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _permuted(tensor: torch.Tensor) -> torch.Tensor:
    """Return ones with channels last for images, otherwise with all dimensions reversed."""
    gradient = torch.ones_like(tensor, memory_format=torch.contiguous_format)
    if tensor.dim() in _CHANNELS_LAST:
        last = gradient.to(memory_format=_CHANNELS_LAST[tensor.dim()])
        if not last.is_contiguous():
            return last
    turned = tuple(range(tensor.dim()))[::-1]
    return gradient.permute(turned).contiguous().permute(turned)


class _Act(torch.autograd.Function):
    """A function whose backward calls `act`."""

    @staticmethod
    def forward(ctx: Any, act: Callable[[], object], like: torch.Tensor) -> torch.Tensor:
        ctx.act = act
        return like.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.act()
        return None, gradient.reshape(1)


def within_backward(act: Callable[[], object], device: torch.device) -> None:
    """Call `act` on autograd's thread for `device`, on which replays run."""
    like = torch.zeros(1, device=device, requires_grad=True)
    torch.autograd.grad(_Act.apply(act, like), like)


class _Give(torch.autograd.Function):
    """A function whose backward gives away the gradients in a list and keeps none, like the next stage's."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        given = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *given


def handed_over(
    outputs: Sequence[torch.Tensor], gradients: list[torch.Tensor]
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Return the start of a `backward` that takes `gradients` out of their list, so that autograd frees each as soon as
    it can. The caller of ``torch.autograd.grad`` would hold them to the end."""
    start = [_Give.apply(gradients, *(t for t in outputs if t.requires_grad))]
    return get_edges(start), ones(start)

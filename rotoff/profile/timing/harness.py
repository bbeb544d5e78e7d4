"""Runs one stage on its sample input, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from ...tensors.stage import StageModule, stage_inputs

MakeGradients = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]  # of those outputs that need one


@dataclass(frozen=True)
class Run:
    """How one stage is run, as often as needed.

    Attributes:
        collective: whether other processes must run it equally often, since a run waits for them.
        makes_leaves: whether the forward makes tensors that get a gradient of their own (``x.requires_grad_()``).
        outputs: of an earlier run, detached.
    """

    stage: StageModule
    tensors: list[torch.Tensor]
    rebuild: Callable[[list[torch.Tensor]], Any]
    last: bool
    collective: bool = False
    makes_leaves: bool = False
    outputs: Sequence[torch.Tensor] = ()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self.stage.parameters()

    def leaves(self) -> list[torch.Tensor]:
        return stage_inputs(self.tensors, [t.requires_grad for t in self.tensors])

    def forward(self, leaves: list[torch.Tensor]) -> Any:
        return self.stage.run(self.rebuild(leaves))

    def targets(self, leaves: list[torch.Tensor], edges: Sequence[GradientEdge]) -> list[torch.Tensor]:
        """Return the tensors whose gradients the backward from `edges` computes; parameters come last."""
        given = [t for t in leaves if t.requires_grad]
        return given + (_leaves_made(given, edges) if self.makes_leaves else []) + self.parameters

    def gradients(self, needed: Sequence[bool]) -> list[torch.Tensor]:
        """Return gradients for timing, of those outputs that need one: copies of an earlier run's outputs. Kernels are
        faster on constant numbers than on those of training, and some write into the gradients that they are given."""
        return [t.clone() for t, need in zip(self.outputs, needed, strict=True) if need]

    def noted(self, leaves: list[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Run:
        """Return this with `makes_leaves` as it was in a forward that made `outputs` of `leaves`."""
        return replace(self, makes_leaves=bool(_leaves_made(leaves, get_edges(outputs))))


def _leaves_made(given: Sequence[torch.Tensor], edges: Sequence[GradientEdge]) -> list[torch.Tensor]:
    """Return the leaves of the graph from `given` to `edges` that are no parameters."""
    entered = {t.grad_fn for t in given}
    todo = [edge.node for edge in edges if edge.node not in entered]
    seen, made = entered.union(todo), list[torch.Tensor]()
    while todo:
        node = todo.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf: torch.Tensor = node.variable  # type: ignore[attr-defined]
            if not isinstance(leaf, torch.nn.Parameter):
                made.append(leaf)
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        todo += following
    return made


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


def contiguous(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous gradients of ones."""
    return [torch.ones_like(t, memory_format=torch.contiguous_format) for t in outputs if t.requires_grad]


def expanded(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return expanded gradients, as the backward of a sum or a mean gives them."""
    return [torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape) for t in outputs if t.requires_grad]


def permuted(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients of ones in another order of dimensions and with gaps, as a part of a larger gradient has them:
    some kernels copy no gradient but one with gaps."""
    return [_permuted(t) for t in outputs if t.requires_grad]


def _permuted(tensor: torch.Tensor) -> torch.Tensor:
    """Return ones with channels last for images, otherwise with all dimensions reversed; a gap follows each run of the
    innermost."""
    order = [*range(tensor.dim())][::-1]  # outermost first
    if tensor.dim() in (4, 5) and tensor.shape[1] > 1 and any(size > 1 for size in tensor.shape[2:]):
        order = [0, *range(2, tensor.dim()), 1]
    innermost = next((d for d in reversed(order) if tensor.shape[d] > 1), None)
    larger = [tensor.shape[d] + (d == innermost) for d in order]
    back = [order.index(d) for d in range(tensor.dim())]
    made = torch.ones(larger, dtype=tensor.dtype, device=tensor.device).permute(back)
    return made if innermost is None else made.narrow(innermost, 0, tensor.shape[innermost])


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

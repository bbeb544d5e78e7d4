"""Models under a sequence of one's own, the smallest limit, and what a step of them allocates."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from allocated import peak_bytes
from models import same
from torch import nn

import rotoff
from rotoff.core.sequence import Op, OpKind
from rotoff.solver import policies

NUMBERS = count()


def with_sequence(model: rotoff.Checkpointable, sequence: rotoff.Sequence) -> rotoff.Checkpointable:
    """Have a measured model run `sequence`, as a policy of its own that proposes nothing else."""
    name = f"given {next(NUMBERS)}"
    policies.POLICIES[name] = lambda chain, mem_limit: sequence  # type: ignore[index]
    weakref.finalize(model, policies.POLICIES.pop, name)  # type: ignore[attr-defined]
    return model.compute_sequence(1 << 40, policy=name)


def run_twice(L: int) -> rotoff.Sequence:
    """Every stage but the last runs again right before its backward."""
    text = [f"F_ck {i}" for i in range(1, L)] + [f"F_all {L}", f"B {L}"]
    for i in range(L - 1, 0, -1):
        text += [f"F_all {i}", f"B {i}"]
    return rotoff.Sequence.from_text(text)


def smallest(wrapped: rotoff.Checkpointable, mode: str) -> int:
    """The smallest limit that works."""
    return wrapped.min_mem_limit(mode)


class Loss(torch.autograd.Function):
    """Makes the gradient of a model's output, which is the step's, and holds nothing."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.size, ctx.dtype = output.size(), output.dtype
        return output.as_strided((), ())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        return torch.ones(ctx.size, dtype=ctx.dtype)


def step_peak(model: torch.nn.Module, batch: object) -> int:
    """Bytes that one training step allocates: its batch and its parameter gradients are the caller's."""
    x = batch()
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    unit = torch.ones((), dtype=model(x).dtype)

    def step() -> None:
        output = model(x)  # held to the end, as training loops do
        Loss.apply(output).backward(unit)

    return peak_bytes(step)


def bits_and_bytes(
    net: nn.Module, draw: Callable[[], torch.Tensor], modes: Iterable[str], shares: Iterable[float] = (0.0, 1.0),
    around: Any = nullcontext, fresh: Callable[[], nn.Module] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Under plans of `modes` at shares of the way from the smallest limit to keeping everything, gradients and buffers of
    two steps are the plain model's, and a step takes the predicted bytes at most, within the limit. around: each forward. fresh:
    makes another model like `net`, where a copy is none."""
    plain = fresh() if fresh is not None else copy.deepcopy(net)

    def gradients(run: nn.Module) -> list[torch.Tensor]:
        found = []
        for n in range(2):
            torch.manual_seed(n)
            run.zero_grad()
            with around():
                loss = run(draw()).square().mean()
            loss.backward()
            found += [p.grad.clone() for p in run.parameters() if p.grad is not None]
        return [*found, *(b.clone() for b in run.buffers())]

    class Within(nn.Module):
        def __init__(self, run: nn.Module) -> None:
            super().__init__()
            self.run = run

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with around():
                return self.run(x)

    state = copy.deepcopy(plain.state_dict())
    expected, wrapped = gradients(plain), rotoff.Checkpointable(net, **options)
    with around():
        wrapped.measure(draw())
    for mode in modes:
        least, most = smallest(wrapped, mode), wrapped.keep_all_memory
        for share in shares:
            wrapped.compute_sequence(limit := least + int(share * max(0, most - least)), mode=mode, refine=False)
            assert step_peak(Within(wrapped), draw) <= wrapped.get_expected_memory() <= limit, (mode, share)
            wrapped.load_state_dict(state)
            assert same(gradients(wrapped), expected), (mode, share)
    wrapped.close()


class Beside:
    """A plain model and a copy within a limit; each step compares them bit for bit."""

    def __init__(self, plain: nn.Module, limit: int, mode: str = "joint", **options: Any) -> None:
        for p in plain.parameters():
            p.grad = torch.zeros_like(p)
        self.plain, self.model = plain, copy.deepcopy(plain)
        self.planned = rotoff.Checkpointable(self.model, **options).compute_sequence(limit, mode, refine=False)
        self.limit = limit

    @staticmethod
    def run(model: nn.Module, *inputs: Any) -> torch.Tensor:
        torch.manual_seed(1)
        model.zero_grad(set_to_none=False)
        out = model(*inputs)
        (loss := out if out.dim() == 0 else out.sum()).backward()
        return loss.detach()

    def step(self, *inputs: Any) -> None:
        losses = [self.run(model, *inputs) for model in (self.planned, self.plain)]
        both = ([*(p.grad for p in model.parameters()), *model.buffers()] for model in (self.model, self.plain))
        assert same(losses[:1], losses[1:]) and same(*both), [
            tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor)
        ]

    def peak(self, *inputs: Any) -> int:
        """Bytes of another step, which both take."""
        most = peak_bytes(lambda: self.run(self.planned, *inputs))
        self.run(self.plain, *inputs)  # so that running statistics stay alike
        return most


def every_form(chain: rotoff.Chain, k: int) -> rotoff.Sequence:
    """Each stage once, in its form k or its last one."""
    forwards = []
    for i, stage in enumerate(chain.stages, start=1):
        form = min(k, len(stage.forms))
        forwards.append(Op(OpKind.F_SEL, i, form) if form else Op(OpKind.F_ALL, i))
    return rotoff.Sequence((*forwards, *(Op(OpKind.B, i) for i in range(len(chain), 0, -1))), mode="forms")

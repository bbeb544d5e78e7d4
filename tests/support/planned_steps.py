"""Models under a sequence of one's own, the smallest limit, and what a step of them allocates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from allocated import peak_bytes
from models import Batch, same
from random_programs import random_sequence
from thoroughness import seeds
from torch import nn

import rotoff
from rotoff.core.sequence import Op, OpKind
from rotoff.solver import policies

Make = Callable[[], tuple[nn.Sequential, Batch]]
Run = Callable[[nn.Module, Batch], list[torch.Tensor]]


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


def every_form(chain: rotoff.Chain, k: int) -> rotoff.Sequence:
    """Each stage once, in its form k or its last one."""
    forwards = []
    for i, stage in enumerate(chain.stages, start=1):
        form = min(k, len(stage.forms))
        forwards.append(Op(OpKind.F_SEL, i, form) if form else Op(OpKind.F_ALL, i))
    return rotoff.Sequence((*forwards, *(Op(OpKind.B, i) for i in range(len(chain), 0, -1))), mode="forms")


def compare(make: Make, run: Run, measured_in: Callable[[], Any] | None = None, sequences: int = 4) -> None:
    """`run` gives the same tensors with the plain model, at the smallest joint limit, and with random sequences."""
    torch.manual_seed(0)
    model, batch = make()
    torch.manual_seed(1)
    expected = run(model, batch)
    for seed in (-1, *seeds(sequences)):
        torch.manual_seed(0)
        model, batch = make()
        wrapped = rotoff.Checkpointable(model, check=True)
        if measured_in is not None:
            with measured_in():
                wrapped.measure(batch())
        else:
            wrapped.measure(batch())
        if seed < 0:
            wrapped.compute_sequence(smallest(wrapped, "joint"))
        else:
            with_sequence(wrapped, random_sequence(wrapped.chain, seed, wildness=0.75))
        torch.manual_seed(1)
        got = run(wrapped, batch)
        assert same(got, expected), f"seed {seed}\n{wrapped.sequence}"
        wrapped.close()


def sequential(*modules: nn.Module, shape: tuple[int, ...] = (64, 16)) -> tuple[nn.Sequential, Batch]:
    return nn.Sequential(*modules), lambda: torch.randn(*shape)

"""A model under a plan beside the plain one, step by step: the same bits, within the bytes that were told; sequences of
one's own; and what a step allocates."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import is_dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
from allocated import peak_bytes
from models import same
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

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


def every_form(chain: rotoff.Chain, k: int) -> rotoff.Sequence:
    """Each stage once, in its form k or its last one."""
    forwards = []
    for i, stage in enumerate(chain.stages, start=1):
        form = min(k, len(stage.forms))
        forwards.append(Op(OpKind.F_SEL, i, form) if form else Op(OpKind.F_ALL, i))
    return rotoff.Sequence((*forwards, *(Op(OpKind.B, i) for i in range(len(chain), 0, -1))), mode="forms")


class Loss(torch.autograd.Function):
    """Makes the gradient of a model's output, which is the step's, and holds nothing."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.size, ctx.dtype = output.size(), output.dtype
        return output.as_strided((), ())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        return torch.linspace(-1, 2, ctx.size.numel(), dtype=ctx.dtype).view(ctx.size)


@cache
def unit(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones((), dtype=dtype)


def backward(output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """From a loss that takes no bytes of its own, if not with the caller's gradient."""
    if gradient is not None:
        output.backward(gradient)
    elif output.numel():
        (Loss.apply(output) if output.dim() else output).backward(unit(output.dtype))
    else:
        output.sum().backward()


def drawn(*shape: int) -> Callable[[], tuple[torch.Tensor]]:
    """Draws the arguments of a model."""
    return lambda: (torch.randn(shape),)


def with_gradients(model: nn.Module) -> nn.Module:
    """Those of parameters are the caller's."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    return model


def step_peak(model: nn.Module, batch: Callable[[], Any]) -> int:
    """Bytes that one training step allocates, but for its batch and its parameters' gradients."""
    x = batch()
    unit(with_gradients(model)(x).dtype)

    def step() -> None:
        output = model(x)  # held to the end, as training loops do
        backward(output)

    return peak_bytes(step)


class Beside:
    """A plain model and a planned copy, which steps compare.

    limit: for a first step that records itself; otherwise `sample` is measured, and `within` plans. fresh: makes the
    copy, where `copy.deepcopy` does not. around: each forward. gradient: makes that of an output which is the caller's.
    backward: runs it from the output and that gradient.
    """

    def __init__(
        self, plain: nn.Module, limit: int = 0, mode: str = "joint", *, sample: tuple[Any, ...] | None = None,
        fresh: Callable[[], nn.Module] | None = None, around: Any = nullcontext, gradient: Any = None,
        backward: Callable[..., object] = backward, **options: Any,
    ) -> None:  # fmt: skip
        self.model, self.plain = copy.deepcopy(plain) if fresh is None else fresh(), with_gradients(plain)
        with_gradients(self.model)
        self.planned, self.limit, self.seed = rotoff.Checkpointable(self.model, **options), limit, 0
        self._around, self._backward, self._gradient, self._given = around, backward, gradient, None
        if sample is None:
            self.at(limit, mode)
        else:
            with around():
                self.planned.measure(*sample)

    def within(self, mode: str, share: float = 0.0) -> Beside:
        """Plan within `share` of the way from the smallest limit to keeping everything."""
        least = self.planned.min_mem_limit(mode)
        return self.at(least + int(share * max(0, self.planned.keep_all_memory - least)), mode)

    def at(self, limit: int, mode: str = "joint") -> Beside:
        self.limit = limit
        self.planned.compute_sequence(limit, mode, refine=False)
        return self

    def following(self, sequence: rotoff.Sequence) -> Beside:
        """Run `sequence`, without a limit."""
        self.limit = 1 << 40
        with_sequence(self.planned, sequence)
        return self

    def run(self, model: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """A step; what it allocates is the output and what `backward` needs."""
        with self._around():
            output = model(*inputs)
        self._backward(output, self._given)
        return output

    def step(self, *inputs: Any, measured: nn.Module | None = None) -> int:
        """A step of each: the same output, gradients, buffers and draws. Returns the bytes of the one that is measured."""
        self.seed += 1
        found, most = [], 0
        for run, model in ((self.plain, self.plain), (self.planned, self.model)):
            own, outputs = self._begin(model, inputs), list[Any]()

            def once(run: nn.Module = run, own: Any = own, outputs: Any = outputs) -> None:
                outputs.append(self.run(run, own))

            if run is measured:
                most = peak_bytes(once)
            else:
                once()
            given = [t.grad for t in tensors(own) if t.grad is not None]
            kept = [p.grad.clone() for p in model.parameters() if p.grad is not None and not p.is_meta]
            found.append([*tensors(outputs), *given, *kept, *model.buffers(), torch.get_rng_state()])
        assert same(*found), [tuple(x.shape) for x in tensors(inputs)]
        return most

    def peak(self, *inputs: Any) -> int:
        """Bytes of another planned step."""
        return self.step(*inputs, measured=self.planned)

    def check(self, *inputs: Any) -> int:
        """A step has the plain bits, and another one takes what was told at most, within the limit."""
        self.step(*inputs)
        told = self.planned.get_expected_memory()  # planned now, not within what is measured
        peak = self.peak(*inputs)
        assert peak <= told <= self.limit, (peak, told, self.limit)
        return peak

    def _begin(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs of a step of its own, which may change them."""
        torch.manual_seed(self.seed)
        if self._gradient is not None and self._given is None:
            self._given = self._gradient(copy.deepcopy(self.plain)(*copied(inputs)).detach())
        model.zero_grad(set_to_none=False)
        torch.manual_seed(self.seed)
        return copied(inputs)


def tensors(thing: Any) -> list[torch.Tensor]:
    """Within containers and dataclasses."""
    found = []
    for leaf in tree_leaves(thing):
        found += [leaf] if isinstance(leaf, torch.Tensor) else tensors(vars(leaf)) if is_dataclass(leaf) else []
    return found


def copied(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs)


def bits_and_bytes(
    net: nn.Module, draw: Callable[[], tuple[Any, ...]], modes: Iterable[str], shares: Iterable[float] = (0.0, 1.0), *,
    over: float = 0.0, close: float = 0.0, first: bool = False, **options: Any,
) -> Beside:  # fmt: skip
    """Under plans of `modes` at `shares` of the way from the smallest limit to keeping everything, two steps have the
    plain bits, and one takes the told bytes at most. over: the most that keeping everything is told to take, over the
    plain peak; close: the same of plans over their own. first: a training step is recorded, and no sample."""
    beside = Beside(net, 1 << 40, sample=None if first else draw(), **options)
    if first:
        beside.step(*draw())
    if over:
        plain = beside.step(*draw(), measured=beside.plain)
        assert plain <= beside.planned.keep_all_memory <= over * plain
    for mode in modes:
        for share in shares:
            peak, told = beside.within(mode, share).check(*draw()), beside.planned.get_expected_memory()
            assert not close or told <= close * peak + 2**13, (mode, share)
    beside.planned.close()
    return beside

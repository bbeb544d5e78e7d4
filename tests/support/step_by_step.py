"""Trains a model under rotoff and the plain model beside it, step by step, and says in a word what became of it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import rotoff
from rotoff import OpKind

MODES = ("remat", "offload", "joint")
STEPS = 5
FORWARDS = (OpKind.F_ALL, OpKind.F_SEL, OpKind.F_CK, OpKind.F_NONE)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def error_of(outputs: Any) -> torch.Tensor:
    """A loss in which every tensor among the outputs takes part."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.double().square().mean() for leaf in leaves]).sum()


def one_step(run: nn.Module, net: nn.Module, call: Call, n: int) -> torch.Tensor:
    args, kwargs = call
    loss = error_of(run(*args, **kwargs))
    loss.backward()
    return loss


def nothing(net: Any, n: int) -> None:
    pass


@dataclass(frozen=True, repr=False)
class Row:
    """A model and what changes between its steps.

    call: what the model is called with in step n, always of the same contents. change: what is done before step n.
    step: forward and backward. may_refuse: the sentence
    that rotoff may answer with in place of the plain model's step. raises: what the plain model raises in some steps, and so must rotoff.
    room: which part of the way from the smallest limit to keeping everything is given. again: done once the model is
    measured, to what no run of it can put back. stages: about as many; more take longer to measure.
    """

    name: str
    make: Callable[[], nn.Module]
    call: Callable[[int], Call]
    change: Callable[[Any, int], object] = nothing
    step: Callable[[nn.Module, Any, Call, int], torch.Tensor] = one_step
    may_refuse: str | None = None
    raises: str | None = None
    room: float = 0.2
    again: Callable[[Any], object] | None = None
    steps: int = STEPS
    stages: int = 5

    def __repr__(self) -> str:
        return f"Row({self.name!r})"


# -- one training


def seeded() -> None:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)


def train(run: nn.Module, net: nn.Module, row: Row) -> Iterable[dict[str, Any]]:
    """What is seen after each step. run: what is called; net: the model in it, which is changed and looked at."""
    seeded()
    optimizer, optimized = None, None
    for n in range(row.steps):
        row.change(net, n)
        names = [(id(p), p.dtype) for p in net.parameters()]
        if optimized != names:  # a new one, as a user needs who replaces parameters
            optimizer, optimized = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), names
        optimizer.zero_grad()
        raised = None
        try:
            loss = row.step(run, net, row.call(n), n)
        except RuntimeError as error:
            if row.raises is None:
                raise
            raised, loss = error, torch.zeros(())
        seen = {
            "raised": raised is not None,
            "loss": loss.detach().clone(),
            "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()},
        }
        if raised is None:  # what a failed backward left behind is nobody's business
            optimizer.step()
        else:
            seen["gradients"] = told_as(raised, row.raises)
        seen["parameters"] = {name: p.detach().clone() for name, p in net.named_parameters()}
        seen["buffers"] = {name: b.detach().clone() for name, b in net.named_buffers()}
        seen["chance"] = (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1:])
        yield seen


def told_as(error: RuntimeError, expected: str | None) -> str:
    """What `error` counts as: any that says `expected` is as good as another."""
    assert expected is not None
    return "as expected" if re.search(expected, str(error)) else f"{type(error).__name__}: {error}"


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return isinstance(b, numpy.ndarray) and bool(numpy.array_equal(a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def by_itself(train_it: Callable[[], Any]) -> Any:
    """Runs it with a default type of its own."""
    dtype = torch.get_default_dtype()
    try:
        return train_it()
    finally:
        torch.set_default_dtype(dtype)


def fresh(row: Row) -> nn.Module:
    torch.manual_seed(0)
    return row.make()


@cache
def plain_of(row: Row) -> list[dict[str, Any]]:
    def train_it() -> list[dict[str, Any]]:
        net = fresh(row)
        seen = list(train(net, net, row))
        assert all(bool(p.isfinite().all()) for p in seen[-1]["parameters"].values()), "NaN is not even equal to itself"
        return seen

    return by_itself(train_it)


# -- the verdict


def compared(run: nn.Module, net: nn.Module, row: Row) -> Iterator[str]:
    """After each step, "equal" or what is wrong beside the plain model's."""
    for n, (got, wanted) in enumerate(zip(train(run, net, row), plain_of(row), strict=True)):
        wrong = [what for what in wanted if not same(got[what], wanted[what])]
        told = f" ({got[wrong[0]]})" if wrong and isinstance(got[wrong[0]], str) else ""
        yield f"wrong: {wrong[0]} in step {n}{told}" if wrong else "equal"


def limits(run: rotoff.Checkpointable, mode: str, room: float) -> Iterator[int]:
    """A little above the smallest; then less, where nothing needs to be moved or made again in so many bytes."""
    least = run.min_mem_limit(mode)
    for part in (room, room / 2, 0):
        yield least + int(part * max(0, run.keep_all_memory - least))


def works(sequence: rotoff.Sequence) -> bool:
    """Whether it moves values or makes them again."""
    runs = Counter(op.stage for op in sequence if op.kind in FORWARDS)
    return any(count > 1 for count in runs.values()) or any(
        op.kind in (OpKind.OFFLOAD, OpKind.F_SEL) for op in sequence
    )


class NoPlan(Exception):
    """It keeps everything, as the plain model does."""


def planned(net: nn.Module, row: Row, mode: str) -> rotoff.Checkpointable:
    # Where parts of stages can be kept, whole ones are recomputed less; and finding them takes a third of the time.
    run = rotoff.Checkpointable(net, stages=row.stages, forms=mode == "joint")
    seeded()
    args, kwargs = row.call(0)
    run.measure(*args, **kwargs)
    plans = (run.compute_sequence(limit, mode, refine=False) for limit in limits(run, mode, row.room))
    if not any(works(plan.sequence) for plan in plans):
        raise NoPlan
    return run


def verdict(row: Row, mode: str) -> str:
    """How `row` trains in `mode`."""
    return judged(row, lambda net: planned(net, row, mode))


def judged(row: Row, run_of: Callable[[nn.Module], nn.Module]) -> str:
    """How what `run_of` makes of the model of `row` trains: "equal", "wrong: ...", "refused: ...", "error: ..." or "no
    plan"."""
    plain_of(row)  # whose errors are no verdict

    def train_it() -> str:
        net = fresh(row)
        run = run_of(net)
        if row.again is not None:
            row.again(net)
        try:
            return next((said for said in compared(run, net, row) if said != "equal"), "equal")
        finally:
            if isinstance(run, rotoff.Checkpointable):
                run.close()

    try:
        return by_itself(train_it)
    except NoPlan:
        return "no plan"
    except rotoff.RotoffError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def is_right(row: Row, said: str) -> bool:
    """A refusal may be an error of PyTorch's own kind, if it says the sentence."""
    told = row.may_refuse is not None and said.startswith(("refused", "error: RuntimeError"))
    return said == "equal" or (told and re.search(row.may_refuse or "", said) is not None)

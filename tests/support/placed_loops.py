"""Steps of a training loop, and what surrounds them: for tests of training with everything placed, on the CPU and on
CUDA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


def nothing(*_: Any) -> None: ...


def usual(model: nn.Module, optimizers: list[Optimizer], n: int, batch: Callable[[], Any]) -> torch.Tensor:
    loss = model(batch()).float().square().mean()
    loss.backward()
    assert all(p.grad is None or p.grad.device == p.device for p in model.parameters())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def result(model: nn.Module, optimizers: list[Optimizer]) -> list[torch.Tensor]:
    """All that must not differ."""
    found = [p.detach().clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                found += [t.clone() for t in optimizer.state.get(p, {}).values() if isinstance(t, torch.Tensor)]
    return found


def loop(
    name: str, updated: Any = nothing, stepped: Any = nothing, set_to_none: bool = True, around: Any = nullcontext
) -> Any:
    """A step that calls ``updated(model, optimizers, n)`` after the backward, and `stepped` after the update. updated may
    return what the step returns, which is the loss otherwise. around: the forward."""

    def step(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
        with around():
            loss = model(batch()).float().square().mean()
        loss.backward()
        told = updated(model, optimizers, n)
        optimizers[0].step()
        optimizers[0].zero_grad(set_to_none=set_to_none)
        stepped(model, optimizers, n)
        return loss.detach() if told is None else told

    step.__name__ = name
    return step


def clamp(model: Any, *_: Any) -> None:
    """As old code does: past autograd's version counters."""
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


clipped = loop("clipped", lambda model, *_: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
clamped, clamped_before = loop("clamped", stepped=clamp), loop("clamped_before", clamp)
zeroed = loop("zeroed", set_to_none=False)
in_bfloat16 = loop("in_bfloat16", around=lambda: torch.autocast("cpu", torch.bfloat16))


def accumulated(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    for _ in range(3):
        loss = model(batch()).float().square().mean()
        loss.backward()
        assert all(p.grad is None or p.grad.device == p.device for p in model.parameters())
    optimizers[0].step()
    optimizers[0].zero_grad(set_to_none=n % 2 == 0)
    return loss.detach()


def hooked(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    seen: dict[int, torch.Tensor] = {}
    handles = []
    for k, p in enumerate(model.parameters()):
        if p.requires_grad:
            handles.append(p.register_hook(lambda g: g * 1.5))
            handles.append(p.register_post_accumulate_grad_hook(lambda p, k=k: seen.update({k: p.grad.sum().cpu()})))
    loss = usual(model, optimizers, n, batch)
    for handle in handles:
        handle.remove()
    return loss.cpu() + torch.stack([seen[k] for k in sorted(seen)]).sum()


def looked_at(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Without gradients, and in eval mode, between forwards, backwards and steps."""
    loss = model(batch()).float().square().mean()
    model.eval()
    with torch.no_grad():
        seen = model(batch()).sum()
    model.train()
    loss.backward()
    with torch.no_grad():
        seen = seen + model(batch()).sum()
    model.eval()
    with torch.no_grad():
        seen = seen + model(batch()).sum()
    model(batch()).float().square().mean().backward()
    model.train()
    optimizers[0].step()
    optimizers[0].zero_grad()
    return loss.detach() + seen


def loaded(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Saved and read back in the middle of the training."""
    loss = usual(model, optimizers, n, batch)
    if n == 2:
        states = dict(model.state_dict()), optimizers[0].state_dict()
        saved = tree_map_only(torch.Tensor, torch.clone, states)
        usual(model, optimizers, n, batch)
        model.load_state_dict(saved[0])
        optimizers[0].load_state_dict(saved[1])
    return loss


def kept(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Gradients of two losses are kept past ``zero_grad()``; in the middle, the numbers and the states of one time."""
    gradients = []
    for _ in range(2):
        optimizers[0].zero_grad()
        model(batch()).float().square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    optimizers[0].zero_grad()
    for p, first, second in zip(model.parameters(), *gradients, strict=True):
        p.grad = None if first is None else (first - 0.5 * second)
    optimizers[0].step()
    optimizers[0].zero_grad()
    if n != 2:
        return torch.zeros(())
    own, states = [p.data for p in model.parameters()], optimizers[0].state_dict()
    for p, data in zip(model.parameters(), own, strict=True):
        p.data = data.clone()
    optimizers[0].state.clear()
    usual(model, optimizers, n, batch)
    usual(model, optimizers, n, batch)
    for p, data in zip(model.parameters(), own, strict=True):
        p.data = data
    optimizers[0].load_state_dict(states)
    return torch.zeros(())


def changed_within(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Hooks change parameters within the backward, as tutorials of updates there do."""
    handles = []
    for k, p in enumerate(model.parameters()):
        if p.requires_grad:

            def changes(p: torch.Tensor, k: int = k) -> None:
                with torch.no_grad():
                    (p if k % 2 else p.data).add_(p.grad, alpha=-0.01)

            handles.append(p.register_post_accumulate_grad_hook(changes))
    loss = usual(model, optimizers, n, batch)
    for handle in handles:
        handle.remove()
    return loss


def given_up(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Forwards without backwards, and an update left out."""
    loss = model(batch()).float().square().mean()
    other = model(batch()).float().square().mean()
    if n == 3:
        other.backward()
        optimizers[0].zero_grad()
    del other
    return loss.detach() + usual(model, optimizers, n, batch)


def frozen_later(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    for k, p in enumerate(model.parameters()):
        if n in (1, 3) and k % 3 == 0:
            p.requires_grad_(n == 3)
    return usual(model, optimizers, n, batch)

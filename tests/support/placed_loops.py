"""Steps of a training loop, and what surrounds them: for tests of training with everything placed, on the CPU and on
CUDA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from forced_plans import Pairs, adamw
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

Make = Callable[[list[nn.Parameter]], list[Optimizer]]


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


def left(pairs: Pairs, step: Any, batch: Callable[[], Any], steps: int = 5) -> list[list[torch.Tensor]]:
    """What training leaves of each of `twins`."""
    found = []
    for model, run, own in pairs:
        torch.manual_seed(2)
        losses = [step(run, own, n, batch) for n in range(steps)]
        found.append([*(t.cpu() for t in (*losses, *result(model, own))), torch.get_rng_state()])
    return found


def loop(
    name: str,
    updated: Any = nothing,
    stepped: Any = nothing,
    set_to_none: bool | None = True,
    around: Any = nullcontext,
) -> Any:
    """A step that calls ``updated(model, optimizers, n)`` after the backward, and `stepped` after the update. updated may
    return what the step returns, which is the loss otherwise. set_to_none: None if gradients are never cleared. around:
    the forward."""

    def step(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
        with around():
            loss = model(batch()).float().square().mean()
        loss.backward()
        told = updated(model, optimizers, n)
        optimizers[0].step()
        if set_to_none is not None:
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
zeroed, uncleared = loop("zeroed", set_to_none=False), loop("uncleared", set_to_none=None)
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


def penalised(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """A penalty of the parameters, asked for before the forward or after it: its gradient counts once."""
    x = batch()

    def penalty() -> torch.Tensor:
        return 0.1 * sum(p.square().sum().to(x.device) for p in model.parameters())

    early = penalty() if n % 2 else 0.0
    loss = model(x).float().square().mean()
    (loss + early if n % 2 else loss + penalty()).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    return loss.detach()


def share(*several: Any) -> None:
    for tensor in tree_leaves(several):
        if isinstance(tensor, torch.Tensor) and not tensor.is_cuda:
            tensor.share_memory_()


shared = loop(  # moved, in place, into memory that processes share, as tensors are that go to another process
    "shared",
    lambda model, own, n: share([(p.data, p.grad) for p in model.parameters()]) if n == 3 else None,
    lambda model, own, n: share(dict(model.state_dict()), own[0].state_dict()),
)


STEPS = (
    clipped, accumulated, uncleared, zeroed, clamped, clamped_before, loaded, kept, given_up, changed_within, looked_at, frozen_later,
    hooked, penalised, shared,
)  # fmt: skip


class Scaled(torch.optim.AdamW):
    """Its step calls that of its base class, and takes an argument."""

    def step(self, closure: Any = None, share: float | None = None) -> Any:
        groups = self.param_groups
        if share is not None:
            self.param_groups = [{**group, "lr": share * group["lr"]} for group in groups]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups


class Decayed(torch.optim.Optimizer):
    """As old optimizers do, it adds the weight decay to ``p.grad`` itself, and asks the first parameter for its device."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        rate = torch.full((), 0.1, device=parameters[0].device)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.add_(parameter, alpha=0.01) * rate)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: [torch.optim.SGD(p, lr=0.05)],
    "SGD with momentum": lambda p: [torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)],
    "Adam": lambda p: [torch.optim.Adam(p, lr=0.01, amsgrad=True)],
    "AdamW": adamw,
    "AdamW foreach": lambda p: [torch.optim.AdamW(p, lr=0.01, foreach=True)],
    "AdamW fused": lambda p: [torch.optim.AdamW(p, lr=0.01, fused=True)],
    "Adagrad": lambda p: [torch.optim.Adagrad(p, lr=0.01)],
    "Adafactor": lambda p: [torch.optim.Adafactor(p, lr=0.01)],
    "Adamax": lambda p: [torch.optim.Adamax(p, lr=0.01)],
    "RMSprop": lambda p: [torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True)],
    "NAdam": lambda p: [torch.optim.NAdam(p, lr=0.01)],
    "RAdam": lambda p: [torch.optim.RAdam(p, lr=0.01)],
    "Rprop": lambda p: [torch.optim.Rprop(p, lr=0.01)],
    "ASGD": lambda p: [torch.optim.ASGD(p, lr=0.01)],
    "Adadelta": lambda p: [torch.optim.Adadelta(p, lr=0.01)],
    "groups": lambda p: [
        torch.optim.AdamW([{"params": p[::2], "lr": 0.02, "weight_decay": 0.0}, {"params": p[1::2]}], lr=0.01)
    ],
    "two": lambda p: [torch.optim.AdamW(p[::2], lr=0.02), torch.optim.SGD(p[1::2], lr=0.01, momentum=0.9)],
    "of a base class": lambda p: [Scaled(p, lr=0.02)],
    "a part": lambda p: [torch.optim.AdamW(p[3:], lr=0.02)],
    "decay in the gradient": lambda p: [Decayed(p)],
}

"""Training on CUDA with everything placed: parameters, gradients and optimizer states on the device and in pinned host
memory, beside the plain model that has all of it on the device."""

from __future__ import annotations

import copy
import functools
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forced_plans import place, twins
from models import ALL, Attention, Does, Residual, linears, same
from placed_loops import (
    OPTIMIZERS,
    STEPS,
    Make,
    clamped,
    clipped,
    frozen_later,
    hooked,
    left,
    loaded,
    penalised,
    usual,
)
from placed_models import drawn, words
from torch import nn

import rotoff

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("deterministic")]

STANDIN = "STANDIN" in os.environ  # computes on the CPU, so that bits are equal
CUDA = torch.device("cuda", 0)
NOT_THERE = {"stateful"}  # has a tensor that no module moves
Record = Callable[[str, object], None]


def spoken(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Asks a parameter for its device, and makes a tensor there, in the middle of its forward."""
    where = net.embedding.weight.device
    x = net.embedding(x.to(where)) + net.positions[torch.arange(x.shape[1], device=where)]
    for block in net.blocks:
        assert next(block.parameters()).is_cuda
        x = block(x) * net.scale
    return net.head(x.to(net.head.weight.dtype))


def language(tie: bool) -> nn.Module:
    embedding, head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
    blocks = nn.ModuleList(nn.Sequential(Attention(32, 4), Residual(32)) for _ in range(4))
    if tie:
        head.weight = embedding.weight
    positions, scale = nn.Parameter(0.1 * torch.randn(64, 32)), nn.Buffer(torch.tensor(0.5))
    return Does(spoken, embedding=embedding, positions=positions, scale=scale, blocks=blocks, head=head)


def made(name: str) -> tuple[nn.Module, Any]:
    """On the host, with its batch on the device."""
    torch.manual_seed(0)
    own = name in ("language", "untied")
    model, batch = (language(tie=name == "language"), words(50, 4, 12)) if own else drawn(name)
    x = batch()
    x = torch.utils._pytree.tree_map(lambda t: t.to(CUDA) if isinstance(t, torch.Tensor) else t, x)
    return model, x


class Slowly(torch.autograd.Function):
    """Its gradient comes when a model's own backward has ended."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


def penalised_late(
    model: Any, optimizers: Any, n: int, batch: Any, times: int = 2, seconds: float = 0.1, of: Any = torch.square
) -> torch.Tensor:
    for _ in range(times):
        loss = model(batch()).float().square().mean()
        penalty = Slowly.apply(of(next(model.parameters())).sum(), seconds)
        (loss + penalty.to(CUDA)).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    return loss.detach()


def carried(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Through ``.data`` of parameters and gradients, to the host and to the device, after a backward and a step."""
    loss = model(batch()).float().square().mean()
    loss.backward()
    model.cpu().to(CUDA if n % 2 else "cpu").to(CUDA)
    optimizers[0].step()
    for state in optimizers[0].state.values():
        for tensor in state.values():
            tensor.data = tensor.data.cpu().to(tensor.device)
    model.cpu().to(CUDA)
    optimizers[0].zero_grad()
    return loss.detach()


names = ["AdamW", "AdamW foreach", "SGD with momentum", "Adafactor", *([] if STANDIN else ["AdamW fused"])]
MAKE: dict[str, Make] = {name: OPTIMIZERS[name] for name in names} | {
    "on the device alone": lambda p: [torch.optim.AdamW(p, lr=1e-2, capturable=True)]  # which PyTorch refuses on a host
}


def compare(net: nn.Module, how: Any, x: Any, record: Record, make: Make = OPTIMIZERS["AdamW"], **options: Any) -> None:
    """What training leaves of the plain model on the device and of one that is planned from the host."""
    pairs = twins(net, x, make=make, plan=place, device="cuda", **options)
    results = left(pairs, how, lambda: x)
    equal = same(*results)
    record("bits equal", equal)
    # PyTorch adds up the norms to clip by device by device; here gradients may lie on two
    assert equal or not STANDIN or how is clipped
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    pairs[1][1].close()


@pytest.mark.parametrize(("share", "updates"), [(0.0, "after"), (0.5, "during")])
@pytest.mark.parametrize("name", ["language", "adapted", "first frozen", "writes", *sorted(set(ALL) - NOT_THERE)])
@pytest.mark.grid(every=3)
def test_training_is_the_plain_models(name: str, share: float, updates: str, record_property: Record) -> None:
    model, x = made(name)
    compare(model, usual, x, record_property, share=share, updates=updates)


@pytest.mark.parametrize(
    ("how", "share", "updates"),
    [
        *((how, share, "after") for how in (*STEPS, penalised_late, carried) for share in (0.0, 0.5)),
        *((how, 0.3, "during") for how in (usual, hooked, clamped, loaded)),
    ],
)
def test_what_surrounds_a_step(how: Any, share: float, updates: str, record_property: Record) -> None:
    least = 0.3 if how is frozen_later else 0.0  # a limit for more parameters that need gradients
    # the gradients of a tied weight are added up in another order
    model, x = made("untied" if how is penalised else "language")
    compare(model, how, x, record_property, share=max(share, least), updates=updates)


def test_a_gradient_that_comes_after_its_update_is_refused(record_property: Record) -> None:
    # of what saves the parameter, PyTorch itself may say that it has changed
    how = functools.partial(penalised_late, times=1, seconds=1.0, of=torch.neg)
    model, x = made("language")
    with pytest.raises(rotoff.ExecutionError, match='after the backward had updated them; plan with updates="after"'):
        compare(model, how, x, record_property, updates="during")


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.grid(every=3)
def test_optimizers(optimizer: str, updates: str, record_property: Record) -> None:
    model, x = made("language")
    compare(model, usual, x, record_property, MAKE[optimizer], share=0.5, updates=updates)


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("frozen", [0, 5])
@pytest.mark.grid(every=3)
def test_no_step_holds_more_than_predicted(frozen: int, share: float, updates: str, record_property: Record) -> None:
    """All that the device holds, of whole steps with their updates. Forwards without gradients take what they can of
    the limit."""
    gc.collect()
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated()
    model, x = nn.Sequential(*[Residual(128) for _ in range(8)]), torch.randn(64, 128, device=CUDA)
    model[:frozen].requires_grad_(False)
    wrapped = rotoff.Checkpointable(model, device="cuda").measure(x)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    limit = place(wrapped, [optimizer], share, updates=updates)
    gc.collect()
    steps, forwards = [], []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        wrapped(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        steps.append(torch.cuda.max_memory_allocated() - others)
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            wrapped(x)
        torch.cuda.synchronize()
        forwards.append(torch.cuda.max_memory_allocated() - others)
    expected = wrapped.get_expected_memory()
    record_property("measured and predicted bytes", f"{max(steps)} {expected}, and {max(forwards)} of {limit}")
    assert max(steps) <= expected <= limit
    assert max(forwards) <= limit
    wrapped.close()


def turns(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Calls some layers twice, or passes no gradient on to the first ones, where told so."""
    for n, layer in enumerate(net.layers):
        x = torch.tanh(layer(x.detach() if n == net.cut else x))
        if n in net.again:
            x = torch.tanh(layer(x))
    return x


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize(("again", "cut"), [({1}, -1), ({5}, -1), ({0, 3}, -1), ({0}, -1), (set(), 1), (set(), 3)])
@pytest.mark.grid(every=4)
def test_steps_off_their_course(again: set[int], cut: int, share: float, updates: str, record_property: Record) -> None:
    """Calls that the plan does not know find the parameters on the device, and their gradients those on the host."""

    def off(model: nn.Module, own: Any, n: int, batch: Any) -> torch.Tensor:
        (net,) = (one for one in model.modules() if isinstance(one, Does))
        net.again, net.cut = (again, cut) if n in (1, 3) else (set(), -1)
        return usual(model, own, n, batch)

    model, x = Does(turns, layers=linears(6), again=set(), cut=-1), torch.randn(16, 32).to(CUDA)
    compare(model, off, x, record_property, share=share, updates=updates)


@pytest.mark.parametrize("begins", ["cpu", "cuda"])
def test_parameters_and_states_leave_the_device_as_far_as_they_must_and_come_back(begins: str) -> None:
    model, x = made("language")
    wrapped = rotoff.Checkpointable(model.to(begins), device="cuda").measure(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for n in range(3):
        if n % 2:
            wrapped.compute_sequence(device_limit=wrapped.keep_all_memory // 2, optimizer=optimizer, refine=False)
            assert sum(p.nbytes for p in model.parameters() if p.is_cuda) < wrapped.keep_all_memory // 2
        else:
            wrapped.compute_sequence(device_limit="1 TiB", optimizer=optimizer)
            states = [t for one in optimizer.state.values() for t in one.values() if t.numel() > 1]
            assert all(t.device == CUDA for t in (*model.parameters(), *model.buffers(), *states))
        usual(wrapped, [optimizer], n, lambda: x)
        assert ({t.device.type for t in wrapped.state_dict().values()} >= {"cpu"}) == bool(n % 2)
    wrapped.close()


@pytest.mark.parametrize("limit", ["300 KiB", "600 KiB", "1 GiB"])
def test_a_frozen_model_needs_no_optimizer(limit: str) -> None:
    """Its parameters come as forwards without gradients need them; a step that only its input needs is planned."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    plain, x = nn.Sequential(*layers).requires_grad_(False).eval(), torch.randn(16, 64, device=CUDA)
    net = copy.deepcopy(plain)
    plain.to(CUDA)
    model = rotoff.Checkpointable(net, device="cuda")
    model.compute_sequence(device_limit=limit, refine=False)
    for n in range(3):
        with torch.no_grad():
            assert torch.equal(model(x + n), plain(x + n))
        if limit != "300 KiB":  # the smallest limit of such a step is larger
            inputs = [x.clone().requires_grad_() for _ in "ab"]
            for one, given in zip((model, plain), inputs, strict=True):
                one(given).square().sum().backward()
            assert torch.equal(*(given.grad for given in inputs))
    here = sum(p.is_cuda for p in net.parameters())
    assert here == 24 if limit == "1 GiB" else here < 24


class Clamped(nn.Linear):
    """Bounds its weights in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if not self.training:
                self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


def test_a_forward_without_gradients_may_write_its_parameters(record_property: Record) -> None:
    @torch.no_grad()
    def evaluated(model: nn.Module, own: Any, n: int, batch: Any) -> torch.Tensor:
        return model.eval()(batch())

    compare(
        nn.Sequential(*(Clamped(128, 128) for _ in range(8))),
        evaluated,
        torch.randn(4, 128, device=CUDA),
        record_property,
    )

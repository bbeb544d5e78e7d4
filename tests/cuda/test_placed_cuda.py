"""Training on CUDA with everything placed: parameters, gradients and optimizer states on the device and in pinned host
memory, beside the plain model that has all of it on the device."""

from __future__ import annotations

import copy
import functools
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import ALL, Attention, Residual
from placed_loops import accumulated, clamped, clipped, frozen_later, given_up, hooked, loaded, looked_at, result, usual
from placed_models import drawn, words
from torch import nn

import rotoff

pytestmark = pytest.mark.cuda

STANDIN = "STANDIN" in os.environ  # computes on the CPU, so that bits are equal
CUDA = torch.device("cuda", 0)
NOT_THERE = {"stateful"}  # has a tensor that no module moves
Record = Callable[[str, object], None]


class Language(nn.Module):
    """Asks a parameter for its device, and makes a tensor there, in the middle of its forward."""

    def __init__(self, width: int = 32, blocks: int = 4, words: int = 50, tie: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.1 * torch.randn(64, width))
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.ModuleList(nn.Sequential(Attention(width, 4), Residual(width)) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where = self.embedding.weight.device
        x = self.embedding(x.to(where)) + self.positions[torch.arange(x.shape[1], device=where)]
        for block in self.blocks:
            assert next(block.parameters()).is_cuda
            x = block(x) * self.scale
        return self.head(x.to(self.head.weight.dtype))


def made(name: str) -> tuple[nn.Module, Any]:
    """On the host, with its batch on the device."""
    torch.manual_seed(0)
    own = name in ("language", "untied")
    model, batch = (Language(tie=name == "language"), words(50, 4, 12)) if own else drawn(name)
    x = batch()
    x = torch.utils._pytree.tree_map(lambda t: t.to(CUDA) if isinstance(t, torch.Tensor) else t, x)
    return model, x


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        yield


def penalised(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Parameters that the loss takes outside of the model."""
    loss = model(batch()).float().square().mean()
    (loss + sum(p.square().sum().to(CUDA) for p in model.parameters() if p.requires_grad)).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    return loss.detach()


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
    model: Any, optimizers: Any, n: int, batch: Any, times: int = 2, seconds: float = 0.1
) -> torch.Tensor:
    for _ in range(times):
        loss = model(batch()).float().square().mean()
        penalty = Slowly.apply(next(model.parameters()).square().sum(), seconds)
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


def shared(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
    """Moved, in place, into memory that processes share, as tensors are that go to another process."""
    loss = usual(model, optimizers, n, batch)
    for tensor in model.state_dict().values():
        if not tensor.is_cuda:
            tensor.share_memory_()
    return loss


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
} | ({} if STANDIN else {"AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)})


def within(wrapped: rotoff.Checkpointable, optimizer: torch.optim.Optimizer, share: float, updates: str) -> int:
    """Plan in a share of the way from the smallest limit to everything; returns that limit."""
    options = {"optimizer": optimizer, "updates": updates, "refine": False}
    with pytest.raises(rotoff.InfeasibleError) as refused:
        wrapped.compute_sequence(device_limit=1, **options)
    least = refused.value.min_mem_limit
    wrapped.compute_sequence(device_limit="1 TiB", **options)
    limit = int(least + share * (wrapped.keep_all_memory - 1 - least))
    wrapped.compute_sequence(device_limit=limit, **options)
    return limit


def placed(
    name: str, share: float, updates: str, make: Any = OPTIMIZERS["AdamW"]
) -> tuple[rotoff.Checkpointable, torch.optim.Optimizer, Any, int]:
    """A model planned by `within`, its optimizer, its batch and its limit."""
    model, x = made(name)
    wrapped = rotoff.Checkpointable(model, device="cuda", cache_directory=None).measure(x)
    assert all(p.device.type == "cpu" for p in model.parameters())
    optimizer = make([p for p in wrapped.parameters() if p.requires_grad])
    limit = within(wrapped, optimizer, share, updates)
    assert wrapped._plan.placed is not None
    return wrapped, optimizer, x, limit


def plain_twin(model: nn.Module, make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = copy.deepcopy(model).to(CUDA)
    return plain, make([p for p in plain.parameters() if p.requires_grad])


def compare(name: str, share: float, updates: str, how: Any, make: Any, record: Record, steps: int = 4) -> None:
    wrapped, optimizer, x, _ = placed(name, share, updates, make)
    plain, twin = plain_twin(made(name)[0], make)
    results = []
    for one, own in ((wrapped, optimizer), (plain, twin)):
        torch.manual_seed(2)
        losses = [how(one, [own], n, lambda: x).cpu() for n in range(steps)]
        results.append([*losses, *(t.cpu() for t in result(one, [own]))])
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    record("bits equal", equal)
    # PyTorch adds up the norms to clip by device by device; here gradients may lie on two
    assert equal or not STANDIN or how is clipped
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    wrapped.close()


@pytest.mark.parametrize(("share", "updates"), [(0.0, "after"), (0.5, "during")])
@pytest.mark.parametrize("name", ["language", "adapted", "first frozen", *sorted(set(ALL) - NOT_THERE)])
def test_training_is_the_plain_models(name: str, share: float, updates: str, record_property: Record) -> None:
    compare(name, share, updates, usual, OPTIMIZERS["AdamW"], record_property)


STEPS = (
    clipped, accumulated, hooked, looked_at, penalised, penalised_late, clamped, loaded, given_up, carried, shared, frozen_later,
)  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("how", STEPS)
def test_what_surrounds_a_step(how: Any, share: float, record_property: Record) -> None:
    least = 0.3 if how is frozen_later else 0.0  # a limit for more parameters that need gradients
    name = "untied" if how is penalised else "language"  # the gradients of a tied weight are added up in another order
    compare(name, max(share, least), "after", how, OPTIMIZERS["AdamW"], record_property)


@pytest.mark.parametrize("how", [usual, hooked, clamped, loaded])
def test_what_surrounds_a_step_that_updates_during_its_backward(how: Any, record_property: Record) -> None:
    compare("language", 0.3, "during", how, OPTIMIZERS["AdamW"], record_property)


def test_a_gradient_that_comes_after_its_update_is_refused(record_property: Record) -> None:
    how = functools.partial(penalised_late, times=1, seconds=1.0)
    with pytest.raises(rotoff.ExecutionError, match='after the backward had updated them; plan with updates="after"'):
        compare("language", 0.0, "during", how, OPTIMIZERS["AdamW"], record_property)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("updates", ["after", "during"])
def test_gradients_that_no_given_optimizer_updates_are_the_callers(updates: str, share: float) -> None:
    """They add up over the steps."""

    def half(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters[::2], lr=1e-2)

    wrapped, optimizer, x, _ = placed("language", share, updates, half)
    plain, twin = plain_twin(made("language")[0], half)
    for n in range(3):
        for net, own in ((wrapped, optimizer), (plain, twin)):
            torch.manual_seed(n)
            net(x).float().square().mean().backward()
            own.step()
            own.zero_grad()
        for p, q in zip(list(wrapped.parameters())[1::2], list(plain.parameters())[1::2], strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad.cpu(), q.grad.cpu(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer: str, updates: str, record_property: Record) -> None:
    compare("language", 0.5, updates, usual, OPTIMIZERS[optimizer], record_property)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize(
    ("how", "updates"), [(usual, "after"), (usual, "during"), (given_up, "after"), (accumulated, "after")]
)
def test_an_optimizer_that_runs_on_the_device_alone_is_used_there(
    how: Any, updates: str, share: float, record_property: Record
) -> None:
    """PyTorch refuses `capturable` on a host; so do quantizing optimizers, whose kernels are CUDA's."""
    compare("language", share, updates, how, lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True), record_property)


class NotingRuntime:
    """CUDA's, which notes what it has registered, or refuses to, as under WSL."""

    def __init__(self, refuses: bool) -> None:
        self.real, self.refuses = torch.cuda.cudart(), refuses
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        code = 801 if self.refuses else int(self.real.cudaHostRegister(address, nbytes, flags))
        if code == 0:
            self.registered[address] = nbytes
        return code

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.pop(address, None)
        return int(self.real.cudaHostUnregister(address))


@pytest.mark.parametrize("refuses", [False, True])
def test_no_tensor_lies_across_two_pieces_of_pinned_memory(
    refuses: bool, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    """A copy may not go from one registered range into the next. The pieces are smaller than most tensors here."""
    runtime = NotingRuntime(refuses)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("rotoff.runtime.links.pinned.SEGMENT_BYTES", 10_000)
    monkeypatch.setenv("ROTOFF_HOST_MEMORY", "16 MiB")  # measuring the link takes no more
    seen, kept = 0, []

    def looked(model: Any, optimizers: Any, n: int, batch: Any) -> torch.Tensor:
        nonlocal seen
        loss = usual(model, optimizers, n, batch)
        if n == 1:
            kept.extend(p.data for p in model.parameters())  # so that the next step takes other memory for them
        states = [t for state in optimizers[0].state.values() for t in state.values() if t.numel() > 1]
        for t in (*model.parameters(), *states) if isinstance(model, rotoff.Checkpointable) and not refuses else ():
            if not t.is_cuda:
                begin, end = t.data_ptr(), t.data_ptr() + t.nbytes
                assert any(at <= begin and end <= at + size for at, size in runtime.registered.items())
                seen += 1
        return loss

    compare("language", 0.0, "after", looked, OPTIMIZERS["AdamW"], record_property)
    assert refuses or seen > 40
    kept.clear()
    assert not runtime.registered


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("frozen", [0, 5])
def test_no_step_holds_more_than_predicted(frozen: int, share: float, updates: str, record_property: Record) -> None:
    """All that the device holds, of whole steps with their updates. Forwards without gradients take what they can of
    the limit."""
    gc.collect()
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated()
    model, x = nn.Sequential(*[Residual(128) for _ in range(8)]), torch.randn(64, 128, device=CUDA)
    model[:frozen].requires_grad_(False)
    wrapped = rotoff.Checkpointable(model, device="cuda", cache_directory=None).measure(x)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    limit = within(wrapped, optimizer, share, updates)
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


@pytest.mark.parametrize("reach", [lambda w: w, lambda w: w.data, lambda w: w.detach(), lambda w: w.view(-1)])
@pytest.mark.parametrize("lent", [False, True])
def test_a_model_may_change_a_parameter_that_lies_on_the_host(lent: bool, reach: Any) -> None:
    """Or autograd refuses it as it refuses the plain model."""

    class Changing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x) if lent else x
            with torch.no_grad():
                reach(self.weight).mul_(0.5)
            return super().forward(x)

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    model, x = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Changing(8, 8), nn.Linear(8, 8)),
        torch.randn(4, 8, device=CUDA),
    )
    plain, twin = plain_twin(model, sgd)
    wrapped, optimizer = (
        rotoff.Checkpointable(model, device="cuda", cache_directory=None),
        sgd(list(model.parameters())),
    )
    try:
        losses = [usual(plain, [twin], n, lambda: x) for n in range(3)]
    except RuntimeError:
        with pytest.raises(rotoff.MeasureError, match="modified by an inplace operation"):
            wrapped.measure(x)
        return
    within(wrapped.measure(x), optimizer, 0.0, "after")
    alike = torch.equal if STANDIN else functools.partial(torch.allclose, rtol=1e-2, atol=1e-3)
    assert all(alike(usual(wrapped, [optimizer], n, lambda: x), loss) for n, loss in enumerate(losses))
    assert all(alike(p.cpu(), q.cpu()) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class Turns(nn.Module):
    """Calls some layers twice, or passes no gradient on to the first ones, where told so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.again: set[int] = set()
        self.cut = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            x = torch.tanh(layer(x.detach() if n == self.cut else x))
            if n in self.again:
                x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize(("again", "cut"), [({1}, -1), ({5}, -1), ({0, 3}, -1), ({0}, -1), (set(), 1), (set(), 3)])
def test_steps_off_their_course(again: set[int], cut: int, share: float, updates: str, record_property: Record) -> None:
    """Calls that the plan does not know find the parameters on the device, and their gradients those on the host."""
    torch.manual_seed(0)
    model, x = Turns(), torch.randn(16, 32).to(CUDA)
    plain, twin = plain_twin(model, OPTIMIZERS["AdamW"])
    wrapped = rotoff.Checkpointable(model, device="cuda", cache_directory=None).measure(x)
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    within(wrapped, optimizer, share, updates)
    results = []
    for one, own, turns in ((wrapped, optimizer, model), (plain, twin, plain)):
        losses = []
        for n in range(5):
            turns.again, turns.cut = (again, cut) if n in (1, 3) else (set(), -1)
            losses.append(usual(one, [own], n, lambda: x).cpu())
        results.append([*losses, *(t.cpu() for t in result(one, [own]))])
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    record_property("bits equal", equal)
    assert equal or not STANDIN
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    wrapped.close()


def test_with_room_for_everything_the_plain_model_trains_on_the_device() -> None:
    model, x = made("language")
    wrapped = rotoff.Checkpointable(model, device="cuda", cache_directory=None).measure(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped.compute_sequence(device_limit="1 TiB", optimizer=optimizer)
    assert all(t.device == CUDA for t in (*model.parameters(), *model.buffers()))
    usual(wrapped, [optimizer], 0, lambda: x)
    wrapped.compute_sequence(device_limit=wrapped.keep_all_memory // 2, optimizer=optimizer, refine=False)
    assert {p.device.type for p in model.parameters()} > {"cpu"} or not any(p.is_cuda for p in model.parameters())
    usual(wrapped, [optimizer], 1, lambda: x)
    wrapped.compute_sequence(device_limit="1 TiB", optimizer=optimizer)
    assert all(p.device == CUDA for p in model.parameters())
    states = [t for one in optimizer.state.values() for t in one.values() if t.numel() > 1]
    assert all(t.device == CUDA for t in states)
    usual(wrapped, [optimizer], 2, lambda: x)


def test_a_model_on_the_device_leaves_it_as_far_as_it_must() -> None:
    model, x = made("language")
    model.to(CUDA)
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped.compute_sequence(device_limit="1 TiB", optimizer=optimizer)
    assert all(p.device == CUDA for p in model.parameters())
    wrapped.compute_sequence(device_limit=wrapped.keep_all_memory // 3, optimizer=optimizer, refine=False)
    held = sum(p.nbytes for p in model.parameters() if p.is_cuda)
    assert held < wrapped.keep_all_memory // 3
    usual(wrapped, [optimizer], 0, lambda: x)
    assert {t.device.type for t in wrapped.state_dict().values()} >= {"cpu"}
    wrapped.close()


@pytest.mark.parametrize("limit", ["300 KiB", "600 KiB", "1 GiB"])
def test_a_frozen_model_needs_no_optimizer(limit: str) -> None:
    """Its parameters come as forwards without gradients need them; a step that only its input needs is planned."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    plain, x = nn.Sequential(*layers).requires_grad_(False).eval(), torch.randn(16, 64, device=CUDA)
    net = copy.deepcopy(plain)
    plain.to(CUDA)
    model = rotoff.Checkpointable(net, device="cuda", cache_directory=None)
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

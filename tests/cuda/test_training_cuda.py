"""What training on CUDA has beside forward and backward: autocast, a scaler, statistics, an optimizer; checked,
recorded, and with no more memory on the device than the limit says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from placed_models import dropping
from planned_steps import run_twice, with_sequence
from torch import nn

import rotoff

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("deterministic")]

STANDIN = "STANDIN" in os.environ  # computes on the CPU
# On a GPU activations of 64 MiB and masks of 16, whole pieces of 2 MiB, which the allocator does not round.
WIDTH, BATCH, SIDE = (8, 4, 8) if STANDIN else (64, 64, 64)
Record = Callable[[str, object], None]


class Block(nn.Module):
    """Convolution, batch norm and dropout in a residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layers(x))


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)]
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), *[Block(WIDTH) for _ in range(6)], *head).cuda()
    return model, torch.randn(BATCH, 3, SIDE, SIDE, device="cuda")


@contextmanager
def no_host_synchronisation(on: bool = True) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if on else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None, strict: bool = False) -> list[torch.Tensor]:
    """Three steps of SGD; losses, parameters, buffers. strict: forward and backward must not wait for the device from
    the second on."""
    torch.manual_seed(1)
    target = torch.randint(10, (len(x),), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16 and not STANDIN)
    losses = []
    for n in range(3):
        optimizer.zero_grad(set_to_none=False)
        with no_host_synchronisation(strict and n > 0):
            with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(model(x).float(), target)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters()), *(b.detach() for b in model.buffers())]


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_training_is_the_plain_models(dtype: torch.dtype | None, mode: str, record_property: Record) -> None:
    model, x = convolutional()
    plain, _ = convolutional()
    wrapped = rotoff.Checkpointable(model)
    with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        wrapped.measure(x)
    with pytest.raises(rotoff.InfeasibleError) as refused:
        wrapped.compute_sequence(1, mode=mode)
    wrapped.compute_sequence(max(int(0.6 * wrapped.keep_all_memory), refused.value.min_mem_limit), mode=mode)
    got, expected = train(wrapped, x, dtype, strict=True), train(plain, x, dtype)
    record_property("bits equal", all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    wrapped.close()


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
def test_after_every_operation_the_device_holds_what_the_machine_says(mode: str) -> None:
    model, x = convolutional()
    wrapped = rotoff.Checkpointable(model, check=True).measure(x)
    wrapped.compute_sequence(int(0.7 * wrapped.keep_all_memory), mode=mode)
    for _ in range(2):
        wrapped(x).sum().backward()
    wrapped.close()


@pytest.mark.alone
def test_a_recorded_step_has_the_times_of_its_streams(record_property: Record) -> None:
    model, x = convolutional()
    wrapped = rotoff.Checkpointable(model).measure(x)
    wrapped.compute_sequence(int(0.7 * wrapped.keep_all_memory), mode="offload")
    for _ in range(3):
        wrapped(x).sum().backward()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with wrapped.record_step() as recorded:
        begin.record()
        wrapped(x).sum().backward()
        end.record()
    torch.cuda.synchronize()
    trace, whole = recorded.trace, begin.elapsed_time(end) / 1e3
    copies = [event for event in trace.events if event.lane != "compute"]
    assert copies
    assert all(0 <= event.start <= event.end for event in trace.events)
    for lane in ("compute", "d2h", "h2d"):
        events = [event for event in trace.events if event.lane == lane]
        assert all(a.end <= b.start + 1e-5 for a, b in zip(events, events[1:], strict=False)), lane
    assert trace.makespan <= whole + 1e-3
    for lane, nbytes in (("d2h", trace.d2h_bytes), ("h2d", trace.h2d_bytes)):
        seconds = sum(event.end - event.start for event in trace.events if event.lane == lane)
        record_property(f"{lane} in a step, GB/s", round(nbytes / max(seconds, 1e-9) / 1e9, 2))
    record_property("measured and predicted ms", f"{whole * 1e3:.3f} {wrapped.get_expected_makespan() * 1e3:.3f}")
    wrapped.close()


def test_recurrent_layers_drop_the_same_in_a_replay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[dropping(32) for _ in range(3)], nn.Linear(32, 4)).cuda()
    x = torch.randn(8, 16, 32, device="cuda")
    wrapped = rotoff.Checkpointable(model).measure(x)
    with_sequence(wrapped, run_twice(4))

    def gradients() -> list[torch.Tensor]:
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            wrapped.zero_grad()
            wrapped(x).square().sum().backward()
            found += [p.grad.clone() for p in wrapped.parameters()]
        return found

    replayed = gradients()
    wrapped.close()
    wrapped.compute_sequence(1 << 40)
    for ours, plain in zip(replayed, gradients(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)

"""Inputs of other sizes: what is known of them from those measured, that it is enough, and what it costs."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from models import Attention, Residual
from torch import nn
from torch.nn import functional as F

import rotoff

WIDTH = 32


class Written(nn.Module):
    """A forward of its own, so that its stages are found by recording it."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * scale
        return x.square()


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.up, self.last = nn.Conv2d(48, 16, 3, padding=1), nn.Conv2d(16, 3, 1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.silu(self.norm(self.first(x)))
        low = F.silu(self.down(F.max_pool2d(skip, 2)))
        return self.last(F.silu(self.up(torch.cat((F.interpolate(low, scale_factor=2), skip), 1))))


class Masked(nn.Module):
    """Asks for its mask's type before it uses the positions, as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(WIDTH, 4) for _ in range(4))
        self.places = nn.Parameter(torch.randn(512, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.places[: x.shape[1]].to(x.device)
        if mask.to(torch.bool).all():
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return x


def rows(batch: int) -> tuple[Any, ...]:
    return (torch.randn(batch, WIDTH),)


def words(length: int) -> tuple[Any, ...]:
    return (torch.randn(3, length, WIDTH),)


def tokens(length: int) -> tuple[Any, ...]:
    return (torch.randint(0, 50, (8, length)),)


def masked(length: int) -> tuple[Any, ...]:
    return torch.randn(3, length, WIDTH), torch.ones(3, length)


def crops(side: int) -> tuple[Any, ...]:
    return (torch.randn(2, 3, side, side + 32),)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "sequential": (lambda: nn.Sequential(*(Residual(WIDTH) for _ in range(5))), rows),
    "recorded": (lambda: Written(*(Residual(WIDTH) for _ in range(5))), rows),
    "attention": (lambda: Written(*(Attention(WIDTH, 4) for _ in range(4))), words),
    "masked": (Masked, masked),
    "convolutions": (Unet, crops),
    "tokens": (lambda: nn.Sequential(nn.Embedding(50, WIDTH), *(Attention(WIDTH, 4) for _ in range(4))), tokens),
}


def planned(kind: str, share: float, largest: int, **options: Any) -> tuple[rotoff.Checkpointable, nn.Module]:
    """A model within `share` of the bytes of its largest input, and the plain one."""
    torch.manual_seed(0)
    model = KINDS[kind][0]()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    probe = rotoff.Checkpointable(copy.deepcopy(model)).measure(*KINDS[kind][1](largest))
    least = probe.min_mem_limit(options.get("mode", "joint"))
    limit = int(least + share * (probe.keep_all_memory - least))
    probe.close()
    check = options.pop("check", False)
    return rotoff.Checkpointable(model, check=check).compute_sequence(limit, **{"refine": False, **options}), plain


def train(model: nn.Module, batch: tuple[Any, ...]) -> None:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=False)
    model(*batch).sum().backward()


def step(model: nn.Module, batch: tuple[Any, ...]) -> list[torch.Tensor]:
    train(model, batch)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("mode", ["joint", "remat"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.grid(every=8)
def test_sizes_between_two_train_bit_for_bit_within_the_limit(
    kind: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped, plain = planned(kind, 0.4, 192, mode=mode)
    make = KINDS[kind][1]
    limit = wrapped.mem_limit
    with caplog.at_level(logging.WARNING, "rotoff"):
        for size in (192, 64, 96, 160, 104, 80, 176, 160, 68):
            batch = make(size)
            for ours, theirs in zip(step(wrapped, batch), step(plain, batch), strict=True):
                assert torch.equal(ours, theirs), size
            told = wrapped.get_expected_memory()
            peak = peak_bytes(lambda batch=batch: train(wrapped, batch))
            step(plain, batch)  # so that running statistics stay alike
            assert peak <= told <= limit, size
    assert "another course" not in caplog.text
    wrapped.close()


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("sequential", (32, 0, 1, 3, 0, 5)),
        ("recorded", (24, 0, 5, 0, 1)),
        ("attention", (16, 0, 1, 8)),
    ],
)
def test_an_empty_input_is_trained_and_tells_nothing_of_others(kind: str, sizes: tuple[int, ...], mode: str) -> None:
    model, plain = planned(kind, 0.0, max(sizes), mode=mode)
    for size in sizes:
        batch = KINDS[kind][1](size)
        assert all(map(torch.equal, step(model, batch), step(plain, batch))), size
    model.close()


@pytest.mark.parametrize("mode", ["joint", "remat"])
@pytest.mark.parametrize("sizes", [(32, 5, 48), (32, 5, 33)])
def test_a_size_told_by_one_other_holds_no_more_than_is_charged(sizes: tuple[int, ...], mode: str) -> None:
    """The skip connections that stay on the device, too."""
    model, plain = planned("recorded", 0.1, max(sizes), mode=mode, check=True)
    for size in sizes:
        batch = rows(size)
        assert all(map(torch.equal, step(model, batch), step(plain, batch))), size
    model.close()


@pytest.mark.parametrize(
    ("kind", "share"), [("recorded", 0.05), pytest.param("convolutions", 0.2, marks=pytest.mark.slow)]
)
def test_a_larger_size_keeps_the_limit(kind: str, share: float) -> None:
    wrapped, plain = planned(kind, share, 192)
    limit = wrapped.mem_limit
    for size in (80, 176, 192, 184):
        batch = KINDS[kind][1](size)
        assert all(map(torch.equal, step(wrapped, batch), step(plain, batch)))
        told = wrapped.get_expected_memory()  # planned now, not within what is measured
        assert peak_bytes(lambda batch=batch: train(wrapped, batch)) <= told <= limit
        step(plain, batch)  # so that running statistics stay alike


def test_what_was_measured_serves_no_larger_size_that_rounds_to_the_same() -> None:
    wrapped, _ = planned("attention", 0.6, 160)
    for size in (150, 60, 147, 157, 160):
        batch = words(size)
        step(wrapped, batch)
        told = wrapped.get_expected_memory()
        assert peak_bytes(lambda batch=batch: train(wrapped, batch)) <= told, size


def test_plans_that_are_known_are_listed() -> None:
    wrapped, _ = planned("recorded", 0.2, 192, mode="remat")
    for size in (192, 64, 128):
        step(wrapped, rows(size))
    table = {one.shapes[0][0]: one for one in wrapped.plans()}
    assert table.keys() == {192, 64, 128}
    assert all(one.memory <= wrapped.mem_limit for one in table.values())
    assert table[192].makespan > 0 < table[192].overhead
    assert table[64].makespan > 0 == table[64].overhead  # of which everything is kept


def test_up_to_a_size_all_that_are_smaller_are_known() -> None:
    wrapped, plain = planned("tokens", 0.4, 96)
    limit = wrapped.mem_limit
    wrapped.compute_sequence(limit, up_to=KINDS["tokens"][1](96))
    for length, batch in ((96, 8), (50, 8), (40, 5), (96, 3), (4, 8), (96, 8)):
        given = (torch.randint(0, 50, (batch, length)),)
        assert all(map(torch.equal, step(wrapped, given), step(plain, given)))
        assert wrapped.get_expected_memory() <= limit


def test_up_to_a_size_that_does_not_fit_says_which_do() -> None:
    wrapped, _ = planned("tokens", 0.0, 96)
    limit = 3 * wrapped.mem_limit // 4
    with pytest.raises(
        rotoff.InfeasibleError, match=r"on the input of up_to, \[\[8, 96\]\], the training step needs at"
    ) as caught:
        wrapped.compute_sequence(limit, up_to=KINDS["tokens"][1](96))
    assert caught.value.min_mem_limit > limit
    batch, length = map(
        int, re.search(r"inputs of \[\[(\d+), 96\]\] and \[\[8, (\d+)\]\] fit", str(caught.value)).groups()
    )
    assert 4 <= batch < 8
    assert 48 <= length < 96
    fresh = rotoff.Checkpointable(KINDS["tokens"][0]()).compute_sequence(limit)
    for given in ((8, length), (batch, 96)):
        step(fresh, (torch.randint(0, 50, given),))
        assert fresh.get_expected_memory() <= limit
    wrapped.compute_sequence(caught.value.min_mem_limit, up_to=KINDS["tokens"][1](96))


@pytest.mark.parametrize("shape", [(4, 0, WIDTH), (0, 8, WIDTH)])
def test_up_to_an_empty_input_that_does_not_fit_names_no_others(shape: tuple[int, ...]) -> None:
    model = rotoff.Checkpointable(KINDS["recorded"][0]())
    with pytest.raises(rotoff.InfeasibleError) as caught:
        model.compute_sequence(100, up_to=torch.randn(shape))
    assert "half" not in str(caught.value)
    model.compute_sequence(caught.value.min_mem_limit, up_to=torch.randn(shape))


def test_an_input_larger_than_announced_is_said(caplog: pytest.LogCaptureFixture) -> None:
    wrapped, _ = planned("tokens", 1.0, 24)
    wrapped.compute_sequence("1 GiB", up_to=KINDS["tokens"][1](24))
    with caplog.at_level(logging.WARNING, "rotoff"):
        step(wrapped, KINDS["tokens"][1](160))
    assert "the input [[8, 160]] is larger than up_to" in caplog.text


# -- where sizes lie

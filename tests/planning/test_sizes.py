"""Inputs of other sizes: what is known of them from those measured, that it is enough, and what it costs; also under a
`device_limit`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from allocated import own_again, peak_bytes
from forced_plans import adamw
from models import Attention, Does, Residual
from planned_steps import Beside
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rotoff
from rotoff.planning import request as planner

WIDTH = 32


def written(*blocks: nn.Module) -> nn.Module:
    """A forward of its own, so that its stages are found by recording it."""

    def forward(net: Any, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in net.blocks:
            x = block(x) * scale
        return x.square()

    return Does(forward, blocks=nn.ModuleList(blocks))


def unet() -> nn.Module:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        skip = F.silu(net.norm(net.first(x)))
        low = F.silu(net.down(F.max_pool2d(skip, 2)))
        return net.last(F.silu(net.up(torch.cat((F.interpolate(low, scale_factor=2), skip), 1))))

    down = {"first": nn.Conv2d(3, 16, 3, padding=1), "down": nn.Conv2d(16, 32, 3, padding=1)}
    up = {"up": nn.Conv2d(48, 16, 3, padding=1), "last": nn.Conv2d(16, 3, 1)}
    return Does(forward, **down, **up, norm=nn.BatchNorm2d(16))


def asking() -> nn.Module:
    """Asks for its mask's type before it uses the positions, as GPT-2 does."""

    def forward(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + net.places[: x.shape[1]].to(x.device)
        if mask.to(torch.bool).all():
            x = x * 2
        return net.blocks(x)

    blocks = nn.Sequential(*(Attention(WIDTH, 4) for _ in range(4)))
    return Does(forward, blocks=blocks, places=nn.Parameter(torch.randn(512, WIDTH)))


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


def small(batch: int) -> tuple[Any, ...]:
    return (torch.randn(batch // 32, 256, 2, 2),)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "sequential": (lambda: nn.Sequential(*(Residual(WIDTH) for _ in range(5))), rows),
    "recorded": (lambda: written(*(Residual(WIDTH) for _ in range(5))), rows),
    "attention": (lambda: written(*(Attention(WIDTH, 4) for _ in range(4))), words),
    "masked": (asking, masked),
    "convolutions": (unet, crops),
    # whose kernels take many times what fake ones do, at any size
    "depthwise": (lambda: written(*(nn.Conv2d(256, 256, 7, padding=3, groups=256) for _ in range(4))), small),
    "tokens": (lambda: nn.Sequential(nn.Embedding(50, WIDTH), *(Attention(WIDTH, 4) for _ in range(4))), tokens),
}


def planned(kind: str, share: float, largest: int, mode: str = "joint", **options: Any) -> Beside:
    """A model within `share` of the bytes of its largest input, and the plain one."""
    model = KINDS[kind][0]()
    probe = Beside(model, sample=KINDS[kind][1](largest)).within(mode, share)
    probe.planned.close()
    return Beside(model, probe.limit, mode, **options)


@pytest.mark.parametrize("mode", ["joint", "remat"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.grid(every=8)
def test_sizes_between_two_train_bit_for_bit_within_the_limit(
    kind: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    beside, make = planned(kind, 0.4, 192, mode), KINDS[kind][1]
    with caplog.at_level(logging.WARNING, "rotoff"):
        for size in (192, 64, 96, 160, 104, 80, 176, 160, 68):
            beside.check(*make(size))
    assert "another course" not in caplog.text
    beside.planned.close()


def image(channels: int, side: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, channels, side, side)


def sentences(batch: int) -> torch.Tensor:
    return torch.randn(batch, 32, WIDTH)


def with_gradient(batch: int) -> torch.Tensor:
    return sentences(batch).requires_grad_()


def recomputed(net: Any, x: torch.Tensor) -> torch.Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x.square()


def after_a_convolution(last: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    return Does(lambda net, x: last(net.first(x).tanh()).square(), first=nn.Conv2d(8, 8, 1))


# a model and its inputs; the batch that is recorded and the one that is asked for; the most told over what is measured
TOLD: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor], int, int, float]] = {
    "a volume": (
        lambda: written(*several_of(nn.Conv3d, 8, padding=1)),
        lambda batch: torch.randn(batch, 8, 8, 8, 8), 4, 1, 1.0,
    ),
    "depthwise": (lambda: written(*several_of(nn.Conv2d, 64, padding=3, groups=64, size=7)), image(64, 4), 4, 1, 1.3),
    "grouped": (lambda: written(*several_of(nn.Conv2d, 32, padding=1, groups=4)), image(32, 16), 4, 12, 1.01),
    "transposed": (
        lambda: written(*several_of(nn.ConvTranspose2d, 16, padding=1, groups=4)), image(16, 6), 4, 1, 1.01,
    ),
    "bicubic": (
        lambda: after_a_convolution(lambda h: F.interpolate(h, scale_factor=2, mode="bicubic")), image(8, 16), 4, 12,
        1.01,
    ),
    "unfolded": (lambda: after_a_convolution(lambda h: F.unfold(h, 3, padding=1)), image(8, 16), 4, 8, 1.01),
    "recomputed": (
        lambda: Does(recomputed, blocks=nn.ModuleList(Attention(WIDTH, 4) for _ in range(4))), sentences, 4, 1, 1.01,
    ),
    "recurrent": (lambda: Does(lambda net, x: net.last(x)[0].square(), last=nn.LSTM(32, 32)), sentences, 4, 8, 1.0),
    "with a gradient": (lambda: written(*(Attention(WIDTH, 4) for _ in range(4))), with_gradient, 4, 12, 1.03),
}  # fmt: skip


def several_of(kind: Any, channels: int, size: int = 3, **options: Any) -> list[nn.Module]:
    return [layer for _ in range(3) for layer in (kind(channels, channels, size, **options), nn.Tanh())]


@pytest.mark.parametrize("kind", TOLD)
def test_what_is_told_of_a_size_that_no_step_has_had_is_what_it_takes(kind: str) -> None:
    make, draw, known, asked, most = TOLD[kind]
    beside = Beside(make(), 1 << 30)
    for _ in range(2):
        beside.step(draw(known))
    beside.step(x := draw(asked))
    x.grad = None
    taken, told = beside.peak(x), beside.planned.get_expected_memory()
    assert taken <= told <= most * taken + 1024


@pytest.mark.parametrize("mode", ["joint", "remat", "offload"])
@pytest.mark.parametrize(
    ("kind", "share", "sizes", "options"),
    [
        ("sequential", 0.0, (32, 0, 1, 3, 0, 5), {}),
        ("recorded", 0.0, (24, 0, 5, 0, 1), {}),
        ("attention", 0.0, (16, 0, 1, 8), {}),
        ("recorded", 0.1, (32, 5, 48), {"check": True}),  # a size told by one other holds no more than is charged
        ("recorded", 0.1, (32, 5, 33), {"check": True}),  # with the skip connections that stay on the device
    ],
)
def test_an_empty_input_is_trained_and_few_sizes_tell_enough_of_others(
    kind: str, share: float, sizes: tuple[int, ...], options: dict[str, Any], mode: str
) -> None:
    beside = planned(kind, share, max(sizes), mode, **options)
    for size in sizes:
        beside.step(*KINDS[kind][1](size))
    beside.planned.close()


@pytest.mark.parametrize(
    ("kind", "share", "largest", "sizes"),
    [
        ("recorded", 0.05, 192, (80, 176, 192, 184)),
        pytest.param("convolutions", 0.2, 192, (80, 176, 192, 184), marks=pytest.mark.slow),
        ("attention", 0.6, 160, (150, 60, 147, 157, 160)),  # several of them round to the same
    ],
)
def test_a_larger_size_keeps_the_limit(kind: str, share: float, largest: int, sizes: tuple[int, ...]) -> None:
    beside = planned(kind, share, largest)
    for size in sizes:
        beside.check(*KINDS[kind][1](size))


def test_plans_that_are_known_are_listed() -> None:
    beside = planned("recorded", 0.2, 192, "remat")
    for size in (192, 64, 128):
        beside.step(*rows(size))
    table = {one.shapes[0][0]: one for one in beside.planned.plans()}
    assert table.keys() == {192, 64, 128}
    assert all(one.memory <= beside.limit for one in table.values())
    assert table[192].makespan > 0 < table[192].overhead
    assert table[64].makespan > 0 == table[64].overhead  # of which everything is kept


def test_up_to_a_size_all_that_are_smaller_are_known() -> None:
    beside = planned("tokens", 0.4, 96)
    beside.planned.compute_sequence(beside.limit, up_to=KINDS["tokens"][1](96))
    for length, batch in ((96, 8), (50, 8), (40, 5), (96, 3), (4, 8), (96, 8)):
        beside.step(torch.randint(0, 50, (batch, length)))
        assert beside.planned.get_expected_memory() <= beside.limit


def test_up_to_a_size_that_does_not_fit_says_so() -> None:
    wrapped = planned("tokens", 0.0, 96).planned
    limit = 3 * wrapped.mem_limit // 4
    with pytest.raises(
        rotoff.InfeasibleError, match=r"on the input of up_to, \[\[8, 96\]\], the training step needs at"
    ) as caught:
        wrapped.compute_sequence(limit, up_to=KINDS["tokens"][1](96))
    assert caught.value.min_mem_limit > limit
    wrapped.compute_sequence(caught.value.min_mem_limit, up_to=KINDS["tokens"][1](96))


@pytest.mark.parametrize("shape", [(4, 0, WIDTH), (0, 8, WIDTH)])
def test_up_to_an_empty_input_that_does_not_fit(shape: tuple[int, ...]) -> None:
    model = rotoff.Checkpointable(KINDS["recorded"][0]())
    with pytest.raises(rotoff.InfeasibleError) as caught:
        model.compute_sequence(100, up_to=torch.randn(shape))
    model.compute_sequence(caught.value.min_mem_limit, up_to=torch.randn(shape))


def test_a_size_that_the_model_does_not_take_raises_what_pytorch_raises_and_is_not_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "callHandlers", logged.append)
    model = rotoff.Checkpointable(nn.Linear(WIDTH, 4)).measure(torch.randn(2, WIDTH)).compute_sequence("1 MiB")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.randn(2, WIDTH + 1))
    assert not logged


def test_an_input_larger_than_announced_is_said(caplog: pytest.LogCaptureFixture) -> None:
    beside = planned("tokens", 1.0, 24)
    beside.planned.compute_sequence("1 GiB", up_to=KINDS["tokens"][1](24))
    with caplog.at_level(logging.WARNING, "rotoff"):
        beside.step(*KINDS["tokens"][1](160))
    assert "the input [[8, 160]] is larger than up_to" in caplog.text


LENGTHS = (64, 31, 48, 9, 64, 23, 57, 40)


def language() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(5)]
    return nn.Sequential(nn.Embedding(40, 32), *blocks, nn.Linear(32, 40))


def batches(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (16, length), generator=generator) for length in lengths]


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.fixture
def searches() -> Iterator[mock.Mock]:
    with mock.patch.object(planner, "solve", wraps=planner.solve) as solve:
        yield solve


def limited(model: nn.Module, updates: str, **options: Any) -> tuple[rotoff.Checkpointable, torch.optim.Optimizer, int]:
    """The model with half of the memory that it needs at its largest size."""
    wrapped, optimizer = rotoff.Checkpointable(model), adamw(model.parameters())[0]
    torch.manual_seed(3)
    wrapped.measure(batches()[0], repeats=1).compute_sequence(device_limit="1 TiB", optimizer=optimizer)
    limit = wrapped.keep_all_memory // 2
    wrapped.compute_sequence(device_limit=limit, optimizer=optimizer, updates=updates, refine=False, **options)
    return wrapped, optimizer, limit


@pytest.mark.parametrize("updates", ["after", "during"])
@pytest.mark.grid
def test_smaller_batches_need_no_search(updates: str, searches: mock.Mock) -> None:
    model = language()
    plain = copy.deepcopy(model)
    wrapped, optimizer, limit = limited(model, updates)
    searched, twin = searches.call_count, adamw(plain.parameters())[0]
    for n, tokens in enumerate(batches()):
        torch.manual_seed(n)
        told = step(wrapped, optimizer, tokens)
        torch.manual_seed(n)
        assert told == step(plain, twin, tokens)
    assert searches.call_count == searched
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    rows = {row.shapes[0][1]: row for row in wrapped.plans()}
    assert set(rows) == set(LENGTHS)
    assert sum(row.measured for row in rows.values()) <= 3
    assert all(row.memory <= limit for row in rows.values())


def test_a_smaller_batch_keeps_its_predicted_peak() -> None:
    model = language()
    wrapped, optimizer, _ = limited(model, "after")
    tokens = batches((64, 31, 40))
    for one in tokens:
        step(wrapped, optimizer, one)
    for one in tokens[1:]:  # what lies on the device between steps counts, too
        measured = peak_bytes(
            lambda one=one: step(wrapped, optimizer, one), before=lambda: own_again(model, [optimizer])
        )
        assert 0.7 * wrapped.get_expected_memory() <= measured + one.nbytes <= wrapped.get_expected_memory()


def test_a_larger_batch_is_planned_anew(searches: mock.Mock) -> None:
    wrapped, optimizer, limit = limited(language(), "after")
    (larger,) = batches((72,))
    searched = searches.call_count
    step(wrapped, optimizer, larger)
    assert searches.call_count > searched
    assert wrapped.get_expected_memory() <= limit


def test_the_largest_batch_is_planned_before_training(searches: mock.Mock) -> None:
    largest, *smaller = batches()
    model = language()
    wrapped, optimizer = (
        rotoff.Checkpointable(model).measure(smaller[0]),
        adamw(model.parameters())[0],
    )
    wrapped.compute_sequence(device_limit="1 TiB", optimizer=optimizer, up_to=largest)
    limit = wrapped.keep_all_memory // 2
    wrapped.compute_sequence(device_limit=limit, optimizer=optimizer, up_to=largest, refine=False)
    searched = searches.call_count
    for tokens in (*smaller, largest):
        step(wrapped, optimizer, tokens)
    assert searches.call_count == searched
    with pytest.raises(rotoff.InfeasibleError, match="the device_limit is 1.00 KiB"):
        wrapped.compute_sequence(device_limit="1 KiB", optimizer=optimizer, up_to=largest)

"""Skip connections kept in place: found from one measurement, planned beside carrying, and run to the plain model's
bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from allocated import live_bytes, peak_bytes
from models import fresh
from random_programs import random_sequence
from recording_link import RecordingLink, moves_over
from thoroughness import seeds
from torch import nn
from torch.nn import functional as F

import rotoff
from rotoff.core.chain import Chain, Form, Stage
from rotoff.planning.planner import least_limit, make_plan
from rotoff.planning.request import Request
from rotoff.profile.memory.skips import Skip, StorageAliasing, behave_in_place, choices, find_skips, keep_in_place
from rotoff.runtime.execution_plan import compile_sequence
from rotoff.runtime.overhead import NO_OVERHEAD
from rotoff.solver import anneal
from rotoff.tensors.stage import Behaviour, SavedKind

KiB = 1024


class UNet(nn.Module):
    """Three resolutions, batch norm and dropout on the way down."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(sizes, sizes[1:], strict=False))
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in sizes[1:])
        self.up = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in zip(sizes, sizes[1:], strict=False))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.stem(x))
        skips = []
        for conv, norm in zip(self.down, self.norms, strict=True):
            skips.append(x)
            x = F.dropout(F.gelu(norm(conv(F.max_pool2d(x, 2)))), 0.1)
        for conv, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = F.gelu(conv(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1)))
        return self.head(x)


class Attend(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(self.norm(x)), self.key(memory), self.value(memory)
        x = x + F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1)
        return x + self.down(F.gelu(self.up(x)))


class Translator(nn.Module):
    """All layers of the decoder read the encoder's output."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(20, width)
        self.encoder, self.decoder = (nn.ModuleList(Attend(width) for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.words(x)
        for layer in self.encoder:
            memory = layer(memory, memory)
        y = self.words(x.flip(1))
        for layer in self.decoder:
            y = layer(y, memory)
        return y


class Collecting(nn.Module):
    """Returns the hidden state of every layer, so that some of what it keeps is the caller's too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = []
        for layer in self.layers:
            x = torch.tanh(layer(x)) * torch.sigmoid(x)
            states.append(x)
        return states[-1] if not self.training else sum(state.square().mean() for state in states)


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]] = {
    "unet": lambda: (UNet(), lambda: torch.randn(2, 3, 16, 16)),
    "translator": lambda: (Translator(), lambda: torch.randint(0, 20, (4, 12))),
    "collecting": lambda: (Collecting(), lambda: torch.randn(32, 16)),
    "handed_on": lambda: fresh("handed_on"),
}


def made(name: str, **options: Any) -> tuple[rotoff.Checkpointable, Callable[[], torch.Tensor]]:
    """The model `name`, measured, with about a stage for every few operations; and a way to draw a batch."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    count = None if isinstance(model, nn.Sequential) else 12
    wrapped = rotoff.Checkpointable(model, stages=count, cache_directory=None, **options).measure(batch())
    return wrapped, batch


def having(wrapped: rotoff.Checkpointable, sequence: rotoff.Sequence, kept: tuple[int, ...]) -> rotoff.Checkpointable:
    """Have `wrapped` run `sequence` with the skips `kept` in place."""
    wrapped.compute_sequence(1 << 40)
    wrapped._latest.plan = compile_sequence(wrapped.profile.keeping(kept).chain, sequence, kept=kept)
    return wrapped


def step(model: nn.Module, batch: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What one training step makes: the loss, gradients, buffers and the generator's state."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = model(batch()).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), *model.buffers(), torch.get_rng_state()]


def wanted(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return step(model, batch)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def ways(wrapped: rotoff.Checkpointable) -> Iterator[tuple[int, ...]]:
    """Choices of skips to keep, the first alone among them."""
    yield from dict.fromkeys([*choices(wrapped.profile.skips), (0,)])


# -- what is found


def test_skips_are_found_with_their_bytes() -> None:
    wrapped, _ = made("handed_on")
    (skip,) = wrapped.profile.skips
    assert (skip.first, skip.last, skip.nbytes, skip.carried) == (2, 3, 32 * 16 * 4, 1)
    assert skip.outputs == ((1,), (0,))
    assert (
        wrapped.chain.stages[1].output_bytes - wrapped.profile.keeping((0,)).chain.stages[1].output_bytes == skip.nbytes
    )


def test_skips_of_unet_and_encoder_are_found() -> None:
    found = made("unet")[0].profile.skips
    sizes = {2 * 4 * 16 * 16 * 4: 0, 2 * 8 * 8 * 8 * 4: 0}  # outputs of the first two resolutions
    for skip in found:
        sizes[skip.nbytes] = max(sizes.get(skip.nbytes, 0), skip.carried)
    assert sizes[2 * 4 * 16 * 16 * 4] > sizes[2 * 8 * 8 * 8 * 4] >= 1
    memory = max(made("translator")[0].profile.skips, key=lambda skip: skip.carried)
    assert memory.nbytes == 4 * 12 * 16 * 4
    assert memory.carried >= 2


def lies(*outputs: tuple[int, int | None, int], saved: Any = (), written: Any = ()) -> StorageAliasing:
    return StorageAliasing(outputs, tuple(saved), frozenset(written))


def own(count: int, saved: int = 0, lasting: int = 0) -> Behaviour:
    return Behaviour((SavedKind.INPUT,) * saved, (True,) * count + (False,) * lasting)


def test_storages_are_followed_from_stage_to_stage() -> None:
    """Made by stage 1 as two views, handed on by 2 in another place, used by 3, which saves it."""
    runs = [
        (lies((8, None, 0), (64, None, 1), (64, None, 1), saved=[(None, 1), (None, None)]), own(3, 2)),
        (lies((64, 2, 0), (16, None, 1), saved=[(0, None)]), own(2, 1)),
        (lies((4, None, 0), saved=[(1, None), (0, None)]), own(1, 2)),
    ]
    assert find_skips(runs) == (Skip(1, 2, 64, ((1, 2), (0,)), ((0,), (), (1,)), 64),)


def test_batch_tensors_and_overwritten_storages_are_no_skips() -> None:
    table = [
        (lies((8, None, 0), (64, None, 1)), own(1, lasting=1)),
        (lies((8, None, 0), (64, 1, 1)), own(1, lasting=1)),
    ]
    assert find_skips(table) == ()
    runs = [(lies((8, None, 0), (64, None, 1)), own(2)), (lies((8, None, 0), (64, 1, 1)), own(2))]
    assert len(find_skips(runs)) == 1
    assert find_skips([*runs, (lies((8, None, 0), written=[1]), own(1))]) == ()


def test_stage_table_lists_skips_and_the_plans_choice() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["handed_on"]()
    wrapped = rotoff.Checkpointable(model, cache_directory=None)
    found = rotoff.stages(wrapped, batch())
    assert found.skips == ((2, 3, 2048, None),)
    assert str(found).endswith("skip of 2.00 KiB, stages 2 to 3: may be kept in place")
    assert wrapped.kept_skips is None
    wrapped.compute_sequence(1 << 40)
    assert rotoff.stages(wrapped, batch()).skips == ((2, 3, 2048, True),)
    assert wrapped.kept_skips == (0,)
    wrapped.close()


# -- what it costs


def test_kept_skip_is_in_no_value() -> None:
    """Where it is handed on it was charged twice while the stage ran, which may have hidden what the stage takes
    then."""
    stage = Stage("s", 1.0, 2.0, 100, 300, 50, 7, 9, 11, (Form(250, 3.0, 5, 6),))
    chain = Chain((stage,) * 4, 1.0, 1.0)
    kept = keep_in_place(
        chain, [Skip(2, 3, 40, ((0,), (0,)), ((), (), ()), 40)], [(0, 0), (0, 0), (30, 50), (0, 0)], [90, 25, 90, 0]
    )
    first, second, third, fourth = kept.stages
    assert first == fourth == stage
    assert third == Stage("s", 1.0, 2.0, 60, 260, 50, 17, 9, 11, (Form(210, 3.0, 45, 6),))
    # its B has no room that its output would leave: 25 bytes of those 40 were used, and of a form that is not known
    assert second == Stage("s", 1.0, 2.0, 60, 260, 50, 47, 49, 36, (Form(210, 3.0, 45, 46),))


class Words(nn.Module):
    """Returns its loss and, like most language models, what that was made of."""

    def __init__(self, width: int = 16, words: int = 80) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Attend(width) for _ in range(4))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y, y)
        logits = self.head(y)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), x.flatten()), "logits": logits}


def test_output_held_by_caller_is_charged_in_backward() -> None:
    """Nobody's backward needs the logits, so that of the head could use their room; kept in place, they stay."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 80, (2, 24))
    wrapped = rotoff.Checkpointable(Words(), cache_directory=None, forms=False).measure(tokens)
    assert wrapped._specializations.latest is not None
    profile = wrapped._specializations.latest.profile
    head, loss = len(profile.chain) - 1, len(profile.chain)
    skip_bytes = 2 * 24 * 80 * 4
    skip = next(n for n, s in enumerate(profile.skips) if (s.first, s.last, s.nbytes) == (head, loss, skip_bytes))
    carried, kept = profile.chain.stages[head - 1], profile.keeping([skip]).chain.stages[head - 1]
    # as output and by way of the loss two gradients reach them, whose sum the head's B makes; δ of its input is charged
    # anyway
    assert (carried.backward_transient_bytes, kept.backward_transient_bytes) == (0, skip_bytes - 2 * 24 * 16 * 4)
    wrapped.close()


def test_saved_tensors_of_kept_skips_become_kept() -> None:
    kinds = (SavedKind.OWN, SavedKind.INPUT, SavedKind.RESIDENT)
    made = behave_in_place([Behaviour(kinds, (True, True))] * 3, [Skip(1, 2, 8, ((1,), (0,)), ((0,), (), (1, 2)), 8)])
    assert [b.kept for b in made] == [(1,), (0,), ()]
    assert [b.own_outputs for b in made] == [(True, False), (False, True), (True, True)]
    assert [b.saved for b in made] == [
        (SavedKind.KEPT, SavedKind.INPUT, SavedKind.RESIDENT),
        kinds,
        (SavedKind.OWN, SavedKind.KEPT, SavedKind.KEPT),
    ]


def test_choices_are_all_long_and_no_skips() -> None:
    short, long = Skip(1, 2, 8, (), (), 8), Skip(1, 5, 8, (), (), 8)
    assert choices([]) == [()]
    assert choices([short]) == [(0,), ()]
    assert choices([long]) == [(0,), ()]
    assert choices([short, long, short]) == [(0, 1, 2), (1,), ()]


# -- how it runs


@pytest.mark.parametrize("name", MODELS)
def test_random_sequences_with_skips_train_bit_for_bit(name: str) -> None:
    expected = wanted(name)
    wrapped, batch = made(name, check=True)
    state = {k: v.clone() for k, v in wrapped.state_dict().items()}
    for kept in ways(wrapped):
        chain = wrapped.profile.keeping(kept).chain
        for seed in seeds(4):
            wrapped.load_state_dict(state)
            sequence = random_sequence(chain, seed, wildness=0.7, forms=True)
            assert same(step(having(wrapped, sequence, kept), batch), expected), f"{kept}\n{sequence}"
    wrapped.close()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.grid
def test_sequences_hold_at_most_predicted_bytes(name: str) -> None:
    """On batches so large that the generators' states are nothing beside them."""
    torch.manual_seed(0)
    model, small = MODELS[name]()
    x = torch.cat([small() for _ in range(16)])
    wanted = None if isinstance(model, nn.Sequential) else 12
    wrapped = rotoff.Checkpointable(model, stages=wanted, cache_directory=None).measure(x)
    for kept in ways(wrapped):
        chain = wrapped.profile.keeping(kept).chain
        texts = [
            str(random_sequence(chain, seed, wildness=wildness, forms=True))
            for seed, wildness in enumerate((0.7, 0.7, 0.1))
        ]
        for text in (*texts, str(rotoff.solver.keep_all(chain)) + "\n"):
            having(wrapped, rotoff.Sequence.from_text(text), kept)
            wrapped._latest.plan = replace(wrapped._latest.plan, keeps_all=False)  # or it would be the plain model
            measured, predicted = measured_peak(wrapped, x), wrapped.get_expected_memory()
            assert measured <= predicted, f"{measured} > {predicted} keeping {kept}\n{wrapped.sequence}"
    wrapped.close()


class Splits(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x), torch.sigmoid(x)


class TakesMuchFor(nn.Module):
    """A moment, beside a skip that it hands on."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(pair[0] + pair[0].detach().repeat(1, 16).mean()), pair[1]


class Joins(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] * pair[1]


def test_transients_are_charged_beside_passed_on_skips() -> None:
    model = nn.Sequential(nn.Linear(8, 32), Splits(), TakesMuchFor(), Joins(), nn.Linear(32, 4))
    x = torch.randn(512, 8)
    wrapped = rotoff.Checkpointable(model, cache_directory=None, forms=False).measure(x)
    (skip,) = wrapped.profile.skips
    for kept in ((0,), ()):
        sequence = rotoff.solver.keep_all(wrapped.profile.keeping(kept).chain)
        having(wrapped, sequence, kept)
        wrapped._latest.plan = replace(wrapped._latest.plan, keeps_all=False)  # or it would be the plain model
        measured, predicted = measured_peak(wrapped, x), wrapped.get_expected_memory()
        assert measured <= predicted < measured + skip.nbytes / 2
    wrapped.close()


def measured_peak(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that one step allocates beside parameters' gradients, the batch, and what the caller makes of the
    output."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gradient = torch.ones_like(model(x))
    return peak_bytes(lambda: model(x).backward(gradient))


@pytest.mark.parametrize("name", ["unet", "translator"])
def test_copies_with_kept_skips_have_no_race(name: str) -> None:
    expected = wanted(name)
    for seed in range(2):
        wrapped, batch = made(name)
        kept = tuple(range(len(wrapped.profile.skips)))
        link = RecordingLink(0.5, seed)
        sequence = random_sequence(wrapped.profile.keeping(kept).chain, seed, wildness=0.75)
        moves_over(wrapped, link)
        assert same(step(having(wrapped, sequence, kept), batch), expected)
        assert link.check() == [], str(sequence)
        link.close()


@contextmanager
def failing_in(stage: nn.Module) -> Iterator[None]:
    hook = stage.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("injected")))
    try:
        yield
    finally:
        hook.remove()


def test_dropped_or_failed_forward_frees_kept_skips() -> None:
    wrapped, batch = made("handed_on")
    text = ["F_all 1", "F_ck 2", "F_none 3", "F_all 4", "F_all 5", "B 5", "B 4"]
    text += ["F_all 2", "F_all 3", "B 3", "B 2", "B 1"]
    having(wrapped, rotoff.Sequence.from_text(text), (0,))
    x = batch()
    wrapped(x).sum().backward()
    before = live_bytes()
    wrapped(x)
    assert live_bytes() == before
    with failing_in(wrapped[4]), pytest.raises(MemoryError, match="injected"):
        wrapped(x)
    assert live_bytes() == before
    wrapped(x).sum().backward()
    assert live_bytes() == before
    wrapped.close()


# -- what is planned


# Stages that end where blocks do, as in a larger model: between finer ones lie outputs that nobody saves, which is
# another matter.
@pytest.mark.parametrize(("name", "count", "share"), [("unet", 40, 1.1), ("translator", 10, 1.05)])
def test_keep_all_memory_is_close_to_plain_model(name: str, count: int, share: float) -> None:
    torch.manual_seed(0)
    model, x = (
        (UNet(8), torch.randn(8, 3, 64, 64)) if name == "unet" else (Translator(64), torch.randint(0, 20, (8, 64)))
    )
    wrapped = rotoff.Checkpointable(model, stages=count, cache_directory=None, forms=False).measure(x)
    real = measured_peak(model, x)
    carried = rotoff.simulate(wrapped.profile.chain, rotoff.solver.keep_all(wrapped.profile.chain)).peak_bytes
    assert real <= wrapped.keep_all_memory <= share * real
    assert wrapped.keep_all_memory < carried - wrapped.profile.chain.input_bytes
    for mode in ("remat", "joint"):
        limit = int(0.7 * wrapped.keep_all_memory)
        wrapped.compute_sequence(limit, mode=mode)
        assert measured_peak(wrapped, x) <= wrapped.get_expected_memory() <= limit
    wrapped.close()


def with_times(stages: tuple[Stage, ...], more: float = 0.0) -> tuple[Stage, ...]:
    """`stages` with times that are the same in every run."""
    return tuple(
        replace(stage, forward_time=1 + n % 3, backward_time=2 + n % 4 + more, tail_time=0.0, forms=())
        for n, stage in enumerate(stages)
    )


@pytest.mark.slow
def test_planner_chooses_faster_skip_treatment_and_smaller_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anneal, "DEFAULT_SECONDS", 100 * anneal.DEFAULT_SECONDS)  # the search has what users give it
    wrapped, _ = made("unet")
    found, request = wrapped.profile, Request(1, "remat", 50, {})
    profile = replace(
        found,
        chain=replace(found.chain, stages=with_times(found.chain.stages)),
        compact=found.compact and found.compact._replace(stages=with_times(found.compact.stages, 0.1)),
        behaviours=tuple(replace(one, forms=()) for one in found.behaviours),
        overhead_times=NO_OVERHEAD,
    )
    ways = [(kept, compact) for kept in choices(profile.skips) for compact in (False, True)]
    profiles = {way: replace(profile.keeping(*way), skips=(), compact=None) for way in ways}
    limits = {way: least_limit(alone, request) for way, alone in profiles.items()}
    assert least_limit(profile, request) == min(limits.values())
    everything = wrapped.keep_all_memory
    for share in (0.9, 0.7, 0.5):
        limit = max(int(share * everything), min(limits.values()))
        plan = make_plan(profile, replace(request, mem_limit=limit))
        sequence, seconds = plan.sequence, plan.trace.makespan
        assert seconds == rotoff.simulate(plan.chain, sequence).makespan
        assert list(plan.kept) == sequence.meta.get("kept_skips", [])
        assert plan.compact == sequence.meta.get("compact_gradients", False)
        for way, alone in profiles.items():
            more = alone.resident_input_bytes - alone.unmanaged_bytes - alone.snapshot_bytes - alone.replay_bytes
            if limit >= limits[way]:
                assert seconds <= rotoff.solve(alone.with_overhead().chain, limit + more, mode="remat").meta["makespan"]
    wrapped.compute_sequence(everything)
    assert wrapped._plan.keeps_all
    wrapped.close()

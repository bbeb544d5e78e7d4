"""What a replay sees and leaves: generators and autocast where stages use them in unusual ways."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import fresh, plain, same, train
from planned_steps import compare, sequential, smallest, with_sequence
from torch import nn

import rotoff
from rotoff.core.sequence import FORWARDS
from rotoff.runtime import stage_tape
from rotoff.runtime.replay import ReplayState
from rotoff.runtime.stage_run import StageRun
from rotoff.tensors.rng import Generators


def run_twice(L: int) -> rotoff.Sequence:
    """Every stage but the last runs again right before its backward."""
    text = [f"F_ck {i}" for i in range(1, L)] + [f"F_all {L}", f"B {L}"]
    for i in range(L - 1, 0, -1):
        text += [f"F_all {i}", f"B {i}"]
    return rotoff.Sequence.from_text(text)


class Asks(nn.Module):
    """Asks a buffer for a number, which is then a part of what Python did."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * float(self.scale)


def test_a_buffer_that_no_call_of_a_replay_reads_may_change_before_the_backward() -> None:
    def gradients(model: nn.Sequential, run: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(2)
        loss = run(torch.randn(4, 16, requires_grad=True)).sum()
        model[1].scale.fill_(7.0)
        loss.backward()
        return [p.grad for p in model.parameters()]

    model = nn.Sequential(nn.Linear(16, 16), Asks(), nn.Linear(16, 4))
    again = copy.deepcopy(model)
    wrapped = rotoff.Checkpointable(model).measure(torch.randn(4, 16, requires_grad=True))
    with_sequence(wrapped, run_twice(len(wrapped.chain)))
    assert same(gradients(model, wrapped), gradients(again, again))
    wrapped.close()


def test_hooks_that_draw_between_replays() -> None:
    """Noise added to gradients, as private training does: it must come from the generator as it stands outside."""

    def run(model: nn.Module, batch: object) -> list[torch.Tensor]:
        hooks = [p.register_hook(lambda g: g + torch.randn_like(g)) for p in model.parameters()]
        result = train(model, batch)
        for hook in hooks:
            hook.remove()
        return result

    compare(lambda: fresh("residual"), run)


@pytest.mark.parametrize("forward_casts", [True, False])
def test_a_backward_under_other_autocast_than_the_forward(forward_casts: bool) -> None:
    def step(model: nn.Module, batch: object) -> list[torch.Tensor]:
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_casts):
            loss = model(batch()).float().square().mean()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not forward_casts, cache_enabled=False):
            loss.backward()
            assert torch.is_autocast_enabled("cpu") is not forward_casts
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()
        return [p.grad.clone() for p in model.parameters()]

    expected = step(*fresh("residual"))
    model, batch = fresh("residual")
    wrapped = rotoff.Checkpointable(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward_casts):
        wrapped.measure(batch())
    assert same(step(with_sequence(wrapped, run_twice(len(wrapped.chain))), batch), expected)


class Unrolled(nn.Module):
    """The layers of a Sequential, called by a forward of its own, which is recorded."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("switch", ["frozen, then thawed", "frozen between", "eval between"])
@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_switched_between_a_forward_and_its_backward(recorded: bool, switch: str) -> None:
    """A GAN freezes its discriminator for the generator's loss and thaws it before the backward."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.Tanh()) for _ in range(6)]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(32, 4))
    if recorded:
        model = Unrolled(model)
    begun_frozen = switch == "frozen, then thawed"

    def step(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x = torch.randn(64, 32).requires_grad_()
        model.requires_grad_(not begun_frozen)
        loss = model(x).square().mean()
        if switch == "eval between":
            model.eval()
        else:
            model.requires_grad_(begun_frozen)
        loss.backward()
        flags = [p.requires_grad for p in model.parameters()] + [m.training for m in layers]
        assert set(flags) == ({False, True} if switch == "frozen between" else {True, switch != "eval between"})
        model.train()
        model.requires_grad_(not begun_frozen)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return [x.grad.clone(), *grads, *(b.clone() for b in model.buffers())]

    state = copy.deepcopy(model.state_dict())
    expected = step(model) + step(model)
    model.load_state_dict(state)
    model.requires_grad_(not begun_frozen)
    wrapped = rotoff.Checkpointable(model).measure(torch.randn(64, 32).requires_grad_())
    wrapped.compute_sequence(smallest(wrapped, "remat"), mode="remat")
    assert any(op.kind in FORWARDS for op in wrapped.sequence.ops[len(wrapped.chain) + 1 :])
    assert same(step(wrapped) + step(wrapped), expected)


def test_a_replay_for_its_own_backward_ends_at_the_last_tensor_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last product of a block saves its argument before it runs, and nobody takes its result: it is not finished
    again."""
    model, batch = fresh("residual")
    wrapped = with_sequence(rotoff.Checkpointable(model, forms=False).measure(batch()), run_twice(6))
    made = stage_tape._made
    begun, ended = [0] * 4, [0] * 4
    down = [block.down.weight for block in list(model)[1:5]]

    def counted(call: Any, *values: Any) -> Any:
        n = next((n for n, weight in enumerate(down) if any(a is weight for a in call[1])), None)
        if n is not None:
            begun[n] += 1
        result = made(call, *values)
        if n is not None:
            ended[n] += 1
        return result

    monkeypatch.setattr(stage_tape, "_made", counted)
    assert same(train(wrapped, batch, steps=3), plain("residual", steps=3))
    assert begun == [3] * 4
    assert ended == [3] * 4  # the mask of the dropout behind it is saved
    for block in list(model)[1:5]:
        block.dropout.p = 0.0
    again = with_sequence(rotoff.Checkpointable(model, forms=False).measure(batch()), run_twice(6))
    begun[:], ended[:] = [0] * 4, [0] * 4
    model.zero_grad()
    x = batch()
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    again(x).sum().backward()
    assert same([p.grad for p in model.parameters()], expected)
    assert begun == [1] * 4
    assert ended == [0] * 4


class Carries(nn.Module):
    """Hands two values from block to block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(12))

    def forward(self, x: torch.Tensor, back: int | None) -> torch.Tensor:
        y, passed = x, []
        for block in self.blocks:
            x, y = torch.tanh(block(x) + y), torch.sin(x * y)
            passed.append(x)
        return x.mean() + y.mean() + (0.0 if back is None else passed[back].mean())


def test_a_hollow_tensor_is_filled_by_one_replay_of_each_stage_before(monkeypatch: pytest.MonkeyPatch) -> None:
    restored, replays = StageRun.restored, []
    monkeypatch.setattr(StageRun, "restored", lambda run, *given: replays.append(run.i) or restored(run, *given))
    model, x = Carries(), torch.randn(64, 16)
    wrapped = rotoff.Checkpointable(model, stages=12).measure(x, None)
    wrapped.compute_sequence(wrapped.min_mem_limit("remat"), mode="remat", refine=False)
    losses = [one(x, 9) for one in (model, wrapped)]
    assert same(*(list(torch.autograd.grad(loss, [*model.parameters()])) for loss in losses))
    assert 5 < len(replays) == len({*replays})


def test_an_operation_that_writes_what_it_saved_runs_to_its_end() -> None:
    """``rrelu`` saves its noise, and only then draws it."""
    stages = sequential(nn.Linear(16, 16), nn.RReLU(), nn.Tanh(), nn.Linear(16, 4))[0]
    apart = rotoff.Checkpointable(stages, stages=["0", "1", "2", "3"])
    profile = apart.measure(torch.randn(8, 16)).profile
    assert [behaviour.early_stop for behaviour in profile.behaviours[1:3]] == [0, 1]


class DeviceGenerator:
    """As CUDA's: it remembers that its state was put, until cuDNN has filled its own buffer of random bits from it."""

    def __init__(self) -> None:
        self.state, self.put = torch.zeros(16, dtype=torch.uint8), False

    def get_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_state(self, state: torch.Tensor) -> None:
        self.state, self.put = state.clone(), True

    def clone_state(self) -> DeviceGenerator:
        copy = DeviceGenerator()
        copy.state = self.state.clone()
        return copy


class Buffer:
    """What cuDNN's recurrent layers draw their dropout from: it goes on from run to run."""

    def __init__(self, generator: DeviceGenerator) -> None:
        self.generator, self.content = generator, 100

    def draw(self) -> int:
        if self.generator.put:
            self.generator.put = False
            self.content = 1000 * int(self.generator.state[0])
            self.generator.state[0] += 1
        self.content += 1
        return self.content


def test_random_bits_that_go_on_from_run_to_run_are_drawn_again_in_a_replay() -> None:
    generators = Generators(torch.device("cpu"))
    generator = DeviceGenerator()
    generators._own.append(generator)  # type: ignore[arg-type]
    buffer = Buffer(generator)
    runs = []
    for _ in range(3):
        state = ReplayState(generators, [])
        runs.append((state, buffer.draw()))
    assert len({drawn for _, drawn in runs}) == 3
    for state, drawn in reversed(runs):
        with state.again():
            assert buffer.draw() == drawn
    assert int(generator.state[0]) == 3  # as before the replays


def test_a_state_is_kept_once_until_something_is_drawn() -> None:
    generators = Generators(torch.device("cpu"))
    before = generators.copies()
    first = generators.states()
    assert generators.states() is first
    torch.rand(1)
    second, after = generators.states(), generators.copies()
    assert second is not first
    generators.put(before)
    assert bytes(torch.get_rng_state().tolist()) == first[0]
    # exactly one whole round of the generator: only the words change, no position does
    generators.put(after)
    position = generators.states()
    torch.empty(624, dtype=torch.int32).random_()
    assert generators.states() is not position


class Doubled(torch.autograd.Function):
    """Changes what it is given, which no schema says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        seen.add_(x.detach().mean())
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * 2, None


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x, self.seen).tanh()


class Whole(nn.Module):
    """Not a sequence, so that its forward is followed."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 1


@pytest.mark.parametrize("around", [nn.Identity, Whole])
def test_a_custom_function_that_changes_its_arguments(
    around: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Doubling(), nn.Linear(8, 8), Doubling(), nn.Linear(8, 8)
    )
    x = torch.randn(4, 8)
    model = Whole(layers) if around is Whole else layers
    plain_model = copy.deepcopy(model)
    wrapped = rotoff.Checkpointable(model).measure(x)
    with_sequence(wrapped, run_twice(len(wrapped.chain)))
    for _ in range(2):
        for one in (wrapped, plain_model):
            one.zero_grad()
            one(x).square().sum().backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in plain_model.parameters()])
        assert same(list(model.buffers()), list(plain_model.buffers()))
    assert "another course" not in caplog.text


class Adding(nn.Module):
    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = x.add(1.0)
        return x


def functions_entered(calls: int) -> int:
    """Return how many of rotoff's own Python functions the forward of a planned step enters."""
    x = torch.ones(4, requires_grad=True)
    model = nn.Sequential(nn.Tanh(), Adding(calls), nn.Tanh())
    wrapped = rotoff.Checkpointable(model, forms=False).measure(x)
    with_sequence(wrapped, run_twice(len(wrapped.chain)))(x).backward(x)
    own, count = str(Path(rotoff.__file__).parent), 0

    def entered(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(own)

    sys.setprofile(entered)
    try:
        result = wrapped(x)
    finally:
        sys.setprofile(None)
    result.backward(x)
    return count


def test_an_ordinary_call_of_torch_enters_one_python_function() -> None:
    """The mode's method; what it calls is compiled."""
    assert functions_entered(30) - functions_entered(10) == 20

"""What a replay sees and leaves: generators and autocast where stages use them in unusual ways."""

from __future__ import annotations

import pytest
import torch
from models import fresh, same, train
from test_composition import compare, sequential
from test_runtime import with_sequence
from torch import nn

import rotoff
from rotoff.runtime.replay import Generators


def run_twice(L: int) -> rotoff.Sequence:
    """Every stage but the last runs again right before its backward."""
    text = [f"F_ck {i}" for i in range(1, L)] + [f"F_all {L}", f"B {L}"]
    for i in range(L - 1, 0, -1):
        text += [f"F_all {i}", f"B {i}"]
    return rotoff.Sequence.from_text(text)


class ForkedNoise(nn.Module):
    """Reads the generator's state, draws, and puts the state back: nothing seems to have been drawn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            return x * torch.rand_like(x)


def test_a_stage_that_draws_and_puts_the_generator_back() -> None:
    compare(
        lambda: sequential(nn.Linear(16, 16), ForkedNoise(), nn.Dropout(), nn.Tanh(), ForkedNoise(), nn.Linear(16, 4)), train
    )


def test_a_stage_that_begins_to_draw_after_it_was_measured() -> None:
    """Stochastic depth whose rate grows from 0: as many tensors are saved, of the same shapes."""

    class Path(nn.Module):
        rate = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = torch.ones(len(x), 1) if self.rate == 0 else (torch.rand(len(x), 1) > self.rate).float()
            return x + torch.tanh(x) * kept

    def steps(model: nn.Sequential, wrapped: nn.Module) -> list[torch.Tensor]:
        seen = []
        for rate in (0.0, 0.5, 0.7):
            for module in model:
                if isinstance(module, Path):
                    module.rate = rate
            seen += train(wrapped, batch, steps=1)
        return seen

    torch.manual_seed(0)
    model, batch = sequential(nn.Linear(16, 16), Path(), Path(), Path(), nn.Linear(16, 4))
    state = {name: t.clone() for name, t in model.state_dict().items()}
    expected = steps(model, model)
    model.load_state_dict(state)
    for module in model:
        module.rate = 0.0
    wrapped = with_sequence(rotoff.Checkpointable(model).measure(batch(), repeats=1), run_twice(5))
    assert same(steps(model, wrapped), expected)


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
        wrapped.measure(batch(), repeats=1)
    assert same(step(with_sequence(wrapped, run_twice(6)), batch), expected)


def test_a_state_is_kept_once_until_something_is_drawn() -> None:
    generators = Generators(torch.device("cpu"))
    first = generators.states()
    assert generators.states() is first
    torch.rand(1)
    second = generators.states()
    assert second is not first
    generators.put(first)
    assert torch.equal(torch.get_rng_state(), first[0])
    # exactly one whole round of the generator: only the words change, no position does
    generators.put(second)
    position = generators.states()
    torch.empty(624, dtype=torch.int32).random_()
    assert generators.states() is not position

"""Gradients that wait in a part of a larger storage: what they hold, and what a plan gains that copies them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from allocated import peak_bytes
from skip_models import Skipping
from torch import nn

import rotoff
from rotoff.planning.planner import least_limit
from rotoff.planning.request import Request
from rotoff.profile.memory.gradients import Charge, GradientPlace, charge


def test_waiting_part_is_copied_and_its_storage_freed() -> None:
    # Stage 3 concatenates: both gradients lie in one storage of 12. Stage 2 hands the first on; stage 1 makes it.
    both = GradientPlace(7, 12, None)
    first, second = GradientPlace(1, 2, None), GradientPlace(0, 6, 0)
    stages = [([first], [6]), ([second], [6, 6]), ([both, both], [12])]
    assert charge(stages) == [Charge(2, fresh_bytes=2), Charge(12), Charge(12, 12, fresh_bytes=12), Charge(12)]
    assert charge(stages, compact=True)[1] == Charge(12)  # stage 1 uses it up: a copy would gain nothing
    longer = [stages[0], ([GradientPlace(0, 6, 0)], [6]), *stages[1:]]
    assert charge(longer)[1:3] == [Charge(12), Charge(12)]
    assert charge(longer, compact=True)[1:3] == [Charge(6), Charge(6, 0, (0,), 6, 0)]


def test_gradient_filling_its_storage_is_not_copied() -> None:
    whole = [([GradientPlace(0, 6, 0)], [6]), ([GradientPlace(0, 6, 0)], [6]), ([GradientPlace(5, 6, None)], [4])]
    assert charge(whole, compact=True) == charge(whole)


def made() -> tuple[rotoff.Checkpointable, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(2, 3, 48, 48)
    return rotoff.Checkpointable(model, stages=12, cache_directory=None, forms=False).measure(x), x


def measured_peak(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that one step allocates beside parameters' gradients and the batch."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return peak_bytes(lambda: model(x).backward())


@pytest.fixture(scope="module")
def skipping() -> tuple[rotoff.Checkpointable, torch.Tensor]:
    return made()


def test_copied_gradients_reach_smaller_limits_bit_for_bit(
    skipping: tuple[rotoff.Checkpointable, torch.Tensor],
) -> None:
    wrapped, x = skipping
    request = Request(1, "joint", 50, {})
    least, before = least_limit(wrapped.profile, request), least_limit(replace(wrapped.profile, compact=None), request)
    skip = 2 * 8 * 48 * 48 * 4
    assert before - least >= skip // 2
    plain = Skipping()
    plain.load_state_dict(wrapped.state_dict())
    plain(x).backward()
    with pytest.raises(rotoff.InfeasibleError, match=r"The backward of stage .* alone needs"):
        wrapped.compute_sequence(least // 2)
    for mode in ("joint", "remat"):
        limit = least_limit(wrapped.profile, replace(request, mode=mode))
        wrapped.compute_sequence(limit, mode=mode)
        assert wrapped._plan.compact
        assert measured_peak(wrapped, x) <= wrapped.get_expected_memory() <= limit
        wrapped.zero_grad()
        wrapped(x).backward()
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    wrapped.close()


def test_nothing_is_copied_under_large_limits(skipping: tuple[rotoff.Checkpointable, torch.Tensor]) -> None:
    wrapped, x = skipping
    copied: list[int] = []

    def count() -> None:
        with torch.profiler.profile() as profiler:
            wrapped(x).backward()
        copied.append(sum(event.count for event in profiler.key_averages() if event.key == "aten::clone"))

    wrapped.compute_sequence(least_limit(wrapped.profile, Request(1, "joint", 50, {})))
    count()
    wrapped.compute_sequence(wrapped.keep_all_memory)
    assert not wrapped._plan.compact
    count()
    assert copied[0] == copied[1] + 1
    assert wrapped.sequence.meta.get("compact_gradients") is None
    wrapped.close()


def test_gradient_is_copied_in_the_stage_reading_its_tensor() -> None:
    # Stage 4 concatenates two values of 6. Stages 2 and 3 make the second anew; the first passes them unread.
    both = GradientPlace(7, 12, None)
    made, unread = GradientPlace(1, 6, None), GradientPlace(0, 6, 0, untouched=True)
    stages = [([made], [6, 6]), ([unread, made], [6, 6]), ([unread, made], [6, 6]), ([both, both], [12])]
    assert [one.nbytes for one in charge(stages)] == [6, 18, 18, 12, 12]
    compact = charge(stages, compact=True)
    assert [one.copied for one in compact] == [(), (), (), (0,), ()]
    assert [one.nbytes for one in compact] == [6, 12, 12, 18, 12]

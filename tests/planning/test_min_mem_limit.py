"""`Checkpointable.min_mem_limit` is the limit that `compute_sequence` accepts and one byte less is not."""

from __future__ import annotations

import pytest
import torch
from models import ALL
from skip_models import OTHERS, dropping, made

import rotoff

MODES = ("joint", "remat", "offload")


def refused(wrapped: rotoff.Checkpointable, limit: int, mode: str) -> int:
    """What the error says that would work."""
    with pytest.raises(rotoff.InfeasibleError) as caught:
        wrapped.compute_sequence(limit, mode=mode)
    return caught.value.min_mem_limit


@pytest.mark.parametrize("check", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("name", [*ALL, *OTHERS])
@pytest.mark.grid(every=8)
def test_it_is_accepted_and_one_byte_less_is_not(name: str, check: bool) -> None:
    model, batch = made(name)
    wrapped = rotoff.Checkpointable(model, cache_directory=None, check=check).measure(batch())
    for mode in MODES:
        least = wrapped.min_mem_limit(mode)
        for limit in {1, least // 2 or 1, least - 1} - {0, least}:
            assert refused(wrapped, limit, mode) == least
        wrapped.compute_sequence(least, mode=mode)
        assert wrapped.get_expected_memory() <= least
        assert wrapped.min_mem_limit(mode) == least  # a plan changes nothing of it
    assert wrapped.min_mem_limit() == wrapped.min_mem_limit("joint")
    assert wrapped.min_mem_limit("joint") <= min(wrapped.min_mem_limit("remat"), wrapped.min_mem_limit("offload"))
    wrapped.close()


@pytest.mark.parametrize("name", ["residual", "dropping", "unet"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.grid
def test_a_step_within_it_has_the_gradients_of_the_plain_model(name: str, mode: str) -> None:
    model, batch = made(name)
    again, _ = made(name)
    wrapped = rotoff.Checkpointable(again, cache_directory=None).measure(x := batch())
    wrapped.compute_sequence(wrapped.min_mem_limit(mode), mode=mode)
    for one in (model, wrapped):
        torch.manual_seed(1)
        one(x).square().mean().backward()
    pairs = zip(model.parameters(), wrapped.parameters(), strict=True)
    assert all(p.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)
    wrapped.close()


def test_it_is_of_what_was_measured_last() -> None:
    model, _ = dropping()
    wrapped = rotoff.Checkpointable(model, cache_directory=None).measure(torch.randn(64, 32))
    large = wrapped.min_mem_limit("remat")
    assert wrapped.measure(torch.randn(16, 32)).min_mem_limit("remat") < large


def test_a_host_limit_that_binds_is_what_the_error_names() -> None:
    wrapped = rotoff.Checkpointable(dropping()[0], cache_directory=None).measure(torch.randn(64, 32))
    least = wrapped.min_mem_limit("offload")
    with pytest.raises(
        rotoff.InfeasibleError, match="on the device and host_limit=5; without a host_limit the training step"
    ) as caught:
        wrapped.compute_sequence(least, mode="offload", host_limit=5)
    assert caught.value.min_mem_limit == least


def test_nothing_has_been_measured() -> None:
    with pytest.raises(rotoff.MeasureError, match=r"nothing has been measured yet; call measure\(\*sample\)"):
        rotoff.Checkpointable(dropping()[0]).compute_sequence("1 GiB").min_mem_limit()


def test_an_unknown_mode() -> None:
    with pytest.raises(rotoff.OptionError, match="mode is 'fast'; modes are 'joint', 'remat', 'offload'"):
        rotoff.Checkpointable(dropping()[0]).min_mem_limit("fast")

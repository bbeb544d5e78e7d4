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

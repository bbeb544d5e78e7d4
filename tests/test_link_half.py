"""Half precision on the way: what crosses, what it costs in digits, and that order is proved as without it."""

from __future__ import annotations

import pytest
import torch
from models import fresh, plain, same, train
from random_programs import random_sequence
from test_runtime import with_sequence

import rotoff
from rotoff.runtime import link_half
from rotoff.runtime.bandwidth import measure_bandwidth
from rotoff.runtime.link_half import HalfLink, check_offload_dtype
from rotoff.runtime.link_recording import RecordingLink


class RecordingHalfLink(HalfLink, RecordingLink):
    """The half link's own places over recorded streams."""

    def __init__(self, eagerness: float, seed: int, dtype: torch.dtype = torch.float16) -> None:
        RecordingLink.__init__(self, eagerness, seed)
        self._dtype = dtype


def round_trip(link: HalfLink, sources: list[torch.Tensor], offset: int) -> list[torch.Tensor]:
    targets = [link.allocate(s.numel() * s.element_size()).view(s.dtype) for s in sources]
    out = link.copy_out(sources, offset)
    back = link.copy_in(targets, offset, out)
    link.wait(out)
    link.wait(back)
    return targets


@pytest.mark.parametrize("dtype", link_half.DTYPES)
def test_float32_comes_back_rounded_and_bytes_as_they_were(dtype, monkeypatch):
    monkeypatch.setattr(link_half, "PIECE", 100)  # several pieces, the last one shorter
    link = RecordingHalfLink(0.0, 0, dtype)
    link.reserve(10_000)
    torch.manual_seed(0)
    floats, mask = torch.randn(1234), torch.randint(0, 255, (37,), dtype=torch.uint8)
    for offset in (0, 6):
        got = round_trip(link, [floats, mask, floats[:8].clone()], offset)
        assert torch.equal(got[0], floats.to(dtype).float())
        assert torch.equal(got[1], mask)
    assert not torch.equal(got[0], floats)
    assert link.check() == []
    link.close()


def test_what_lies_at_an_odd_address_or_in_two_pieces_crosses_unconverted():
    link = RecordingHalfLink(0.0, 0)
    link.reserve(64)
    link.reserve(256)  # a second segment from byte 64 on
    floats = torch.randn(10)
    for offset in (1, 48):
        assert torch.equal(round_trip(link, [floats], offset)[0], floats)
    assert torch.equal(round_trip(link, [floats], 100)[0], floats.half().float())
    link.close()


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
@pytest.mark.parametrize("name", ["residual", "convolutional", "language"])
def test_a_step_has_no_race_and_nearly_the_plain_gradients(name, eagerness):
    expected = plain(name, steps=1)
    lossy = False
    for seed in range(3):
        link = RecordingHalfLink(eagerness, seed)
        model, batch = fresh(name)
        wrapped = rotoff.Checkpointable(model).measure(batch())
        with_sequence(wrapped, random_sequence(wrapped.chain, seed, wildness=0.75))

        def take(device: torch.device, nbytes: int, link=link) -> HalfLink:
            link.reserve(nbytes)
            return link

        wrapped._links.take = take
        wrapped._links.give_back = lambda link: None
        got = train(wrapped, batch, steps=1)
        assert link.check() == []
        lossy = lossy or not same(got, expected)
        for mine, its in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-2)
        link.close()
    assert lossy


def test_bandwidth_counts_the_value_and_not_what_crosses():
    link = RecordingHalfLink(1.0, 0)
    out, back = measure_bandwidth(link, 4001)
    assert out > 0 and back > 0
    link.close()


def test_refusals():
    check_offload_dtype(None)
    with pytest.raises(rotoff.OptionError, match=r"offload_dtype is torch\.int8"):
        rotoff.Checkpointable(torch.nn.Sequential(torch.nn.Linear(1, 1)), offload_dtype=torch.int8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with pytest.raises(rotoff.OptionError, match="CUDA device only"):
        rotoff.Checkpointable(model, offload_dtype=torch.float16).measure(torch.randn(4, 8))

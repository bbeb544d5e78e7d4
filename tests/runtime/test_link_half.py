"""Half precision on the way: what crosses, what it costs in digits, and that order is proved as without it."""

from __future__ import annotations

import pytest
import torch
from models import fresh, plain, same, train
from planned_steps import with_sequence
from random_programs import random_sequence
from recording_link import RecordingLink, moves_over

import rotoff
from rotoff.runtime.links import half as link_half
from rotoff.runtime.links.bandwidth import measure_bandwidth
from rotoff.runtime.links.half import HalfLink, check_offload_dtype
from rotoff.runtime.values import Held


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


def test_on_the_host_each_storage_begins_at_a_boundary_of_its_own():
    sizes = (5001, 4000, 16, 1024, 5002, 0)
    held = Held(("a_1", "stage"), [torch.zeros(size, dtype=torch.uint8) for size in sizes])
    link = RecordingHalfLink(0.0, 0)
    link.reserve(sum(sizes))
    assert held.offload(link, lambda _: 0)
    offset = 0
    for size in held._sizes:
        assert not size or offset % (size & -size) == 0
        offset += size
    assert sorted(held._sizes) == sorted(sizes)
    held.release()
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


# Of the convolutional model, sequences that replay no ReLU or pooling on rounded values: which element is the largest
# of a window may change then, and with it where a gradient goes
# (`test_a_replay_on_rounded_values_gives_the_gradients_of_the_plain_model_on_those`).
@pytest.mark.parametrize("eagerness", [0.0, 1.0])
@pytest.mark.parametrize(
    ("name", "seeds"), [("residual", (0, 1, 2)), ("convolutional", (1, 2, 3)), ("language", (0, 1, 2))]
)
@pytest.mark.grid
def test_a_step_has_no_race_and_nearly_the_plain_gradients(name, seeds, eagerness):
    expected = plain(name, steps=1)
    lossy = False
    for seed in seeds:
        link = RecordingHalfLink(eagerness, seed)
        model, batch = fresh(name)
        wrapped = rotoff.Checkpointable(model).measure(batch())
        moves_over(wrapped, link)
        with_sequence(wrapped, random_sequence(wrapped.chain, seed, wildness=0.75))
        got = train(wrapped, batch, steps=1)
        assert link.check() == []
        lossy = lossy or not same(got, expected)
        for mine, its in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-2)
        link.close()
    assert lossy


class Rounded(torch.autograd.Function):
    """What comes back from the host, for a backward that knows nothing of it."""

    @staticmethod
    def forward(ctx, x):
        return x.half().float()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_replay_on_rounded_values_gives_the_gradients_of_the_plain_model_on_those():
    """However far off: here one ReLU and one window of the pooling turn."""
    model, batch = fresh("convolutional")
    model[0][0].register_forward_hook(lambda module, args, out: Rounded.apply(out))
    rounded = train(model, batch, steps=1)
    link = RecordingHalfLink(0.0, 0)
    model, batch = fresh("convolutional")
    wrapped = rotoff.Checkpointable(model).measure(batch())
    moves_over(wrapped, link)
    L = len(wrapped.chain)
    assert [stage.name for stage in wrapped.chain.stages][4] == "1.3..2.0"  # with the pooling
    text = ["F_all 1", "offload abar 1", "F_ck 2", "free abar 1", "F_ck 3", "F_ck 4", "F_ck 5"]
    text += [f"F_all {i}" for i in range(6, L + 1)] + [f"B {i}" for i in range(L, 5, -1)]
    text += ["drop a 2", "drop a 3", "drop a 4", "prefetch abar 1", "wait abar 1"]
    text += [f"F_all {i}" for i in range(2, 6)] + [f"B {i}" for i in range(5, 0, -1)]
    with_sequence(wrapped, rotoff.Sequence.from_text(text))
    got = train(wrapped, batch, steps=1)
    assert link.check() == []
    off = [float((mine - its).abs().max()) for mine, its in zip(got, plain("convolutional", steps=1), strict=True)]
    assert max(off) > 1e-3
    for mine, its in zip(got[1:], rounded[1:], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)
    link.close()


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

"""How an estimate grows with the batch."""

from __future__ import annotations

import pytest
import torch
from models import Does
from torch import nn
from torch.nn import functional as F

from rotoff.profile.estimate.devices import find
from rotoff.profile.estimate.estimate import Estimate
from rotoff.profile.estimate.growth import Growth
from rotoff.tools.estimate import estimated


def copied_labels(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    labels = x.detach().argmax(-1)[:, 1:].contiguous()
    return F.cross_entropy(x[:, 1:].flatten(0, 1), labels.view(-1))


def copied_values(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).reshape(-1, x.shape[-1]).tanh()


@pytest.mark.parametrize(("last", "batches"), [(copied_labels, [8]), (copied_values, [8, 2])])
def test_copies_that_a_batch_of_one_saves_grow_with_it(last, batches) -> None:  # type: ignore[no-untyped-def]
    """A third step is estimated only where the backward copies, too."""
    model, asked = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), Does(last)), []

    def at(batch: int) -> Estimate:
        return estimated(model, (torch.empty(batch, 9, 64, device="meta"),), {}, find("CPU"))

    def larger(batch: int) -> Estimate:
        asked.append(batch)
        return at(batch)

    growth = Growth.of(larger, at(1), 1, 8)
    assert growth is not None and asked == batches
    for batch in (2, 5):
        grown, found = growth.at(batch).trace, at(batch).trace
        assert [one.nbytes for one in grown.made] == [one.nbytes for one in found.made]
        assert [event.size for event in grown.backward] == [event.size for event in found.backward]
        assert [(op.peak, op.copies) for op in grown.ran] == [(op.peak, op.copies) for op in found.ran]

"""The caching allocator gives blocks by what was there before; what is measured of a model does not depend on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rotoff

pytestmark = pytest.mark.cuda
MIB = 1 << 20
ROWS = 1229  # of 1,024 numbers, 4.8 MiB: the fourth in a segment of 20 MiB gets what is left of it, 5.6 MiB


def measured(model: nn.Module, x: torch.Tensor) -> rotoff.Checkpointable:
    return rotoff.Checkpointable(model, stages=[*model.children()], cache_directory=None).measure(x, repeats=1)


def test_stages_that_do_the_same_have_the_same_bytes_whatever_was_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh()) for _ in range(4)]).cuda()
    x = torch.randn(ROWS, 1024, device="cuda", requires_grad=True)
    found, forms = [], []
    for history in range(3):
        torch.cuda.empty_cache()
        # blocks of odd sizes that lie between others, and so do not become one
        made = [torch.empty(x.nbytes + (n * history * 333 << 10), dtype=torch.uint8, device="cuda") for n in range(6)]
        del made[::2]
        wrapped = measured(model, x)
        found.append([(s.saved_bytes, s.output_bytes) for s in wrapped.chain.stages])
        forms.append([[form.saved_bytes for form in s.forms] for s in wrapped.chain.stages])
        wrapped.close()
        reserved = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == reserved  # measuring left nothing behind
        del made
    assert found[0] == found[1] == found[2]
    assert len(set(found[0][1:-1])) == 1
    assert found[0][1] == (3 * x.nbytes, x.nbytes)
    assert forms[0] == forms[1] == forms[2]
    assert x.nbytes in forms[0][1]

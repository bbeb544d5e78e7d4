"""Fake tensors as the kernels answer: types of statistics, grouped products; temporaries of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_steps import recorded_chain
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import rotoff
from rotoff.profile.estimate.fake_kernels import FakeKernels

HALF, FULL = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def saved(run: Callable[[], torch.Tensor]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    found: list[tuple[torch.dtype, tuple[int, ...]]] = []
    with saved_tensors_hooks(lambda t: found.append((t.dtype, tuple(t.shape))), lambda _: None):
        run()
    return sorted(found, key=str)


def norms(x: torch.dtype, w: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    images, rows = (
        torch.randn(2, 8, 4, 4, dtype=x, requires_grad=True),
        torch.randn(2, 4, 8, dtype=x, requires_grad=True),
    )
    weight, bias = torch.ones(8, dtype=w, requires_grad=True), torch.zeros(8, dtype=w)
    mean, variance = torch.zeros(8, dtype=w), torch.ones(8, dtype=w)
    return {
        "layer": lambda: F.layer_norm(rows, (8,), weight, bias),
        "group": lambda: F.group_norm(images, 4, weight, bias),
        "batch": lambda: F.batch_norm(images, mean, variance, weight, bias, True),
        "instance": lambda: F.instance_norm(images, None, None, weight, bias),
    }


@pytest.mark.parametrize(("x", "w"), [(FULL, FULL), (HALF, HALF), (HALF, FULL)])
@pytest.mark.parametrize("name", ["layer", "group", "batch", "instance"])
def test_fake_norms_keep_cpu_dtypes(name: str, x: torch.dtype, w: torch.dtype) -> None:
    real = norms(x, w)
    with FakeKernels():
        fake = norms(x, w)
        answer = saved(fake[name])
    assert answer == saved(real[name])


def test_fake_cuda_norms_keep_float32_statistics() -> None:
    with FakeKernels(cuda=True):
        for name, shape in (("layer", (2, 4, 1)), ("batch", (8,))):
            kept = saved(norms(HALF, HALF)[name])
            assert kept.count((FULL, shape)) == 2, name


def test_grouped_matmul_is_estimated_in_float32() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 16, 24))
            self.register_buffer("ends", torch.tensor([4, 8, 12], dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(x, self.weight, offs=self.ends).tanh()

    model, x = nn.Sequential(nn.Linear(16, 16), Experts()), torch.randn(12, 16)
    chain = rotoff.estimate(model, x, device="CPU")
    measured = recorded_chain(model, x)
    assert chain.stages[1].output_bytes == 12 * 24 * 4
    assert [s.saved_bytes for s in chain.stages] == [s.saved_bytes for s in measured.stages]


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "new": lambda x: x @ x.mT,
    "other layout": lambda x: x.mT * 2,
    "scalar": lambda x: x.int() + 1,
    "other scalar": lambda x: x.int() + 1.0,
    "view": lambda x: x[1:, 2].T,
    "views": lambda x: x.split(1, -1),
    "view of other type": lambda x: x.view(torch.int32),
    "expanded": lambda x: x[:, :1].expand(2, 3, 4),
    "in place": lambda x: x.add_(1),
    "in place on a view": lambda x: x[0].mul_(2),
    "changed shape": lambda x: x.unsqueeze_(0),
    "named outputs": lambda x: x.max(-1),
    "output of no tensor": lambda x: F.conv1d(x, torch.ones(3, 3, 2), stride=2),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "sparse": lambda x: (x.to_sparse().shape, x),
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_repeated_answers_are_those_of_the_first_time(name: str) -> None:
    def told(mode: FakeTensorMode) -> Any:
        with mode:
            x = torch.rand(2, 3, 4)  # drawn: what is made of numbers alone is real
            found = [t for t in tree_leaves(CALLS[name](x)) if isinstance(t, torch.Tensor)]
            keys = [torch._C._dispatch_keys(t).raw_repr() for t in found]
            shared = [t.untyped_storage()._cdata == x.untyped_storage()._cdata for t in found]
            return [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t is x) for t in found], keys, shared

    mode = FakeKernels()
    assert told(mode) == told(mode) == told(FakeTensorMode())


def test_what_is_written_to_a_tensor_of_numbers_is_that_tensor() -> None:
    with FakeKernels():
        noise = torch.empty(4, 1)
        assert noise.bernoulli_(0.5) is noise and noise.div_(0.5) is noise

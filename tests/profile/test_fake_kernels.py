"""Fake tensors as the kernels answer: types of statistics, grouped products; temporaries of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import Does
from recorded_steps import recorded_chain
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

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
    ends = nn.Buffer(torch.tensor([4, 8, 12], dtype=torch.int32))
    experts = Does(
        lambda net, x: F.grouped_mm(x, net.weight, offs=net.ends).tanh(),
        weight=nn.Parameter(torch.randn(3, 16, 24)), ends=ends,
    )  # fmt: skip
    model, x = nn.Sequential(nn.Linear(16, 16), experts), torch.randn(12, 16)
    chain = rotoff.estimate(model, x, device="CPU")
    measured = recorded_chain(model, x)
    assert chain.stages[1].output_bytes == 12 * 24 * 4
    assert [s.saved_bytes for s in chain.stages] == [s.saved_bytes for s in measured.stages]


def test_what_is_written_to_a_tensor_of_numbers_is_that_tensor() -> None:
    with FakeKernels():
        noise = torch.empty(4, 1)
        assert noise.bernoulli_(0.5) is noise and noise.div_(0.5) is noise

"""Half precision on the way, on the device: values come back rounded, half the bytes cross, little memory is taken."""

from __future__ import annotations

import os

import pytest
import torch

import rotoff
from rotoff.runtime.links.half import STAGING_BYTES, CudaHalfLink

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SMALLER = 32 if "STANDIN" in os.environ else 1  # the stand-in of tests/cuda_standin computes on the CPU


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_come_back_rounded_within_the_staging_bytes(dtype: torch.dtype) -> None:
    link = CudaHalfLink("cuda", dtype)
    floats = torch.randn(64 << 20, device="cuda")  # 256 MiB: 32 pieces
    link.reserve(4 * floats.numel())
    back = link.allocate(4 * floats.numel()).view(torch.float32)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    out = link.copy_out([floats], 0)
    into = link.copy_in([back], 0, out)
    link.wait(out)
    link.wait(into)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    assert torch.equal(back, floats.to(dtype).float())
    assert reserved - before <= STAGING_BYTES
    link.close()


def test_a_step_with_values_in_half_precision() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8))
    ).cuda()
    x = torch.randn(65536 // SMALLER, 512, device="cuda")
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    planned = rotoff.Checkpointable(model, offload_dtype=torch.float16).measure(x)
    planned.compute_sequence(planned.keep_all_memory * 2 // 3, mode="offload")
    assert any(op.kind.value == "offload" for op in planned.sequence)
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    planned(x).square().mean().backward()
    resident = sum(p.numel() * 4 for p in model.parameters())  # gradients, which the limit leaves out
    assert torch.cuda.max_memory_allocated() - before <= planned.mem_limit + resident
    for grad, its in zip((p.grad for p in model.parameters()), expected, strict=True):
        torch.testing.assert_close(grad, its, rtol=1e-2, atol=1e-4)

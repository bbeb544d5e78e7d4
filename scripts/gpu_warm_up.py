"""The first use of each library on a GPU, so that no test pays for it: a matrix product, a convolution, attention, an
LSTM, the profiler.

Each is a line with its seconds, the first time and the second; what fails says so, and the exit code is 1.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.profiler import profile


def matmul() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(2048, 2048, device="cuda", dtype=dtype, requires_grad=True)
        (a @ a).sum().backward()


def convolution() -> None:
    layer = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()).cuda()
    layer(torch.randn(8, 16, 64, 64, device="cuda")).sum().backward()


def attention() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(2, 8, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def lstm() -> None:
    layer = nn.LSTM(64, 64, num_layers=2, dropout=0.5).cuda()
    layer(torch.randn(8, 4, 64, device="cuda"))[0].sum().backward()


def profiler() -> None:
    with profile(profile_memory=True, use_cpu=True):
        torch.randn(64, device="cuda").sum().item()


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> int:
    failed = 0
    print(f"CUDA's context: {seconds(lambda: torch.zeros(1, device='cuda').sum()):.2f} s", flush=True)
    for run in (matmul, convolution, attention, lstm, profiler):
        try:
            print(f"{run.__name__}: {seconds(run):.2f} s, then {seconds(run) * 1e3:.1f} ms", flush=True)
        except Exception as error:
            failed = 1
            print(f"{run.__name__}: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

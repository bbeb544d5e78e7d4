"""A case of `ranks` for two processes: what they have in common, and what one of them may ask alone; prints lines that
`test_distributed` reads."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from models import Residual
from ranks import by_first, everyone
from torch import nn

import rotoff
from rotoff.runtime.links import pool

copied: list[tuple[float, float]] = []  # when the link was last measured here
own_bandwidth = pool.measure_bandwidth


def copying(*args: Any, **options: Any) -> tuple[float, float]:
    began = time.monotonic()
    found = own_bandwidth(*args, **options)
    time.sleep(0.1)
    copied[:] = [(began, time.monotonic())]
    return found if dist.get_rank() else (found[0] / 2, found[1])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *[Residual(32) for _ in range(4)], nn.Linear(32, 8))


def said(what: str, found: object) -> None:
    told = everyone(found)
    by_first(f"{what}: {told[0]} {told[1]}")


def asked_alone(wrapped: rotoff.Checkpointable) -> str:
    try:
        return str(wrapped.get_expected_makespan() > 0)
    except rotoff.MeasureError as error:
        return "refused" if "the processes of the group plan together" in str(error) else str(error)


def main() -> None:
    pool.measure_bandwidth = copying  # in this process, which was forked for it
    rows = (32, 64)[dist.get_rank()]
    many = rotoff.Checkpointable(model()).measure(torch.randn(64, 16)).keep_all_memory

    wrapped = rotoff.Checkpointable(model(), process_group=True).compute_sequence(many + 4096)
    wrapped(torch.randn(rows, 16)).sum().backward()
    said("shown before", asked_alone(wrapped))
    wrapped(torch.randn(rows, 16)).sum().backward()
    said("shown after", asked_alone(wrapped))
    said("same bytes", wrapped.get_expected_memory() == wrapped.keep_all_memory)
    wrapped.compute_sequence(many * 9 // 10, refine=False)
    said("expected", wrapped.get_expected_makespan() > 0)
    wrapped(torch.randn(rows, 16)).sum().backward()
    spans, links = everyone(copied[0]), everyone(wrapped.chain.link)
    said("copies at once", max(begin for begin, _ in spans) < min(end for _, end in spans))
    said("one link", links[0] == links[1] and links[0].d2h_bandwidth > 1)
    wrapped.close()

    unlike = nn.Sequential(*list(model())[: 3 + dist.get_rank()])
    try:
        rotoff.Checkpointable(unlike, process_group=True).measure(torch.randn(rows, 16))
    except rotoff.MeasureError as error:
        said("unlike", "refused" if "different numbers of stages (3, 4)" in str(error) else error)

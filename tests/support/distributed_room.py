"""A case of `ranks` for two processes: whether stages are timed is decided by all of them together; prints lines that
`test_distributed` reads."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from models import Residual
from ranks import say
from torch import nn

import rotoff
from rotoff.profile import stage_meter
from rotoff.runtime.links import pool

timed = 0
copied: list[tuple[float, float]] = []  # when the link was last measured here
own, own_bandwidth = stage_meter.time_stage, pool.measure_bandwidth


def counted(*args: Any) -> None:
    global timed
    timed += 1
    time.sleep(0.1 * dist.get_rank())  # one process is later than the other
    own(*args)


def copying(*args: Any) -> tuple[float, float]:
    began = time.monotonic()
    found = own_bandwidth(*args)
    time.sleep(0.1)
    copied[:] = [(began, time.monotonic())]
    return found if dist.get_rank() else (found[0] / 2, found[1])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *[Residual(32) for _ in range(4)], nn.Linear(32, 8))


def keep_all(rows: int) -> int:
    probe = rotoff.Checkpointable(model(), cache_directory=None).measure(torch.randn(rows, 16))
    return probe.keep_all_memory


def said(what: str, found: object) -> None:
    everyone: list[object] = [None, None]
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        say(f"{what}: {everyone[0]} {everyone[1]}")


def main() -> None:
    global timed
    stage_meter.time_stage = counted  # in this process, which was forked for it
    pool.measure_bandwidth = copying
    rows = (32, 64)[dist.get_rank()]
    few, many = keep_all(32), keep_all(64)

    wrapped = rotoff.Checkpointable(model(), process_group=True).compute_sequence(many + 4096)
    timed = 0
    wrapped(torch.randn(rows, 16)).sum().backward()
    said("timed with room", timed)
    try:
        said("shown", wrapped.get_expected_makespan())
    except rotoff.MeasureError as error:
        said("shown", "refused" if "in all processes" in str(error) else error)
    said("same bytes", wrapped.get_expected_memory() == wrapped.keep_all_memory)
    wrapped.compute_sequence(many * 7 // 10, refine=False)
    said("timed for less", timed > 0)
    said("expected", wrapped.get_expected_makespan() > 0)
    wrapped(torch.randn(rows, 16)).sum().backward()
    wrapped.close()

    timed = 0
    apart = rotoff.Checkpointable(model(), process_group=True).compute_sequence((few + many) // 2, refine=False)
    apart(torch.randn(rows, 16)).sum().backward()  # everything fits in the first process alone
    said("timed where one lacks room", timed > 0)
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, [str(op) for op in apart.sequence])
    said("one plan", plans[0] == plans[1])
    spans: list[Any] = [None, None]
    dist.all_gather_object(spans, copied[0])
    said("copies at once", max(begin for begin, _ in spans) < min(end for _, end in spans))
    links: list[Any] = [None, None]
    dist.all_gather_object(links, apart.profile.chain.link)
    said("one link", links[0] == links[1] and links[0].d2h_bandwidth > 1)
    apart.close()

    least = rotoff.Checkpointable(model(), process_group=True).compute_sequence(many + 4096)
    least(torch.randn(rows, 16)).sum().backward()
    limits: list[Any] = [None, None]
    dist.all_gather_object(limits, least.min_mem_limit())
    said("one limit", limits[0] == limits[1] > 0)
    least.close()

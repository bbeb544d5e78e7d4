"""Run by `ranks`: what two ranks of a pipeline count on that share a host; prints lines that `test_pipeline` reads."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch.distributed as dist
from pipeline_steps import CASES, Line, batch, pipeline, step
from ranks import say

import rotoff
from rotoff.planning import link_share
from rotoff.runtime.links import pool

measured: list[bool] = []  # for each measurement of the link, whether the second rank had come


def store() -> dist.Store:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def bandwidth(*_: Any, **__: Any) -> tuple[float, float]:
    """First the rates of all at once, then those of a process alone."""
    measured.append(store().check(["came"]))
    store().set("measured", "")
    return (3e9, 4e9) if len(measured) == 1 else (5e9, 2e9)


def attached(schedule: Any) -> rotoff.Checkpointable:
    """This rank's stage, with a limit in which not everything fits."""
    return rotoff.attach_schedule(schedule, 200_000, host_limit="1 GB", refine=False)[0]


def main(name: str) -> None:
    """name: "together", or "late": the second rank attaches when the first one has given up."""
    line, rank = Line(False), dist.get_rank()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    pool.measure_bandwidth = bandwidth  # type: ignore[assignment]
    schedule, modules = pipeline(line, *CASES["1f1b"])
    if name == "late":
        link_share.PATIENCE = 0.2
        if rank:
            dist.barrier()
        share = attached(schedule)._links.share
        say(f"late {rank}: {share and share[:2]}")
        if not rank:
            dist.barrier()
        return
    if rank:
        while not any(store().check([key]) for key in ("measured", f"rotoff/{socket.gethostname()}")):
            time.sleep(0.01)  # until the first one waits, or does not
        store().set("came", "")
    planned = attached(schedule)
    say(f"at once {rank}: {measured}")
    step(line, schedule, *batch(0, line))
    say(f"link {rank}: {planned.chain.d2h_bandwidth:g} {planned.chain.h2d_bandwidth:g}")
    assert planned._steps.request is not None
    say(f"host {rank}: {planned._steps.request.options['host_limit']}")
    rotoff.detach(modules[0])
    if rank:  # again, and the other one does not
        attached(schedule)
        say(f"again {rank}: {len(measured)} measured")

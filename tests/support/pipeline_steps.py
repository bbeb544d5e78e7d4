"""Run by `ranks`: steps of a pipeline of which every rank is unequal, with and without rotoff, and ranks that share a
host's link; prints lines that `test_pipeline` reads."""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from allocated import peak_bytes
from distributed_steps import whole
from ranks import say
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rotoff
from rotoff.planning import link_share
from rotoff.runtime.links import pool

ROWS, WIDTH, MANY = 48, 32, 8


class Line:
    """The processes of the pipeline that this one is in. split: whether two processes run each stage together (tensor
    parallel), so that there are two lines."""

    def __init__(self, split: bool) -> None:
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.group = self.split = None
        if split:
            mesh = init_device_mesh("cpu", (self.ranks // 2, 2), mesh_dim_names=("line", "split"))
            self.group, self.split = mesh["line"].get_group(), mesh["split"]
            self.ranks, self.rank = self.ranks // 2, self.rank // 2


class Block(nn.Module):
    """Random, with buffers that each forward changes, and as wide as it is told."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))), 0.1)


def module(number: int, line: Line) -> nn.Module:
    """Stage `number` of the pipeline: no two have as many blocks, or as wide ones."""
    torch.manual_seed(number)
    made = nn.Sequential(*[Block(WIDTH * (1 + number + n % 2)) for n in range(4 + number % 3)])
    for block in made if line.split is not None else ():
        parallelize_module(block, line.split, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return made


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of which autograd saves as much as the output takes."""
    return (output - target).square().mean()


def pipeline(line: Line, kind: Callable[..., Any], chunks: int, known: bool) -> tuple[Any, list[nn.Module]]:
    """A schedule and the modules of this rank. known: whether the stages are told what they are given."""
    numbers = range(line.rank, line.ranks * chunks, line.ranks)
    modules = [module(number, line) for number in numbers]
    told = {"input_args": torch.zeros(ROWS, WIDTH), "output_args": torch.zeros(ROWS, WIDTH)} if known else {}
    told = {name: tensor.requires_grad_() for name, tensor in told.items()}
    device = torch.device("cpu")
    stages = [
        PipelineStage(one, number, line.ranks * chunks, device, group=line.group, **told)
        for one, number in zip(modules, numbers, strict=True)
    ]
    return kind(stages if chunks > 1 else stages[0], n_microbatches=MANY, loss_fn=loss), modules


def batch(n: int, line: Line) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 * n + line.rank)
    return torch.randn(MANY * ROWS, WIDTH), torch.randn(MANY * ROWS, WIDTH)


def step(line: Line, schedule: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    first, last = line.rank == 0, line.rank == line.ranks - 1
    schedule.step(*([x] if first else []), **({"target": y} if last else {}), return_outputs=False)


def train(line: Line, schedule: Any, modules: list[nn.Module], buffers: bool) -> tuple[list[torch.Tensor], int]:
    """(gradients, buffers and the generator's state after four steps; the most allocated in the last one). buffers: not
    where the schedule itself has run the modules on uninitialised memory, to see what they return."""
    seen: list[torch.Tensor] = []
    peak = 0
    for n in range(4):
        x, y = batch(n, line)
        if n < 3:
            step(line, schedule, x, y)
        else:
            peak = peak_bytes(partial(step, line, schedule, x, y))
        for one in modules:
            seen += [whole(p.grad).clone() for p in one.parameters() if p.grad is not None]
            seen += [b.clone() for b in one.buffers() if buffers]
    return [*seen, torch.get_rng_state()], peak


CASES = {
    "gpipe": (ScheduleGPipe, 1, False),
    "1f1b": (Schedule1F1B, 1, True),
    "interleaved": (ScheduleInterleaved1F1B, 2, False),
    "told": (ScheduleInterleaved1F1B, 2, True),
    "split": (Schedule1F1B, 1, True),  # tensor parallel stages
    "split_interleaved": (ScheduleInterleaved1F1B, 2, False),
}


def wait_for_gloo() -> None:
    """From now on who waits for a collective also waits until gloo's thread has let its result go. It does so a moment
    after the end, and the profiler misses what such a thread frees."""
    own = collectives.wait_tensor

    def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = own(tensor)
        end = time.monotonic() + 5
        while result._use_count() > 1 and time.monotonic() < end:
            time.sleep(1e-5)
        return result

    collectives.wait_tensor = wait_tensor


def refused() -> None:
    """What schedules that split the backward meet, planned as such and with a wrapped module."""
    for kind in (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble):
        try:
            rotoff.attach_schedule(pipeline(Line(False), kind, 2, True)[0], "1 GiB")
        except rotoff.OptionError as error:
            say(f"OptionError: {error}")
    configured = {"mem_limit": rotoff.RotoffConfig(mem_limit="1 GiB", process_group=True)}
    for given in ({"mem_limit": "1 GiB", "process_group": True}, configured):
        try:
            rotoff.attach_schedule(pipeline(Line(False), *CASES["1f1b"])[0], **given)
        except rotoff.OptionError as error:
            say(f"all ranks: {error}")
    try:
        rotoff.attach_schedule(
            pipeline(Line(False), *CASES["1f1b"])[0], rotoff.RotoffConfig(mem_limit="1 GiB", in_flight=3)
        )
    except rotoff.OptionError as error:
        say(f"in flight: {error}")
    plain = module(1, Line(False))
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    wrapped = rotoff.Checkpointable(copy.deepcopy(plain)).measure(x)
    wrapped.compute_sequence(wrapped.min_mem_limit("joint"))
    found = []
    for one in (plain, wrapped):  # a split backward works, only slowly
        torch.manual_seed(2)
        output = one(own := x.detach().requires_grad_())
        given, groups = stage_backward_input((output,), [torch.ones_like(output)], [own], one.parameters())
        stage_backward_weight(one.parameters(), groups)
        found.append([*given, *(parameter.grad for parameter in one.parameters())])
    say(f"bare: equal {all(map(torch.equal, *found))}")


def attached_and_not() -> None:
    """What a call that raises leaves behind, what the stages of a process share, and what detaching them leaves."""
    schedule, modules = pipeline(Line(False), *CASES["interleaved"])
    rotoff.attach(modules[1], "1 GiB")
    try:
        rotoff.attach_schedule(schedule, "1 GiB")
    except rotoff.OptionError as error:
        say(f"raised: {error}")
    rotoff.detach(modules[1])
    planned = rotoff.attach_schedule(schedule, "1 GiB")  # the first stage is not attached any more
    link = planned[0]._steps.links.take(torch.device("cpu"), 4096)
    planned[0]._steps.links.give_back(link)
    say(f"one link: {planned[1]._steps.links.take(torch.device('cpu'), 4096) is link}")
    for one in modules:
        rotoff.detach(one)
        one(torch.zeros(ROWS, WIDTH))
    say(f"hooks left: {[len(one._forward_pre_hooks) for one in modules]}")


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


def linked(name: str) -> None:
    """What two ranks count on that share a host. name: "together", or "late": the second one attaches when the first one has
    given up."""
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


def main(name: str) -> None:
    """name: one of CASES, or "refused", "together" or "late"."""
    if name in ("together", "late"):
        return linked(name)
    if name == "refused":
        refused()
        return attached_and_not()
    line = Line(name.startswith("split"))
    if line.split is not None:
        wait_for_gloo()
    together = {} if line.split is None else {"process_group": line.split.get_group()}
    rank, held = dist.get_rank(), CASES[name][2]
    expected, plain = train(line, *pipeline(line, *CASES[name]), held)
    for share, mode in ((0.5, "joint"), (0.5, "remat"), (0.7, "offload"))[: 3 if name == "gpipe" else 1]:
        share += 0.05 * rank  # every rank has a limit of its own, so some keep everything and others do not
        schedule, modules = pipeline(line, *CASES[name])
        limit = int(share * plain)
        planned = rotoff.attach_schedule(schedule, limit, mode=mode, mem_slots=20, **together)
        got, peak = train(line, schedule, modules, held)
        equal = len(got) == len(expected) and all(map(torch.equal, got, expected))
        many = max(one.in_flight for one in planned)
        say(f"{mode} {rank}: equal={equal} {peak} of {limit} ({plain}), {many} in flight")
        for one in planned:
            one.close()

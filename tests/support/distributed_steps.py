"""Run by `ranks` in each of two processes: a few steps under DDP or FSDP2, with and without rotoff; prints a line that
`test_distributed` reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from allocated import peak_bytes
from models import Residual
from ranks import by_first, everyone
from step_by_step import works
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rotoff

# by kind, arguments of fully_shard. Of the kinds of a root, it gathers what is beside the blocks; alone, these too
SHARDED: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "root_alone": {},
    "root_alone_small": {},
    "root": {},
    "root_resharded": {"reshard_after_forward": True},
    "root_unsharded": {"reshard_after_forward": False},
}
ROWS = {"root_alone_small": 64}  # 192 unless it says so
ATTEMPTS = 40  # steps whose bytes are looked at: a thread of gloo may hold what it has gathered for a moment


class Averaged(nn.Module):
    """A layer whose parameters take more than what it makes, as those of an embedding do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.mean(dim=-1)


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    first = Averaged() if kind.startswith("root") else nn.Linear(16, 32)
    return nn.Sequential(first, *[Residual(32) for _ in range(4)], nn.BatchNorm1d(32), nn.Linear(32, 8))


def wrap(kind: str, mode: str | None) -> tuple[nn.Module, rotoff.Checkpointable | None]:
    """The model under the wrapper `kind`, plain or within a limit half-way between the smallest and keeping
    everything."""
    stages = model(kind)
    inner: nn.Module = stages
    planned = None
    for stage in stages if kind in SHARDED else ():
        if kind == "fsdp" or (isinstance(stage, Residual) and not kind.startswith("root_alone")):
            fully_shard(stage, **SHARDED[kind])
    if mode is not None:
        inner = planned = rotoff.Checkpointable(stages, process_group=True).compute_sequence(1 << 40)
    if kind in SHARDED:
        module: nn.Module = fully_shard(inner, **SHARDED[kind])
    else:
        module = DistributedDataParallel(inner, gradient_as_bucket_view=True)
    if planned is not None and mode is not None:
        buffers = [b.clone() for b in module.buffers()]
        step(module, batch(kind))  # measured within the root's first forward
        module.zero_grad()
        for buffer, old in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(old)
        # ranks ask for different limits, and the tighter one rules
        planned.compute_sequence(
            (planned.min_mem_limit(mode) + planned.keep_all_memory) // 2 + 1000 * dist.get_rank(), mode=mode
        )
    return module, planned


def batch(kind: str) -> torch.Tensor:
    """Of another size in each process."""
    return torch.randn(ROWS.get(kind, 192) - 8 * dist.get_rank(), 16)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def train(module: nn.Module, kind: str) -> list[torch.Tensor]:
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for n in range(4):
        x = batch(kind) if n != 2 else torch.randn(24 - 8 * dist.get_rank(), 16)
        optimizer.zero_grad()
        if isinstance(module, DistributedDataParallel):
            with module.no_sync():  # a micro-batch whose gradients are only added up
                module(x * 2).mean().backward()
        module(x).square().mean().backward()
        seen += [whole(p.grad).clone() for p in module.parameters()]
        optimizer.step()
        seen += [b.clone() for b in module.buffers()]
    return [*seen, torch.get_rng_state()]


def step(module: nn.Module, *micro_batches: torch.Tensor) -> None:
    for loss in [module(x).square().mean() for x in micro_batches]:
        loss.backward()


def peaks(
    planned: rotoff.Checkpointable, run: Callable[[], object], measure: Callable[..., int] = peak_bytes, told: int = 0
) -> tuple[bool, bool, object]:
    """Whether the predicted peak is at least the measured one of each process and at most the limit, and whether it is
    at most 5 % above; with the figures."""
    found, told, within, close = list[int](), told or planned.get_expected_memory(), False, False
    while not (within and close) and len(found) < ATTEMPTS:  # threads of gloo hold tensors for a moment, or do not
        found.append(measure(run))
        within = all(everyone(min(found) <= told <= (planned.mem_limit or 0)))
        # one plan covers the largest of all processes
        close = told <= max(everyone(max((one for one in found if one <= told), default=0))) * 1.05
    return within, close, everyone((told, planned.mem_limit, *found))


def let_threads_go() -> None:
    """From now on, whoever waits for a collective gives gloo's thread the time to let go of its tensors first: what that
    thread frees afterwards, the profiler does not see, and counts to the end."""
    wait = dist.Work.wait

    def waited(work: dist.Work, *args: Any) -> bool:
        done = wait(work, *args)
        time.sleep(0.001)
        return done

    dist.Work.wait = waited  # type: ignore[method-assign]


def main(kind: str) -> None:
    let_threads_go()
    expected = train(wrap(kind, None)[0], kind)
    for mode in ("joint", "remat", "offload"):
        module, planned = wrap(kind, mode)
        got = train(module, kind)
        assert planned is not None
        equal = len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        x = batch(kind)
        within, close, figures = peaks(planned, partial(step, module, x))
        same = len(set(everyone(f"{planned.sequence}\n{planned.mem_limit}"))) == 1
        by_first(
            f"{mode}: equal={equal} same_plan={same} works={works(planned.sequence)} within={within} close={close}"
        )
        by_first(f"{figures}")
        if kind == "root_unsharded" and mode == "joint":
            for share in (0.5, 1):
                least = planned.min_mem_limit(mode, in_flight=2)
                planned.compute_sequence(1 << 40, mode=mode, in_flight=2)
                limit = int(least + share * (planned.keep_all_memory - least))
                planned.compute_sequence(limit, mode=mode, in_flight=2)
                step(module, x, x.clone())
                within, close, figures = peaks(planned, partial(step, module, x, x.clone()))
                by_first(f"two in flight: within={within} close={close}")
                by_first(f"{figures}")
        planned.close()

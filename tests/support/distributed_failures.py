"""Run by `ranks` in each of two processes: one of them fails where plans are agreed on, and both must say so, and go
on; or all ask for what a `device_limit` refuses there. Prints lines that `test_distributed` and
`test_distributed_placed` read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from models import Does, Residual
from ranks import by_first, everyone
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rotoff


def fail(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Runs out of memory as long as `on`."""
    if net.on:
        raise torch.OutOfMemoryError("injected")
    return x.tanh()


def break_off(*_: object) -> None:
    raise ArithmeticError("injected")


def said(what: str, act: object) -> None:
    try:
        act()  # type: ignore[operator]
        found = "nothing"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    for rank, text in enumerate(everyone(found)):
        by_first(f"{what} {rank}: {text}")


def blocks(shard: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[fully_shard(nn.Linear(8, 8)) if shard else nn.Linear(8, 8) for _ in range(4)])


def ask(planned: rotoff.Checkpointable, limit: int | str = "1 MiB", optimizer: bool = True) -> None:
    given = torch.optim.SGD(planned.parameters(), lr=0.1) if optimizer else None
    planned.compute_sequence(device_limit=limit, optimizer=given)


def whole() -> None:
    planned = rotoff.Checkpointable(blocks(False), process_group=True)
    DistributedDataParallel(planned)
    ask(planned)


def root_not_sharded() -> None:
    ask(rotoff.Checkpointable(blocks(True), process_group=True))


def without_group() -> None:
    ask(fully_shard(rotoff.Checkpointable(blocks(True))))


def in_one() -> None:
    planned = fully_shard(rotoff.Checkpointable(blocks(True), process_group=True))
    ask(planned, optimizer=dist.get_rank() == 0)


def too_small() -> None:
    planned = fully_shard(rotoff.Checkpointable(blocks(True), process_group=True))
    ask(planned, 1000 + dist.get_rank())
    planned(torch.ones(4, 8)).sum().backward()
    planned(torch.ones(4, 8))


def kept_gathered() -> None:
    """After the update FSDP2 alone goes on with the parameters from before."""
    planned = fully_shard(rotoff.Checkpointable(blocks(True), process_group=True))
    optimizer = torch.optim.SGD(planned.parameters(), lr=0.1)
    planned.compute_sequence(device_limit="1 MiB", optimizer=optimizer)
    planned.set_reshard_after_backward(False)
    planned(torch.ones(4, 8)).sum().backward()
    optimizer.step()


def after_a_failure() -> None:
    """FSDP2 alone trains no further."""
    planned = fully_shard(rotoff.Checkpointable(blocks(True), process_group=True))
    ask(planned)
    result = planned(torch.ones(4, 8))
    result.register_hook(break_off)
    with suppress(ArithmeticError):
        result.sum().backward()
    planned(torch.ones(4, 8))


REFUSED: tuple[Callable[[], None], ...] = (
    *(whole, root_not_sharded, without_group, in_one, too_small),
    *(kept_gathered, after_a_failure),
)


def refused() -> None:
    for act in REFUSED:
        said(act.__name__, act)


def main(what: str) -> None:
    if what == "refused":
        return refused()
    rank, x = dist.get_rank(), torch.randn(64, 16)
    for failing in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 32), Residual(32), Does(fail, on=rank == failing), Residual(32), nn.Linear(32, 8)
        )
        wrapped = rotoff.Checkpointable(model, process_group=True)
        sample = () if rank == failing else (x,)
        said(f"sample {failing}", lambda wrapped=wrapped, sample=sample: wrapped.measure(*sample))
        said(f"measure {failing}", lambda wrapped=wrapped: wrapped.measure(x))
        wrapped.compute_sequence(1 << 40)
        said(f"forward {failing}", lambda wrapped=wrapped: wrapped(x))
        model[2].on = False
        said(f"later {failing}", lambda wrapped=wrapped: wrapped(x).sum().backward())
        limit = -5 if rank == failing else "1 GiB"
        said(f"limit {failing}", lambda wrapped=wrapped, limit=limit: wrapped.compute_sequence(limit))
        said(f"small {failing}", lambda wrapped=wrapped: wrapped.compute_sequence(5))
        progress = break_off if rank == failing else None
        said(
            f"plan {failing}",
            lambda wrapped=wrapped, p=progress: wrapped.compute_sequence(wrapped.min_mem_limit(), progress=p),
        )
        mode = "remat" if rank == failing else "offload"
        said(f"other {failing}", lambda wrapped=wrapped, mode=mode: wrapped.compute_sequence(5, mode=mode))
        wrapped.close()

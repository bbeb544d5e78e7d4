"""Run by `ranks` in each of two processes: one of them fails where plans are agreed on; both must say so, and go
on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import Residual
from ranks import say
from torch import nn

import rotoff


class Failing(nn.Module):
    """Runs out of memory in one process, as long as `on`."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.on = dist.get_rank() == rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on:
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
    everyone: list[str | None] = [None, None]
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        for rank, text in enumerate(everyone):
            say(f"{what} {rank}: {text}")


def main() -> None:
    rank, x = dist.get_rank(), torch.randn(64, 16)
    for failing in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), Residual(32), Failing(failing), Residual(32), nn.Linear(32, 8))
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

"""Run by `ranks` in each of two processes that are unequal in their batches: under every limit both must do the same.
Arguments: names of models. Prints two lines for each that `test_distributed` reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import fresh
from planned_steps import step_peak
from ranks import by_first, everyone
from step_by_step import works
from torch.utils._pytree import tree_map

import rotoff

MODES = ("joint", "remat", "offload")
POINTS = 2  # limits within each interval


def gradients(model: torch.nn.Module, x: Any) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def limits_of(alone: rotoff.Checkpointable, both: rotoff.Checkpointable) -> list[int]:
    """From the smallest one to above what both need, with what keeping everything takes in each by itself and by the
    common account."""
    marks = {both.min_mem_limit(mode) for mode in MODES} | {both.keep_all_memory, *everyone(alone.keep_all_memory)}
    low, *higher = sorted(marks)
    within = [low + (high - low) * n // POINTS for high in higher for n in range(POINTS)]
    return sorted({limit + more for limit in (*within, *marks) for more in (-1, 0)} - {0})


def run(name: str, few: int) -> None:
    """A quarter of the rows in process `few`, all in the other one."""
    model, batch = fresh(name)
    torch.manual_seed(2)
    whole = batch()
    rank = dist.get_rank()

    def rows(t: torch.Tensor) -> torch.Tensor:
        return t.detach()[: max(2, len(t) // 4)].clone().requires_grad_(t.requires_grad) if rank == few else t

    x = tree_map(rows, whole)
    expected = [g.clone() for g in gradients(model, x)]
    again, _ = fresh(name)
    both = rotoff.Checkpointable(again, process_group=True).measure(x)
    said: list[str] = []
    counts = dict.fromkeys(("refused", "kept", "worked"), 0)
    alone = rotoff.Checkpointable(fresh(name)[0]).measure(x)
    for n, limit in enumerate(limits_of(alone, both)):
        mode = MODES[n % 3]
        # each process asks for another limit, and the tighter one holds
        outcome: Any
        try:
            both.compute_sequence(limit + 1000 * ((rank + n) % 2), mode=mode, refine=False)
            holds = both.get_expected_memory() <= limit >= both.min_mem_limit(mode)
            outcome = works(both.sequence), str(both.sequence), holds
        except rotoff.InfeasibleError as error:
            outcome = str(error), limit < error.min_mem_limit == both.min_mem_limit(mode)
        outcomes = everyone(outcome)
        if outcomes[0] != outcomes[1] or not outcome[-1]:
            said.append(f"{mode} {limit}: {outcomes}")
        if len(outcome) == 2:
            counts["refused"] += 1
            continue
        counts["worked" if outcome[0] else "kept"] += 1
        again.load_state_dict(fresh(name)[0].state_dict())
        if not all(everyone(all(map(torch.equal, gradients(both, x), expected)))):
            said.append(f"{mode} {limit}: other gradients")
        if not all(everyone((peak := step_peak(both, lambda: x)) <= both.get_expected_memory())):
            said.append(f"{mode} {limit}: a peak of {peak} here, where {both.get_expected_memory()} is expected")
    alone.close()
    both.close()
    by_first(f"{name} {few}: {counts}; {said or 'alike'}")


def main(*names: str) -> None:
    for name in names:
        for few in (0, 1):
            run(name, few)

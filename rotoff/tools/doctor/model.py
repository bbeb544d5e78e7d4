"""The small transformer that the doctor trains, sized by the device's speed and memory."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from ...accelerator import finish, is_accelerator, memory_of, peaks
from ...checkpointable import Checkpointable
from ...errors import InfeasibleError
from ...profile.allocations import logged, peak_of

SEED = 1
STEP_SECONDS = 0.5  # most seconds of a plain step on a GPU
ROOM = 1 / 3  # share of the device's free memory that training may take
SHARES = (1.0, 0.7, 0.45)  # of the bytes between the smallest limit and keeping everything
PAIRS = 3  # least pairs of timed steps at each


@dataclass(frozen=True)
class Size:
    """Blocks, channels, attention heads, positions and rows of a batch."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int

    @property
    def operations(self) -> int:
        """Floating-point operations of a step."""
        return 3 * self.layers * self.batch * self.context * self.width * (24 * self.width + 4 * self.context)

    @property
    def nbytes(self) -> int:
        """Approximate bytes of a step with fused attention, plus parameters and two copies of their gradients."""
        return 4 * self.layers * (17 * self.batch * self.context * self.width + 3 * 12 * self.width**2)


SIZES = (Size(8, 1024, 16, 1024, 8), Size(8, 512, 8, 512, 8), Size(6, 256, 4, 128, 4))  # the last is for CPUs
PLACED = Size(6, 128, 4, 64, 4)  # of steps under a `device_limit`


class MeanSquare(nn.Module):
    """A loss as the last stage, so that its bytes count as the model's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def made(size: Size) -> nn.Sequential:
    """The model on the CPU, the same each time."""
    torch.manual_seed(SEED)
    ends = nn.Linear(size.width, size.width), nn.Linear(size.width, size.width)
    how = size.width, size.heads, 4 * size.width, 0.1, "gelu"
    blocks = (nn.TransformerEncoderLayer(*how, batch_first=True, norm_first=True) for _ in range(size.layers))
    return nn.Sequential(ends[0], *blocks, ends[1], MeanSquare())


class SmallModel:
    """The model on `device` with a batch; `model` runs plain steps, `planned` runs planned ones.

    seconds: duration of the timed steps in each row of a check. threads: CPU threads to use; `close` restores them.
    """

    def __init__(self, device: torch.device, seconds: float, threads: int) -> None:
        self.device = device
        self.seconds = seconds
        self._threads = torch.get_num_threads()
        if not is_accelerator(device):  # the thread that copies to the file needs a core of its own
            torch.set_num_threads(min(self._threads, max(1, threads - 1)))

    @cached_property
    def size(self) -> Size:
        """The largest of `SIZES` that the device trains in about `STEP_SECONDS` and in `ROOM` of its free memory."""
        if not is_accelerator(self.device):
            return SIZES[-1]
        free, per_second = memory_of(self.device)[0], speed(self.device)
        fitting = (s for s in SIZES if s.nbytes <= ROOM * free and s.operations <= STEP_SECONDS * per_second)
        return next(fitting, SIZES[-1])

    @cached_property
    def model(self) -> nn.Sequential:
        model = made(self.size).to(self.device)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return model

    @cached_property
    def batch(self) -> torch.Tensor:
        torch.manual_seed(SEED)
        return torch.randn(self.size.batch, self.size.context, self.size.width, device=self.device)

    @cached_property
    def planned(self) -> Checkpointable:
        """The measured model."""
        self.step(self.model)  # so that libraries allocate their workspaces
        return Checkpointable(self.model).measure(self.batch)

    @cached_property
    def repeated(self) -> dict[str, Any]:
        """The difference between the gradients of two plain steps."""
        return difference(self.gradients(self.model), self._plain)

    @cached_property
    def _plain(self) -> list[torch.Tensor]:
        return self.gradients(self.model)

    @cached_property
    def steps(self) -> list[dict[str, dict[str, Any]]]:
        """Planned steps at each of `SHARES`: the difference of their `gradients` from a plain step's, their `peak` and
        their `time`, beside the predicted ones."""
        rows = []
        for share in SHARES:
            asked = {"share": share, "limit": self.plan(share)}
            row = {"gradients": asked | difference(self.gradients(self.planned), self._plain)}
            row["peak"] = asked | {"predicted": self.planned.get_expected_memory()} | self.peak(self.planned)
            row["time"] = asked | self._times()
            rows.append(row)
        return rows

    def _times(self) -> dict[str, Any]:
        """Seconds of planned steps and of alternating plain ones, and the predicted ones."""
        pairs: list[tuple[float, float]] = []
        start = time.perf_counter()
        while len(pairs) < 1 + PAIRS or time.perf_counter() - start < self.seconds:
            order = (self.model, self.planned) if len(pairs) % 2 else (self.planned, self.model)
            took = {run: seconds(self.device, partial(self.step, run)) for run in order}
            pairs.append((took[self.model], took[self.planned]))
        del pairs[0]  # a warm-up
        predicted = self.planned.get_expected_makespan()
        expected = predicted / self.planned._figures.keep_all_time
        ratio = statistics.median(b / a for a, b in pairs)
        found = {"predicted": predicted, "predicted_ratio": expected, "pairs": len(pairs), "load": os.getloadavg()[0]}
        found |= {"plain": statistics.median(a for a, _ in pairs), "measured": statistics.median(b for _, b in pairs)}
        return {**found, "measured_ratio": ratio, "ratio_error": ratio / expected - 1}

    def plan(self, share: float, mode: str = "joint") -> int:
        """Plan for `share` of the bytes between the smallest limit of `mode` and keeping everything; returns that
        limit."""
        least, most = self.planned.min_mem_limit(mode), self.planned.keep_all_memory
        limit = most if share == 1 else int(least + share * (most - least))
        self.planned.compute_sequence(limit, mode=mode)
        return limit

    def step(self, run: nn.Module) -> None:
        """Run forward and backward of `run` with the same random numbers each time; gradients accumulate."""
        batch = self.batch
        torch.manual_seed(SEED)
        run(batch).backward()

    def gradients(self, run: nn.Module) -> list[torch.Tensor]:
        """The gradients of one step."""
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_zero_(found)
        self.step(run)
        return [gradient.clone() for gradient in found]

    @contextmanager
    def off_course(self) -> Iterator[None]:
        """Skip a block within."""
        block, self.model[1] = self.model[1], nn.Identity()
        try:
            yield
        finally:
            self.model[1] = block

    def trained(self, updates: str | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The parameters of a model of size `PLACED` after three AdamW steps, and figures: `step`, the seconds of the
        last one, `update`, those of its updates alone, and the `limit` and the `predicted` ones of both.

        updates: of a plan under a `device_limit` 1.3 times the smallest; None for plain steps."""
        size, model = PLACED, made(PLACED)
        batch = torch.randn(size.batch, size.context, size.width).to(self.device)
        run: Any = (
            model.to(self.device) if updates is None else Checkpointable(model, device=self.device).measure(batch)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        figures: dict[str, Any] = {"updates": updates}
        if updates is not None:
            options = {"optimizer": optimizer, "updates": updates, "refine": False}
            try:
                run.compute_sequence(device_limit=1, **options)
            except InfeasibleError as error:
                figures["limit"] = int(1.3 * error.min_mem_limit)
            run.compute_sequence(device_limit=figures["limit"], **options)
            figures["predicted"] = run.get_expected_makespan()
            figures["predicted_update"] = sum(group.update_time for group in run.chain.parameters or ())
        for n in range(3):
            torch.manual_seed(n)
            step = seconds(self.device, lambda: run(batch).backward())
            update = seconds(self.device, lambda: (optimizer.step(), optimizer.zero_grad()))
        figures |= {"step": step + update, "update": update}
        found = [p.detach().cpu().clone() for p in model.parameters()]
        if updates is not None:
            run.close()
        return found, figures

    def peak(self, run: nn.Module) -> dict[str, int]:
        """Peak bytes of one step above those held before, and on an accelerator the other figures of `peaks`."""
        if not is_accelerator(self.device):
            return {"asked": peak_of(logged(lambda: self.step(run), self.device)[1])}
        gc.collect()
        return peaks(self.device, lambda: self.step(run))

    def close(self) -> None:
        """Release memory, and restore the number of threads."""
        torch.set_num_threads(self._threads)
        if "planned" in vars(self):
            self.planned.close()


def difference(found: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> dict[str, Any]:
    """bit_for_bit: whether all gradients are equal. largest: the largest difference of an element, relative to the
    largest element of its gradient; None if that is not finite."""
    pairs = list(zip(found, plain, strict=True))
    far = [float((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(b.dtype).tiny)) for a, b in pairs]
    finite = all(value < float("inf") for value in far)
    return {"bit_for_bit": all(torch.equal(a, b) for a, b in pairs), "largest": max(far) if finite else None}


def speed(device: torch.device) -> float:
    """Floating-point operations per second of a product of float32 matrices."""
    a = torch.randn(1024, 1024, device=device)
    return 2 * 1024**3 / min(seconds(device, lambda: a @ a) for _ in range(4))


def seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of `run` on a device that has nothing else to do."""
    finish(device)
    start = time.perf_counter()
    run()
    finish(device)
    return time.perf_counter() - start

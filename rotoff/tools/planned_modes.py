"""The answers of `rotoff.plan`: a step's cost in each mode, and with parameters placed, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..core.chain import Chain
from ..core.sequence import TRANSFERS, OpKind, Sequence
from ..core.sizes import format_bytes
from ..core.trace import Trace
from ..io.json_file import save_json

WAYS_ON = (
    "take a device with more memory, a smaller batch, an optimizer with fewer states, parameters in bfloat16, or"
    " adapters on frozen parameters, or shard the model over several devices (FSDP2)"
)
PLAIN = "plain PyTorch"
NEARLY = 1.02  # a step's time / the fastest one's up to which the simpler setting is the better one
MARGIN = 0.06  # share of the device's memory for the context, libraries' workspaces and fragmentation


@dataclass(frozen=True)
class PlannedMode:
    """One mode within the limit; fields that depend on a plan are None if nothing fits.

    step_time: estimated seconds.
    overhead: step_time over that of keeping everything, less 1.
    peak_bytes: the most on the device, without resident bytes, as the limit.
    host_bytes: the most on the host.
    bound_time: seconds that no sequence within the limit can beat.
    min_mem_limit: the smallest limit that works in this mode.
    """

    mode: str
    step_time: float | None
    overhead: float | None
    peak_bytes: int | None
    host_bytes: int | None
    bound_time: float | None
    min_mem_limit: int


@dataclass(frozen=True)
class PlannedStep:
    """A row of the table: one training step with the updates of the optimizer.

    name: what is done. fits: whether `peak_bytes` are within the limit.
    peak_bytes: the most on the device, all included: parameters, gradients once they are made, states, batch, step.
        With a `mem_limit` what the step allocates, as the limit.
    host_bytes: the most on the host.
    step_time: estimated seconds. overhead: that over forward and backward alone, less 1.
    largest_batch: an estimate of the largest batch that fits. None if the sample has none, or none fits.
    moves: what is recomputed, and what moves to the host and back.
    setting: what to write for it, in Python; empty for what others do.
    """

    name: str
    fits: bool
    peak_bytes: int
    host_bytes: int
    step_time: float
    overhead: float
    largest_batch: int | None
    moves: str
    setting: str = ""

    @property
    def to_paste(self) -> str:
        """The line with the setting, and what it excludes."""
        without = " (no clipping, GradScaler or accumulation)" if "updates='during'" in self.setting else ""
        return f"to paste: {self.setting}{without}"

    def __str__(self) -> str:
        sizes = f"{format_bytes(self.peak_bytes):>11} {format_bytes(self.host_bytes):>11}"
        times = f"{self.step_time:>9.4g} {100 * self.overhead:>+8.1f}% {self.largest_batch or '-':>8}"
        return f"{self.name:<41} {'yes' if self.fits else 'NO':>4} {sizes} {times}  {self.moves}".rstrip()


TABLE_HEAD = f"{'':<41} {'fits':>4} {'peak':>11} {'host':>11} {'step s':>9} {'overhead':>9} {'batch':>8}  moves"
_MOVED = {"": "activations", "w": "parameters", "g": "gradients", "o": "states"}


def moved_by(sequence: Sequence, trace: Trace) -> str:
    """What a step recomputes and moves, as text."""
    moved = {op.of for op in sequence if op.kind in TRANSFERS}
    again = trace.recompute_time or any(op.kind is OpKind.F_SEL for op in sequence)
    said = ["recomputes"] if again else []
    said += [name for of, name in _MOVED.items() if of in moved]
    said += ["updates on the host"] if any(op.kind is OpKind.H for op in sequence) else []
    return ", ".join(said)


@dataclass(frozen=True)
class PlannedModes:
    """The answer of `rotoff.plan`; prints as a table.

    chain: the estimated chain.
    device: name of the device.
    mem_limit: bytes that a step may allocate, at most those that resident bytes leave; 0 if these fill the device.
    keep_all_bytes, keep_all_time: the peak and the seconds of keeping everything, without resident bytes and updates.
    resident_bytes: parameters and buffers, gradients, optimizer states and the batch, by name; the limit does not count
        them.
    device_bytes: size of the device's memory.
    rows: one for each mode, within `mem_limit`.
    placed: training within the device's memory where parameters, gradients and optimizer states move too, with updates
        "after" the backward and "during" it; empty if a `mem_limit` was given.
    steps: the table: plain PyTorch, what is set elsewhere, and rotoff's plans.
    bound_time: seconds of a step that no plan can beat; None if nothing fits.
    asked: whether a `mem_limit` was given.
    notes: what the figures rest on, as sentences.
    """

    chain: Chain
    device: str
    mem_limit: int
    keep_all_bytes: int
    keep_all_time: float
    resident_bytes: dict[str, int]
    device_bytes: int
    rows: tuple[PlannedMode, ...]
    placed: tuple[PlacedStep, ...] = ()
    steps: tuple[PlannedStep, ...] = ()
    bound_time: float | None = None
    asked: bool = False
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[PlannedMode]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, mode: str) -> PlannedMode:
        for row in self.rows:
            if row.mode == mode:
                return row
        raise KeyError(mode)

    @property
    def best(self) -> PlannedStep | None:
        """What to do: plain PyTorch if it fits, else the simplest of rotoff's settings that is nearly the fastest; None
        if none fits."""
        able = [row for row in self.steps if row.fits and (row.setting or row.name == PLAIN)]
        nearly = NEARLY * min((row.step_time for row in able), default=0.0)
        return next((row for row in able if row.name == PLAIN or row.step_time <= nearly), None)

    @property
    def step_time(self) -> float | None:
        """Seconds of a step of `best`, with the updates; None if nothing fits."""
        return None if self.best is None else self.best.step_time

    @property
    def needed_bytes(self) -> int:
        """Bytes that a device must have, with the resident ones: the peak of `best`, or what the smallest limit needs
        if nothing fits."""
        resident = sum(self.resident_bytes.values())
        if self.best is not None:
            return self.best.peak_bytes + (resident if self.asked else 0)
        return min(row.min_mem_limit for row in self.rows) + resident

    @property
    def fits(self) -> bool:
        """Whether any of the modes has a plan within `mem_limit`, with the resident bytes on the device."""
        return any(row.step_time is not None for row in self.rows)

    @property
    def works(self) -> bool:
        """Whether there is a plan that fits the device's memory, be it with parameters on the host."""
        return self.best is not None

    @property
    def verdict(self) -> str:
        """Whether the training fits, how, and what to change if it does not."""
        usable = usable_bytes(self.device_bytes)
        of = (
            f"the {format_bytes(usable)} that {self.device} has for training ({format_bytes(self.device_bytes)}, less"
            f" {MARGIN:.0%} for context and libraries)"
        )
        within = f"a mem_limit of {format_bytes(self.mem_limit)}" if self.asked else of
        plain, best = self.steps[0], self.best
        if best is plain:
            return f"fits: plain PyTorch takes {format_bytes(plain.peak_bytes)} of {within}; nothing has to be set"
        takes = f"plain PyTorch takes {format_bytes(plain.peak_bytes)}, more than {within}"
        if best is not None:
            return f"fits with {best.name}, at {best.step_time:.4g} s a step ({100 * best.overhead:+.1f}%): {takes}"
        if self.asked and self.needed_bytes <= usable:
            least = min(row.min_mem_limit for row in self.rows)
            left = least + usable - self.needed_bytes
            cure = f"mem_limit may be from {format_bytes(least)} ({least} bytes) to {format_bytes(left)} ({left} bytes)"
            return f"DOES NOT FIT in {format_bytes(self.mem_limit)}; {cure}"
        return (
            f"DOES NOT FIT: with even the smallest limit it takes {format_bytes(self.needed_bytes)} of {of}; {WAYS_ON}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, without the chain."""
        return {
            "format": "rotoff.planned_modes",
            "version": 1,
            "meta": dict(self.chain.meta),
            "device": self.device,
            "device_bytes": self.device_bytes,
            "mem_limit": self.mem_limit,
            "keep_all_bytes": self.keep_all_bytes,
            "keep_all_time": self.keep_all_time,
            "resident_bytes": self.resident_bytes,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
            "works": self.works,
            "modes": [asdict(row) for row in self.rows],
            "placed": [asdict(row) for row in self.placed],
            "steps": [asdict(row) for row in self.steps],
            "bound_time": self.bound_time,
            "best": None if self.best is None else asdict(self.best),
            "notes": list(self.notes),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` as JSON to `path`."""
        save_json(path, self.to_dict())

    def __str__(self) -> str:
        asked = f" within a mem_limit of {format_bytes(self.mem_limit)}" if self.asked else ""
        lines = [
            self.verdict,
            f"{self.chain.name or 'model'} on {self.device}{asked}: {resident_parts(self.resident_bytes)}",
            *self.notes,
            "",
            TABLE_HEAD,
            *map(str, self.steps),
        ]
        plain = self.keep_all_time
        if self.bound_time is not None:
            over = max(0.0, 100 * (self.bound_time / plain - 1)) if plain else 0.0
            lines.append(f"{'no plan is faster than':<69} {self.bound_time:>9.4g} {over:>+8.1f}%")
        least = ", ".join(f"{row.mode} {format_bytes(row.min_mem_limit)}" for row in self.rows)
        lines += ["", f"smallest mem_limit: {least}"]
        if self.placed:
            lines[-1] += f"; smallest device: {format_bytes(self.placed[0].min_device_bytes)}"
        if self.best is not None and self.best.setting:
            lines.append(self.best.to_paste)
        return "\n".join(lines)


@dataclass(frozen=True)
class PlacedStep:
    """One training step whose plan places parameters, too; fields that depend on a plan are None if nothing fits.

    updates: "after" the backward, as ``optimizer.step()`` does, or "during" it.
    step_time: estimated seconds, updates included.
    overhead: step_time over forward and backward alone, less 1.
    peak_bytes, host_bytes: the most on the device and on the host.
    bound_time: seconds that no sequence within the device's memory can beat.
    min_device_bytes: the smallest device memory that works.
    largest_batch: an estimate of the largest batch that fits: all bytes of a step, including kernels' workspaces, grow
        with it, but for the gradient of a weight that a backward makes. None if the sample has no batch or nothing
        fits.
    moves: what is recomputed, and what moves.
    """

    updates: str
    step_time: float | None
    overhead: float | None
    peak_bytes: int | None
    host_bytes: int | None
    bound_time: float | None
    min_device_bytes: int
    largest_batch: int | None
    moves: str = ""


def usable_bytes(device_bytes: int) -> int:
    """The part of a device's memory that a training process can use."""
    return int(device_bytes * (1 - MARGIN))


def resident_parts(resident: dict[str, int]) -> str:
    """`resident` as text."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in resident.items() if size)

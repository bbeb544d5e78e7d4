"""The answer of `rotoff.plan`: steps of a model on a device, as rows of one table."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..core.chain import Chain
from ..core.figures import overhead, percent, table
from ..core.sizes import format_bytes
from ..io.files import save_json
from ..solver.bounds import largest_operation

WAYS_ON = (
    "take a device with more memory, a smaller batch, an optimizer with fewer states, parameters in bfloat16, or"
    " adapters on frozen parameters, or shard the model over several devices (FSDP2)"
)
PLAIN = "plain PyTorch"
NOW = "now: "  # begins the name of the row of another tool's settings
NEARLY = 1.02  # a step's time / the fastest one's up to which the simpler setting is the better one
MARGIN = 0.06  # share of the device's memory for the context, libraries' workspaces and fragmentation


@dataclass(frozen=True)
class PlannedStep:
    """A row of the table: one training step with the updates of the optimizer.

    name: what is done. fits: whether `peak_bytes` are within the limit.
    peak_bytes: the most on the device, all included: parameters, gradients once they are made, states, batch, step.
        With a `mem_limit` what the step allocates, as the limit.
    host_bytes: the most on the host.
    step_time: estimated seconds. overhead: that over a step that keeps everything, with its updates, less 1.
    moves: what is recomputed, and what moves to the host and back.
    setting: what to write for it, in Python; empty for what others do.
    """

    name: str
    fits: bool
    peak_bytes: int
    host_bytes: int
    step_time: float
    overhead: float
    moves: str
    setting: str = ""

    @property
    def to_paste(self) -> str:
        """The line with the setting, and what it excludes."""
        without = " (no clipping, GradScaler or accumulation)" if "updates='during'" in self.setting else ""
        return f"to paste: {self.setting}{without}"

    @property
    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        sizes = "yes" if self.fits else "NO", format_bytes(self.peak_bytes), format_bytes(self.host_bytes)
        return (self.name, *sizes, f"{self.step_time:.4g}", percent(self.overhead), self.moves)


@dataclass(frozen=True)
class PlannedMesh:
    """What the ranks of a mesh have in common; prints as a table.

    axes: as text. ranks: their number. link: B/s that a rank is assumed to send. sent: for each kind of collective, how
    many there are in a step, bytes that a rank sends, and seconds. waits: seconds of plain FSDP2's step in which
    kernels wait for them.
    """

    axes: str
    ranks: int
    link: float
    sent: dict[str, tuple[int, int, float]]
    waits: float

    def __str__(self) -> str:
        rows = [
            (name, str(calls), format_bytes(nbytes), f"{seconds:.4g}")
            for name, (calls, nbytes, seconds) in self.sent.items()
        ]
        rows.append(("of these, plain PyTorch waits for", "", "", f"{self.waits:.4g}"))
        head = f"collectives, at {format_bytes(self.link)}/s", "", "sent", "s"
        return "\n".join(table(head, rows))


@dataclass(frozen=True)
class PlannedSteps:
    """The answer of `rotoff.plan`; prints as a table. Its rows can be had by name: ``found["rotoff, mem_limit"]``.

    chain: the estimated chain.
    device: name of the device. device_bytes: size of its memory.
    mem_limit: bytes that a step may allocate, at most those that resident bytes leave; 0 if these fill the device.
    asked: whether a `mem_limit` was given.
    keep_all_bytes: what a step that keeps everything allocates, as the limit.
    resident_bytes: parameters and buffers, gradients, optimizer states and the batch, by name; the limit does not count
        them.
    min_mem_limits: the smallest limit that works, by mode. min_device_bytes: the smallest memory of a device, with all
        on the host that can lie there.
    steps: the rows: plain PyTorch, what is set elsewhere, and rotoff's plans, if plain PyTorch does not fit.
    bound_time: seconds of a step that no plan can beat; None if nothing fits.
    notes: what the figures rest on, as sentences.
    mesh: the ranks, of which each has such a device and these rows; None if there is one.
    """

    chain: Chain
    device: str
    device_bytes: int
    mem_limit: int
    asked: bool
    keep_all_bytes: int
    resident_bytes: dict[str, int]
    min_mem_limits: dict[str, int]
    min_device_bytes: int
    steps: tuple[PlannedStep, ...]
    bound_time: float | None
    notes: tuple[str, ...] = ()
    mesh: PlannedMesh | None = None

    def __iter__(self) -> Iterator[PlannedStep]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> PlannedStep:
        for row in self.steps:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def best(self) -> PlannedStep | None:
        """What to do: plain PyTorch if it fits, else the simplest of what is set now and of rotoff's settings that is
        nearly the fastest; None if none fits."""
        able = [row for row in self.steps if row.fits and (row.setting or row.name.startswith((PLAIN, NOW)))]
        nearly = NEARLY * min((row.step_time for row in able), default=0.0)
        return next((row for row in able if row.name == PLAIN or row.step_time <= nearly), None)

    @property
    def fits(self) -> bool:
        """Whether there is a `best` step."""
        return self.best is not None

    @property
    def needed_bytes(self) -> int:
        """Bytes that a device must have, with the resident ones: the peak of `best`, or what the smallest limit needs
        if nothing fits."""
        resident = sum(self.resident_bytes.values())
        if self.best is not None:
            return self.best.peak_bytes + (resident if self.asked else 0)
        return min(self.min_mem_limits.values()) + resident

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
            return f"fits with {best.name}, at {best.step_time:.4g} s a step ({percent(best.overhead)}): {takes}"
        if self.asked and self.needed_bytes <= usable:
            least = min(self.min_mem_limits.values())
            left = least + usable - self.needed_bytes
            cure = f"mem_limit may be from {format_bytes(least)} ({least} bytes) to {format_bytes(left)} ({left} bytes)"
            return f"DOES NOT FIT in {format_bytes(self.mem_limit)}; {cure}"
        takes, nbytes = "with even the smallest limit it takes", self.needed_bytes
        if not self.asked:
            takes, nbytes = "with all that can lie on the host there it takes a device of", self.min_device_bytes
        phase, i, alone = largest_operation(self.chain)
        of += f"; the {phase} of stage {i} ({self.chain.stage(i).name}) alone needs {format_bytes(alone)}"
        return f"DOES NOT FIT: {takes} {format_bytes(nbytes)}, more than {of}: {WAYS_ON}"

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, without the chain."""
        said = {name: value for name, value in vars(self).items() if name != "chain"}
        said |= {"meta": dict(self.chain.meta), "needed_bytes": self.needed_bytes, "fits": self.fits}
        said |= {"notes": [*self.notes], "steps": [asdict(row) for row in self.steps]}
        said |= {"mesh": self.mesh and asdict(self.mesh)}
        best = None if self.best is None else asdict(self.best)
        return {"format": "rotoff.planned_steps", "version": 1, **said, "best": best}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` as JSON to `path`."""
        save_json(path, self.to_dict())

    def __str__(self) -> str:
        asked = f" within a mem_limit of {format_bytes(self.mem_limit)}" if self.asked else ""
        resident = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.resident_bytes.items() if size)
        where = self.device if self.mesh is None else f"each of {self.mesh.ranks} {self.device} ({self.mesh.axes})"
        head = f"{self.chain.name or 'model'} on {where}{asked}: {resident}"
        lines = [self.verdict, head, *self.notes, "", *steps_table(self, self.steps)]
        lines += [] if self.mesh is None else ["", str(self.mesh)]
        least = ", ".join(f"{mode} {format_bytes(nbytes)}" for mode, nbytes in self.min_mem_limits.items())
        lines += ["", f"smallest mem_limit: {least}"]
        if not self.asked:
            lines[-1] += f"; smallest device: {format_bytes(self.min_device_bytes)}"
        if self.best is not None and self.best.setting:
            lines.append(self.best.to_paste)
        return "\n".join(lines)


def steps_table(found: PlannedSteps, rows: Iterable[PlannedStep]) -> list[str]:
    """Lines of a table of `rows`, and of the time that no plan beats."""
    cells = [row.cells for row in rows]
    if found.bound_time is not None:
        over = percent(overhead(found.bound_time, found.steps[0].step_time))
        cells.append(("no plan is faster than", "", "", "", f"{found.bound_time:.4g}", over, ""))
    return table(("", "fits", "peak", "host", "step s", "overhead", "moves"), cells, (0, 6))


def usable_bytes(device_bytes: int) -> int:
    """The part of a device's memory that a training process can use."""
    return int(device_bytes * (1 - MARGIN))


def memory_with(usable: int) -> int:
    """The memory of a device of which a training process can use so many bytes."""
    return math.ceil(usable / (1 - MARGIN)) + 1

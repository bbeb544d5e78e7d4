"""The answers of `rotoff.plan`: a step's cost in each mode, and with parameters placed, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..core.chain import Chain
from ..core.sizes import format_bytes
from ..io.json_file import save_json

WAYS_ON = (
    "take a device with more memory, a smaller batch, an optimizer with fewer states, parameters in bfloat16, or"
    " adapters on frozen parameters, or shard the model over several devices (FSDP2)"
)
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
class PlannedModes:
    """Rows of `PlannedMode`; prints as a table.

    chain: the estimated chain.
    device: name of the device.
    mem_limit: bytes that a step may allocate, at most those that resident bytes leave; 0 if these fill the device.
    keep_all_bytes, keep_all_time: the peak and the seconds of keeping everything.
    resident_bytes: parameters and buffers, gradients, optimizer states and the batch, by name; the limit does not count
        them.
    device_bytes: size of the device's memory.
    rows: one for each mode.
    placed: training within the device's memory where parameters, gradients and optimizer states move too, with updates
        "after" the backward and "during" it; empty if a `mem_limit` was given.
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
    def needed_bytes(self) -> int:
        """Bytes that a device must have: the resident ones, and the peak of the fastest mode, or the smallest limit if
        no mode fits."""
        return sum(self.resident_bytes.values()) + self._step_bytes

    @property
    def _step_bytes(self) -> int:
        found = [(row.step_time, row.peak_bytes or 0) for row in self.rows if row.step_time is not None]
        return min(found)[1] if found else min(row.min_mem_limit for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether any of the modes has a plan within `mem_limit`, with the resident bytes on the device."""
        return any(row.step_time is not None for row in self.rows)

    @property
    def verdict(self) -> str:
        """Whether the training fits, of which bytes it consists, and what to change if it does not fit."""
        least, usable = self._step_bytes, usable_bytes(self.device_bytes)
        has = f"{resident_parts(self.resident_bytes)} and {format_bytes(least)} for the step take"
        has = f"{has} {format_bytes(self.needed_bytes)}"
        of = (
            f"the {format_bytes(usable)} that {self.device} has for training ({format_bytes(self.device_bytes)}, less"
            f" {MARGIN:.0%} for context and libraries)"
        )
        if self.fits:
            return f"fits: {has} of {of}"
        times = [row.step_time for row in self.placed if row.step_time is not None]
        if times:
            return (
                f"fits only with a device_limit, at {min(times):.4g} s a step: {has}, more than {of}, and partly lie on"
                " the host"
            )
        if self.needed_bytes > usable:
            return f"DOES NOT FIT: {has} with even the smallest limit, more than {of}; {WAYS_ON}"
        left = least + usable - self.needed_bytes
        cure = f"mem_limit may be from {format_bytes(least)} ({least} bytes) to {format_bytes(left)} ({left} bytes)"
        return f"DOES NOT FIT in {format_bytes(self.mem_limit)}; {cure}"

    @property
    def works(self) -> bool:
        """Whether there is a plan that fits the device's memory, be it with parameters on the host."""
        return self.fits or any(row.step_time is not None for row in self.placed)

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
            "modes": [asdict(row) for row in self.rows],
            "placed": [asdict(row) for row in self.placed],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` as JSON to `path`."""
        save_json(path, self.to_dict())

    def __str__(self) -> str:
        head = (
            f"{'mode':<8} {'step s':>10} {'overhead':>9} {'bound':>9} {'peak':>11} {'host':>11} {'smallest limit':>15}"
        )
        within = f" within {format_bytes(self.mem_limit)}" if self.mem_limit else ""
        lines = [
            self.verdict,
            f"{self.chain.name or 'model'} on {self.device}{within} (times are estimates)",
            f"keeping everything: {format_bytes(self.keep_all_bytes)}, {self.keep_all_time:.4g} s a step",
            *([head] if within else []),
        ]
        for row in self.rows if within else ():
            start, end = f"{row.mode:<8} ", f" {format_bytes(row.min_mem_limit):>15}"
            if row.step_time is None:
                lines.append(f"{start}{'does not fit':<54}{end}")
                continue
            assert row.overhead is not None and row.bound_time is not None
            bound = max(0.0, row.bound_time / self.keep_all_time - 1) if self.keep_all_time else 0.0
            lines.append(
                f"{start}{row.step_time:>10.4g} {100 * row.overhead:>+8.1f}% {100 * bound:>+8.1f}%"
                f" {format_bytes(row.peak_bytes or 0):>11} {format_bytes(row.host_bytes or 0):>11}{end}"
            )
        if self.placed:
            usable = format_bytes(usable_bytes(self.device_bytes))
            lines += [f"parameters, gradients and states placed too, within {usable} in all:", HEAD]
            lines += map(str, self.placed)
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
    """

    updates: str
    step_time: float | None
    overhead: float | None
    peak_bytes: int | None
    host_bytes: int | None
    bound_time: float | None
    min_device_bytes: int
    largest_batch: int | None

    def __str__(self) -> str:
        end = f" {format_bytes(self.min_device_bytes):>15} {self.largest_batch or '-':>13}"
        if self.step_time is None or self.overhead is None or self.bound_time is None:
            return f"{self.updates:<8} {'does not fit':<54}{end}"
        bound = round(self.bound_time / self.step_time * (1 + self.overhead) - 1, 3) + 0.0  # without a -0.0
        return (
            f"{self.updates:<8} {self.step_time:>10.4g} {100 * self.overhead:>+8.1f}% {100 * bound:>+8.1f}%"
            f" {format_bytes(self.peak_bytes or 0):>11} {format_bytes(self.host_bytes or 0):>11}{end}"
        )


HEAD = (
    f"{'updates':<8} {'step s':>10} {'overhead':>9} {'bound':>9} {'peak':>11} {'host':>11} {'smallest device':>15}"
    f" {'largest batch':>13}"
)


def usable_bytes(device_bytes: int) -> int:
    """The part of a device's memory that a training process can use."""
    return int(device_bytes * (1 - MARGIN))


def resident_parts(resident: dict[str, int]) -> str:
    """`resident` as text."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in resident.items() if size)

"""Random programs of values made, moved, used and dropped, for any link; they play the interpreter's part without a
model.

Each program keeps what every value must hold, compares all that compute reads, and ends with everything given back.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Copy:
    """Device bytes of a value: its tensors, and the copies under way that nobody has waited for."""

    tensors: list[torch.Tensor]
    arriving: Any = None
    leaving: Any = None


@dataclass
class Value:
    """A value: what it must hold, its device bytes (one set, or two for a while), its host bytes."""

    number: int
    sizes: list[int]
    seed: int
    here: list[Copy] = field(default_factory=list)
    offset: int | None = None
    written: Any = None  # the ticket of the copy out that filled the host bytes

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class TransferProgram:
    """`steps` random operations on `link`, whose order they keep as the interpreter would.

    elsewhere: a context in which compute runs on another stream.
    """

    def __init__(self, link: Any, seed: int, elsewhere: Any = None, sizes: Sequence[int] = ()):
        self.link = link
        # where the link records what compute does
        self.access, self.release = (getattr(link, name, lambda *_: None) for name in ("access", "release"))
        self.random = random.Random(seed)
        self.elsewhere = elsewhere
        self.sizes = list(sizes) or [1, 3, 64, 1000, 4096]
        self.made = 0
        self.values: list[Value] = []
        self.taken: list[tuple[int, int]] = []  # host ranges in use
        # (a clone of what compute read, the pattern expected)
        self.seen: list[tuple[torch.Tensor, tuple[int, int]]] = []

    def run(self, steps: int = 40) -> list[int]:
        """Run the program; returns the indices of the reads that saw wrong bytes."""
        self.issue(steps)
        return [i for i, (got, pattern_of) in enumerate(self.seen) if not torch.equal(got.cpu(), pattern(*pattern_of))]

    def issue(self, steps: int) -> None:
        """The program alone, without a look at what was read, which on a GPU would wait for it."""
        actions = 3 * [self.make, self.offload, self.free, self.prefetch, self.arrive]
        actions += [self.use, self.twin, self.overwrite, self.drop, self.abandon]
        for _ in range(steps):
            self.random.choice(actions)()
        for value in list(self.values):
            self.finish(value)

    def before_compute(self) -> None:
        """Called ahead of all that makes or changes a value; a subclass may let it come late."""

    # What compute does

    def make(self) -> None:
        sizes = [self.random.choice(self.sizes) for _ in range(self.random.randint(1, 3))]
        value = Value(self.made, sizes, self.random.randrange(256))
        self.made += 1
        tensors = [torch.empty(size, dtype=torch.uint8, device=self.link.device) for size in sizes]
        value.here.append(Copy(tensors))
        self.fill(value, f"make {value.number}")
        self.values.append(value)

    def use(self) -> None:
        value = self.pick(lambda v: v.here and v.here[0].arriving is None)
        if value is not None:
            self.read(value, value.here[0], f"use {value.number}")

    def overwrite(self) -> None:
        """Compute changes a value in place, once the copy that reads it has ended; its host bytes are out of date."""
        value = self.pick(lambda v: len(v.here) == 1 and v.here[0].arriving is None)
        if value is not None:
            self.settle(value.here[0])
            self.forget_host(value)
            value.seed = self.random.randrange(256)
            self.fill(value, f"overwrite {value.number}")

    # What moves

    def offload(self) -> None:
        value = self.pick(lambda v: v.offset is None and len(v.here) == 1 and v.here[0].arriving is None)
        if value is not None:
            value.offset = self.place(value.nbytes)
            value.written = value.here[0].leaving = self.link.copy_out(value.here[0].tensors, value.offset)

    def free(self) -> None:
        value = self.pick(lambda v: v.offset is not None and len(v.here) == 1)
        if value is not None:
            self.settle(value.here[0])
            self.give_back(value, f"free {value.number}")

    def prefetch(self) -> None:
        value = self.pick(lambda v: v.offset is not None and not v.here)
        if value is not None:
            self.fetch(value)

    def twin(self) -> None:
        """The copy back is asked for before anybody has waited for the copy out; both sets of device bytes stay."""
        value = self.pick(lambda v: v.offset is not None and len(v.here) == 1 and v.here[0].arriving is None)
        if value is not None:
            self.fetch(value)
            self.settle(value.here[1])
            self.read(value, value.here[1], f"twin {value.number}")
            self.settle(value.here[0])
            self.give_back(value, f"untwin {value.number}")

    def arrive(self) -> None:
        value = self.pick(lambda v: v.here and v.here[0].arriving is not None)
        if value is not None:
            self.settle(value.here[0])
            self.read(value, value.here[0], f"arrive {value.number}")

    def drop(self) -> None:
        value = self.pick(lambda v: v.here)
        if value is not None:
            self.finish(value)

    def abandon(self) -> None:
        """A step is given up: the tickets die unawaited, then the memory goes back."""
        value = self.pick(lambda v: v.here and (v.here[0].arriving is not None or v.here[0].leaving is not None))
        if value is not None:
            for copy in value.here:
                copy.arriving = copy.leaving = None
            value.written = None
            self.forget_host(value)
            self.give_back(value, f"abandon {value.number}")
            self.values.remove(value)

    # What they are made of

    def pick(self, condition: Any) -> Value | None:
        able = [value for value in self.values if condition(value)]
        return self.random.choice(able) if able else None

    def fill(self, value: Value, what: str) -> None:
        tensors = value.here[0].tensors
        self.access(what, [], storages(tensors))
        self.before_compute()
        for i, tensor in enumerate(tensors):
            tensor.copy_(pattern(tensor.numel(), value.seed + i, tensor.device))

    def read(self, value: Value, copy: Copy, what: str) -> None:
        self.access(what, storages(copy.tensors), [])
        self.seen += [(tensor.clone(), (tensor.numel(), value.seed + i)) for i, tensor in enumerate(copy.tensors)]

    def fetch(self, value: Value) -> None:
        tensors = [self.link.allocate(size) for size in value.sizes]
        ticket = self.link.copy_in(tensors, value.offset, value.written)
        value.here.append(Copy(tensors, arriving=ticket))

    def settle(self, copy: Copy) -> None:
        """Compute waits for whatever reads or writes these device bytes."""
        for ticket in (copy.leaving, copy.arriving):
            if ticket is not None:
                with self.somewhere():
                    self.link.wait(ticket)
        copy.leaving = copy.arriving = None

    def somewhere(self) -> AbstractContextManager[Any]:
        return self.elsewhere() if self.elsewhere is not None and self.random.random() < 0.5 else nullcontext()

    def give_back(self, value: Value, what: str) -> None:
        self.release(what, storages(value.here[0].tensors))
        del value.here[0]

    def finish(self, value: Value) -> None:
        """The end of a value, wherever it is: fetched if it is away, used once more, given back."""
        if not value.here:
            self.fetch(value)
        self.settle(value.here[0])
        self.read(value, value.here[0], f"last use of {value.number}")
        self.give_back(value, f"drop {value.number}")
        self.forget_host(value)
        self.values.remove(value)

    def place(self, nbytes: int) -> int:
        """The first free host range of `nbytes` bytes; the slab grows where there is none."""
        offset = 0
        for low, high in sorted(self.taken):
            if low - offset >= nbytes:
                break
            offset = max(offset, high)
        self.taken.append((offset, offset + nbytes))
        self.link.reserve(offset + nbytes)
        return offset

    def forget_host(self, value: Value) -> None:
        if value.offset is not None:
            self.taken.remove((value.offset, value.offset + value.nbytes))
            value.offset = None
        value.written = None


def pattern(size: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """`size` bytes that differ with `seed`, the same on every device."""
    return torch.arange(size, device=device).mul_(37).add_(seed).bitwise_and_(255).to(torch.uint8)


def storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]

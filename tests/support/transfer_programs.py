"""Random programs of values made, moved, used and dropped, for any link; they play the interpreter's part without a
model.

Each program keeps what every value must hold, compares all that compute reads, and ends with everything given back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
    """A value: what it must hold, its device bytes, its host bytes, and the ticket of the copy out that filled those."""

    number: int
    sizes: list[int]
    seed: int
    here: Copy | None = None
    offset: int | None = None
    written: Any = None

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def ready(self) -> bool:
        return self.here is not None and self.here.arriving is None


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
        often: list[tuple[Callable[[Value], Any], Callable[[Value], Any]]] = [  # which values, and what happens to one
            (lambda v: v.offset is None and v.ready, self.offload),
            (lambda v: v.offset is not None and v.here, self.free),
            (lambda v: v.offset is not None and not v.here, self.prefetch),
            (lambda v: v.here and not v.ready, self.arrive),
        ]
        rarely: list[tuple[Callable[[Value], Any], Callable[[Value], Any]]] = [
            (lambda v: v.ready, lambda v: self.read(v, f"use {v.number}")),
            (lambda v: v.offset is not None and v.ready, self.twin),
            (lambda v: v.ready, self.overwrite),
            (lambda v: v.here, self.finish),
            (lambda v: v.here and (v.here.arriving or v.here.leaving) is not None, self.abandon),
        ]
        for _ in range(steps):
            if self.random.random() < 0.15:
                self.make()
            condition, act = self.random.choice(3 * often + rarely)
            if able := [value for value in self.values if condition(value)]:
                act(self.random.choice(able))
        for value in list(self.values):
            self.finish(value)

    def before_compute(self) -> None:
        """Called ahead of all that makes or changes a value; a subclass may let it come late."""

    # What happens to a value

    def make(self) -> None:
        sizes = [self.random.choice(self.sizes) for _ in range(self.random.randint(1, 3))]
        tensors = [torch.empty(size, dtype=torch.uint8, device=self.link.device) for size in sizes]
        value = Value(self.made, sizes, self.random.randrange(256), Copy(tensors))
        self.made += 1
        self.fill(value, f"make {value.number}")
        self.values.append(value)

    def overwrite(self, value: Value) -> None:
        """Compute changes it in place, once the copy that reads it has ended; its host bytes are out of date."""
        self.settle(value.here)
        self.forget_host(value)
        value.seed = self.random.randrange(256)
        self.fill(value, f"overwrite {value.number}")

    def offload(self, value: Value) -> None:
        value.offset = self.place(value.nbytes)
        value.written = value.here.leaving = self.link.copy_out(value.here.tensors, value.offset)

    def free(self, value: Value) -> None:
        self.settle(value.here)
        self.give_back(value, f"free {value.number}")

    def prefetch(self, value: Value) -> None:
        tensors = [self.link.allocate(size) for size in value.sizes]
        value.here = Copy(tensors, arriving=self.link.copy_in(tensors, value.offset, value.written))

    def twin(self, value: Value) -> None:
        """The copy back is asked for before anybody has waited for the copy out; both sets of device bytes stay."""
        first = value.here
        self.prefetch(value)
        self.arrive(value)
        self.settle(first)
        self.release(f"untwin {value.number}", storages(first.tensors))

    def arrive(self, value: Value) -> None:
        self.settle(value.here)
        self.read(value, f"arrive {value.number}")

    def abandon(self, value: Value) -> None:
        """A step is given up: the tickets die unawaited, then the memory goes back."""
        value.here.arriving = value.here.leaving = None
        self.forget_host(value)
        self.give_back(value, f"abandon {value.number}")
        self.values.remove(value)

    def finish(self, value: Value) -> None:
        """The end of a value, wherever it is: fetched if it is away, used once more, given back."""
        if value.here is None:
            self.prefetch(value)
        self.settle(value.here)
        self.read(value, f"last use of {value.number}")
        self.give_back(value, f"drop {value.number}")
        self.forget_host(value)
        self.values.remove(value)

    # What that is made of

    def fill(self, value: Value, what: str) -> None:
        self.access(what, [], storages(value.here.tensors))
        self.before_compute()
        for i, tensor in enumerate(value.here.tensors):
            tensor.copy_(pattern(tensor.numel(), value.seed + i, tensor.device))

    def read(self, value: Value, what: str) -> None:
        tensors = value.here.tensors
        self.access(what, storages(tensors), [])
        self.seen += [(tensor.clone(), (tensor.numel(), value.seed + i)) for i, tensor in enumerate(tensors)]

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
        self.release(what, storages(value.here.tensors))
        value.here = None

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

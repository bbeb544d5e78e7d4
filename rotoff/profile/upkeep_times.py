"""What the runtime's hooks and moves take for one tensor, measured beside work that pushes them out of the caches as a step does.

In a step kernels run between two saved tensors, and the interpreter's code and data are as cold after them as anything: 10 to 20
microseconds where a loop of nothing else takes 3. So a probe goes through memory before each thing that it times, about
as much as the model does for each tensor saved. Everything is timed by the thread's own processor time, which neighbours take no part of.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..capture.saved_tensors import watch_saved
from ..runtime.link import Link
from ..runtime.upkeep import NO_UPKEEP, UpkeepTimes
from ..runtime.values import Held, Slot

MOST = 50e-6  # seconds: what is above was no measurement of this
COLD_BYTES = 4 << 20  # more than a core's own cache
TRAFFIC = 4  # what a kernel reads and writes over what is saved of it: its input, its output and its weights, roughly
ROUNDS, MOVES, TENSORS = 17, 9, 16  # the first round of each does not count


class _Still(Link):
    """Takes copies on and does none."""

    def __init__(self) -> None:
        self.device, self.duplex, self.capacity = torch.device("cpu"), False, 0

    def reserve(self, nbytes: int) -> None: ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_out(self, sources: Sequence[torch.Tensor], offset: int) -> object:
        return object()

    def copy_in(self, targets: Sequence[torch.Tensor], offset: int, after: object) -> object:
        return object()

    def wait(self, ticket: object) -> None: ...

    def drain(self) -> None: ...

    def close(self) -> None: ...


def measure_upkeep(device: torch.device, tensor_bytes: float) -> UpkeepTimes:
    """Seconds for one tensor; none on a device that the host runs ahead of.

    tensor_bytes: of the tensors that autograd saves, on average; TRAFFIC times that is gone through between two.
    """
    if device.type != "cpu":
        return NO_UPKEEP
    cold = torch.zeros(max(1, min(int(TRAFFIC * tensor_bytes), COLD_BYTES) // 4))

    def timed(run: Callable[[], object]) -> float:
        cold.add_(1)
        start = time.thread_time()
        run()
        return time.thread_time() - start

    with torch.enable_grad():
        pack, unpack = _hooks(timed)
    return UpkeepTimes(pack, unpack, _move(timed))


def typical(seconds: Sequence[float], without: Sequence[float]) -> float:
    """What the first take more than the second, by their lower quartiles, since all noise adds; from 0 to MOST."""
    return min(MOST, max(0.0, _lower(seconds) - _lower(without)))


def _lower(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def _hooks(timed: Callable[[Callable[[], object]], float]) -> tuple[float, float]:
    """What a forward of one operation takes more under hooks; and what reading the tensor takes, but for autograd's part in it, which
    is too small a part of a backward to be seen there."""
    x = torch.ones(4, requires_grad=True)
    slots: list[weakref.ref[Slot]] = []
    made: list[Slot] = []

    def pack(tensor: torch.Tensor) -> Slot:
        slot = Slot(tensor.detach())
        slots.append(weakref.ref(slot))
        made.append(slot)
        return slot

    def unpack() -> torch.Tensor | None:
        slot = made[-1]
        tensor = slot.tensor
        return tensor if tensor is not None and tensor._version == slot.version else None

    found: dict[str, list[float]] = {"plain": [], "hooked": [], "read": [], "nothing": []}
    for n in range(ROUNDS):
        for name in list(found)[:: 1 if n % 2 else -1]:
            if name == "hooked":
                with watch_saved(pack):
                    seconds = timed(x.tanh)
            elif name == "plain":
                seconds = timed(x.tanh)
            elif made:
                seconds = timed(unpack if name == "read" else _nothing)
            else:
                continue
            if n:
                found[name].append(seconds)
    return typical(found["hooked"], found["plain"]), typical(found["read"], found["nothing"])


def _nothing() -> None: ...


def _move(timed: Callable[[Callable[[], object]], float]) -> float:
    """What one tensor of a value takes when that leaves, or comes back."""
    link, found = _Still(), []
    nothing = [timed(_nothing) for _ in range(MOVES)]
    for n in range(MOVES):
        tensors = [torch.zeros(4) for _ in range(TENSORS)]
        slots = [Slot(t) for t in tensors]
        held = Held((None, "probe"), tensors[:1], (True,), [weakref.ref(slot) for slot in slots[1:]])
        room = sum(t.nbytes for t in tensors)
        seconds = timed(partial(held.offload, link, 0, room)) + timed(held.release)
        seconds += timed(partial(held.prefetch, link)) + timed(held.settle)
        if n:
            found.append(seconds / (2 * TENSORS))
    return typical(found, [2 * seconds / TENSORS for seconds in nothing])

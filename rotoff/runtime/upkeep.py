"""What the runtime itself takes of the compute lane: hooks around what autograd saves, and the bookkeeping of moves.

The machine charges a forward and a backward what they take in the plain model, and a move nothing but the link. On the CPU
the lane is the thread that runs the interpreter too, so every tensor that is packed, unpacked or moved takes a little of it,
some microseconds each and up to 2 % of a step in all. On CUDA the host runs ahead of the device, and nothing is charged.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..sequence import FORWARDS, Op, OpKind


class UpkeepTimes(NamedTuple):
    """Seconds for one tensor. pack: autograd saves it under hooks. unpack: it reads it. move: a value that it is a part of leaves
    or comes back."""

    pack: float = 0.0
    unpack: float = 0.0
    move: float = 0.0


NO_UPKEEP = UpkeepTimes()


@dataclass(frozen=True)
class Upkeep:
    """times: for one tensor. saved: of each stage, how many tensors autograd saves. own, outputs: how many of those, and of its
    outputs, are moved with its value."""

    times: UpkeepTimes
    saved: Sequence[int]
    own: Sequence[int]
    outputs: Sequence[int]

    def of(self, operations: Sequence[Op], untouched: Collection[int]) -> list[float]:
        """Seconds that each operation takes longer; stages that are `untouched` run as in the plain model."""
        if not any(self.times):
            return [0.0] * len(operations)
        form: dict[int, int] = {}
        found = []
        for op in operations:
            i = op.stage
            seconds = 0.0
            if op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH):
                seconds = self.times.move * ((self.own[i - 1] if op.saved else 0) + (self.outputs[i - 1] if i else 1))
            elif i not in untouched and op.kind in FORWARDS:
                seconds = self.times.pack * self.saved[i - 1]
                form[i] = op.form
            elif i not in untouched and op.kind is OpKind.B:
                again = self.times.pack if form.get(i) else 0.0  # what a smaller form redoes is packed once more
                seconds = (self.times.unpack + again) * self.saved[i - 1]
            found.append(seconds)
        return found

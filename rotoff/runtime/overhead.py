"""What the runtime itself takes of the compute lane: the interpreter's work for each stage, hooks around what autograd
saves, and the bookkeeping of moves.

The machine charges a forward and a backward what they take in the plain model, and a move nothing but the link. On the
CPU the lane is the thread that runs the interpreter too, so every stage and every tensor that is packed, unpacked or
moved takes a little of it, up to 3 % of a step in all. On CUDA the host runs ahead of the device, which hides all that,
but for stages whose kernels take less than launching them: there the device waits for the host, and so for the
interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.sequence import FORWARDS, Op, OpKind


class UpkeepTimes(NamedTuple):
    """Seconds. forward, backward: the interpreter's for a stage. pack, unpack: for a tensor that autograd saves under
    hooks, and reads. move: for one that is a part of a value which leaves or comes back."""

    forward: float = 0.0
    backward: float = 0.0
    pack: float = 0.0
    unpack: float = 0.0
    move: float = 0.0


NO_UPKEEP = UpkeepTimes()


@dataclass(frozen=True)
class Upkeep:
    """times: of the interpreter. saved: of each stage, how many tensors autograd saves. own, outputs: how many of
    those, and of its outputs, are moved with its value. bound: of each stage, whether the host is what it waits for;
    empty: all are."""

    times: UpkeepTimes
    saved: Sequence[int]
    own: Sequence[int]
    outputs: Sequence[int]
    bound: Sequence[bool] = ()

    def of(self, operations: Sequence[Op]) -> list[float]:
        """Seconds that each operation takes longer; a step that keeps everything is that of the plain model."""
        times, form = self.times, dict[int, int]()
        if all(op.kind in (OpKind.F_ALL, OpKind.B) for op in operations[: 2 * len(self.saved)]) or not any(times):
            return [0.0] * len(operations)
        found = []
        for op in operations:
            i = op.stage
            seconds = 0.0
            if self.bound and not (i and self.bound[i - 1]):
                form[i] = op.form if op.kind in FORWARDS else form.get(i, 0)
            elif op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH):
                seconds = times.move * ((self.own[i - 1] if op.saved else 0) + (self.outputs[i - 1] if i else 1))
            elif op.kind in FORWARDS:
                seconds = times.forward + times.pack * self.saved[i - 1]
                form[i] = op.form
            elif op.kind is OpKind.B:
                again = times.pack if form.get(i) else 0.0  # what a smaller form redoes is packed once more
                seconds = times.backward + (times.unpack + again) * self.saved[i - 1]
            found.append(seconds)
        return found

"""What the runtime itself takes of the compute lane: the interpreter's work for each stage, and hooks around what
autograd saves.

On the CPU the lane is the thread that runs the interpreter too, so every stage and every tensor that is packed or
unpacked takes a little of it, up to 3 % of a step in all. On CUDA the host runs ahead of the device, which hides that,
but for stages whose kernels take less than launching them: there the device waits for the host, and so for the
interpreter. A planned step has it in its chain's times; a step that keeps everything is that of the plain model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..core.chain import Stage


class UpkeepTimes(NamedTuple):
    """Seconds. forward, backward: the interpreter's for a stage. pack, unpack: for a tensor that autograd saves under
    hooks, and reads."""

    forward: float = 0.0
    backward: float = 0.0
    pack: float = 0.0
    unpack: float = 0.0

    def added_to(self, stage: Stage, saved: int) -> Stage:
        """A stage of whose forward autograd saves so many tensors; what a smaller form redoes is packed once more."""
        backward = self.backward + self.unpack * saved
        again = backward + self.pack * saved
        return replace(
            stage,
            forward_time=stage.forward_time + self.forward + self.pack * saved,
            backward_time=stage.backward_time + backward,
            forms=tuple(replace(form, backward_time=form.backward_time + again) for form in stage.forms),
        )


NO_UPKEEP = UpkeepTimes()

"""Overhead of the runtime on the compute lane: the interpreter's work for each stage, and its saved-tensor hooks.

On the CPU the interpreter runs in the thread that computes, so every stage and every tensor that is packed or unpacked
takes a little time, up to 3 % of a step in all. On CUDA the host runs ahead of the device, which hides this time except
for stages whose kernels run shorter than their launches take: there the device waits for the host. The chain's times of
a planned step include it; a step that keeps everything runs the plain model, without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..core.chain import Stage


class OverheadTimes(NamedTuple):
    """Seconds. forward, backward: of the interpreter for each stage. pack, unpack: of the hooks for each tensor that
    autograd saves and reads."""

    forward: float = 0.0
    backward: float = 0.0
    pack: float = 0.0
    unpack: float = 0.0

    def added_to(self, stage: Stage, saved: int) -> Stage:
        """Return `stage`, whose forward saves `saved` tensors, with this overhead; a smaller form packs them again."""
        backward = self.backward + self.unpack * saved
        again = backward + self.pack * saved
        return replace(
            stage,
            forward_time=stage.forward_time + self.forward + self.pack * saved,
            backward_time=stage.backward_time + backward,
            forms=tuple(replace(form, backward_time=form.backward_time + again) for form in stage.forms),
        )


NO_OVERHEAD = OverheadTimes()

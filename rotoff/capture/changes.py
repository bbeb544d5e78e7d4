"""Which buffers the forward of a stage changes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..runtime.replay import same_content
from .stage import StageModule


class ChangedBuffers:
    """Watches the buffers of a stage while it runs a few times.

    By version counter and by content: batch norm changes its statistics without telling their counters, and a power
    iteration that has converged changes nothing that could be seen. So one look at one run would not do, and batch norm's
    statistics always count.
    """

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage
        self._before = self._snapshot()
        self._found: dict[tuple[nn.Module, str], None] = {}

    def look(self) -> tuple[tuple[nn.Module, str], ...]:
        """(module, name) of every buffer found to change so far."""
        for module, name, old, version, content in self._before:
            now = module._buffers[name]
            statistics = isinstance(module, _NormBase) and module.training and module.track_running_stats
            if statistics or now is not old or old._version != version or not same_content(old, content):
                self._found[module, name] = None
        self._before = self._snapshot()
        return tuple(self._found)

    def _snapshot(self) -> list[tuple[nn.Module, str, torch.Tensor, int, torch.Tensor]]:
        return [(m, name, t, t._version, t.detach().clone()) for m, name, t in self._stage.buffers()]

"""Which buffers the forward of a stage changes, and which Python values of its modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import MeasureError
from ..tensors.buffers import restorable, same_content
from ..tensors.stage import StageModule
from .unrepeatable import NO_BUFFER


class ChangedBuffers:
    """Watches the buffers of a stage while it runs a few times.

    By version counter and by content: batch norm changes its statistics without telling their counters, and a power
    iteration that has converged changes nothing that could be seen. So one look at one run would not do, and batch
    norm's statistics always count.
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


class ChangedAttributes:
    """Watches the attributes of a stage's modules that hold numbers, texts or tensors without a graph, from a run to
    the next.

    What the first run fills in (a cache) is none; so let it pass before.
    """

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage
        self._before = [
            (module, name, value, value._version if isinstance(value, torch.Tensor) else 0)
            for module in stage.every_module()
            for name, value in vars(module).items()
            if restorable(value)
        ]

    def look(self) -> tuple[tuple[nn.Module, str, int], ...]:
        """(module, name, bytes) of every attribute that has another value now.

        Raises:
            MeasureError: where a tensor was changed in place.
        """
        found = []
        for module, name, value, version in self._before:
            now = vars(module).get(name)
            if now is value:
                if isinstance(value, torch.Tensor) and value._version != version:
                    raise MeasureError(
                        f"stage {self._stage.name!r} changes its attribute {name!r} in place, a tensor that is no"
                        f" buffer{NO_BUFFER}"
                    )
            elif isinstance(value, torch.Tensor) or isinstance(now, torch.Tensor) or now != value:
                found.append((module, name, value.nbytes if isinstance(value, torch.Tensor) else 0))
        return tuple(found)

"""Finds the buffers and the Python attributes that a stage's forward changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import MeasureError
from ..tensors.buffers import restorable, same_content
from ..tensors.stage import StageModule
from .undo import OF_EVERY_MODULE, content_of, is_as_before
from .unrepeatable import NO_BUFFER


class ChangedBuffers:
    """Watches the buffers of a stage while it runs a few times.

    Buffers are compared by version counter and by content: batch norm changes its statistics without the counters, and
    a converged power iteration changes nothing visible. One run would not show all changes, and batch norm's statistics
    always count as changed.
    """

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage
        self._before = self._snapshot()
        self._found: dict[tuple[nn.Module, str], None] = {}

    def look(self) -> tuple[tuple[nn.Module, str], ...]:
        """Return (module, name) of every buffer that has changed so far."""
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
    """Watches attributes of a stage's modules between two runs: numbers, strings, tensors without a graph, and what
    containers and generators hold.

    Create it after a first run, because a cache that the first run fills is no change.
    """

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage
        self._before: list[tuple[nn.Module, str, Any, Any]] = []  # and a tensor's version, or what a container holds
        for module in stage.every_module():
            for name, value in vars(module).items():
                if restorable(value):
                    version = value._version if isinstance(value, torch.Tensor) else None
                    self._before.append((module, name, value, version))
                elif name not in OF_EVERY_MODULE and (content := content_of(value)) is not None:
                    self._before.append((module, name, value, content))

    def look(self) -> tuple[tuple[nn.Module, str, int], ...]:
        """Return (module, name, bytes) of every attribute that has another value now.

        Raises:
            MeasureError: if a tensor was changed in place.
        """
        found = []
        for module, name, value, before in self._before:
            now: Any = vars(module).get(name)
            if isinstance(value, torch.Tensor):
                if now is value and value._version != before:
                    raise MeasureError(
                        f"stage {self._stage.name!r} changes its attribute {name!r} in place, a tensor that is not a"
                        f" buffer{NO_BUFFER}"
                    )
                if now is not value:
                    found.append((module, name, value.nbytes))
            elif before is not None:
                if now is not value or not is_as_before(value, before):
                    found.append((module, name, 0))
            elif now is not value and (isinstance(now, torch.Tensor) or now != value):
                found.append((module, name, 0))
        return tuple(found)

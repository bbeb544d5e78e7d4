"""Lets a replay run in the state that the first run had, and restores the present state afterwards.

Before its first run, a stage saves the states of the random number generators, the buffers that its forward changes,
the autocast settings and the flags that choose kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..capture.interception import other_generators, put_other_generators
from ..capture.undo import content_of, put_back
from ..tensors.autocast import autocast_as, autocast_now
from ..tensors.buffers import restorable
from ..tensors.kernel_flags import kernel_flags, kernels_as
from ..tensors.rng import Generators
from ..tensors.stage import TRAINING

_Attribute = tuple[dict[str, Any], str, Any]  # (where it is held, its name, its value)


class ReplayState:
    """The state in which a stage's first run begins.

    Args:
        generators: the random number generators that the stage may use.
        buffers: (module, name) of every buffer that the stage's forward changes.
        attributes: (module, name, bytes) of every other attribute that it sets.
        others: whether the stage's code may draw from Python's and NumPy's generators.
        modes: the measured modes (`StageModule.modes`), which the first run had too. They may change before the replay:
            a GAN thaws its discriminator before the backward of the generator's loss.
    """

    __slots__ = (
        "_attributes",
        "_buffers",
        "_cached",
        "_contents",
        "_generators",
        "_modes",
        "_others",
        "_rng",
        "autocast",
        "kernels",
    )

    def __init__(
        self,
        generators: Generators,
        buffers: Sequence[tuple[nn.Module, str]],
        attributes: Sequence[tuple[nn.Module, str, int]] = (),
        modes: Sequence[tuple[nn.Module, str, bool]] = (),
        others: bool = False,
    ) -> None:
        self._modes = modes
        self._others = others
        values = [(vars(module), name, vars(module).get(name)) for module, name, _ in attributes]
        contents = [(held, None if restorable(held) or _has_graph(held) else content_of(held)) for *_, held in values]
        self._contents = [(held, content) for held, content in contents if content is not None]
        containers = {id(held) for held, _ in self._contents}
        self._attributes: list[_Attribute] = [one for one in values if restorable(one[2]) or id(one[2]) in containers]
        self._generators = generators
        self._rng = generators.begin()
        self._buffers = [(module, name, _buffer(module, name).clone()) for module, name in buffers]
        self.autocast, self._cached = autocast_now(), torch.is_autocast_cache_enabled()
        self.kernels = kernel_flags()

    def mark(self) -> tuple[object, ...]:
        """Return the mark of the generators before the first run."""
        return self._generators.mark(self._rng)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set the state from before the first run; at the end, restore the present one."""
        rng, grad_enabled = self._generators.copies(), torch.is_grad_enabled()
        buffers = [(module, name, module._buffers[name]) for module, name, _ in self._buffers]
        attributes = [(held, name, held.get(name)) for held, name, _ in self._attributes]
        modes: Sequence[tuple[nn.Module, str, bool]] = ()
        others = other_generators() if self._others else None
        contents = [(held, content_of(held)) for held, _ in self._contents]
        try:
            for held, name, value in self._attributes:
                held[name] = value
            for container, content in self._contents:
                put_back(container, content)
            # clones, because the run changes them and another replay may follow
            _put_buffers([(module, name, saved.clone()) for module, name, saved in self._buffers])
            modes = _switch(self._modes)
            self._generators.put(self._rng)
            # the setter, because a context manager costs as much as all else here
            torch._C._set_grad_enabled(True)
            with autocast_as(self.autocast, self._cached), kernels_as(self.kernels):
                yield
        finally:
            torch._C._set_grad_enabled(grad_enabled)
            _switch(modes)
            _put_buffers(buffers)
            for container, content in contents:
                put_back(container, content)
            for held, name, value in attributes:
                held[name] = value
            self._generators.put(rng)
            if others is not None:
                put_other_generators(others)


def _has_graph(value: Any) -> bool:
    """Whether it is, or a container of, tensors with a graph, whose bytes a step must not hold."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value))


def _buffer(module: nn.Module, name: str) -> torch.Tensor:
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer.detach()


def _put_buffers(buffers: Sequence[tuple[nn.Module, str, torch.Tensor | None]]) -> None:
    for module, name, buffer in buffers:
        module._buffers[name] = buffer


def _switch(modes: Sequence[tuple[nn.Module, str, bool]]) -> list[tuple[nn.Module, str, bool]]:
    """Set all `modes`; returns the old values of those that differed."""
    before = []
    for module, name, value in modes:
        if name == TRAINING:
            if module.training is not value:
                before.append((module, name, not value))
                module.training = value
        elif (parameter := getattr(module, name, None)) is not None and parameter.requires_grad is not value:
            before.append((module, name, not value))
            parameter.requires_grad_(value)
    return before

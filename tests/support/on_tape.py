"""Trains a row of the tables with its forward on a tape, and says in a word what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from step_by_step import Row, judged
from torch import nn

from rotoff.tape import kernel
from rotoff.tape.tape import Tape

Kernel: Any = None if kernel.Tape is Tape else kernel.Tape


class AsMode(Tape):
    """As where there is no kernel."""

    is_mode = True


TAPES = [
    pytest.param(AsMode, id="mode"),
    pytest.param(Tape, id="plain"),
    pytest.param(Kernel, id="compiled", marks=pytest.mark.skipif(Kernel is None, reason="no kernel for this torch")),
]


class OnTape(nn.Module):
    """`net`, whose forward is recorded: each of `modules` begins a stage of the tape when it is called."""

    def __init__(self, net: nn.Module, modules: list[nn.Module], new_tape: Callable[[], Tape] = Tape) -> None:
        super().__init__()
        self.net, self._modules_of, self.new_tape = net, modules, new_tape
        self.tapes: list[Tape] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.recording():
            return self.net(*args, **kwargs)

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        tape = self.new_tape()
        self.tapes.append(tape)
        stage = 0

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal stage
            stage += 1
            tape.enter(stage)

        hooks = [module.register_forward_pre_hook(enter) for module in self._modules_of]
        try:
            with tape, torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack):
                yield tape
        finally:
            for hook in hooks:
                hook.remove()


def stages_of(net: nn.Module) -> list[nn.Module]:
    """Modules whose calls begin stages: the blocks of a trunk, or the children."""
    return list(getattr(net, "blocks", None) or net.children())


def verdict(row: Row, new_tape: Callable[[], Tape] = Tape) -> str:
    """How `row` trains on tapes: "equal", "wrong: ...", "error: ..."."""
    return judged(row, lambda net: OnTape(net, stages_of(net), new_tape))

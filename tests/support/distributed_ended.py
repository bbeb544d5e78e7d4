"""Run by `ranks` in each of two processes: one of them ends within a step under FSDP2 and a `device_limit`; the other
one says what it raises, with the notes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from distributed_placed import Trained
from ranks import say
from torch import nn


def main(ends: str, where: str, updates: str) -> None:
    """ends: the number of the process. where: in the forward or the backward."""
    one = Trained("adamw", updates)
    one.step()
    one.limit_further()
    one.step()
    model: nn.Module = one.model[4]

    def end(*_: object) -> None:
        if dist.get_rank() == int(ends):
            os._exit(0)

    if where == "forward":
        model.register_forward_pre_hook(end)
    else:

        def watch(module: nn.Module, args: Any, result: torch.Tensor) -> None:
            result.register_hook(end)

        model.register_forward_hook(watch)
    try:
        one.step()
    except RuntimeError as error:
        said = " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        say(said.replace("\n", " "))
        os._exit(0)

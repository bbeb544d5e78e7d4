"""Modules that FSDP2 has sharded. It gathers their parameters around each of their calls, and empties them again.

What it does is not on the tape, so a gathered parameter is a resident, which its owner fills before the backward of the
module. Stages are cut where calls of these modules begin and end, what crosses a cut stays on the device, and a stage
is made again for its own backward alone: nothing is gathered behind FSDP's back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from ..tape.tape import Tape


def sharded(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside `model` that FSDP2 has sharded, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not used unless imported
    return {} if fsdp is None else {name: m for name, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)}


@contextmanager
def gathering_apart(
    modules: Iterable[nn.Module], tape: Tape, region: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Iterator[None]:
    """Within, `tape` notes nothing of what FSDP2 does before and after calls of these modules; that is in a region."""
    regions: list[AbstractContextManager[object]] = []

    def stop(*_: Any) -> None:
        tape.paused = True
        regions.append(region())
        regions[-1].__enter__()

    def go_on(*_: Any) -> None:
        regions.pop().__exit__(None, None, None)
        tape.paused = False

    hooks: list[Any] = []
    for module in modules:
        hooks += [module.register_forward_pre_hook(stop, prepend=True), module.register_forward_pre_hook(go_on)]
        hooks += [module.register_forward_hook(stop, prepend=True), module.register_forward_hook(go_on)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

"""What kind of module one is."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn


def compiled(module: nn.Module) -> bool:
    """Whether Python does not run the module's code, because it is compiled or scripted."""
    made: Any = type(module)
    return getattr(module, "_compiled_call_impl", None) is not None or _made_by_a_compiler(made)


def parts_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules within one that is compiled, of which Python runs none; also itself, if it is scripted."""
    return (inner for inner in module.modules() if inner is not module or isinstance(module, torch.jit.ScriptModule))


def eagerly(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, in this thread alone, and not where PyTorch compiles a call of the module, as `torch.cond` does; there it
    looks into this."""
    thread = threading.get_ident()

    def run(*args: Any) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == thread:
            hook(*args)

    return run


@lru_cache(maxsize=256)
def _made_by_a_compiler(kind: type) -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    return issubclass(kind, torch.jit.ScriptModule) or (dynamo is not None and issubclass(kind, dynamo.OptimizedModule))

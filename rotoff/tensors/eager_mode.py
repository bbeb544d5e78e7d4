"""What ``torch.compile`` leaves alone: rotoff's own code. None of this imports the compiler, which takes a second."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_PACKAGE = __name__.partition(".")[0]
# parts of the package; compilers look into others, such as hooks of modules
_RUNS_STEPS = "tape", "profile", "planning", "runtime", "tensors.storage"
_told: list[Any] = []


def leave_alone() -> None:
    """Tell the compiler, once it is there, to compile no code that runs steps: where it cannot compile a part of the
    model, it compiles what that part calls, such as hooks of saved tensors."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if not _told and rules is not None and hasattr(rules, "_recompile_re"):  # else it is being imported
        _told.append(rules)
        for part in _RUNS_STEPS:
            rules.add(f"{_PACKAGE}.{part}")


class EagerMode(TorchDispatchMode):
    """A dispatch mode that the compiler leaves alone.

    PyTorch ensures this for every mode, but by a wrapper whose first call imports the compiler.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        leave_alone()
        return super().__enter__()

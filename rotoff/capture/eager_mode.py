"""The base of our dispatch modes: kept from ``torch.compile``, and free of it where nobody compiles."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A dispatch mode that is kept from ``torch.compile`` once that is loaded.

    PyTorch does so for every mode, but by a wrapper whose first call imports all of ``torch._dynamo``, which takes more than a
    second. Without the wrapper a function compiled within a module would have the mode's own method compiled too.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        if "torch._dynamo" in sys.modules:
            for one in type(self).__mro__:
                if issubclass(one, EagerMode) and "__torch_dispatch__" in vars(one) and not vars(one).get("_kept", False):
                    one.__torch_dispatch__ = torch.compiler.disable(vars(one)["__torch_dispatch__"])  # type: ignore[method-assign]
                    one._kept = True  # type: ignore[attr-defined]
        return super().__enter__()

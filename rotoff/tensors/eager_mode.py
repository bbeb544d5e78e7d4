"""Base class of rotoff's modes: ``torch.compile`` does not compile them, and they do not import it unnecessarily."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A dispatch mode that ``torch.compile`` skips once it is loaded.

    PyTorch ensures this for every mode, but by a wrapper whose first call imports all of ``torch._dynamo``, which takes
    more than a second. Without any wrapper, compiling a function within a module would compile the mode's own method
    too.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        if "torch._dynamo" in sys.modules:
            for one in type(self).__mro__:
                own = vars(one).get("__torch_dispatch__")
                if issubclass(one, EagerMode) and own is not None and not vars(one).get("_kept", False):
                    one.__torch_dispatch__ = torch.compiler.disable(own)  # type: ignore[method-assign]
                    one._kept = True  # type: ignore[attr-defined]
        return super().__enter__()

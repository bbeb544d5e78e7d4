"""What sees the operations of a forward: the compiled module, as a fallback of PyTorch's dispatcher on a key directly
below Python's.

A mode of Python would see them, too, but under one PyTorch takes other operations in places (`areAnyTensorSubclassLike`
in ATen), so it is taken only where the compiled module is not there.
"""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any

import torch

from . import contents, regions

logger = logging.getLogger("rotoff")
IN_PYTHON = "TESTING_ONLY_GenericMode"  # the key of the fallback for tapes in Python, which the module calls


def module_name(version: str) -> str:
    """Return the module's name for a version of torch: the dispatcher is that of a minor version."""
    major, minor = version.split(".")[:2]
    return f"_kernel_torch{major}{minor}"


def _load() -> Any:
    """Return the compiled module, or None: tapes are in Python and modes then, and the log says why."""
    try:
        module = importlib.import_module(f".{module_name(torch.__version__)}", __package__)
        if module.start(contents.CHANGED, contents.LOST, contents.checksum):
            return module
        why = "something else has its place in PyTorch's dispatcher"
    except ImportError as error:
        why = str(error)
    logger.info("rotoff: a model's forward is followed in Python, which takes longer: %s", why)
    return None


class _Recording(threading.local):
    """The tapes in Python of a thread that record, the innermost last."""

    def __init__(self) -> None:
        self.tapes: list[Any] = []


_recording = _Recording()


def _seen(operator: Any, *args: Any, **kwargs: Any) -> Any:
    tape = _recording.tapes.pop()
    try:
        return tape.__torch_dispatch__(operator, (), args, kwargs)
    finally:
        _recording.tapes.append(tape)


compiled = _load()
if compiled is not None:
    _library = torch.library.Library("_", "IMPL")
    _library.fallback(_seen, IN_PYTHON)
    for key in filter(None, map(torch._C._parse_dispatch_key, ("Fake", IN_PYTHON))):
        # operators of higher order (torch.cond) know no fallbacks: their branches are seen as they run
        torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
        for operator in torch._ops._higher_order_ops.values():
            operator.fallthrough(key)
    if regions.HIGHER_ORDER is not None:
        regions.HIGHER_ORDER.py_impl(torch._C._parse_dispatch_key("Fake"))(regions.called)


class Below:
    """Within, a tape in Python sees the operations of this thread without a mode of Python."""

    def __init__(self, tape: Any) -> None:
        self._tape, self._begun = tape, compiled.Tape()
        self._begun.in_python = True

    def __enter__(self) -> None:
        _recording.tapes.append(self._tape)
        self._begun.begin()

    def __exit__(self, *error: object) -> None:
        self._begun.end()
        _recording.tapes.remove(self._tape)

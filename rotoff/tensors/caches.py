"""Switches off ``use_cache`` settings that a forward reads: training does not need cached keys and values."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

logger = logging.getLogger("rotoff")
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose users know that their caches are off


def caches(model: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of `model`, its modules and their configurations that hold a setting ``use_cache`` that is
    True."""
    held: dict[int, dict[str, Any]] = {}
    for module in model.modules():
        for value in (module, *vars(module).values()):
            attributes = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
            if attributes.get("use_cache") is True:
                held[id(attributes)] = attributes
    return list(held.values())


@contextmanager
def switched_off(model: nn.Module, held: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Switch the `caches` of a model off, for forwards that read the setting there instead of taking it as an argument;
    say so once."""
    held = [attributes for attributes in held if attributes.get("use_cache") is True]
    if held and model not in _told:
        _told.add(model)
        logger.warning(
            "rotoff: training steps of %s run with use_cache=False, since no training step reads cached keys and"
            " values; steps of plain PyTorch that keep them may round otherwise. For equal bits set use_cache to False"
            " in the model's configuration, in plain runs, too",
            type(model).__name__,
        )
    for attributes in held:
        attributes["use_cache"] = False
    try:
        yield
    finally:
        for attributes in held:
            attributes["use_cache"] = True

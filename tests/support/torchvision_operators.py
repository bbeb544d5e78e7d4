"""transformers and timm import torchvision, which does not load beside a torch that it was not built for."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch

_KEPT: list[torch.library.Library] = []  # a library's operators go with it


def declare() -> None:
    """Have torchvision import: declare the operators that it only registers fakes for, where its own are missing."""
    if _KEPT or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        _KEPT.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def load() -> ModuleType:
    """torchvision itself."""
    declare()
    import torchvision

    return torchvision

"""Options that the user chooses once for a model, shared by `Checkpointable` and estimates."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..accelerator import TYPES, indexed, is_available, named
from ..core.backward_from import BackwardFrom, read_backward_from
from ..errors import MeasureError, OptionError
from ..io.files import named_directory
from .stages import StagesOption, stages_of


@dataclass(frozen=True)
class Options:
    """The arguments of `rotoff.Checkpointable` with these names; see there."""

    stages: StagesOption = None
    backward_from: BackwardFrom = None
    forms: bool = True
    host_directory: str | os.PathLike[str] | None = None
    device: torch.device | None = None

    def check(self, model: nn.Module) -> None:
        """Raise OptionError if an option is invalid or does not suit `model`, MeasureError for an empty model."""
        check_flag("forms", self.forms)
        if self.host_directory is not None:
            named_directory(self.host_directory)
        read_backward_from(self.backward_from)
        stages_of(model, self.stages)

    @property
    def chosen(self) -> dict[str, Any]:
        """Those of the options that a plan depends on and that are not the default, by name."""
        usual = Options()
        names = ("stages", "backward_from", "forms")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(usual, name)}


def check_flag(name: str, given: Any) -> None:
    """Raise OptionError if the option `name` is neither True nor False."""
    if not isinstance(given, bool):
        raise OptionError(f"{name} is {given!r}; give true or false")


def check_module(model: Any) -> None:
    """Raise MeasureError if `model` is no module."""
    if not isinstance(model, nn.Module):
        raise MeasureError(f"the model is a {type(model).__name__}; give a torch.nn.Module")


def read_device(device: Any) -> torch.device | None:
    """Read the option `device`; an accelerator gets the current device's index.

    Raises:
        OptionError: if it names no device.
    """
    if device is None:
        return None
    found = named_device(device)
    if found.type not in TYPES:
        raise OptionError(f"device is {device!r}; rotoff runs steps on {' and '.join(TYPES)}")
    if not is_available(found):
        kind = found.type.upper()
        raise OptionError(f"device is {device!r}, and this torch ({torch.__version__}) finds no {kind} device here")
    return indexed(found)


def named_device(device: Any) -> torch.device:
    """The device that the option `device` names, which this machine need not have.

    Raises:
        OptionError: if it names none.
    """
    try:
        if isinstance(device, bytes):
            raise TypeError("bytes are no text")
        return named(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f'device is {device!r}; give one such as "cuda" ({str(error).splitlines()[0]})') from error

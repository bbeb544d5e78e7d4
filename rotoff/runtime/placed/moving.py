"""Moves parameters, buffers and states of optimizers to a device for good."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def settle_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of `model` to `device` for good."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)  # as ``nn.Module.to`` does


def all_on(model: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move a whole model and the states of its optimizers to `device`."""
    settle_buffers(model, device)
    for parameter in model.parameters():
        move(parameter, device)
    for optimizer in optimizers:
        for updated, state in optimizer.state.items():
            move_state(updated, state)


def move(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter and its gradient to `device`."""
    if parameter.device != device:
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.to(device)
        parameter.grad = None if gradient is None else gradient.to(device)


def move_state(parameter: torch.Tensor, state: dict[str, Any], scalars: bool = False) -> None:
    """Move an optimizer's state of a parameter to the parameter's device. scalars: move step counts, too."""
    for key, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.device != parameter.device and (scalars or tensor.numel() > 1):
            state[key] = tensor.to(parameter.device)

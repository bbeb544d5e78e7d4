"""Estimates the profile of a model on a device, without the device or memory."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...accelerator import block_bytes
from ...core.chain import Chain, LinkRates
from ...runtime.sharded import sharded
from ...tensors.storage import rounded
from ...tensors.tree import tensor_leaves
from ...version import __version__
from ..tape_chain import STAGES
from ..tape_profile import TapeProfile
from ..trace import trace_of
from .collectives import Collectives
from .devices import Device
from .fake_trace import FakeStep, fake_step


@dataclass(frozen=True, eq=False)
class Estimate(TapeProfile):
    """The profile of a step on fake tensors.

    Attributes:
        step: what it was made from. target: for which device.
        name, meta: of the chain.
    """

    step: FakeStep = field(kw_only=True)
    target: Device = field(kw_only=True)
    name: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chain(self) -> Chain:
        return replace(super().chain, name=self.name, meta=self.meta)

    @cached_property
    def collectives(self) -> Collectives | None:
        """Those of the step, by the stages of its first chain; None if there are none."""
        begins, step = self.chains[0].layout.begins, self.step
        if not step.collectives:
            return None
        return Collectives.of(step.collectives, step.log, step.positions, begins, self.target.interconnect is None)


def estimate_profile(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: Device,
    stages: int | Collection[str] = STAGES,
    forms: bool = True,
    names: tuple[str | int, ...] = (),
    shard: Callable[[nn.Module], object] | None = None,
) -> Estimate:
    """Return the profile of a step of `model` on `device`.

    Args:
        model, args, kwargs, shard: as for `fake_step`.
        stages, forms: as for `TapeProfile`.
        names: of the outputs from which the backward starts.

    Raises:
        MeasureError: as for `fake_step`.
    """
    step = fake_step(model, args, kwargs, device, names, shard)
    units = sharded(step.model)
    given = tensor_leaves((args, kwargs))
    block = block_bytes(step.device)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in given}
    return Estimate(
        trace=trace_of(step),
        device=step.device,
        rates=link(device),
        batch_bytes=sum(rounded(nbytes, block) for nbytes in storages.values()),
        stages=tuple(filter(None, units)) or stages,
        forms=forms,
        shapes=tuple(tuple(t.shape) for t in given),
        seen=False,
        borders_stay=bool(units),
        step=step,
        target=device,
        name=type(model).__name__,
        meta=_provenance(model, given, device),
    )


def link(device: Device) -> LinkRates:
    """Return the assumed rates of copies."""
    share = device.link_efficiency
    return LinkRates(device.d2h_bandwidth * share, device.h2d_bandwidth * share, device.duplex)


def _provenance(model: nn.Module, given: Iterable[torch.Tensor], device: Device) -> dict[str, Any]:
    """Return what a chain file says about the origin of its numbers: plain JSON."""
    parameters = list(model.parameters())
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "trained_bytes": sum(p.nbytes for p in parameters if p.requires_grad),
        "buffer_bytes": sum(b.nbytes for b in model.buffers()),
        "inputs": [{"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for t in given],
        "device": device.name,
        "times": "estimated from operation counts and the device's data sheet",
        "bytes": "estimated from shapes, without most temporaries inside kernels",
        "versions": {"rotoff": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }

"""Estimates the profile of a model on a device, without the device or memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from torch import nn

from ...accelerator import block_bytes
from ...core.chain import Chain, LinkRates
from ...tensors.storage import rounded
from ...tensors.tree import tensor_leaves
from ..provenance import provenance
from ..recorded_step import GRADIENT
from ..tape_chain import STAGES
from ..tape_profile import TapeProfile
from ..trace import trace_of
from .devices import Device
from .fake_trace import FakeStep, fake_step


@dataclass(frozen=True, eq=False)
class Estimate(TapeProfile):
    """The profile of a step on fake tensors.

    Attributes:
        step: what it was made from.
        name, meta: of the chain.
    """

    step: FakeStep = field(kw_only=True)
    name: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chain(self) -> Chain:
        return replace(super().chain, name=self.name, meta=self.meta)

    @cached_property
    def moving(self) -> TapeProfile:
        """The profile of steps whose gradients are those of groups of parameters: they are in no stage."""
        log = self.step.log
        gradients = {int(e.begins.removeprefix(GRADIENT)) for e in log if e.begins.startswith(GRADIENT)}
        self.step.log = [event for event in log if event.ptr not in gradients]
        trace, self.step.log = trace_of(self.step), log
        plain = {one.name: getattr(self, one.name) for one in fields(TapeProfile)}
        return TapeProfile(**{**plain, "trace": trace, "like": tuple(self.chains)})


def estimate_profile(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: Device,
    stages: int | Collection[str] = STAGES,
    forms: bool = True,
    names: tuple[str | int, ...] = (),
) -> Estimate:
    """Return the profile of a step of `model` on `device`.

    Args:
        model, args, kwargs: as for `fake_step`.
        stages, forms: as for `TapeProfile`.
        names: of the outputs from which the backward starts.

    Raises:
        MeasureError: as for `fake_step`.
    """
    step = fake_step(model, args, kwargs, device, names)
    given = tensor_leaves((args, kwargs))
    block = block_bytes(step.device)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in given}
    return Estimate(
        trace=trace_of(step),
        device=step.device,
        rates=link(device),
        batch_bytes=sum(rounded(nbytes, block) for nbytes in storages.values()),
        stages=stages,
        forms=forms,
        shapes=tuple(tuple(t.shape) for t in given),
        seen=False,
        step=step,
        name=type(model).__name__,
        meta=provenance(model, (args, kwargs), device),
    )


def link(device: Device) -> LinkRates:
    """Return the assumed rates of copies."""
    share = device.link_efficiency
    return LinkRates(device.d2h_bandwidth * share, device.h2d_bandwidth * share, device.duplex)

"""Chains of models: `estimate`, on a device that is not there, and `stages`, measured and printed as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checkpointable import Checkpointable, refuse_planned
from ..core.backward_from import read_backward_from
from ..core.chain import Chain
from ..errors import OptionError
from ..planning.inputs import chain_input, read_sample, refuse_lazy
from ..planning.options import Options, check_module
from ..planning.stages import stages_of
from ..profile.estimate.devices import Device, find
from ..profile.estimate.estimate import Estimate, estimate_profile
from ..report.chain_table import chain_table


def estimate(model: nn.Module, *sample: Any, device: Device | str = "H200", **kwargs: Any) -> Chain:
    """Estimate the chain of `model` on `device`, without the device and without memory.

    Bytes are exact except for temporaries inside kernels (docs/profiles.md lists them). Times are estimates from
    operation counts and the device's data sheet; the chain's ``meta`` says so.

    Args:
        model, sample, kwargs: the model and its arguments; a single dict holds named arguments. Tensors may be real, on
            ``meta``, or fake, and stay unchanged. Autocast is respected if it is on for the CPU or CUDA. A
            `Checkpointable` is estimated with its ``stages=``, ``forms=`` and ``backward_from=``.
        device: a name (``rotoff.devices()`` lists them) or a `Device`.

    Raises:
        OptionError: for an unknown device; the message names the known ones.
        MeasureError: if the model's forward depends on its tensors' contents, or cannot run on fake ones.
    """
    return estimated(model, sample, kwargs, find(device)).chain


def estimated(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: Device,
    shard: Callable[[nn.Module], object] | None = None,
    options: Options = Options(),  # noqa: B008 - it is frozen
) -> Estimate:
    """The estimated profile of `model`, a `Checkpointable` or a plain module with `options`, on `device`. shard: shards
    a copy.

    Raises:
        OptionError: also for options of a `Checkpointable`, which has its own.
    """
    check_module(model)
    inner = model
    if isinstance(model, Checkpointable):
        if options.chosen:
            raise OptionError(f"the model is a Checkpointable; give {next(iter(options.chosen))} to it alone")
        inner, options = model._model, model._options
    refuse_planned(inner)  # rotoff.attach replaces the model's own forward
    options.check(inner)
    args, kwargs = read_sample(inner, args, kwargs)
    stages, names = stages_of(inner, options.stages), read_backward_from(options.backward_from)
    args, kwargs = chain_input(inner, args, kwargs)
    refuse_lazy(inner)
    return estimate_profile(inner, args, kwargs, device, stages, bool(options.forms), names, shard)


@dataclass(frozen=True)
class FoundStages:
    """The stages of a model; prints as a table.

    strategy: how they were found, as text. chain: their bytes and seconds.
    """

    strategy: str
    chain: Chain

    def __str__(self) -> str:
        return f"{self.strategy}\n{chain_table(self.chain)}"


def stages(model: nn.Module, *sample: Any, repeats: int = 3, **kwargs: Any) -> FoundStages:
    """Cut `model` into stages for `sample` and `kwargs`, and measure each one, to see what rotoff plans for.

    Args:
        model: as for `Checkpointable`; or a `Checkpointable`, to see the effect of its ``stages=``.
        repeats: how many steps are recorded.

    Raises:
        MeasureError: if the model cannot run on the sample.
    """
    wrapped = model if isinstance(model, Checkpointable) else Checkpointable(model)
    wrapped.measure(*sample, repeats=repeats, **kwargs)
    return FoundStages(wrapped.strategy, wrapped.profile.chain)

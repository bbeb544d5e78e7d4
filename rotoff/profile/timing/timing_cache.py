"""Times that need not be measured, since another size or another process has shown them; and what a profile is known
again by: the stages' structure and code, the shapes, autocast, the device, versions and the number of threads.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...core.chain import LinkRates
from ...runtime.overhead import UpkeepTimes
from ...tensors.convolutions import flags
from ...tensors.stage import StageModule
from ...version import __version__
from ..profile import Profile
from ..provenance import device_name
from ..selective.graph import describe, structure

WORTH_CHECKING = 1e-3  # seconds of a stage: shorter ones take another time in each process
FAR = 1.15  # from each other: times of which one was taken while something else ran


class TimesChanged(Exception):
    """Times that were kept are no longer what the stages take."""


class KnownForm(NamedTuple):
    """A smaller form. identity: `Recipe.identity`, what is kept and by which algorithms. seconds: of its backward."""

    identity: tuple[tuple[int, ...], str]
    seconds: float


KnownForms = tuple[KnownForm, ...]


class StageTimes(NamedTuple):
    """Times of one stage, in seconds, which forms it has, and whether the device
    waits for the host."""

    name: str
    forward_time: float
    backward_time: float
    tail_time: float
    forms: KnownForms
    host_bound: bool = False


class KnownTimes(NamedTuple):
    """stages: of the chain. link: None where it is to be measured. copy_bandwidth: of copies
    on the device, B/s, likewise. upkeep: what the runtime itself takes, likewise. checked: whether to look at one of
    them again."""

    stages: tuple[StageTimes, ...]
    link: LinkRates | None
    copy_bandwidth: float | None = None
    upkeep: UpkeepTimes | None = None
    checked: bool = True

    @property
    def heaviest(self) -> StageTimes | None:
        """The stage to look at again; None where all are too short to tell, or are of other sizes."""
        heaviest = max(self.stages, key=lambda row: row.forward_time + row.backward_time)
        long = heaviest.forward_time + heaviest.backward_time >= WORTH_CHECKING
        return heaviest if long and self.checked else None


def check_times(known: StageTimes, runs: Sequence[float]) -> None:
    """Compare what the stage's forward and backward took together, in seconds, with what they are known to take.

    Raises:
        TimesChanged: where they took another time, and not for one slow run.
    """
    before = known.forward_time + known.backward_time
    if min(runs) > FAR * before or statistics.median(runs) * FAR < before:
        now = f"{statistics.median(runs):.3g} s now"
        raise TimesChanged(f"stage {known.name!r} took {before:.3g} s when its times were kept and {now}")


def times_of(profile: Profile) -> tuple[StageTimes, ...]:
    """The times of a measured model's stages."""
    rows = []
    bound = profile.host_bound or (False,) * len(profile.chain)
    for stage, behaviour, host in zip(profile.chain.stages, profile.behaviours, bound, strict=True):
        pairs = zip(behaviour.forms, stage.forms, strict=True)
        forms = tuple(KnownForm(recipe.identity, form.backward_time) for recipe, form in pairs)
        rows.append(StageTimes(stage.name, stage.forward_time, stage.backward_time, stage.tail_time, forms, host))
    return tuple(rows)


def known_times(profile: Profile, longer: float = 1.0, checked: bool = False) -> KnownTimes:
    """The times of a measured model, its link and the runtime. longer: how many times what it took a step takes now.
    checked: as of `KnownTimes`."""

    def scaled(row: StageTimes) -> StageTimes:
        forms = tuple(form._replace(seconds=form.seconds * longer) for form in row.forms)
        times = {name: getattr(row, name) * longer for name in ("forward_time", "backward_time", "tail_time")}
        return row._replace(**times, forms=forms)

    stages = tuple(map(scaled, times_of(profile)))
    return KnownTimes(stages, profile.chain.link, profile.copy_bandwidth, profile.upkeep_times, checked)


def profile_key(stages: Sequence[StageModule], value: Any, device: torch.device, *more: Any) -> dict[str, Any] | None:
    """What bytes and times of `stages` depend on; None where some of it cannot be known again in another process."""
    told = structure([m for stage in stages for m in stage.modules])
    if "@" in told:
        return None
    types = sorted({"cpu", device.type})
    return {
        "stages": [stage.name for stage in stages],
        "structure": told,
        "input": describe(value),
        "device": [device.type, device_name(device)],
        "threads": torch.get_num_threads(),
        "versions": [__version__, torch.__version__],
        "autocast": [[t, torch.is_autocast_enabled(t), str(torch.get_autocast_dtype(t))] for t in types],
        "precision": torch.get_float32_matmul_precision(),
        "lives": [repr((stage.storages, stage.lives)) for stage in stages],
        "kernels": [
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.is_autocast_cache_enabled(),
            str(torch.get_default_dtype()),  # of what a forward makes from numbers
        ],
        "cudnn": list(flags()) if device.type == "cuda" else [],
        "more": [str(one) for one in more],
    }

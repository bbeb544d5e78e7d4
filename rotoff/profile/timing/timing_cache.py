"""Times that need not be measured, because another size or another process measured them, and the key of a profile: the
stages' structure and code, the shapes, autocast, the device, versions and the number of threads."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...core.chain import LinkRates
from ...runtime.overhead import OverheadTimes
from ...tensors.stage import StageModule
from ...tensors.torch_settings import settings_of_torch
from ...version import __version__
from ..profile import Profile
from ..provenance import device_name
from ..selective.graph import describe, structure

WORTH_CHECKING = 1e-3  # seconds; the time of a shorter stage varies between processes
TOLERANCE = 1.15  # ratio beyond which times count as changed


class TimesChanged(Exception):
    """Raised if the stages no longer take the cached times."""


class KnownForm(NamedTuple):
    """A smaller form.

    Attributes:
        identity: `Recipe.identity`, what it keeps and by which algorithms.
        seconds: of its backward; None: to be measured.
    """

    identity: tuple[tuple[int, ...], str]
    seconds: float | None


KnownForms = tuple[KnownForm, ...]


class StageTimes(NamedTuple):
    """Times of one stage in seconds, its forms (None: to be found), whether the device waits for the host, where a
    replay may stop, and `Profile.alike`: if True, gradients of other layouts need not be tried."""

    name: str
    forward_time: float
    backward_time: float
    tail_time: float
    forms: KnownForms | None
    host_bound: bool = False
    early_stop: int = 0
    alike: bool = False


class KnownTimes(NamedTuple):
    """Known times.

    Attributes:
        stages: of the chain.
        link, copy_bandwidth, overhead: rates of the link, B/s of copies on the device, and the interpreter's overhead;
            None if they are to be measured.
        checked: whether to measure one stage again as a check.
    """

    stages: tuple[StageTimes, ...]
    link: LinkRates | None
    copy_bandwidth: float | None = None
    overhead: OverheadTimes | None = None
    checked: bool = True

    def trying_layouts(self) -> KnownTimes:
        """Return these without `StageTimes.alike`."""
        return self._replace(stages=tuple(row._replace(alike=False) for row in self.stages))

    @property
    def heaviest(self) -> StageTimes | None:
        """The stage to measure again; None if all are too short to compare, or no check is wanted."""
        heaviest = max(self.stages, key=lambda row: row.forward_time + row.backward_time)
        long = heaviest.forward_time + heaviest.backward_time >= WORTH_CHECKING
        return heaviest if long and self.checked else None


def check_times(known: StageTimes, runs: Sequence[float]) -> None:
    """Compare the seconds of forward and backward in some `runs` with the known times.

    Raises:
        TimesChanged: if they differ, and not in one slow run alone.
    """
    before = known.forward_time + known.backward_time
    if min(runs) > TOLERANCE * before or statistics.median(runs) * TOLERANCE < before:
        now = f"{statistics.median(runs):.3g} s now"
        raise TimesChanged(f"stage {known.name!r} took {before:.3g} s when its times were kept and {now}")


def times_of(profile: Profile) -> tuple[StageTimes, ...]:
    """Return the times of a measured model's stages."""
    rows = []
    unknown = (False,) * len(profile.chain)
    bound, likes = profile.host_bound or unknown, profile.alike or unknown
    for stage, behaviour, host, alike in zip(profile.chain.stages, profile.behaviours, bound, likes, strict=True):
        pairs = zip(behaviour.forms, stage.forms, strict=True)
        forms = tuple(KnownForm(recipe.identity, form.backward_time) for recipe, form in pairs)
        times = stage.forward_time, stage.backward_time, stage.tail_time
        rows.append(StageTimes(stage.name, *times, forms, host, behaviour.early_stop, alike))
    return tuple(rows)


def known_times(profile: Profile, longer: float = 1.0, checked: bool = False) -> KnownTimes:
    """Return the times of a measured model, its link and the interpreter.

    Args:
        longer: the factor by which a step takes longer now.
        checked: as in `KnownTimes`.
    """

    def scaled(row: StageTimes) -> StageTimes:
        forms = tuple(form._replace(seconds=(form.seconds or 0.0) * longer) for form in row.forms or ())
        times = {name: getattr(row, name) * longer for name in ("forward_time", "backward_time", "tail_time")}
        return row._replace(**times, forms=forms)

    stages = tuple(map(scaled, times_of(profile)))
    overhead = profile.overhead_times if any(profile.overhead_times) else None  # its stages may all have been long
    return KnownTimes(stages, profile.chain.link, profile.copy_bandwidth, overhead, checked)


def profile_key(stages: Sequence[StageModule], value: Any, device: torch.device, *more: Any) -> dict[str, Any] | None:
    """Return what bytes and times of `stages` depend on; None if another process cannot recognise some of it."""
    described = structure([m for stage in stages for m in stage.modules])
    if "@" in described:
        return None
    return {
        "stages": [stage.name for stage in stages],
        "structure": described,
        "input": describe(value),
        "device": [device.type, device_name(device)],
        "threads": torch.get_num_threads(),
        "versions": [__version__, torch.__version__],
        **settings_of_torch(sorted({"cpu", device.type})),
        "lives": [repr((stage.storages, stage.lives)) for stage in stages],
        "more": [str(one) for one in more],
    }

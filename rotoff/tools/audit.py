"""`audit`: what another tool's settings take, what is possible in the same bytes, and the setting that gets there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ..accelerator import is_available, named
from ..core.backward_from import BackwardFrom
from ..core.figures import percent
from ..core.sizes import format_bytes
from ..io.progress import Bar
from ..planning.options import Options
from ..planning.stages import StagesOption
from ..profile.allocations import without_gc
from ..profile.estimate.devices import Device, find
from .foreign_settings import ForeignSettings, read_foreign
from .planned_steps import MARGIN, PLAIN, PlannedStep, PlannedSteps, steps_table
from .question import HOST_BANDWIDTH, Question, batch_of


@dataclass(frozen=True)
class Audit:
    """The answer of `audit`; prints as a table, with a row of plain PyTorch, which neither recomputes nor moves.

    read: the settings. now: the step that they make. possible: the plan in the bytes of `now`. notes: what the figures
    do not count, as sentences.
    """

    read: ForeignSettings
    now: PlannedStep
    possible: PlannedSteps
    device: str
    notes: tuple[str, ...]

    @property
    def best(self) -> PlannedStep:
        """The fastest step in the same bytes; `now` if none is faster."""
        able = [row for row in self.possible if row.fits and row.setting]
        return min([self.now, *able], key=lambda row: row.step_time)

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        said = {"read": self.read.read, "not_read": self.read.not_read, "setting": asdict(self.read.setting)}
        return {
            "format": "rotoff.audit",
            "version": 1,
            "kind": self.read.kind,
            **{name: {key: str(value) for key, value in keys.items()} for name, keys in said.items()},
            "now": asdict(self.now),
            "plain": asdict(self.possible[PLAIN]),
            "best": asdict(self.best),
            "bound_time": self.possible.bound_time,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        now, best = self.now, self.best
        takes = f"{format_bytes(now.peak_bytes)}, {now.step_time:.4g} s a step"
        says = f"{self.read.kind} on {self.device}: {now.name}, {takes}"
        if best is now:
            says += "; no faster plan was found in these bytes"
        else:
            less = percent(best.step_time / now.step_time - 1)
            says += f"; {best.name} takes {best.step_time:.4g} s in the same bytes ({less})"
        plain = self.possible[PLAIN]
        rows = [replace(now, name=f"now: {now.name}"), *([plain] if now.name != PLAIN else [])]
        rows += [row for row in self.possible if row.setting]
        lines = [says, *self.notes, *self.possible.notes, "", *steps_table(self.possible, rows)]
        if best.setting:
            lines += ["", best.to_paste]
        return "\n".join(lines)


def audit(
    model: nn.Module,
    *sample: Any,
    settings: Any,
    device: Device | str = "H200",
    optimizer: str | None = None,
    master_weights: bool | None = None,
    host_bandwidth: float = HOST_BANDWIDTH,
    stages: StagesOption = None,
    backward_from: BackwardFrom = None,
    forms: bool = True,
    **kwargs: Any,
) -> Audit:
    """Estimate peak and step time of the settings of another tool, and what is possible in the same bytes.

    Only keys that touch the memory of one device are read; ``print`` lists those that were not understood. Nothing is
    sharded: give the model as one device holds it.

    Args:
        model, sample, kwargs, device, host_bandwidth, stages, backward_from, forms: as for `rotoff.plan`.
        settings: a ``transformers.TrainingArguments``, one or several of FSDP2's policies, or the path or the content
            of a DeepSpeed (JSON), axolotl (YAML) or torchtitan (TOML) file.
        optimizer, master_weights: as for `rotoff.plan`; None: what the settings say, or "adamw" and False.

    Raises:
        OptionError: for settings of another kind, and as for `rotoff.plan`. OSError: if the file cannot be read.
        MeasureError: if the model cannot be estimated.
    """
    read, target = read_foreign(settings), find(device)
    said = {"optimizer": "adamw", "master_weights": False, "autocast": None, **read.said}
    masters = said["master_weights"] if master_weights is None else master_weights
    how = optimizer or said["optimizer"], host_bandwidth, masters
    question = Question(target, Options(stages, backward_from, forms), "joint", None, *how)
    kind = "cpu" if not is_available(named(0)) else named(0).type
    within = torch.autocast(kind, getattr(torch, said["autocast"])) if said["autocast"] else nullcontext()
    with without_gc(), Bar("auditing") as bar:
        bar(0.0, "tracing the model")
        with within:
            profile = question.estimated(model, sample, kwargs)
        now = question.whole(profile).of(read.setting)
        small = replace(target, memory_bytes=math.ceil(now.peak_bytes / (1 - MARGIN)) + 1)
        possible = replace(question, device=small).answer(model, profile, None, bar)
    return Audit(read, now, possible, target.name, tuple(_notes(read, batch_of(sample, kwargs), optimizer)))


def _notes(read: ForeignSettings, batch: int | None, optimizer: str | None) -> Iterable[str]:
    if read.read:
        yield "read: " + ", ".join(f"{key} = {value}" for key, value in read.read.items())
    if read.not_read:
        yield "not understood, and not counted: " + ", ".join(
            f"{key} = {value}" for key, value in read.not_read.items()
        )
    if batch is not None and (of := read.said.get("batch", batch)) != batch:
        yield f"the settings have a batch of {of}, the sample has {batch}; the figures are for the sample"
    if optimizer is None and "optimizer" not in read.said:
        yield "the settings name no optimizer that is known; the figures are for adamw"

"""Runs all checks, one after the other; an exception in one becomes its finding, and the others still run."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from ...tensors.torch_settings import bytes_by_default
from . import machine, training
from .findings import FAILED, Finding, Report
from .model import SmallModel

OF_DEVICE = machine.versions, machine.load, machine.memory, machine.host_bytes, machine.bandwidth
OF_TRAINING = (
    *(training.small_model, training.gradients, training.odd_steps, training.optimizer_steps),
    *(training.peak_bytes, training.step_time, training.host_waits, training.overlap),
)
CHECKS = tuple(check.__name__.replace("_", " ") for check in (*OF_DEVICE, *OF_TRAINING))
MEASURING = "small model"  # without which those that train cannot run


def examine(device: torch.device, seconds: float) -> Iterator[Report]:
    """Run all checks on `device`, and yield the report after each. seconds: duration of the timed steps at each
    limit."""
    report, begun = Report(str(device)), time.perf_counter()
    small = SmallModel(device, seconds, machine.cores())
    checks = [*(partial(check, device) for check in OF_DEVICE), *(partial(check, small) for check in OF_TRAINING)]
    lost = False  # whether the model could not be measured
    try:
        for name, check in zip(CHECKS, checks, strict=True):
            start = time.perf_counter()
            finding = Finding(FAILED, f"not checked, since {MEASURING!r} failed") if lost else _attempt(check)
            lost |= name == MEASURING and finding.verdict == FAILED
            report.findings.append(replace(finding, check=name, seconds=time.perf_counter() - start))
            report.seconds = time.perf_counter() - begun
            report.complete = name == CHECKS[-1]
            yield report
    finally:
        small.close()


def _attempt(check: Callable[[], Finding]) -> Finding:
    """The finding of `check`; an exception becomes a finding, too."""
    try:
        with bytes_by_default():
            return check()
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        return Finding(FAILED, f"{said}; if that names no cure, send the file", error=traceback.format_exc()[-6000:])

"""Runs all checks, one after the other; an exception in one becomes its finding, and the others still run."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ...errors import OptionError
from ...tensors.torch_settings import bytes_by_default
from . import host_tier, machine, training
from .findings import FAILED, Finding, Report
from .model import SmallModel

SECONDS = 2.0  # duration of the timed steps at each limit
MEASURING = "small model"
_MODEL = {
    MEASURING: "measured",
    "gradients": "gradients",
    "odd steps": "odd_steps",
    "optimizer steps": "optimizer_steps",
    "peak bytes": "peak_bytes",
    "step time": "step_time",
    "host waits": "host_waits",
    "overlap": "overlap",
}
CHECKS = ("versions", "load", "memory", "host bytes", "bandwidth", *_MODEL)


def find_device(name: str | None) -> torch.device:
    """The device called `name`; by default CUDA if available, else the CPU.

    Raises:
        OptionError: if there is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    known = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name)
    if known is None:
        raise OptionError(f"device is {name!r}; it is cpu, cuda, or one of several such as cuda:1")
    if known[1] == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "is built without CUDA" if torch.version.cuda is None else "finds no GPU; see whether nvidia-smi does"
        raise OptionError(f"device is {name!r}, and torch {torch.__version__} {built}; give cpu")
    index = torch.cuda.current_device() if known[2] is None else int(known[2])
    if index >= (count := torch.cuda.device_count()):
        raise OptionError(f"device is {name!r}, and torch finds {count}: the last is cuda:{count - 1}")
    return torch.device("cuda", index)


def examine(
    device: torch.device, seconds: float = SECONDS, told: Callable[[Report, Finding], None] | None = None
) -> Report:
    """Run all checks on `device`.

    seconds: duration of the timed steps at each limit. told: called after each check with the report so far and the
    check's finding.
    """
    report, begun = Report(str(device)), time.perf_counter()
    small = SmallModel(device, seconds, machine.cores())
    checks: dict[str, Callable[[], Finding]] = {
        "versions": partial(machine.versions, device),
        "load": machine.load,
        "memory": partial(machine.memory, device),
        "host bytes": partial(host_tier.host_bytes, device),
        "bandwidth": partial(host_tier.bandwidth, device),
    }
    checks |= {name: partial(getattr(training, function), small) for name, function in _MODEL.items()}
    lost = False  # whether the model could not be measured
    try:
        for name, check in checks.items():
            start = time.perf_counter()
            if lost:
                finding = Finding(FAILED, f"not checked, since {MEASURING!r} failed")
            else:
                with bytes_by_default():
                    finding = attempt(check)
            lost |= name == MEASURING and finding.verdict == FAILED
            report.findings.append(replace(finding, check=name, seconds=time.perf_counter() - start))
            report.seconds = time.perf_counter() - begun
            report.complete = name == CHECKS[-1]
            if told is not None:
                told(report, report.findings[-1])
    finally:
        small.close()
    return report


def attempt(check: Callable[[], Finding]) -> Finding:
    """The finding of `check`; an exception becomes a finding, too."""
    try:
        return check()
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        return Finding(FAILED, f"{said}; if that names no cure, send the file", error=traceback.format_exc()[-6000:])

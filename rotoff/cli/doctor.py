"""The command that checks the machine, with torch: doctor."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..io.json_file import save_json
from .command import UsageError, add_command, print_json

if TYPE_CHECKING:
    from ..tools.doctor.findings import Finding, Report


def _doctor(options: argparse.Namespace) -> int:
    try:
        import torch as torch
    except ModuleNotFoundError:
        raise UsageError("the checks train a model, which needs torch: pip install torch") from None
    except Exception as error:
        said = f"{type(error).__name__} {error}".strip()
        raise UsageError(f"torch cannot be imported ({said}); reinstall it, or give the process more memory") from error
    from ..planning.options import read_device
    from ..tools.doctor.examination import examine
    from ..tools.doctor.findings import FAILED, VERDICTS, Report

    device = read_device(options.device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    assert device is not None
    if device.index is not None and device.index >= max(1, count := torch.accelerator.device_count()):
        last = f"{device.type}:{count - 1}"
        raise UsageError(f"device is {options.device!r}, and torch finds {count}: the last is {last}")
    try:
        save_json(options.output, Report(str(device)).to_dict())
    except OSError as error:  # before the work
        raise UsageError(f"{options.output} cannot be written ({error.strerror}); name another file with -o") from error

    def told(report: Report, finding: Finding) -> None:
        save_json(options.output, report.to_dict())  # after each check, so that an interrupt keeps the findings so far
        if not options.json:
            print(finding, flush=True)

    report = examine(device, options.seconds, told)
    if options.json:
        print_json(report.to_dict())
    else:
        ended = [finding.verdict for finding in report.findings]
        counts = ", ".join(f"{ended.count(verdict)} {verdict}" for verdict in VERDICTS)
        print(f"\n{counts}, in {report.seconds:.0f} s; written to {options.output}")
        print(
            "Is this hardware new to rotoff? Please attach the file to an issue: it is used to check rotoff's"
            " predictions."
        )
        print(report.conclusion(options.output))
    return 1 if report.verdict == FAILED else 0


def add_commands(commands: Any) -> None:
    one = add_command(
        commands,
        "doctor",
        _doctor,
        "check this machine for all that training under a limit needs, with a verdict for each",
        "rotoff doctor --device cuda -o doctor.json",
        "Versions, memory, pinned memory, bandwidth, and a small model trained under three limits: bytes and seconds"
        " against"
        "\npredicted ones, gradients against plain ones, waits of the host, overlap of copies. Exit code 1: a check"
        " failed.",
    )
    one.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:1 (default: CUDA if available)")
    one.add_argument("--seconds", type=float, default=2.0, metavar="N", help="of timed steps at each of three limits")
    one.add_argument("-o", "--output", default="doctor.json", metavar="FILE", help="(default: doctor.json)")

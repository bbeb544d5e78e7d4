"""OUTDIR/summary.json of scripts/gpu_check.sh, written after each step, so that what ended is told whatever comes
after:

    python3 scripts/gpu_summary.py OUTDIR machine                           # once for each call
    python3 scripts/gpu_summary.py OUTDIR step NAME CODE BEGIN END COMMAND  # after each; prints its line
    python3 scripts/gpu_summary.py OUTDIR end NAME...                       # exit code 1 where one of these failed

Steps of earlier calls stay, as long as the machine is the same. A step whose tests all skip has failed: with CUDA at
hand they have shown nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NO_TIME = "the time that this run was given is over"  # as tests/conftest.py says it
PACKAGES = ("numpy", "cython", "setuptools", "pytest", "pytest-xdist", "triton", "torchao", "timm", "transformers")


def said(*command: str) -> str | None:
    """The first line that `command` prints, or None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "device": device
        and {"name": device.name, "total_bytes": device.total_memory, "count": torch.cuda.device_count()},
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "host": {"system": platform.platform(), "machine": platform.machine(), "cores": os.cpu_count()},
        "host_memory": os.environ.get("ROTOFF_HOST_MEMORY"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            **{package: installed(package) for package in PACKAGES},
        },
        "commit": said("git", "rev-parse", "HEAD"),
    }


def tests(path: Path) -> dict[str, Any]:
    """Counts of a step's tests, the message of each that failed and where, those that had no time, the figures that
    they measured."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError) as error:
        return {"tests": 0, "failed": {}, "no_time": [], "figures": {}, "unread": str(error)}
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }
    failed, no_time, figures = dict[str, str](), list[str](), dict[str, str | None]()
    for case in (case for suite in suites for case in suite.iter("testcase")):
        name = f"{case.get('classname')}.{case.get('name')}"
        for figure in case.iter("property"):
            figures[f"{case.get('name')}: {figure.get('name')}"] = figure.get("value")
        for fault in [*case.iter("failure"), *case.iter("error")]:
            if NO_TIME in (fault.get("message") or ""):
                no_time.append(name)
            else:
                failed[name] = f"{(fault.get('message') or '')[:2000]}\n...\n{(fault.text or '')[-2000:]}"
    return {**counts, "failed": failed, "no_time": no_time, "figures": figures}


def read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}


def write(path: Path, summary: dict[str, Any]) -> None:
    summary["ok"] = all(step["exit_code"] == 0 for step in summary["steps"].values())
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)


def step(out: Path, name: str, code: int, begin: float, end: float, command: str) -> dict[str, Any]:
    """What is kept of a step, and printed."""
    found: dict[str, Any] = {"command": command, "exit_code": code, "seconds": round(end - begin, 3)}
    if name in ("alone", "tests"):
        found.update(tests(out / f"{name}.xml"))
        if code == 0 and found["tests"] == found.get("skipped", 0):
            found["exit_code"] = 5
    print(f"{name}: exit code {found['exit_code']} after {found['seconds']:.0f} s")
    for figure, value in found.get("figures", {}).items():
        print(f"  {figure}: {value}"[:300])
    for test, message in found.get("failed", {}).items():
        print(f"FAILED {test}: {message.splitlines()[0]}"[:600])
        print("\n".join(f"    {line}"[:200] for line in message.splitlines()[-4:]))
    if found.get("no_time"):
        print(f"NO TIME for {len(found['no_time'])} tests: {', '.join(found['no_time'])}"[:600])
    return found


def main(out: Path, what: str, *arguments: str) -> int:
    path = out / "summary.json"
    summary = read(path)
    if what == "machine":
        now = machine()
        same = all(summary.get(key) == now[key] for key in ("device", "driver", "cuda", "host", "versions"))
        write(path, {"format": "rotoff.gpu_check", **now, "steps": summary.get("steps", {}) if same else {}})
    elif what == "step":
        name, code, begin, end, command = arguments
        summary["steps"][name] = step(out, name, int(code), float(begin), float(end), command)
        write(path, summary)
    else:
        failed = [name for name in arguments if summary["steps"].get(name, {"exit_code": 1})["exit_code"]]
        print(f"summary: {path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
        return bool(failed)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

#!/usr/bin/env bash
# Everything that only a GPU can tell, on any machine with CUDA, with that machine's own python3 and torch:
#
#   scripts/gpu_check.sh OUTDIR
#
# Builds the extension in place, runs the tests marked `cuda`, the example and two benchmarks on CUDA, and writes to OUTDIR
#   summary.json        the machine, the versions, and of each step: exit code, seconds, what failed
#   compare_modes.json  the example's table
#   interpreter_cost.json, prediction.json  those benchmarks, on CUDA
#   *.log, tests.xml    the output of each step
# A step that fails does not stop the others. Each step has its time limit; together they stay below 10 minutes.
#
#   scripts/gpu_check.sh OUTDIR grid [WORKLOAD...]
#   scripts/gpu_check.sh OUTDIR reach [NETWORK...]
#
# run the benchmarks' grid on CUDA into OUTDIR/grid_cuda.json, or a step of each network of benchmarks/reach.py (12 GB) into
# OUTDIR/reach.json, in at most 9.5 minutes. The grid goes on where the last call stopped, from OUTDIR or else from the file
# committed under benchmarks/results/, where that is of the same machine; the page of results is written to OUTDIR/results.md each time.
#
# Exit code: 0 all well, 1 a step failed, 2 wrong usage, 3 no CUDA here, 4 the grid is not complete: call again.
# PYTHON names another interpreter than python3.
set -uo pipefail

mode=${2:-checks}
if [ $# -lt 1 ] || [[ ! $mode =~ ^(checks|grid|reach)$ ]] || { [ "$mode" = checks ] && [ $# -gt 2 ]; }; then
    echo "usage: $0 OUTDIR [grid [WORKLOAD...] | reach [NETWORK...]]" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
shift $(($# > 1 ? 2 : 1))
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1

reason=$("$python" - 2>/dev/null <<'PYTHON'
try:
    import torch
except Exception as error:
    print(f"torch cannot be imported ({error})")
else:
    print("" if torch.cuda.is_available() else f"torch {torch.__version__} finds no CUDA device")
PYTHON
) || reason="$python cannot be run"
if [ -n "$reason" ]; then
    echo "Nothing was checked: $reason."
    exit 3
fi

steps=()
run() { # name, limit in seconds, command...
    local name=$1 limit=$2 begin code
    shift 2
    echo "== $name: $*"
    begin=$(date +%s.%N)
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    [ $code -eq 124 ] && echo "stopped after its $limit seconds" >>"$out/$name.log"
    steps+=("$name" "$code" "$begin" "$(date +%s.%N)" "$*")
    tail -n "$([ $code -eq 0 ] && echo 5 || echo 40)" "$out/$name.log"
    echo "== $name: exit code $code"
}

build() { run build "$1" "$python" setup.py build_ext --inplace; }

if [ "$mode" != checks ]; then
    build 60
    name=$([ "$mode" = grid ] && echo grid_cuda || echo reach).json
    if [ "$mode" = grid ]; then
        run grid 490 "$python" -m benchmarks.grid.run --suite cuda --seconds 4 --minutes 7.5 --cell-minutes 7.5 \
            --compiled --start "benchmarks/results/$name" --out "$out/$name" ${1:+--workloads "$@"}
    else
        run reach 490 "$python" benchmarks/reach.py --run --out "$out/$name" ${1:+--only "$@"}
    fi
    code=${steps[6]}
    [ "$mode" = grid ] && [ "$code" -eq 3 ] && code=4
    if [ -e "$out/$name" ]; then # pictures where matplotlib is
        pictures=$("$python" -c 'import matplotlib' 2>/dev/null && echo --pictures "$out/pictures")
        run page 15 "$python" -m benchmarks.grid.report "$out/$name" --out "$out/results.md" $pictures
    fi
    [ "$code" -eq 4 ] && echo "The grid is not complete yet: run this again, with the same OUTDIR."
    [ "$code" -eq 0 ] || [ "$code" -eq 4 ] || code=1
    exit "$code"
fi

build 90
run tests 220 "$python" -m pytest -m cuda -p no:cacheprovider --durations=10 --junitxml "$out/tests.xml" tests
run compare_modes 100 "$python" examples/compare_modes.py --device cuda --json "$out/compare_modes.json"
run interpreter_cost 30 "$python" benchmarks/interpreter_cost.py --device cuda --repeats 100 --json "$out/interpreter_cost.json"
run prediction 120 "$python" benchmarks/prediction.py --device cuda --seconds 4 --pairs 5 --layers 12 --width 1024 \
    --heads 16 --context 1024 --batch 8 --out "$out/prediction.json"

"$python" - "$out" "${steps[@]}" <<'PYTHON'
"""Write summary.json from the steps' results; exit with 1 where one failed."""

import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

out, arguments = Path(sys.argv[1]), sys.argv[2:]


def said(*command):
    """The first line that `command` prints, or None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def tests():
    """Counts of the tests, the message of each that failed, the figures that they measured."""
    try:
        suites = ElementTree.parse(out / "tests.xml").getroot().iter("testsuite")
        counts, failed = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0), {}
        figures = {}
        for suite in suites:
            for name in counts:
                counts[name] += int(suite.get(name, 0))
            for case in suite.iter("testcase"):
                for figure in case.iter("property"):
                    figures[figure.get("name")] = figure.get("value")
                for fault in [*case.iter("failure"), *case.iter("error")]:
                    failed[f"{case.get('classname')}.{case.get('name')}"] = (fault.get("message") or "")[:2000]
        return {**counts, "failed": failed, "figures": figures}
    except (OSError, ElementTree.ParseError) as error:
        return {"tests": 0, "failed": {}, "unread": str(error)}


device = torch.cuda.get_device_properties(0)
steps = {}
for name, code, begin, end, command in zip(*[iter(arguments)] * 5, strict=True):
    steps[name] = {"command": command, "exit_code": int(code), "seconds": round(float(end) - float(begin), 3)}
steps["tests"].update(tests())
if steps["tests"]["exit_code"] == 0 and steps["tests"]["tests"] == steps["tests"]["skipped"]:
    steps["tests"]["exit_code"] = 5  # with CUDA at hand, tests that all skip have shown nothing
ok = all(step["exit_code"] == 0 for step in steps.values())
summary = {
    "format": "rotoff.gpu_check",
    "ok": ok,
    "device": {"name": device.name, "total_bytes": device.total_memory, "count": torch.cuda.device_count()},
    "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "cuda": torch.version.cuda,
    "host": {"system": platform.platform(), "machine": platform.machine()},
    "versions": {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: installed(package) for package in ("numpy", "cython", "setuptools", "pytest", "hypothesis")},
    },
    "commit": said("git", "rev-parse", "HEAD"),
    "steps": steps,
}
(out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
for name, step in steps.items():
    print(f"{name}: exit code {step['exit_code']} after {step['seconds']:.0f} s")
for name, message in steps["tests"]["failed"].items():
    print(f"FAILED {name}: {message.splitlines()[0] if message else ''}")
print(f"summary: {out / 'summary.json'}")
sys.exit(not ok)
PYTHON

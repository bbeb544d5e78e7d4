#!/usr/bin/env bash
# Everything that only a GPU can tell, on any machine with CUDA, with that machine's own python3 and torch:
#
#   scripts/gpu_check.sh OUTDIR
#
# Builds the extension in place, runs the tests marked `cuda`, the example and two benchmarks on CUDA, and writes to OUTDIR
#   log.txt             the machine, and what each step printed, whole
#   summary.json        the machine, the versions, and of each step: exit code, seconds, what failed, what the tests measured
#   tests.xml, alone.xml  the tests' results; those of the second judge speed and run one by one
#   prediction.json, compare_modes.json, interpreter_cost.json  those benchmarks and the example's table, on CUDA
# A step that fails does not stop the others; what matters most comes first. Each step has its time limit; together they stay
# below 9.5 minutes.
#
#   scripts/gpu_check.sh OUTDIR grid [WORKLOAD...]
#   scripts/gpu_check.sh OUTDIR reach [NETWORK...]
#
# run the benchmarks' grid on CUDA into OUTDIR/grid_cuda.json (LIMITS="60 30" in the environment: these shares of the plain peak,
# in %, and not all five), or a step of each network of benchmarks/reach.py (12 GB, at the sizes
# in benchmarks/results/reach.json) into OUTDIR/reach.json, in at most 9.5 minutes. The grid goes on where the last call stopped,
# from OUTDIR or else from the file committed under benchmarks/results/, where that is of the same machine; the page of results is
# written to OUTDIR/results.md each time.
#
# Exit code: 0 all well, 1 a step failed, 2 wrong usage, 3 no CUDA here, 4 the grid is not complete: call again.
# PYTHON names another interpreter than python3. It needs torch, Cython, setuptools, NumPy and pytest; tests run side by side where
# pytest-xdist is.
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
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8} # 32 MiB, Hopper's default, and deterministic if asked

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

log=$out/log.txt
say() { echo "$@" | tee -a "$log"; }
has() { "$python" -c "import $1" 2>/dev/null; }

: >"$log"
say "== $(date -u +%FT%TZ) $(nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader 2>&1 | head -1)"
say "== $(nproc) cores, $(grep -E '^(MemTotal|MemAvailable|SwapTotal):' /proc/meminfo | tr -s ' \n' ' '), $(df -h "$out" | tail -1 | tr -s ' ')"
say "== $("$python" - 2>&1 <<'PYTHON'
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

print("Python", platform.python_version(), "cuDNN", torch.backends.cudnn.version(), "CUDA", torch.version.cuda, end=" ")
for package in ("torch", "numpy", "Cython", "setuptools", "pytest", "pytest-xdist", "torchvision", "timm", "transformers"):
    try:
        print(package, version(package), end=" ")
    except PackageNotFoundError:
        print(package, "is missing", end=" ")
PYTHON
)"

steps=()
run() { # name, limit in seconds, command...
    local name=$1 limit=$2 begin code lines
    shift 2
    say "== $name, at most $limit s: $*"
    begin=$(date +%s.%N)
    lines=$(($(wc -l <"$log") + 1))
    timeout -s INT -k 10 "$limit" "$@" >>"$log" 2>&1 # pytest writes its results when interrupted, and not when killed
    code=$?
    [ $code -eq 124 ] || [ $code -eq 137 ] && echo "stopped after its $limit seconds" >>"$log"
    steps+=("$name" "$code" "$begin" "$(date +%s.%N)" "$*")
    tail -n "+$lines" "$log" | tail -n "$([ $code -eq 0 ] && echo 6 || echo 40)" | cut -c 1-400
    say "== $name: exit code $code after $(awk "BEGIN { printf \"%.0f\", $(date +%s.%N) - $begin }") s"
}

build() { run build "$1" "$python" setup.py build_ext --inplace -j 8; }

if [ "$mode" != checks ]; then
    build 60
    name=$([ "$mode" = grid ] && echo grid_cuda || echo reach).json
    if [ "$mode" = grid ]; then
        # shellcheck disable=SC2086
        run grid 490 "$python" -m benchmarks.grid.run --suite cuda --seconds 4 --minutes 7.5 --cell-minutes 2.5 \
            ${LIMITS:+--limits $LIMITS} --compiled --start "benchmarks/results/$name" --out "$out/$name" ${1:+--workloads "$@"}
    else
        run reach 490 "$python" benchmarks/reach.py --run --known benchmarks/results/reach.json --out "$out/$name" ${1:+--only "$@"}
    fi
    code=${steps[6]}
    [ "$mode" = grid ] && [ "$code" -eq 3 ] && code=4
    [ -e "$out/$name" ] && run page 15 "$python" -m benchmarks.grid.report "$out/$name" --out "$out/results.md"
    [ "$code" -eq 4 ] && echo "The grid is not complete yet: run this again, with the same OUTDIR."
    [ "$code" -eq 0 ] || [ "$code" -eq 4 ] || code=1
    exit "$code"
fi

build 90
tests=("$python" -m pytest -p no:cacheprovider --durations=15 -o faulthandler_timeout=100 -o console_output_style=classic
    -o junit_family=xunit1)
beside=$(has xdist && echo "-n 4 --dist worksteal")
export ROTOFF_TESTS_END=$(($(date +%s) + 40)) # tests that have not begun by then are skipped, so that the others' results are written
run alone 60 "${tests[@]}" -m "cuda and alone" --junitxml "$out/alone.xml" tests/cuda
export ROTOFF_TESTS_END=$(($(date +%s) + 170))
# shellcheck disable=SC2086
run tests 210 "${tests[@]}" $beside -m "cuda and not alone" --junitxml "$out/tests.xml" tests/cuda
run prediction 95 "$python" benchmarks/prediction.py --device cuda --seconds 2 --pairs 5 --layers 12 --width 1024 \
    --heads 16 --context 1024 --batch 8 --out "$out/prediction.json"
run compare_modes 70 "$python" examples/compare_modes.py --device cuda --json "$out/compare_modes.json"
run interpreter_cost 35 "$python" benchmarks/interpreter_cost.py --device cuda --repeats 40 --json "$out/interpreter_cost.json"

"$python" - "$out" "${steps[@]}" <<'PYTHON'
"""Write summary.json from the steps' results; exit with 1 where one failed."""

import json
import os
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


def tests(step):
    """Counts of a step's tests, the message of each that failed and where, the figures that they measured."""
    try:
        suites = ElementTree.parse(out / f"{step}.xml").getroot().iter("testsuite")
        counts, failed = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0), {}
        figures = {}
        for suite in suites:
            for name in counts:
                counts[name] += int(suite.get(name, 0))
            for case in suite.iter("testcase"):
                for figure in case.iter("property"):
                    figures[f"{case.get('name')}: {figure.get('name')}"] = figure.get("value")
                for fault in [*case.iter("failure"), *case.iter("error")]:
                    said = f"{(fault.get('message') or '')[:2000]}\n...\n{(fault.text or '')[-2000:]}"
                    failed[f"{case.get('classname')}.{case.get('name')}"] = said
        return {**counts, "failed": failed, "figures": figures}
    except (OSError, ElementTree.ParseError) as error:
        return {"tests": 0, "failed": {}, "unread": str(error)}


device = torch.cuda.get_device_properties(0)
steps = {}
for name, code, begin, end, command in zip(*[iter(arguments)] * 5, strict=True):
    steps[name] = {"command": command, "exit_code": int(code), "seconds": round(float(end) - float(begin), 3)}
for name in ("alone", "tests"):
    steps[name].update(tests(name))
    if steps[name]["exit_code"] == 0 and steps[name]["tests"] == steps[name]["skipped"]:
        steps[name]["exit_code"] = 5  # with CUDA at hand, tests that all skip have shown nothing
ok = all(step["exit_code"] == 0 for step in steps.values())
summary = {
    "format": "rotoff.gpu_check",
    "ok": ok,
    "device": {"name": device.name, "total_bytes": device.total_memory, "count": torch.cuda.device_count()},
    "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    "cuda": torch.version.cuda,
    "host": {"system": platform.platform(), "machine": platform.machine(), "cores": os.cpu_count()},
    "versions": {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        **{package: installed(package) for package in ("numpy", "cython", "setuptools", "pytest", "pytest-xdist", "triton")},
    },
    "commit": said("git", "rev-parse", "HEAD"),
    "steps": steps,
}
(out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
for name, step in steps.items():
    print(f"{name}: exit code {step['exit_code']} after {step['seconds']:.0f} s")
    for figure, value in step.get("figures", {}).items():
        print(f"  {figure}: {value}"[:300])
for step in ("alone", "tests"):
    for name, message in steps[step]["failed"].items():
        print(f"FAILED {name}: {message.splitlines()[0]}"[:600])
        print("\n".join(f"    {line}"[:200] for line in message.splitlines()[-4:]))
print(f"summary: {out / 'summary.json'}")
sys.exit(not ok)
PYTHON

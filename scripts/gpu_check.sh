#!/usr/bin/env bash
# What only a GPU can tell, on any machine with CUDA, with that machine's own python3 and torch:
#
#   scripts/gpu_check.sh OUT    builds in the tree, runs rotoff doctor, then the tests for CUDA, the most important first
#
# It takes at most 9 minutes. OUT/doctor.json has the doctor's figures, OUT/tests.json the outcome of each test and what
# it has measured, OUT/log.txt all that was printed. The last line is the verdict. Exit code: 0 all well, 1 a step
# failed, 2 wrong usage, 3 no CUDA here. PYTHON names another interpreter than python3; it needs torch, Cython,
# setuptools, NumPy and pytest. ROTOFF_HOST_MEMORY (such as "100 GiB") says how much the host has, where the system says
# too little.
set -uo pipefail
[ $# -eq 1 ] && mkdir -p "$1" || { sed -n '4s/^# *//p' "$0" >&2; exit 2; }
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "Nothing was checked: no CUDA."; exit 3; }

run() { # seconds, command...
    local limit=$1 left=$((530 - SECONDS))
    shift
    echo "== $*" | tee -a "$out/log.txt"
    timeout -s INT -k 8 $((limit < left ? limit : left > 0 ? left : 1)) "$@" 2>&1 | tee -a "$out/log.txt"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || echo "== failed with exit code $code" | tee -a "$out/log.txt"
}
end() { echo "$1" | tee -a "$out/log.txt"; exit "$2"; }

run 120 "$python" setup.py build_ext --inplace -j 8
[ "$code" -eq 0 ] || end "NOT CHECKED: the build failed (send $out)" 1
run 20 nvidia-smi
run 150 "$python" -m rotoff doctor --device cuda -o "$out/doctor.json"
verdict=$(tail -n 1 "$out/log.txt")
[ "$code" -eq 0 ] || verdict="DO NOT USE (send $out)"
doctor=$code
files=(tests/cuda/test_{step,link,placed,training,reserved}_cuda.py)
# tests that have not begun by then fail, so that the results are written
ROTOFF_TESTS_END=$(($(date +%s) + 505 - SECONDS)) run 530 "$python" -m pytest -p no:cacheprovider -m cuda --durations=15 \
    --junitxml "$out/tests.xml" "${files[@]}"
[ "$code" -eq 0 ] || verdict="$verdict, and tests failed (send $out)"
"$python" - "$out" <<'END'
import json, sys, xml.etree.ElementTree as xml
from pathlib import Path

out, tests = Path(sys.argv[1]), []
for case in xml.parse(out / "tests.xml").iter("testcase"):
    said = {one.tag: (one.get("message") or "")[:2000] for one in case if one.tag in ("failure", "error", "skipped")}
    found = {one.get("name"): one.get("value") for one in case.iter("property")}
    tests.append({"name": case.get("name"), "seconds": float(case.get("time")), "measured": found, **said})
(out / "tests.json").write_text(json.dumps(tests, indent=1))
END
end "$verdict" $((doctor || code))

#!/usr/bin/env bash
# What only a GPU can tell, on any machine with CUDA, with that machine's own python3 and torch:
#
#   scripts/gpu_check.sh OUT          rotoff doctor, and the tests that judge speed, one by one
#   scripts/gpu_check.sh OUT tests    the other tests for CUDA
#
# Each call takes at most 9.5 minutes. All that is printed is in OUT/log.txt, what was measured in files beside it. The
# last line is the doctor's, or how many tests failed. Exit code: 0 all well, 1 a step failed, 2 wrong usage, 3 no CUDA
# here. PYTHON names another interpreter than python3; it needs torch, Cython, setuptools, NumPy and pytest.
# ROTOFF_HOST_MEMORY (such as "100 GiB") says how much the host has, where the system says too little.
set -uo pipefail
mode=${2:-first}
if [ $# -lt 1 ] || [[ ! $mode =~ ^(first|tests)$ ]]; then
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "Nothing was checked: no CUDA."; exit 3; }

failed=0
run() { # seconds, command...: a step that fails does not stop those after it
    local limit=$1 left=$((560 - SECONDS))
    shift
    echo "== $*" | tee -a "$out/log.txt"
    timeout -s INT -k 10 $((limit < left ? limit : left > 0 ? left : 1)) "$@" 2>&1 | tee -a "$out/log.txt"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || { failed=1; echo "== failed with exit code $code: $*" | tee -a "$out/log.txt"; }
}
tests() { # seconds, marks, name; those that have not begun 15 s before the limit fail, so that the results are written
    ROTOFF_TESTS_END=$(($(date +%s) + $1 - 15)) run "$1" "$python" -m pytest -p no:cacheprovider --durations=15 \
        -m "$2" --junitxml "$out/$3.xml" tests/cuda
}

run 90 "$python" setup.py build_ext --inplace -j 8
[ $failed -eq 0 ] || { echo "NOT CHECKED: the build failed (send $out)"; exit 1; }
run 20 nvidia-smi
if [ "$mode" = first ]; then
    run 120 "$python" -m rotoff doctor --device cuda -o "$out/doctor.json"
    verdict=$(tail -n 1 "$out/log.txt")
    [ "$code" -eq 0 ] || verdict="DO NOT USE (send $out)"
    tests 200 "cuda and alone" alone
    [ "$code" -eq 0 ] || verdict="$verdict, and tests of speed failed (send $out)"
else
    tests 400 "cuda and not alone" tests
    verdict="all tests passed"
    [ "$code" -eq 0 ] || verdict="DO NOT USE: tests failed (send $out)"
fi
echo "$verdict" | tee -a "$out/log.txt"
exit $failed

#!/usr/bin/env bash
# What only a GPU can tell, on any machine with CUDA, with that machine's own python3 and torch:
#
#   scripts/gpu_check.sh OUT                       rotoff doctor, and the tests that judge speed, one by one
#   scripts/gpu_check.sh OUT tests                 the other tests for CUDA, a benchmark and the example
#   scripts/gpu_check.sh OUT grid [WORKLOAD...]    the benchmarks' grid; gpt-1.3b where none is named
#   scripts/gpu_check.sh OUT reach [NETWORK...]    a step of each network of benchmarks/reach.py, in 12 GB
#   scripts/gpu_check.sh OUT placed                steps with parameters and optimizer states placed
#
# Each call takes at most 9.5 minutes; `grid` goes on where its last call stopped (LIMITS="60 30": these shares of the
# plain peak, in %; COMPILED=1: with torch.compile, too). All that is printed is in OUT/log.txt, what was measured in
# files beside it, each as soon as it is there. Exit code: 0 all well, 1 a step failed, 2 wrong usage, 3 no CUDA here,
# 4 the grid is not complete: call again. PYTHON names another interpreter than python3; it needs torch, Cython,
# setuptools, NumPy and pytest. ROTOFF_HOST_MEMORY (such as "100 GiB") says how much the host has, where the system says
# too little.
set -uo pipefail
mode=${2:-first}
if [ $# -lt 1 ] || [[ ! $mode =~ ^(first|tests|grid|reach|placed)$ ]]; then
    sed -n '4,8s/^# *//p' "$0" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
shift $(($# > 1 ? 2 : 1))
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8} # 32 MiB, Hopper's default, and deterministic if asked
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
[ $failed -eq 0 ] || exit 1
run 20 nvidia-smi
case $mode in
first)
    run 60 "$python" -m rotoff doctor --device cuda --seconds 1 -o "$out/doctor.json"
    tests 200 "cuda and alone" alone
    ;;
tests)
    tests 330 "cuda and not alone" tests
    run 30 "$python" benchmarks/interpreter_cost.py --device cuda --repeats 40 --json "$out/interpreter_cost.json"
    # a model that keeps the device busy: at the example's own size, the CPU's, kernels are shorter than their launches
    run 90 "$python" examples/compare_modes.py --device cuda --layers 12 --width 1024 --heads 16 --context 1024 \
        --batch 16 --json "$out/compare_modes.json"
    ;;
grid)
    [ $# -gt 0 ] || set -- gpt-1.3b
    # shellcheck disable=SC2086
    run 480 "$python" -m benchmarks.grid.run --suite cuda --seconds 4 --minutes 7.3 --cell-minutes 2.5 \
        ${LIMITS:+--limits $LIMITS} ${COMPILED:+--compiled} --out "$out/grid_cuda.json" --workloads "$@"
    incomplete=$((code == 3))
    run 30 "$python" -m benchmarks.grid.report "$out/grid_cuda.json" --out "$out/results.md"
    [ $incomplete -eq 0 ] || { echo "It is not complete yet: run this again, with the same OUT."; exit 4; }
    ;;
reach)
    run 480 "$python" benchmarks/reach.py --run --known benchmarks/results/reach.json --out "$out/reach.json" \
        ${1:+--only "$@"}
    ;;
placed)
    run 480 "$python" -m benchmarks.placed_steps --device cuda --width 2048 --blocks 24 --rows 4096 --context 512 \
        --dtype bfloat16 --rounds 3 --out "$out/placed_steps.json"
    ;;
esac
exit $failed

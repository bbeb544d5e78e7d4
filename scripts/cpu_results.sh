#!/usr/bin/env bash
# The figures of docs/results.md, on a quiet machine with two cores or more:
#
#   scripts/cpu_results.sh [grid] [four_times]      # default: both; about 37 and 6 minutes
#
# Writes JSON to benchmarks/results/ and makes docs/results.md and its plots from whatever JSON is there. What was stopped goes
# on where it stopped: the grid keeps cells that have run. PYTHON names another interpreter than python3; rotoff's kernels must
# have been built for it (`python setup.py build_ext --inplace`). MINUTES: for the grid (39). WIDER: run those of its cells again whose
# quartiles are further apart than that (0.06, say, where others used the machine).
# Exit code: 0 all well, 1 something failed, 2 wrong usage, 4 the grid is not complete: call again.
set -uo pipefail

for step in "$@"; do
    if [[ ! $step =~ ^(grid|four_times)$ ]]; then
        echo "usage: $0 [grid] [four_times]" >&2
        exit 2
    fi
done
[ $# -gt 0 ] || set -- grid four_times
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
results=benchmarks/results failed=0 incomplete=0

for step in "$@"; do
    case $step in
    grid)
        "$python" -m benchmarks.grid.run --suite cpu --compiled gpt vit --minutes "${MINUTES:-39}" \
            ${WIDER:+--wider "$WIDER"} --out $results/grid_cpu.json
        code=$?
        ;;
    *)
        "$python" benchmarks/$step.py --out $results/$step.json
        code=$?
        ;;
    esac
    if [ $step = grid ] && [ $code -eq 3 ]; then incomplete=1; elif [ $code -ne 0 ]; then failed=1; fi
done

files=()
for name in grid_cpu grid_cuda four_times; do
    [ -e $results/$name.json ] && files+=("$results/$name.json")
done
"$python" -m benchmarks.grid.report "${files[@]}" --out docs/results.md --pictures docs/results || failed=1
[ $failed -eq 0 ] || exit 1
[ $incomplete -eq 0 ] || exit 4

#!/usr/bin/env bash
# Everything that only a GPU can tell, on any machine with CUDA, with that machine's own python3 and torch:
#
#   scripts/gpu_check.sh OUTDIR [first]            at most 4.5 minutes: what all else builds on
#   scripts/gpu_check.sh OUTDIR tests              at most 8 minutes
#   scripts/gpu_check.sh OUTDIR grid [WORKLOAD...] at most 9.5 minutes; gpt-1.3b where none is named
#   scripts/gpu_check.sh OUTDIR reach [NETWORK...] at most 9.5 minutes
#   scripts/gpu_check.sh OUTDIR placed [WORKLOAD...] at most 9.5 minutes; 7b vit-g qwen3-8b where none is named
#
# in this order where time is short: `first` builds the extension in place, uses each of CUDA's libraries once, probes the machine
# (scripts/gpu_probe.py), lets `rotoff doctor` check it and runs the tests that judge speed one by one; `tests` runs all others, two
# benchmarks and the example; `grid` the benchmarks' grid, one workload after the other (LIMITS="60 30" in the environment: these shares of the plain peak, in %, and
# not all five; COMPILED=1: with torch.compile, too); `reach` a step of each network of benchmarks/reach.py (12 GB, at the sizes in
# benchmarks/results/reach.json); `placed` whole steps of models of 1 to 8 billion parameters with AdamW within limits on all of it, beside
# checkpoints, torchao's optimizer and FSDP2 on the host, save_on_cpu (benchmarks/placed_peers.py; 64 GB of host memory). These three go
# on where the last call stopped, from OUTDIR; grid and reach else from the file committed under benchmarks/results/, where that is of the same
# machine.
#
# OUTDIR gets, each as soon as it is there
#   log.txt             the machine, and what each step printed, whole
#   summary.json        the machine, the versions, and of each step: exit code, seconds, what failed, what the tests measured
#   clocks.csv          clocks, power, temperature, memory and what holds the clock back, once a second
#   probe.json, doctor.json, alone.xml                                 of `first`
#   tests.xml, prediction.json, interpreter_cost.json, compare_modes.json  of `tests`; a row of prediction.json at a time
#   grid_cuda.json or reach.json, results.md
#   placed.json         of `placed`; a row at a time
# A build that fails stops the call; any other step that fails does not stop those after it. A test that does not begin for lack of time
# has failed.
#
# Host memory: ROTOFF_HOST_MEMORY in the environment (such as "100 GiB") says how much there is. Where it says nothing, up to
# 48 GiB are taken and given back (scripts/host_room.py), since a machine that grows as it is used says too little.
#
# Exit code: 0 all well, 1 a step failed, 2 wrong usage, 3 no CUDA here, 4 grid or placed is not complete: call again.
# PYTHON names another interpreter than python3. It needs torch, Cython, setuptools, NumPy and pytest; tests run side by side where
# pytest-xdist is.
set -uo pipefail

mode=${2:-first}
if [ $# -lt 1 ] || [[ ! $mode =~ ^(first|tests|grid|reach|placed)$ ]] || { [[ $mode =~ ^(first|tests)$ ]] && [ $# -gt 2 ]; }; then
    echo "usage: $0 OUTDIR [first | tests | grid [WORKLOAD...] | reach [NETWORK...] | placed [WORKLOAD...]]" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
shift $(($# > 1 ? 2 : 1))
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8} # 32 MiB, Hopper's default, and deterministic if asked
case $mode in first) budget=270 ;; tests) budget=480 ;; *) budget=570 ;; esac # seconds; bash counts them in SECONDS

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
left() { echo $((budget - SECONDS - 3)); } # seconds, but for what the script itself takes

say "== $(date -u +%FT%TZ) $mode: $(nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader 2>&1 | head -1)"
say "== $(nproc) cores, $(grep -E '^(MemTotal|MemAvailable|SwapTotal):' /proc/meminfo | tr -s ' \n' ' '), $(df -h "$out" | tail -1 | tr -s ' ')"

figures=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu,memory.used
for reasons in clocks_event_reasons.active clocks_throttle_reasons.active; do # the newer name and the older
    nvidia-smi --query-gpu=$reasons --format=csv,noheader >/dev/null 2>&1 && figures+=,$reasons && break
done
nvidia-smi --query-gpu=$figures --format=csv,noheader -l 1 >>"$out/clocks.csv" 2>/dev/null &
watch=$!
trap 'kill "$watch" 2>/dev/null' EXIT

if [ -z "${ROTOFF_HOST_MEMORY:-}" ]; then
    room=$(timeout -k 5 25 "$python" scripts/host_room.py 48 2>>"$log" | tail -n 1)
    [ -n "$room" ] && export ROTOFF_HOST_MEMORY=$room
fi
say "== host memory: ${ROTOFF_HOST_MEMORY:-as the system says}, $SECONDS s so far"
"$python" scripts/gpu_summary.py "$out" machine 2>&1 | tee -a "$log"

names=()
code=0
run() { # name, limit in seconds, command...: its exit code is in `code`, 124 where its time or the call's was up
    local name=$1 limit=$2 begin lines
    shift 2
    names+=("$name")
    [ "$limit" -gt "$(left)" ] && limit=$(left)
    begin=$(date +%s.%N)
    if [ "$limit" -lt 5 ]; then
        code=124
        say "== $name: not begun, since the $budget s of this call are over"
    else
        say "== $name, at most $limit s: $*"
        lines=$(($(wc -l <"$log") + 1))
        timeout -s INT -k 10 "$limit" "$@" >>"$log" 2>&1 # pytest writes its results when interrupted, and not when killed
        code=$?
        [ $code -eq 124 ] || [ $code -eq 137 ] && echo "stopped after its $limit seconds" >>"$log"
        tail -n "+$lines" "$log" | tail -n "$([ $code -eq 0 ] && echo 6 || echo 40)" | cut -c 1-400
    fi
    "$python" scripts/gpu_summary.py "$out" step "$name" "$code" "$begin" "$(date +%s.%N)" "$*" 2>&1 | tee -a "$log"
}
end() {
    "$python" scripts/gpu_summary.py "$out" end "${names[@]}" | tee -a "$log"
}
run_tests() { # name, limit, marks, options...; those that have not begun 15 s before the limit fail, so that the others are written
    local name=$1 limit=$2 marks=$3
    shift 3
    [ "$limit" -gt "$(left)" ] && limit=$(left)
    export ROTOFF_TESTS_END=$(($(date +%s) + limit - 15))
    run "$name" "$limit" "$python" -m pytest -p no:cacheprovider --durations=15 -o faulthandler_timeout=100 \
        -o console_output_style=classic -o junit_family=xunit1 "$@" -m "$marks" --junitxml "$out/$name.xml" tests/cuda
}

run build 90 "$python" setup.py build_ext --inplace -j 8
if [ $code -ne 0 ]; then
    say "Nothing else was run: the extension cannot be built."
    end
    exit 1
fi

if [ "$mode" = first ]; then
    run warm_up 40 "$python" scripts/gpu_warm_up.py
    run probe 60 "$python" scripts/gpu_probe.py "$out/probe.json"
    run doctor 45 "$python" -m rotoff doctor --device cuda --seconds 1 -o "$out/doctor.json"
    run_tests alone 90 "cuda and alone"
    end
    exit
fi

if [ "$mode" = tests ]; then
    run warm_up 40 "$python" scripts/gpu_warm_up.py
    # shellcheck disable=SC2046
    run_tests tests 180 "cuda and not alone" $(has xdist && echo "-n 4 --dist worksteal")
    # a model that keeps the device busy: at the example's own size, the CPU's, kernels are shorter than their launches
    size=(--layers 12 --width 1024 --heads 16 --context 1024 --batch 16)
    run prediction 100 "$python" benchmarks/prediction.py --device cuda --seconds 2 --pairs 5 "${size[@]}" --out "$out/prediction.json"
    run interpreter_cost 30 "$python" benchmarks/interpreter_cost.py --device cuda --repeats 40 --json "$out/interpreter_cost.json"
    run compare_modes 70 "$python" examples/compare_modes.py --device cuda "${size[@]}" --limits 50 --json "$out/compare_modes.json"
    end
    exit
fi

if [ "$mode" = grid ]; then
    name=grid_cuda.json
    [ $# -eq 0 ] && set -- gpt-1.3b
    # shellcheck disable=SC2086
    run grid 480 "$python" -m benchmarks.grid.run --suite cuda --seconds 4 --minutes 7.3 --cell-minutes 2.5 \
        ${LIMITS:+--limits $LIMITS} ${COMPILED:+--compiled} --start "benchmarks/results/$name" --out "$out/$name" --workloads "$@"
elif [ "$mode" = placed ]; then
    name=placed.json
    run placed 480 "$python" -m benchmarks.placed_peers --minutes 7.3 --row-minutes 4 --out "$out/$name" ${1:+--workloads "$@"}
else
    name=reach.json
    run reach 480 "$python" benchmarks/reach.py --run --known benchmarks/results/reach.json --out "$out/$name" ${1:+--only "$@"}
fi
ended=$code
[ "$mode" != reach ] && [ "$ended" -eq 3 ] && ended=4
[ "$mode" != placed ] && [ -e "$out/$name" ] && run page 15 "$python" -m benchmarks.grid.report "$out/$name" --out "$out/results.md"
end
[ "$ended" -eq 4 ] && say "It is not complete yet: run this again, with the same OUTDIR."
[ "$ended" -eq 0 ] || [ "$ended" -eq 4 ] || ended=1
exit "$ended"

"""How long the first training step takes without and with what an earlier process left on disk, as JSON.

    python benchmarks/first_step.py [--rounds 3] [--layers 4] [--json FILE]

Each round starts two processes, one after the other, with one new cache directory: the first finds nothing there, the
second the times and the plan. Both wrap the same model, plan for 60 % of its keep-all bytes and run one step; importing
torch and making the model are not counted. Takes less than two minutes.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import rotoff

WIDTH, LENGTH, BATCH = 128, 64, 8
SHARE = 0.6  # of the keep-all bytes


def first_step(directory: str, device: str, depth: int) -> dict[str, float]:
    """Seconds of measuring, planning and the step itself."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True) for _ in range(depth)]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    model(x).sum().backward()  # libraries load what they need
    seconds, times = {}, [now(x)]
    wrapped = rotoff.Checkpointable(model, cache_directory=directory)
    wrapped.measure(x)
    times.append(now(x))
    wrapped.compute_sequence(int(SHARE * wrapped.keep_all_memory))
    times.append(now(x))
    wrapped(x).sum().backward()
    times.append(now(x))
    for n, name in enumerate(("measure", "plan", "step")):
        seconds[name] = times[n + 1] - times[n]
    wrapped.close()
    return {**seconds, "all": times[-1] - times[0]}


def now(x: torch.Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def fresh_process(directory: str, device: str, depth: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", directory, "--device", device, "--layers", str(depth)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--one", metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(first_step(options.one, options.device, options.layers)))
        return
    without, found = [], []
    for n in range(options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            without.append(fresh_process(directory, options.device, options.layers))
            found.append(fresh_process(directory, options.device, options.layers))
        print(f"round {n + 1}: {without[-1]['all']:.2f} s without, {found[-1]['all']:.2f} s with", file=sys.stderr)
    result = {
        "what": f"first step of {options.layers} encoder layers of width {WIDTH}, batch {BATCH} x {LENGTH}, at"
        f" {SHARE:.0%} of keep-all",
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"rotoff": rotoff.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "seconds_without": medians(without),
        "seconds_with": medians(found),
        "speed_up": statistics.median(a["all"] / b["all"] for a, b in zip(without, found, strict=True)),
        "rounds": [{"without": a, "with": b} for a, b in zip(without, found, strict=True)],
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if options.json:
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

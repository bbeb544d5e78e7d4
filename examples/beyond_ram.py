"""Training beyond RAM on a CPU: under a hard limit of the kernel plain PyTorch fails, and rotoff trains to the same
losses.

    python examples/beyond_ram.py
    python examples/beyond_ram.py --blocks 24 --rows 4096 --room "1 GiB"

Three processes train the same steps from the same seed: plain PyTorch with all the memory that it wants; plain PyTorch
with `--room` bytes for a step, beyond parameters, their gradients and the optimizer's state; rotoff with the same room.
The kernel enforces the room (RLIMIT_DATA): whoever asks for more gets none. Values that rotoff moves go to a file on a
disk, and 96 MiB of the room are left to what rotoff itself takes once in a process: the profiler that measures,
threads, tables. Linux only.
"""

import argparse
import json
import os
import resource
import subprocess
import sys

import torch
from torch import nn

import rotoff

# bytes of the room for what is no activation: the profiler that measures, threads, the solver's tables
OTHERS = 96 * 2**20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def data_bytes() -> int:
    """Private writable memory of this process, what RLIMIT_DATA counts."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))


def child(options: argparse.Namespace) -> None:
    """Train in one of the three ways; print the losses as JSON."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))  # the copies need a core
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[Block(options.width) for _ in range(options.blocks)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # there before the step, as in any step but the first
    x, y = torch.randn(options.rows, options.width), torch.randn(options.rows, options.width)
    (model[0](x[:8]).sum() * 0).backward()  # threads and kernels are set up
    room = rotoff.parse_bytes(options.room)
    if options.way != "free":
        limit = data_bytes() + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    plan = {}
    if options.way == "rotoff":
        model = rotoff.Checkpointable(model).measure(x, repeats=1)
        model.compute_sequence(room - OTHERS)
        plan = {
            "peak": model.get_expected_memory(),
            "host": model.get_expected_host_memory(),
            "everything": model.keep_all_memory,
        }
    losses = []
    for _ in range(options.steps):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    print(json.dumps({"losses": losses, **plan}))


def run(way: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    # One arena, of which blocks of this size and more go back to the kernel when they are freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, __file__, *arguments, "--way", way]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", default="256 MiB", help="bytes that a step may take, enforced by the kernel")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--way", choices=("free", "plain", "rotoff"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        child(options)
        return 0

    ran = {way: run(way, sys.argv[1:]) for way in ("free", "plain", "rotoff")}
    print(f"a step may take {options.room}")
    for way, words in (("free", "plain, no limit"), ("plain", "plain, limited"), ("rotoff", "rotoff, limited")):
        result = ran[way]
        if result.returncode:
            said = [line for line in result.stderr.strip().splitlines() if "memory" in line.lower() or "Error" in line]
            print(f"{words:<16} fails: {(said or ['no output'])[0][:160]}")
        else:
            print(f"{words:<16} losses {' '.join(f'{loss:.6f}' for loss in json.loads(result.stdout)['losses'])}")
    if ran["free"].returncode or ran["rotoff"].returncode:
        print(ran["free"].stderr or ran["rotoff"].stderr, file=sys.stderr)
        return 1
    free, planned = json.loads(ran["free"].stdout), json.loads(ran["rotoff"].stdout)
    kept, peak, host = (rotoff.format_bytes(planned[key]) for key in ("everything", "peak", "host"))
    print(f"keeping everything takes {kept}; the plan {peak} of RAM, and {host} of a file")
    print("the same losses:", planned["losses"] == free["losses"])
    return 0 if planned["losses"] == free["losses"] and ran["plain"].returncode else 1


if __name__ == "__main__":
    sys.exit(main())

"""Whole training steps, with AdamW in bfloat16, of models that are too large for the device: rotoff's ``device_limit``
beside what others do.

    python -m benchmarks.placed_peers --out FILE [--workloads 7b vit-g qwen3-8b] [--minutes 9]  # until "complete"

Workloads: ``7b``, a GPT of 6.7 billion parameters; ``vit-g``, the ViT of torchao's table of optimizers on the host
(1.1 billion parameters, 32 images of 224², each block checkpointed: 1.27 s and 9.82 GB on a 4070 Ti SUPER, with
torchao 1.52 s and 5.24 GB, gradients offloaded as well 1.53 s and 4.01 GB); ``qwen3-8b``, at 8,192 tokens, the model of
axolotl's table of activations on the host.

Rows of a workload, in this order: rotoff within each of its limits; each peer, and rotoff within the peer's peak,
``rotoff@PEER``; rotoff with updates during the backward. Peers: ``checkpoint``, each block; ``torchao``, its
`CPUOffloadOptimizer`, and ``torchao-gradients``, which offloads gradients too, both with checkpointed blocks;
``fsdp2``, `fully_shard` with `CPUOffloadPolicy` in one process, likewise; ``save_on_cpu``, all that autograd saves,
pinned; ``plain``.

Each row runs in a process of its own and is in the file before the next begins. Of a row: ``status`` (ok, infeasible,
not here, out of memory, too slow, failed) and ``note``, why; ``seconds``, the median of the steps, and ``losses``,
which are alike in all rows of a workload; on CUDA ``peak`` and ``reserved``, the most bytes of the device in a step,
with parameters, gradients and states; of rotoff ``limit``, ``expected_seconds``, ``expected_peak``, ``moved``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# of the packages below; last, so that an installed rotoff goes first
sys.path.append(str(Path(__file__).parent.parent))
import rotoff
from benchmarks.grid.models import Loss, gpt, trained, vit
from benchmarks.grid.run import commit, machine
from rotoff.io.atomic_write import write_whole

PEERS = ("checkpoint", "torchao", "torchao-gradients", "fsdp2", "save_on_cpu", "plain")
WARM = 2


class NotHere(Exception):
    """A peer that cannot run here; the sentence says why."""


class Workload(NamedTuple):
    """build: the model, without its loss. batch: (input, target), from a seeded generator. limits: bytes of the device
    for rotoff."""

    build: Callable[[], nn.Sequential]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    limits: tuple[str, ...]


class Qwen3Block(nn.Module):
    """A decoder block of Qwen3: grouped queries, normalized queries and keys, rotary positions, a gated middle."""

    def __init__(self, width: int, heads: int, groups: int, head: int, middle: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, head
        self.first, self.second = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.query, self.merge = nn.Linear(width, heads * head, bias=False), nn.Linear(heads * head, width, bias=False)
        self.key, self.value = (nn.Linear(width, groups * head, bias=False) for _ in range(2))
        self.query_norm, self.key_norm = nn.RMSNorm(head, 1e-6), nn.RMSNorm(head, 1e-6)
        self.gate, self.up = (nn.Linear(width, middle, bias=False) for _ in range(2))
        self.down = nn.Linear(middle, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        y = self.first(x)
        q, k, v = (part(y).view(n, length, -1, self.head) for part in (self.query, self.key, self.value))
        q, k = (rotated(part.transpose(1, 2)) for part in (self.query_norm(q), self.key_norm(k)))
        mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(n, length, -1))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """`x` (n, heads, length, head), turned by its positions."""
    length, half = x.shape[2], x.shape[3] // 2
    places = torch.arange(length, device=x.device, dtype=torch.float32)
    angles = torch.outer(places, 1e6 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half))
    cos, sin = (turn.repeat(1, 2).to(x.dtype) for turn in (angles.cos(), angles.sin()))
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def qwen3(layers: int, width: int, heads: int, groups: int, head: int, middle: int, vocabulary: int) -> nn.Sequential:
    """Tokens (n, length) -> logits (n, length, vocabulary)."""
    blocks = [Qwen3Block(width, heads, groups, head, middle) for _ in range(layers)]
    last = [nn.RMSNorm(width, 1e-6), nn.Linear(width, vocabulary, bias=False)]
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, *last)


def tokens(length: int, vocabulary: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.randint(vocabulary, (1, length + 1), generator=random)
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()


def images(n: int, size: int, classes: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    pictures = torch.randn(n, 3, size, size, generator=random).bfloat16()
    return pictures, torch.randint(classes, (n,), generator=random)


GPT, VIT, QWEN3 = (
    (32, 4096, 32, 4096, 32000),
    (224, 14, 40, 1536, 24, 45),
    (36, 4096, 32, 8, 128, 12288, 151936),
)
WORKLOADS = {
    "7b": Workload(partial(gpt, *GPT), partial(tokens, 4096, 32000), ("24 GB", "16 GB", "12 GB")),
    "vit-g": Workload(partial(vit, *VIT), partial(images, 32, 224, 45), ("4 GB",)),
    "qwen3-8b": Workload(partial(qwen3, *QWEN3), partial(tokens, 8192, 151936), ("24 GB",)),
}
TINY = {  # to see whether all of it runs
    "7b": Workload(partial(gpt, 3, 64, 2, 32, 64), partial(tokens, 32, 64), ("1.2 MB", "1 KB")),
    "vit-g": Workload(partial(vit, 28, 14, 3, 64, 2, 5), partial(images, 2, 28, 5), ()),
    "qwen3-8b": Workload(partial(qwen3, 3, 64, 4, 2, 16, 96, 64), partial(tokens, 32, 64), ()),
}


def made(workload: Workload, device: torch.device, where: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """The model, which lies on `where` and returns its loss, and its input, on `device`; the same for every row."""
    with torch.device("meta"):
        net = workload.build().bfloat16()
    net.to_empty(device=where)
    torch.manual_seed(0)
    for name, p in net.named_parameters():  # drawn on the device, where it takes seconds and not minutes
        if p.dim() < 2:
            nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)
        else:
            p.data.copy_(torch.randn(p.shape, device=device, dtype=p.dtype) * 0.02)
    x, target = (t.to(device) for t in workload.batch(torch.Generator().manual_seed(0)))
    return trained(net, Loss(target)), x


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, **options)


Made = tuple[Callable[[torch.Tensor], torch.Tensor], Any]  # the model's call, and its optimizer


def checkpointed(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    for block in [*model][1:-2]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def plain(model: nn.Module, device: torch.device) -> Made:
    return model, adamw(model)


def checkpoint_blocks(model: nn.Module, device: torch.device) -> Made:
    return plain(checkpointed(model), device)


def save_on_cpu(model: nn.Module, device: torch.device) -> Made:
    if device.type != "cuda":
        raise NotHere("save_on_cpu needs a device other than the CPU")

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(x)

    return run, adamw(model)


def torchao(model: nn.Module, device: torch.device, offload_gradients: bool = False) -> Made:
    if device.type != "cuda":
        raise NotHere("torchao's optimizer needs a device other than the CPU")
    if importlib.util.find_spec("torchao") is None:
        raise NotHere("torchao is not installed")
    from torchao.optim import CPUOffloadOptimizer

    ours = {"lr": 1e-5, "fused": True}
    parameters = checkpointed(model).parameters()
    return model, CPUOffloadOptimizer(parameters, torch.optim.AdamW, offload_gradients=offload_gradients, **ours)


def fsdp2(model: nn.Module, device: torch.device) -> Made:
    import torch.distributed as dist

    if device.type != "cuda" or not dist.is_available() or not dist.is_nccl_available():
        raise NotHere("CPUOffloadPolicy needs CUDA, and NCCL in this torch")
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(device.type, (1,))
    assert isinstance(model, nn.Sequential)
    for part in [*checkpointed(model)][:-1]:
        fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    return model, adamw(model)


METHODS: dict[str, Callable[..., Made]] = {
    "plain": plain,
    "checkpoint": checkpoint_blocks,
    "save_on_cpu": save_on_cpu,
    "torchao": torchao,
    "torchao-gradients": partial(torchao, offload_gradients=True),
    "fsdp2": fsdp2,
}


def measure(cell: dict[str, Any], found: dict[str, Any]) -> None:
    """Run a row and add what came out to `found`."""
    device, name = torch.device(cell["device"]), cell["method"]
    ours, cuda = name.startswith("rotoff"), device.type == "cuda"
    workload = (TINY if cell["tiny"] else WORKLOADS)[cell["workload"]]
    model, x = made(workload, device, torch.device("cpu") if ours or name == "fsdp2" else device)
    if ours:
        updates = "during" if name.startswith("rotoff-during") else "after"
        run: Any = rotoff.Checkpointable(model, device=device).measure(x)
        optimizer: Any = adamw(run)
        run.compute_sequence(device_limit=cell["limit"], optimizer=optimizer, updates=updates)
        moved = rotoff.simulate(run.chain, run.sequence, updates=updates)
        found |= {"limit": rotoff.parse_bytes(cell["limit"]), "moved": moved.d2h_bytes + moved.h2d_bytes}
        found |= {"expected_seconds": run.get_expected_makespan(), "expected_peak": run.get_expected_memory()}
    else:
        run, optimizer = METHODS[name](model, device)
    seconds, losses = [], []
    for n in range(WARM + cell["steps"]):
        if n == WARM and cuda:
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        loss = run(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device, but not for what torchao copies beside it
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        del loss
    found |= {"seconds": statistics.median(seconds[WARM:]), "all_seconds": seconds, "losses": losses}
    if cuda:
        found |= {"peak": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}


def run_row(cell: dict[str, Any]) -> dict[str, Any]:
    """Run a row; what stops it is a result, not an error."""
    found: dict[str, Any] = {"status": "ok", "note": ""}
    try:
        measure(cell, found)
    except Exception as error:
        short = "out of memory" in str(error) or isinstance(error, (torch.OutOfMemoryError, MemoryError))
        kinds = {rotoff.InfeasibleError: "infeasible", NotHere: "not here", ImportError: "not here"}
        status = next((said for kind, said in kinds.items() if isinstance(error, kind)), "")
        found["status"] = status or ("out of memory" if short else "failed")
        found["note"] = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    return found


def todo(options: argparse.Namespace, rows: dict[str, Any]) -> Iterator[tuple[str, str, str | int | None]]:
    """(workload, method, limit) of the rows that have not run, in order; later ones need what earlier ones found."""
    for name in options.workloads:
        limits = (TINY if options.tiny else WORKLOADS)[name].limits
        wanted: list[tuple[str, str | int | None]] = [(f"rotoff@{limit}", limit) for limit in limits]
        for peer in PEERS:
            wanted.append((peer, None))
            if peak := rows.get(f"{name}/{peer}", {}).get("peak"):
                wanted.append((f"rotoff@{peer}", peak))
        wanted += [(f"rotoff-during@{limit}", limit) for limit in limits]
        for method, limit in wanted:
            if f"{name}/{method}" not in rows:
                yield name, method, limit


def row_of(cell: dict[str, Any], allowed: float, environment: dict[str, str]) -> dict[str, Any] | None:
    """Run a row in a process of its own; None where it took longer than the seconds `allowed`."""
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=allowed, env=environment)
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return None
    except (IndexError, ValueError):  # it died: killed for memory, or a fault that the note shows
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"status": "out of memory" if done.returncode in (-9, 137) else "failed", "note": last[:500]}


def said(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{row['status']} ({row['note']})"
    peak = f", {row['peak'] / 1e9:.2f} GB" if "peak" in row else ""
    return f"{row['seconds']:.3f} s{peak}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file, which an interrupted run goes on with")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), metavar="NAME", default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=3, help="that are timed (%(default)s)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this many")
    parser.add_argument("--row-minutes", type=float, default=4, help="after which a row is stopped (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small models, to see whether it runs")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is None and options.cell is None:
        parser.error("--out is missing")
    return options


def main() -> int:
    """Exit code 0 when complete, 3 where the time was up before."""
    options = parse()
    if options.cell:
        print(json.dumps(run_row(json.loads(options.cell))), flush=True)
        os._exit(0)  # a peer's threads and process groups need no farewell
    end = time.time() + 60 * options.minutes
    told: dict[str, Any] = {"machine": machine(options.device), "tiny": options.tiny, "rows": {}}
    if options.out.exists():
        before = json.loads(options.out.read_text(encoding="utf-8"))
        if {**before, "rows": {}} != told:
            print(f"{options.out} is of another machine or other versions; name another --out, or move it away")
            return 1
        told = before
    rows = told["rows"]
    with tempfile.TemporaryDirectory(prefix="rotoff-peers-") as times:  # of stages: one row's serve the others
        environment = {**os.environ, "ROTOFF_CACHE": times}
        while (following := next(todo(options, rows), None)) is not None:
            workload, method, limit = following
            cell = {"workload": workload, "method": method, "limit": limit, "device": options.device}
            cell |= {"steps": options.steps, "tiny": options.tiny}
            most, began = 60 * options.row_minutes, time.time()
            row = row_of(cell, min(most, max(1.0, end - began)), environment)
            if row is None and time.time() >= end:
                print(f"time is up; {len(rows)} rows are in {options.out}; run this again to go on")
                return 3
            row = row or {"status": "too slow", "note": f"stopped after {options.row_minutes:g} minutes"}
            rows[f"{workload}/{method}"] = {**row, "took": round(time.time() - began, 1), "commit": commit()}
            write_whole(options.out, json.dumps(told, indent=1) + "\n")
            print(f"{workload}, {method}: {said(row)}", flush=True)
    print(f"complete: {len(rows)} rows in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What no choice of forms can beat: the least redo time that the operations of a model allow within a limit, beside the
plans.

The model runs once on fake tensors and every operation is logged with its time on the device (as `rotoff.estimate`
takes it) and with the storages that it reads and makes. The floor is the optimum of a linear program over them. At the
start of each B_c (c = L, ..., 2) it may hold any storages at all that any operation has made, saved by autograd or not,
in any parts of them; between two such points it may run any operations again, in any parts, from what is held or made
then. So every choice of forms, and every recompute of whole stages, is one of its points. It has to satisfy only

* at the start of B_c: what is held, with a_0, a_L, the two gradients and the transients of B_c, fits the limit; stage
  c's saved tensors and input are there, whole (the machine's B is one operation);
* whatever B_c, ..., B_2 still need is held at B_c or made after it by operations that run at least once more, whose own
  arguments are held or made in turn. (The sum over all later intervals stands in this one, or the relaxation would make
  a whole storage twice out of one half.)

What it leaves out makes it smaller only: memory during the forward and inside operations, the allocator's rounding,
random numbers drawn in order, launches and dispatch of a redo. After Checkmate's formulation (Jain et al., MLSys 2020).

    python benchmarks/forms_floor.py --json benchmarks/results/forms_floor.json

Nothing here is measured: the figures are the same on any machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse
import torch
from torch import nn

# of the packages below; last, so that an installed rotoff goes first
sys.path.append(str(Path(__file__).parent.parent))
import rotoff
from benchmarks.grid import models
from benchmarks.grid.run import commit
from rotoff.capture.operations import OperationLog, record_operations
from rotoff.profile.estimate.cuda_kernels import cuda_variants
from rotoff.profile.estimate.devices import find
from rotoff.profile.estimate.fake import fake_copy
from rotoff.profile.estimate.fake_kernels import FakeKernels
from rotoff.profile.estimate.roofline import Roofline

SHARES = (0.6, 0.45, 0.3)
MICROSECOND, MIB = 1e-6, 2.0**20  # units that keep the program's numbers near 1
Made = tuple[nn.Sequential, torch.Tensor]


@dataclass
class Row:
    """One model and limit. Overheads are step times over keeping everything, less 1: of the plans without and with
    forms, of the certified bound for the forms offered, and of the floor for any forms."""

    model: str
    share: float
    limit: int
    without: float
    with_forms: float
    bound: float
    floor: float


def gpt(layers: int = 24, width: int = 2048, length: int = 2048, batch: int = 4, vocabulary: int = 50304) -> Made:
    """A GPT on tokens, bfloat16."""
    with torch.device("meta"):
        model = models.gpt(layers, width, max(1, width // 128), length, vocabulary).bfloat16()
        return model, torch.zeros(batch, length, dtype=torch.long)


def vit(layers: int = 24, width: int = 1024, batch: int = 64, size: int = 224) -> Made:
    """A ViT on images, bfloat16; ViT-L/16 as it stands."""
    with torch.device("meta"):
        model = models.vit(size, 16, layers, width, max(1, width // 64), 1000).bfloat16()
        return model, torch.zeros(batch, 3, size, size, dtype=torch.bfloat16)


CASES: dict[str, Callable[[], Made]] = {
    "GPT, 24 blocks of width 2048, 4 x 2048 tokens": gpt,
    "ViT-L/16, 64 images": vit,
}
QUICK: dict[str, Callable[[], Made]] = {
    "GPT, 4 blocks": lambda: gpt(4, 256, 512, 4, 512),
    "ViT, 4 blocks": lambda: vit(4, 256, 8, 224),
}


class Operations:
    """The operations of all stages of an `nn.Sequential`, as its forward runs them one after another.

    stage_of: of each operation, its stage (from 1). output: storage of each stage's output. saved: storages made in the
    model that autograd saves, by stage.
    """

    def __init__(self, model: nn.Sequential, x: torch.Tensor, device: str) -> None:
        chosen = find(device)
        mode = FakeKernels()
        copied, value = fake_copy(model, mode).train(), fake_copy(x, mode)

        def run() -> list[torch.Tensor]:
            outputs = [value]
            for stage in copied:
                outputs.append(stage(outputs[-1]))
            return outputs[1:]

        with mode, cuda_variants(chosen):
            self.log: OperationLog = record_operations(run, torch.device("cpu"), Roofline(chosen).time)
        made = sorted((self.log.made[s], s) for s in self.log.outputs if s is not None)
        if len(made) != len(model):
            raise SystemExit("every stage has to make a storage of its own for its output")
        self.output = {i: storage for i, (_, storage) in enumerate(made, start=1)}
        ends = [position for position, _ in made]
        self.stage_of = [1 + int(np.searchsorted(ends, p)) for p in range(len(self.log.operations))]
        self.saved: dict[int, set[int]] = {i: set() for i in range(1, len(model) + 1)}
        for pack in self.log.packs:
            if pack.storage in self.log.made:
                last_run = self.stage_of[pack.before - 1]
                stage = last_run if pack.before <= ends[last_run - 1] or last_run == len(model) else last_run + 1
                self.saved[stage].add(pack.storage)

    def made_in(self, stage: int) -> list[int]:
        """Storages with any bytes that the operations of `stage` make."""
        log = self.log
        return [s for s, p in log.made.items() if self.stage_of[p] == stage and log.nbytes[s]]


class Program:
    """A linear program: least cost x with A x <= b, low <= x <= 1."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._low: list[float] = []
        self._rows: list[list[tuple[int, float]]] = []
        self._b: list[float] = []

    def variable(self, cost: float = 0.0) -> int:
        self._cost.append(cost)
        self._low.append(0.0)
        return len(self._cost) - 1

    def fix(self, variable: int) -> None:
        """Let `variable` be 1."""
        self._low[variable] = 1.0

    def at_most(self, terms: list[tuple[int, float]], b: float) -> None:
        self._rows.append(terms)
        self._b.append(b)

    def least(self) -> float:
        """The optimum; infinite where there is none."""
        entries = [(n, v, a) for n, row in enumerate(self._rows) for v, a in row]
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(self._rows), len(self._cost))
        A = scipy.sparse.csr_matrix((values, (rows, columns)), shape=shape)
        bounds = np.column_stack([self._low, np.ones(len(self._low))])
        found = scipy.optimize.linprog(self._cost, A_ub=A, b_ub=self._b, bounds=bounds, method="highs")
        return float(found.fun) if found.status == 0 else float("inf")


def floor(operations: Operations, chain: rotoff.Chain, limit: int) -> float:
    """Seconds that any schedule within `limit` bytes must spend on operations that it runs again."""
    log, L = operations.log, len(chain)
    runs_of = {b: [p for p, stage in enumerate(operations.stage_of) if stage == b] for b in range(1, L)}
    storages = {b: operations.made_in(b) for b in range(1, L)}
    known = {s for made in storages.values() for s in made}
    points = list(range(L, 1, -1))
    program = Program()
    held: dict[tuple[int, int], int] = {}  # (point, storage)
    runs: dict[tuple[int, int], int] = {}  # (point, operation): between this point and the next
    ever: dict[tuple[int, int], int] = {}  # (point, operation): at least once from this point on
    for t, c in enumerate(points):
        for b in range(1, min(c, L - 1) + 1):
            held |= {(t, s): program.variable() for s in storages[b]}
            runs |= {(t, p): program.variable(log.operations[p].seconds / MICROSECOND) for p in runs_of[b]}
            ever |= {(t, p): program.variable() for p in runs_of[b]}
    for t, c in enumerate(points):
        alive = range(1, min(c, L - 1) + 1)
        stage = chain.stages[c - 1]
        there = chain.input_bytes + chain.grad_bytes(c) + chain.grad_bytes(c - 1) + stage.backward_transient_bytes
        there += stage.saved_bytes if c == L else chain.output_bytes(L)
        terms = [(held[t, s], log.nbytes[s] / MIB) for b in alive for s in storages[b]]
        program.at_most(terms, (limit - there) / MIB)
        needed_now = (operations.saved[c] if c < L else set()) | {operations.output[c - 1]}
        for s in needed_now & known:
            program.fix(held[t, s])
        for b in alive:
            for s in (operations.saved[b] | {operations.output[b]}) & known if b < c else ():
                program.at_most([(held[t, s], -1), (ever[t, log.made[s]], -1)], -1)
            for p in runs_of[b]:
                later = [(runs[u, p], -1.0) for u in range(t, len(points)) if (u, p) in runs]
                program.at_most([(ever[t, p], 1.0), *later], 0)
                for s in set(log.operations[p].reads) & known:
                    for ran in (runs, ever):
                        program.at_most([(ran[t, p], 1), (held[t, s], -1), (ran[t, log.made[s]], -1)], 0)
            if t + 1 < len(points):
                for s in storages[b]:
                    if (t + 1, s) in held:
                        program.at_most([(held[t + 1, s], 1), (held[t, s], -1), (runs[t, log.made[s]], -1)], 0)
    return program.least() * MICROSECOND


def compare(name: str, made: Made, device: str, shares: tuple[float, ...]) -> list[Row]:
    """The plans of pure recompute, their bound and the floor, at `shares` of the peak of keeping everything."""
    model, x = made
    chain = replace(rotoff.estimate(model, x, device=device), d2h_bandwidth=1.0, h2d_bandwidth=1.0)  # links of no use
    plain = replace(chain, stages=tuple(replace(stage, forms=()) for stage in chain.stages))
    operations = Operations(model, x, device)
    peak = rotoff.simulate(plain, rotoff.solver.keep_all(plain)).peak_bytes
    kept = chain.compute_time
    rows = []
    for share in shares:
        limit = int(share * peak)
        spans = [rotoff.simulate(c, rotoff.solve(c, limit, mode="remat")).makespan for c in (plain, chain)]
        bound = rotoff.lower_bound(chain, limit) / kept - 1
        least = floor(operations, chain, limit) / kept
        rows.append(Row(name, share, limit, spans[0] / kept - 1, spans[1] / kept - 1, bound, least))
        print(line(rows[-1]), flush=True)
    return rows


HEADER = f"{'model':46}  limit  without    with   bound   floor  with/without  floor/without"


def line(row: Row) -> str:
    """One line of the table."""
    overheads = "".join(f"{value:8.2%}" for value in (row.without, row.with_forms, row.bound, row.floor))
    shares = f"{row.with_forms / row.without:14.3f}{row.floor / row.without:15.3f}" if row.without else ""
    return f"{row.model:46}  {row.share:5.0%} {overheads}{shares}"


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--device", default="H200", help="whose data sheet gives the times (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small models at 60 %%")
    options = parser.parse_args(arguments)
    print(HEADER)
    cases, shares = (QUICK, SHARES[:1]) if options.quick else (CASES, SHARES)
    rows = [row for name, make in cases.items() for row in compare(name, make(), options.device, shares)]
    versions = {"torch": torch.__version__, "rotoff": rotoff.__version__, "commit": commit()}
    figures: dict[str, Any] = {"device": options.device, **versions, "rows": [asdict(row) for row in rows]}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()

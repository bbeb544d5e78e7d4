"""Score methods that save memory, on a CPU: bytes promised against bytes taken, whether a smaller wish takes fewer,
gradients with dropout, and step time.

    python benchmarks/promises.py --json benchmarks/results/promises.json --picture docs/results/promises.png

A GPT of grid/models.py, timm's ResNet-26 and transformers' GPT-2, all with dropout. Bytes are those of PyTorch's
allocator: the most that a step holds beyond parameters, gradients and the batch. `torch.compile`'s budget promises a
share of what is saved, which is compared with what its step holds between forward and backward. Gradients are compared
with the plain model's under the same seed, bit for bit; with `torch.compile`, which draws other numbers, with those of
budget 1.0. Times are ratios of processor time to a plain step beside each. `save_on_cpu` is not scored: on a CPU it
frees nothing.

Four dropouts in a row show the masks: an element that the last one dropped has no gradient, unless the backward used
another mask than the forward.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "support")]
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # the budget is no part of a cache's key everywhere

import torchvision_operators  # noqa: E402
from allocated import _memory_events, peak_bytes  # noqa: E402
from torch._functorch import config  # noqa: E402
from torch.autograd.profiler import profile  # noqa: E402

import rotoff  # noqa: E402
from benchmarks.grid import models  # noqa: E402
from benchmarks.grid.run import commit, machine  # noqa: E402
from rotoff.io.files import write_whole  # noqa: E402

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.0)
SHARES = (0.8, 0.65, 0.5, 0.4, 0.3)
AOT, INDUCTOR = "aot_eager_decomp_partition", "inductor"
OURS = ("remat", "joint", "selective_policy")
Step = Callable[[], object]


class OwnLoss(nn.Module):
    """A language model of transformers, and its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids=x, labels=x).loss


def gpt(scale: int) -> tuple[nn.Module, torch.Tensor]:
    x = torch.randint(200, (2 * scale, 128))
    return models.Trained(models.gpt(6, 128, 4, 128, 200, 0.1), models.Loss(x)), x


def resnet(scale: int) -> tuple[nn.Module, torch.Tensor]:
    torchvision_operators.declare()
    import timm

    net = timm.create_model("resnet26", num_classes=10, drop_rate=0.1)
    return models.Trained(net, models.Loss(torch.randint(10, (scale,)))), torch.randn(scale, 3, 96, 96)


def gpt2(scale: int) -> tuple[nn.Module, torch.Tensor]:
    torchvision_operators.declare()
    import transformers

    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    options = transformers.GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=200, n_positions=128, **ends)
    return OwnLoss(transformers.GPT2LMHeadModel(options)), torch.randint(200, (2 * scale, 128))


MODELS = {"GPT": gpt, "ResNet-26 (timm)": resnet, "GPT-2 (transformers)": gpt2}


class Scored:
    """One model, made anew for each method with the same parameters."""

    def __init__(self, name: str, scale: int, rounds: int) -> None:
        self._name, self._scale, self._rounds = name, scale, rounds
        self.plain, self.x = self.make()
        self._references: dict[str, list[torch.Tensor]] = {"plain": self.gradients(self.plain, self.plain)}
        self.keep_all = self.peak(self.plain, self.plain)

    def make(self) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        model, x = MODELS[self._name](self._scale)
        return model.train(), x

    def step(self, model: nn.Module, run: Callable[..., Any]) -> None:
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
        run(self.x).backward()

    def gradients(self, model: nn.Module, run: Callable[..., Any]) -> list[torch.Tensor]:
        """After a step, which may be recorded, and another one."""
        for _ in range(2):
            torch.manual_seed(1)
            self.step(model, run)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def peak(self, model: nn.Module, run: Callable[..., Any]) -> int:
        self.step(model, run)
        return peak_bytes(lambda: run(self.x).backward(), lambda: self.step(model, run))

    def saved(self, run: Callable[..., Any]) -> int:
        """Bytes held between forward and backward."""
        with profile(use_cpu=True, profile_memory=True) as profiler:
            loss = run(self.x)
        held: dict[int, int] = {}
        for _, address, size in sorted(_memory_events(profiler), key=lambda event: event[0]):
            held.pop(address, None)
            held |= {address: size} if size > 0 else {}
        loss.backward()
        return sum(held.values())

    def row(self, method: str, knob: float | None, model: nn.Module, run: Any, promised: int | None) -> dict[str, Any]:
        """The score of a model that is run by `run`. promised: bytes of the peak, or of what is saved."""
        compiled = method.startswith("compile")
        found = self.gradients(model, run)
        reference = self._references.setdefault(method if compiled else "plain", found)
        off = max((float((a - b).abs().max() / (b.abs().max() + 1e-30)) for a, b in zip(found, reference, strict=True)))
        row = {"model": self._name, "method": method, "knob": knob, "peak": self.peak(model, run), "promised": promised}
        row |= {"equal": all(map(torch.equal, found, reference)), "off": off, "time": self._time(model, run)}
        row |= {"keep_all": self.keep_all, "saved": self.saved(run) if compiled else None}
        print(json.dumps(row), flush=True)
        return row

    def _time(self, model: nn.Module, run: Callable[..., Any]) -> float:
        def seconds(step: Step) -> float:
            begin = time.process_time()
            step()
            return time.process_time() - begin

        one, other = partial(self.step, model, run), partial(self.step, self.plain, self.plain)
        return median(seconds(one) / seconds(other) for _ in range(self._rounds))

    def rows(self, backends: list[str]) -> Iterator[dict[str, Any]]:
        yield self.row("plain", None, self.plain, self.plain, None)
        model, _ = self.make()
        names = [name for name, _ in model.named_modules() if numbered(name)]
        yield self.row("checkpoint per block", None, *2 * (checkpointed(model, dict.fromkeys(names, None)),), None)
        for method in OURS:
            for share in SHARES:
                model, _ = self.make()
                wrapped, limit = rotoff.Checkpointable(model).measure(self.x), share
                try:
                    if method == "selective_policy":
                        policy = rotoff.selective_policy(wrapped, mem_limit=int(limit * self.keep_all))
                        yield self.row(method, share, *2 * (checkpointed(model, policy),), policy.peak_bytes)
                    else:
                        run = wrapped.compute_sequence(int(limit * self.keep_all), mode=method)
                        yield self.row(method, share, model, run, run.get_expected_memory())
                except rotoff.InfeasibleError as error:
                    print(f"{method} at {share}: {error}")
                finally:
                    wrapped.close()
        for backend in backends:
            whole: int | None = None
            for budget in BUDGETS:
                model, _ = self.make()
                torch._dynamo.reset()
                with config.patch(activation_memory_budget=budget):
                    run = torch.compile(model, backend=backend)
                    row = self.row(f"compile, {backend}", budget, model, run, None)
                whole = row["saved"] if whole is None else whole
                yield row | {"promised": int(budget * whole)}


def numbered(name: str) -> bool:
    """Whether it is a block: the first number in a module's name ends it."""
    *before, last = name.split(".")
    return last.isdigit() and not any(part.isdigit() for part in before)


def checkpointed(model: nn.Module, contexts: Any) -> nn.Module:
    """The model with checkpoints of these blocks; None: that keep nothing."""
    for name, context_fn in contexts.items():
        block, more = model.get_submodule(name), {} if context_fn is None else {"context_fn": context_fn}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)  # type: ignore[method-assign]
    return model


def masks(backend: str, budget: float) -> dict[str, Any]:
    """Of the elements that have a gradient after four dropouts, the share that the last one has dropped."""

    def four(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = F.dropout(x.sin() + 2, 0.5)
        return x

    torch._dynamo.reset()
    x = torch.randn(1 << 16, requires_grad=True)
    with config.patch(activation_memory_budget=budget):
        result = torch.compile(four, backend=backend)(x)
        result.sum().backward()
    assert x.grad is not None
    wrong = int(((x.grad != 0) & (result == 0)).sum())
    return {"backend": backend, "budget": budget, "wrong": wrong / max(1, int((x.grad != 0).sum()))}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each method and model."""
    lines = ["| model | method | promised bytes | a smaller wish has a lower peak | gradients | step time |"]
    lines.append("|---|---|---|---|---|---|")
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        own = [row for row in rows if (row["model"], row["method"]) == (model, method)]
        of = "saved" if own[0]["saved"] is not None else "peak"
        over = [row[of] / row["promised"] - 1 for row in own if row["promised"]]
        takes = [row["peak"] for row in own]
        falls = "" if len(own) == 1 else "yes" if takes == sorted(takes, reverse=True) else "**no**"
        bits = "equal" if all(row["equal"] for row in own) else f"off by up to {max(row['off'] for row in own):.1g}"
        kept = "none" if not over else "kept" if max(over) <= 0 else f"exceeded by up to {max(over):.1%}"
        times = " to ".join(dict.fromkeys(f"{end(row['time'] for row in own):.2f}" for end in (min, max)))
        lines.append(f"| {model} | {method} | {kept} | {falls} | {bits} | {times} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Peaks against what was asked, both over the peak of keeping everything."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(MODELS), figsize=(12, 4), sharey=True, layout="constrained")
    styles = dict(zip(OURS, (("#D55E00", "s"), ("#0072B2", "o"), ("#009E73", "^")), strict=True))
    styles |= {f"compile, {AOT}": ("#999999", "v"), f"compile, {INDUCTOR}": ("#000000", "x")}
    for axis, name in zip(panels, MODELS, strict=True):
        for method, (colour, marker) in styles.items():
            own = [row for row in rows if (row["model"], row["method"]) == (name, method)]
            points = [(row["knob"], row["peak"] / row["keep_all"]) for row in own]
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=method)
        axis.plot((0, 1), (0, 1), "--", color="#666666", linewidth=1, label="as asked")
        axis.set(title=name, xlabel="asked, of keeping everything")
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("peak, of keeping everything")
    named = dict(one for axis in panels for one in zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named), frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--scale", type=int, default=4, help="of the batches (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of steps that are timed (%(default)s)")
    parser.add_argument("--backends", nargs="*", default=[AOT, INDUCTOR], help="of torch.compile (%(default)s)")
    parser.add_argument("--masks", nargs="*", default=[AOT, INDUCTOR], help="the same, of the four dropouts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shown = [masks(backend, budget) for backend in options.masks for budget in BUDGETS]
    rows = [
        row for name in options.models for row in Scored(name, options.scale, options.rounds).rows(options.backends)
    ]
    print(table(rows))
    for row in shown:
        print(f"{row['backend']}, budget {row['budget']}: wrong masks in {row['wrong']:.0%} of the gradient")
    if options.json:
        found = {
            "format": "rotoff.promises",
            "machine": machine("cpu"),
            "commit": commit(),
            "rows": rows,
            "masks": shown,
        }
        write_whole(options.json, json.dumps(found, indent=1) + "\n")
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()

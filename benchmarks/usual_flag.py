"""The usual flag beside rotoff, on the transformers models of the gallery: bytes and CPU seconds of a training step.

    python benchmarks/usual_flag.py --out benchmarks/results/usual_flag.json    # some 20 minutes
    python benchmarks/usual_flag.py --only gpt2,t5
    python benchmarks/usual_flag.py --show benchmarks/results/usual_flag.json   # the table of docs/trainers.md

The loop is that of Hugging Face's Trainer: when the backward begins it holds the loss that the model returns, and
nothing else. The flag is ``gradient_checkpointing_enable()``, which the Trainer's ``gradient_checkpointing=True``
calls. Models have the gallery's layers, batches of four times its size, and 4,000 words, so that logits are large as in
real ones. All bytes are peaks of the allocator above parameters, their gradients and the batch. `least` is the smallest
limit that `RotoffCallback` accepts, `peak` what a step takes in the bytes of the flag. `equal` says whether losses and
gradients are the plain model's, bit for bit. Seconds are the least of several interleaved rounds, of CPU time, since
other programs may run; copies to a file count with what the process itself computes for them. Needs the extra
``gallery``.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

# of the packages below; last, so that an installed rotoff goes first
sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests" / "support")]
sys.path += [str(Path(__file__).parent)]
from allocated import peak_bytes
from gallery_models import LIBRARIES

import rotoff
from benchmarks.grid.run import commit, machine
from rotoff.capture.backward_roots import LossAlone

WORDS, BATCHES, ROUNDS = 4000, 4, 5


def case(name: str) -> tuple[nn.Module, dict[str, Any]] | None:
    """The model and its batch; None if it has no loss of its own, or no flag."""
    torch.manual_seed(0)
    model, _, batch = LIBRARIES["transformers"][name]()
    if not {"labels", "return_loss"} & batch.keys() or not model.supports_gradient_checkpointing:
        return None
    if "input_ids" in batch and "pixel_values" not in batch:
        model.resize_token_embeddings(WORDS)
    batch = {k: torch.cat([v] * BATCHES) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.train(), batch


def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(1)  # of dropout
    loss = model(**batch)["loss"]
    loss.backward()
    return loss.detach()


def peak(model: nn.Module, batch: dict[str, Any]) -> int:
    for _ in range(2):
        step(model, batch)
    return peak_bytes(lambda: step(model, batch))


def seconds(models: list[nn.Module], batch: dict[str, Any]) -> list[float]:
    best = [float("inf")] * len(models)
    for _ in range(ROUNDS):
        for n, model in enumerate(models):
            began = time.process_time()
            step(model, batch)
            best[n] = min(best[n], time.process_time() - began)
    return best


def gradients(model: nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = step(model, batch)
    return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def row(name: str) -> dict[str, Any] | None:
    found = case(name)
    if found is None:
        return None
    plain, batch = found
    flag, ours = (
        copy.deepcopy(plain),
        rotoff.Checkpointable(copy.deepcopy(plain), backward_from=LossAlone("loss"), cache_directory=None),
    )
    flag.gradient_checkpointing_enable()
    result: dict[str, Any] = {"model": name, "plain": peak(plain, batch), "flag": peak(flag, batch), "equal": True}
    expected = gradients(plain, batch)
    ours.measure(**batch, repeats=3)
    result["least"] = ours.min_mem_limit()
    for limit, told in ((result["least"], "least_peak"), (max(result["flag"], result["least"]), "peak")):
        ours.compute_sequence(limit)
        result[told] = peak(ours, batch)
        result["equal"] &= all(map(torch.equal, expected, gradients(ours, batch)))
    result["plain_s"], result["flag_s"], result["seconds"] = seconds([plain, flag, ours], batch)
    return result


def show(data: dict[str, Any]) -> None:
    """The table, in the bytes of the flag and the seconds of the plain model."""
    rows, failed = data["rows"], data["failed"]
    print("| model | the flag, MiB | rotoff from | the flag, step | rotoff's in the same bytes |")
    print("|---|---|---|---|---|")
    for one in rows:
        share = f"{one['least'] / 2**20:.2f} ({one['least'] / one['flag']:.0%})"
        times = f"{one['flag_s'] / one['plain_s']:.2f} | {one['seconds'] / one['plain_s']:.2f}"
        print(f"| {one['model']} | {one['flag'] / 2**20:.2f} | {share} | {times} |")
    within = sum(one["least"] <= one["flag"] for one in rows)
    print(f"\n{within} of {len(rows)} accept what the flag takes; equal bits: {sum(one['equal'] for one in rows)}")
    for name, why in failed.items():
        print(f"{name}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of this file, and run nothing")
    options = parser.parse_args()
    if options.show is not None:
        show(json.loads(options.show.read_text(encoding="utf-8")))
        return
    logging.disable(logging.WARNING)
    data: dict[str, Any] = {"machine": machine("cpu"), "commit": commit(), "words": WORDS, "rows": [], "failed": {}}
    for name in LIBRARIES["transformers"] if options.only is None else options.only.split(","):
        try:
            found = row(name)
        except Exception as error:  # of the library's, in a plain step too: the others still run
            data["failed"][name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        data["rows"] += [] if found is None else [found]
        if options.out is not None:
            options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    show(data)


if __name__ == "__main__":
    main()

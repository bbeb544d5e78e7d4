"""Training on batches of varying sizes: what new sizes cost, beside the same steps with every plan known and beside
plain PyTorch.

    python benchmarks/varying_shapes.py [--batches 500] [--workloads gpt2 bert vit unet] [--output FILE.json]

Each workload trains three times on the same batches: by plain PyTorch; by a fresh `Checkpointable`, measuring and
planning on the way; and by the same one again, which knows all plans then. A fourth pass looks at the allocator in the
first step of every size. Reported: the time of the second pass over that of the third, the longest stall after the
tenth batch in steps of that size, the largest peak over the limit, and whether all losses are plain's bit for bit.
Seconds are of the processor in all threads of the process, so that other work on the machine counts for little. The
garbage collector leaves out what exists before the passes (``gc.freeze``): a full collection of all imported modules
takes 0.2 s, in whatever step it falls.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

# of the packages below; last, so that an installed rotoff goes first
sys.path += [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests" / "support")]
import torchvision_operators
from allocated import peak_bytes

import rotoff
from benchmarks.grid.run import machine

VOCABULARY = 2000
Batches = Iterator[dict[str, Any]]


def texts(count: int, seed: int, last: int) -> Iterator[torch.Tensor]:
    """Tokens of lengths with a long tail, in batches of 4, at times of `last`: the longest of a batch is usually below
    a hundred, and at times 512."""
    drawn = random.Random(seed)
    for n in range(count):
        length = min(512, max(4, int(drawn.lognormvariate(4.0, 0.8))))
        size = (4 if n % 50 != 49 else last, length)
        yield torch.randint(0, VOCABULARY, size, generator=torch.Generator().manual_seed(n))


def gpt2(count: int) -> tuple[nn.Module, Batches]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 512, "n_embd": 192, "n_layer": 8, "n_head": 4}
    config = GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    batches = ({"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} for ids in texts(count, 0, 2))
    return GPT2LMHeadModel(config), batches


def bert(count: int) -> tuple[nn.Module, Batches]:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 8}

    def batches() -> Batches:
        for ids in texts(count, 1, 3):
            mask = torch.ones_like(ids)
            mask[0, ids.shape[1] // 2 :] = 0
            yield {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 4}

    config = BertConfig(**sizes, num_attention_heads=4, num_labels=4)
    return BertForSequenceClassification(config), batches()


class WithLoss(nn.Module):
    """A model of images, and a loss that needs no labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).square().mean()


def images(batch: int, height: int, width: int, seed: int) -> dict[str, Any]:
    return {"images": torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))}


def vit(count: int) -> tuple[nn.Module, Batches]:
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 192, "depth": 8, "num_heads": 4, "num_classes": 10}
    sides = (128 if n % 3 == 2 else 64 for n in range(count))
    batches = (images(4 if n % 50 != 49 else 3, side, side, n) for n, side in enumerate(sides))
    return WithLoss(VisionTransformer(**sizes, dynamic_img_size=True)), batches


class Unet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            convolutions = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
            return nn.Sequential(convolutions[0], nn.GroupNorm(4, b), nn.SiLU(), convolutions[1], nn.SiLU())

        self.first = block(3, width)
        self.down = nn.ModuleList(block(width << n, width << n + 1) for n in range(3))
        self.up = nn.ModuleList(block((width << n) * 3, width << n) for n in reversed(range(3)))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [self.first(x)]
        for block in self.down:
            skips.append(block(nn.functional.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat((nn.functional.interpolate(x, scale_factor=2), skips.pop()), 1))
        return self.last(x)


def unet(count: int) -> tuple[nn.Module, Batches]:
    drawn = random.Random(3)
    sizes = ([8 * drawn.randint(4, 16) for _ in range(2)] for _ in range(count))
    return WithLoss(Unet()), (images(4 if n % 50 != 49 else 2, *size, n) for n, size in enumerate(sizes))


WORKLOADS: dict[str, Callable[[int], tuple[nn.Module, Batches]]] = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "unet": unet,
}


def loss_of(run: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    result = run(**batch)
    return result if isinstance(result, torch.Tensor) else result.loss


def train(run: nn.Module, batches: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """(seconds, loss) of each step."""
    optimizer = torch.optim.SGD(run.parameters(), lr=1e-3)
    seconds, losses = [], []
    for n, batch in enumerate(batches):
        torch.manual_seed(n)
        begun = time.process_time()
        loss = loss_of(run, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        seconds.append(time.process_time() - begun)
        losses.append(loss.item())
    return seconds, losses


def size_of(batch: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(tensor.shape) for tensor in batch.values())


def row(name: str, count: int, share: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model, made = WORKLOADS[name](count)
    batches = list(made)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    states = copy.deepcopy(model.state_dict())
    gc.collect()
    gc.freeze()
    plain, plain_losses = train(model, batches)
    model.load_state_dict(states)
    largest = max(batches, key=lambda batch: sum(tensor.numel() for tensor in batch.values()))
    probe = rotoff.Checkpointable(model, cache_directory=False).measure(**largest)
    limit = int(probe.min_mem_limit() + share * (probe.keep_all_memory - probe.min_mem_limit()))
    probe.close()

    wrapped = rotoff.Checkpointable(model, cache_directory=False).compute_sequence(limit)
    first, losses = train(wrapped, batches)
    model.load_state_dict(states)
    again, losses_again = train(wrapped, batches)
    model.load_state_dict(states)
    sizes = [size_of(batch) for batch in batches]
    usual = dict(zip(sizes, again, strict=True))
    stalls = [seconds / usual[size] - 1 for size, seconds in list(zip(sizes, first, strict=True))[10:]]
    model.zero_grad(set_to_none=False)
    one_of_each = dict(zip(reversed(sizes), reversed(batches), strict=True)).values()
    peaks = [peak_bytes(lambda batch=batch: loss_of(wrapped, batch).backward()) for batch in one_of_each]  # type: ignore[misc]
    measured = sum(one.measured for one in wrapped.plans())
    wrapped.close()
    return {
        "workload": name,
        "batches": count,
        "sizes": len(usual),
        "measured": measured,
        "limit": limit,
        "plain_seconds": sum(plain),
        "seconds": sum(first),
        "known_seconds": sum(again),
        "ratio": sum(first) / sum(again),
        "longest_stall_steps": max(stalls, default=0.0),
        "highest_peak_of_limit": max(peaks) / limit,
        "peaks_above_limit": sum(nbytes > limit for nbytes in peaks),
        "losses_equal": losses == plain_losses == losses_again,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--share", type=float, default=0.3, help="0: the smallest limit; 1: keeping everything")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torchvision_operators.declare()  # of which timm and transformers import parts
    content: dict[str, Any] = {
        "machine": machine("cpu"),
        "threads": options.threads,
        "clock": "seconds of the processor",
    }
    rows = content["rows"] = []
    for name in options.workloads:
        load = os.getloadavg()
        rows.append({**row(name, options.batches, options.share), "load_before": load, "load_after": os.getloadavg()})
        print(json.dumps(rows[-1]), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

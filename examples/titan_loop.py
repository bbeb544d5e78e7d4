"""A loop in torchtitan's manner, with its memory limit in a file: built on meta, sharded by FSDP2, micro-batches,
clipping, a schedule.

    python examples/titan_loop.py examples/titan_loop.yaml
    torchrun --standalone --nproc-per-node 2 examples/titan_loop.py examples/titan_loop.yaml
    python examples/titan_loop.py examples/titan_loop.yaml --plain
    python examples/titan_loop.py examples/titan_loop.yaml --checkpoint

The one line for rotoff is `rotoff.attach`, after the model is whole. With `--checkpoint` rotoff only chooses what
torchtitan's own checkpoint of each block keeps: `checkpointed` is what `apply_ac` does there, before sharding.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import rotoff


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(words, width)
        self.layers = nn.ModuleDict({str(n): Block(width) for n in range(layers)})
        self.output = nn.Linear(width, words, bias=False)

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                module.reset_parameters()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


def checkpointed(model: Model, job: dict) -> None:
    """Wrap the blocks that a step within the limit has to checkpoint."""
    with torch.device("meta"):
        tokens = torch.zeros(job["training"]["rows"], job["training"]["tokens"], dtype=torch.long)
    policy = rotoff.selective_policy(model, tokens, mem_limit=job["rotoff"]["mem_limit"], device="CPU")
    for name, context_fn in policy.items():
        folder, _, number = name.rpartition(".")
        model.get_submodule(folder)[number] = checkpoint_wrapper(model.get_submodule(name), context_fn=context_fn)
    print(policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--plain", action="store_true", help="without rotoff")
    parser.add_argument("--checkpoint", action="store_true", help="checkpoint blocks, and let rotoff say how")
    options = parser.parse_args()
    job = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    training = job["training"]
    with ExitStack() as stack:
        several = dist.is_torchelastic_launched()
        if several:
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        rank = dist.get_rank() if several else 0
        with torch.device("meta"):
            model = Model(**job["model"])
        if options.checkpoint:
            checkpointed(model, job)
        if several:
            for stage in (model.tok_embeddings, *model.layers.values(), model.output):
                fully_shard(stage)
            fully_shard(model)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.init_weights()
        planned = None
        if not options.plain and not options.checkpoint:
            planned = rotoff.attach(
                model.train(), rotoff.RotoffConfig.from_dict(job["rotoff"]), process_group=several or None
            )

        optimizer = torch.optim.AdamW(model.parameters(), lr=training["lr"])
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=training["steps"])
        drawn = torch.Generator().manual_seed(1 + rank)
        for step in range(1, 1 + training["steps"]):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(training["microbatches"]):
                tokens = torch.randint(
                    job["model"]["words"], (training["rows"], 1 + training["tokens"]), generator=drawn
                )
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / training["microbatches"]
                del logits
                loss.backward()
                total += loss.item()
            norm = nn.utils.clip_grad_norm_(model.parameters(), training["max_norm"])
            optimizer.step()
            scheduler.step()
            if rank == 0:
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                print(f"step {step}  loss {total:.9f}  grad_norm {norm.item():.9f}", flush=True)
        if planned is not None and rank == 0:
            planned.display()


if __name__ == "__main__":
    main()

"""Programs around those blocks of the docs that are no whole programs. A block marked ``in: trainer`` runs within
`trainer`, which gives it names, and then uses what it made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision_operators
from models import Does
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH = 24, 32


class Net(nn.Module):
    """Blocks with a skip and dropout; returns its loss and its logits by name, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()

        def block() -> nn.Sequential:
            up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            return nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down, nn.Dropout(0.1))

        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        logits = self.head(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows() -> list[dict[str, torch.Tensor]]:
    """Four batches of random inputs and labels, the same each time."""
    drawn = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(4 * ROWS, WIDTH, generator=drawn), torch.randint(0, 3, (4 * ROWS,), generator=drawn)
    return [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


def batch() -> dict[str, torch.Tensor]:
    return next(iter(torch.utils.data.DataLoader(rows(), batch_size=ROWS)))  # type: ignore[no-any-return]


PROGRAMS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {}


def program(make: Any) -> Any:
    """Enters a program by its name."""
    PROGRAMS[make.__name__] = contextmanager(make)
    return make


@program
def step(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    names["model"] = Net()
    yield
    names["model"].compute_sequence("1 GiB")(**batch())["loss"].backward()


@program
def trainer(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    torchvision_operators.declare()
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    args = transformers.TrainingArguments(output_dir=str(folder), max_steps=2, report_to=[], use_cpu=True)
    names |= {"Trainer": transformers.Trainer, "model": Net(), "args": args, "data": rows()}
    yield
    names["trainer"].train()


@program
def accelerate(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    library = pytest.importorskip("accelerate")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(rows(), batch_size=ROWS)
    names |= {"accelerator": library.Accelerator(cpu=True), "model": model, "optimizer": optimizer, "loader": loader}
    yield
    for rows_of_a_step in names["loader"]:
        names["accelerator"].backward(names["model"](**rows_of_a_step)["loss"])
        names["optimizer"].step()


@program
def lightning(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    library = pytest.importorskip("lightning")

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, rows_of_a_step: Any, n: int) -> Any:
            return self.net(**rows_of_a_step)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    names["Trainer"] = partial(library.Trainer, max_steps=2, default_root_dir=str(folder), **quiet)
    yield
    names["trainer"].fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=ROWS // 2))


@program
def measured(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    names |= {"net": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), "batch": torch.randn(ROWS, WIDTH)}
    yield
    assert (folder / "net.json").exists()


@program
def lengths(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    torchvision_operators.declare()
    transformers = pytest.importorskip("transformers")
    import rotoff

    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, use_cache=False)
    names |= {
        "model": rotoff.Checkpointable(transformers.GPT2LMHeadModel(config)),
        "longest": torch.zeros(4, 32, dtype=torch.long),
    }
    yield
    assert names["model"].plans()


@program
def torchvision(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    torchvision_operators.declare()
    names |= {"torch": torch, "torchvision": pytest.importorskip("torchvision")}
    yield


@program
def devices(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    from rotoff.profile.estimate import devices as known

    before = dict(known._known)
    yield
    assert known._known.keys() > before.keys()
    known._known.clear()
    known._known.update(before)


@contextmanager
def _one_process() -> Iterator[None]:
    """The variables of a process that torchrun has started alone."""
    said = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    before = {name: os.environ.get(name) for name in said}
    os.environ.update(said)
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@program
def ddp(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    with _one_process():
        names |= {"torch": torch, "model": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())}
        yield
        names["model"](torch.randn(ROWS, WIDTH)).sum().backward()


def block() -> Any:
    up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Does(lambda net, x: net.down(net.up(x).tanh()), up=up, down=down)


@program
def sharded(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    from torch.distributed.fsdp import fully_shard

    with _one_process():
        torch.distributed.init_process_group("gloo")
        names |= {"torch": torch, "fully_shard": fully_shard, "blocks": [block() for _ in range(3)]}
        yield
        for _ in range(2):
            names["model"](torch.randn(ROWS, WIDTH)).sum().backward()
            names["optimizer"].step()


@program
def tensor_parallel(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    with _one_process():
        one = block()
        names |= {"block": one, "model": nn.Sequential(one, nn.Tanh())} | vars(parallel)
        names["mesh"] = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        yield
        names["planned"](torch.randn(ROWS, WIDTH)).sum().backward()


@program
def pipeline(folder: Path, names: dict[str, Any]) -> Iterator[None]:
    from torch.distributed import pipelining

    with _one_process():
        torch.distributed.init_process_group("gloo")
        names |= {"module": block(), "rank": 0, "ranks": 1, "device": torch.device("cpu"), "loss_fn": F.mse_loss}
        names |= vars(pipelining)
        yield
        names["schedule"].step(torch.randn(8 * ROWS, WIDTH), target=torch.randn(8 * ROWS, WIDTH))

"""Run by `ranks` in each of a few processes: training under FSDP2 and a `device_limit`, compared with FSDP2 alone; prints
a line that `test_distributed_placed` reads."""

from __future__ import annotations

import gc
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from allocated import peak_bytes
from distributed_steps import let_threads_go, peaks, step, whole
from models import Does
from quantized import own as quantized
from ranks import by_first, everyone, say
from staged import Gather, Scatter
from step_by_step import works
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, AdamW, Optimizer

import rotoff
from rotoff.accelerator import take_workspaces
from rotoff.tape.contents import checksum
from rotoff.tensors.storage import is_wrapper, local, stored
from rotoff.tools.attach import ForTrainer

WIDTH, BLOCKS, ROWS = 48, 6, 96


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(1))  # of which one process has nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Bare(Block):
    """Without a norm, whose backward the CPU's kernels, which stand in for a device's, compute in one precision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


class Skipping(nn.Module):
    """Each step leaves another of its blocks out, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.steps = stacked(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training and torch.is_grad_enabled()
        return nn.Sequential(*(one for n, one in enumerate(self.blocks) if (self.steps + n) % 4))(x)


class Adapted(Block):
    """A frozen block with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.b(self.a(x))


class Quantized(Adapted):
    """A block whose frozen weights a tensor subclass wraps, with adapters."""

    def __init__(self) -> None:
        super().__init__()
        quantized(self.up), quantized(self.down)


def whole_model(kind: Callable[[], nn.Module] = Block, end: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Its root has parameters of its own."""
    ends = {name: nn.Linear(WIDTH, WIDTH) if end is None else end() for name in ("first", "last")}
    return Does(lambda net, x: net.last(net.blocks(net.first(x))), **ends, blocks=stacked(kind))


def stacked(kind: Callable[[], nn.Module] = Block) -> nn.Sequential:
    return nn.Sequential(*[kind() for _ in range(BLOCKS)])


def frozen_below() -> nn.Sequential:
    net = stacked()
    net[:3].requires_grad_(False)
    return net


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# by name: the model, arguments of fully_shard, the optimizer
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Callable[..., Optimizer]]] = {
    "adamw": (stacked, {}, partial(AdamW, lr=1e-2)),
    "momentum": (stacked, {}, partial(SGD, lr=0.01, momentum=0.9)),
    "uneven": (partial(stacked, partial(Block, WIDTH, 151)), {}, partial(AdamW, lr=1e-2)),
    "root": (whole_model, {}, partial(AdamW, lr=1e-2)),
    "adapters": (partial(stacked, Adapted), {}, partial(AdamW, lr=1e-2)),
    "quantized": (partial(whole_model, Quantized, Quantized), {}, partial(AdamW, lr=1e-2)),
    "skipping": (Skipping, {}, partial(AdamW, lr=1e-2)),
    "frozen": (frozen_below, {}, partial(AdamW, lr=1e-2)),
    "mixed": (stacked, {"mp_policy": HALF}, partial(AdamW, lr=1e-2)),
    "half": (partial(stacked, Bare), {"mp_policy": HALF}, partial(AdamW, lr=1e-2)),
    "unsharded": (stacked, {"reshard_after_forward": False}, partial(AdamW, lr=1e-2)),
    "copies": (stacked, {}, partial(AdamW, lr=1e-2)),
    "hybrid": (stacked, {}, partial(AdamW, lr=1e-2)),
    "split": (stacked, {}, partial(AdamW, lr=1e-2)),
    "offloaded": (whole_model, {"offload_policy": CPUOffloadPolicy()}, partial(AdamW, lr=1e-2)),
    "foreach": (stacked, {}, partial(AdamW, lr=1e-2, foreach=True)),
    "trainer": (stacked, {}, partial(AdamW, lr=1e-2)),  # whose callback attaches it
}


@cache
def beside(device: torch.device) -> int:
    """The bytes that libraries, and rotoff, keep on a device."""
    take_workspaces(device)
    checksum(torch.ones(1, device=device).untyped_storage())
    return torch.cuda.memory_allocated()


class Trained:
    """A model, its optimizer and what training it has shown. updates: when rotoff updates; None: FSDP2 alone."""

    def __init__(self, name: str, updates: str | None, device: str = "cpu") -> None:
        make, how, optimizer = MODELS[name]
        torch.manual_seed(0)
        net = make()
        ranks = dist.get_world_size()
        if name == "split":  # tensor parallel, too
            mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
            split = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            net, how = (
                nn.Sequential(*[parallelize_module(block, mesh["tp"], split) for block in net]),
                {"mesh": mesh["dp"]},
            )
        self.device = torch.device(device)
        if device != "cpu":
            self.others = beside(self.device)
            net, how = (
                net if "offload_policy" in how else net.to(device),
                {**how, "mesh": init_device_mesh(device, (ranks,))},
            )
        shard = replicate if name == "copies" else fully_shard
        if name == "hybrid":
            how = {"mesh": init_device_mesh(device, (ranks, 1), mesh_dim_names=("copies", "dp"))}
        for block in getattr(net, "blocks", net):
            shard(block, **how)
        self.planned: rotoff.Checkpointable | None = None
        if updates is not None and name != "trainer":
            self.planned = rotoff.Checkpointable(net, process_group=True)
        self.model = shard(net if self.planned is None else self.planned, **how)
        if updates is not None and self.planned is None:
            callback = ForTrainer(device_limit=1 << 40)
            callback._attach(net, ranks)
            self.planned = callback.planned
        for module in self.model.modules() if device != "cpu" else ():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Gather())
                module.set_custom_reduce_scatter(Scatter())
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.updates, self.seen = updates, list[torch.Tensor]()
        self.generator = torch.Generator().manual_seed(dist.get_rank() * 2 // ranks)
        if updates is not None:
            self.limit(1 << 40)

    def limit(self, limit: int) -> None:
        assert self.planned is not None
        self.planned.compute_sequence(device_limit=limit, optimizer=self.optimizer, updates=self.updates)

    def limit_further(self) -> int:
        """Plan for half of what can be saved; returns the limit."""
        assert self.planned is not None
        self.limit(1 << 40)
        most = self.planned.keep_all_memory
        try:
            self.limit(1000)
        except rotoff.InfeasibleError as error:
            self.limit((error.min_mem_limit + most) // 2)
        return int(self.planned.mem_limit or 0)

    def batch(self) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=self.generator).to(self.device)

    def backward(self, x: torch.Tensor) -> None:
        loss = self.model(x).float().square().mean()
        loss.backward()
        self.seen.append(loss.detach().cpu())

    def step(self, x: torch.Tensor | None = None) -> None:
        self.backward(self.batch() if x is None else x)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[p] for p in self.model.parameters() if p in self.optimizer.state]
        kept = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        numbers = [one for t in (*self.model.parameters(), *kept) for one in numbers_of(t.detach(), self.device)]
        return [*self.seen, *numbers]


def numbers_of(t: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """What a tensor consists of, whole, or this process's part of a wrapper, or of what is trained on a device."""
    here = local(t)
    if is_wrapper(here):
        return [one.cpu().clone() for one in stored([here])]
    return [whole(t).clone() if device.type == "cpu" else here.cpu().clone()]


# -- loops around a step


def plainly(one: Trained) -> None:
    one.step()


def clipped(one: Trained) -> None:
    one.backward(one.batch())
    one.seen.append(whole(nn.utils.clip_grad_norm_(one.model.parameters(), 0.01)))
    one.optimizer.step()
    one.optimizer.zero_grad(set_to_none=False)


def accumulated(one: Trained) -> None:
    one.backward(one.batch())
    found = [p.grad for p in one.model.parameters() if p.grad is not None]
    one.seen += [part for gradient in found for part in numbers_of(gradient, one.device)]
    one.backward(one.batch())
    one.optimizer.step()
    one.optimizer.zero_grad()


def synced_last(one: Trained) -> None:
    one.model.set_requires_gradient_sync(False)
    one.backward(one.batch())
    one.model.set_requires_gradient_sync(True)
    one.backward(one.batch())
    one.optimizer.step()
    one.optimizer.zero_grad()


def gathered_throughout(one: Trained) -> None:
    """FSDP2 gathers once for several backwards."""
    for last in (False, True):
        one.model.set_reshard_after_backward(last)
        one.backward(one.batch())
    one.optimizer.step()
    one.optimizer.zero_grad()


def evaluated(one: Trained) -> None:
    one.step()
    one.model.eval()
    with torch.no_grad():
        one.seen.append(one.model(one.batch()).cpu())
    one.model.train()


def checkpointed(one: Trained) -> None:
    """Saved, trained, and loaded again."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    model, optimizer = get_state_dict(one.model, one.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=Path(folder[0]))
    one.step()
    model, optimizer = get_state_dict(one.model, one.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=Path(folder[0]))
    set_state_dict(one.model, one.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    one.step()


LOOPS: dict[str, Callable[[Trained], None]] = {
    one.__name__: one
    for one in (plainly, clipped, accumulated, synced_last, gathered_throughout, evaluated, checkpointed)
}


def train(one: Trained, loop: str) -> Iterator[None]:
    for _ in range(4):
        LOOPS[loop](one)
        yield


def peak(one: Trained, run: Callable[[], object]) -> int:
    """The most bytes in a step, with what lies in memory, and not over a file's pages, throughout."""
    if one.device.type != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - one.others
    states = [t for state in one.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    found = [t.untyped_storage() for t in stored(map(local, (*one.model.parameters(), *states)))]
    before = {s._cdata: (StorageWeakRef(s), s.nbytes()) for s in found if s.resizable()}
    stays = 0
    del states, found

    def settle() -> None:  # no log tells when a block from before is freed
        nonlocal stays
        run()
        stays = sum(nbytes for storage, nbytes in before.values() if not storage.expired())

    most = peak_bytes(run, before=settle)
    return most + stays


def gathered_ahead() -> None:
    """What stages have saved is moved between two blocks, when FSDP2 has gathered the second one; under a mem_limit."""
    torch.manual_seed(0)
    net = stacked()
    for block in net:
        fully_shard(block)
    planned = rotoff.Checkpointable(net, process_group=True).compute_sequence(1 << 40)
    run = partial(step, fully_shard(planned), torch.randn(ROWS, WIDTH))
    run()
    planned.compute_sequence((planned.min_mem_limit("offload") + planned.keep_all_memory) // 2, mode="offload")
    run()
    within, close, figures = peaks(planned, run)
    by_first(f"within={within} close={close} works={works(planned.sequence)}")
    by_first(f"{figures} now told {planned.get_expected_memory()} by {str(planned.sequence).splitlines()}")
    planned.close()


def ended(ends: str, where: str, updates: str) -> None:
    """One process ends within a step, the number `ends`, in the forward or the backward; the other one says what it
    raises, with the notes."""
    one = Trained("adamw", updates)
    one.step()
    one.limit_further()
    one.step()
    model: nn.Module = one.model[4]

    def end(*_: object) -> None:
        if dist.get_rank() == int(ends):
            os._exit(0)

    if where == "forward":
        model.register_forward_pre_hook(end)
    else:

        def watch(module: nn.Module, args: Any, result: torch.Tensor) -> None:
            result.register_hook(end)

        model.register_forward_hook(watch)
    try:
        one.step()
    except RuntimeError as error:
        said = " ".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])
        say(said.replace("\n", " "))
        os._exit(0)


def full(when: str) -> None:
    """Files of the process 1 grow no more from then on; each says what it raises."""
    steps = ("made", "recorded", "planned"), iter([Trained.step, Trained.limit_further, Trained.step])
    one = Trained("adamw", "after")
    try:
        for name, act in zip(*steps, strict=True):
            if name == when and dist.get_rank() == 1:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            act(one)
    except rotoff.RotoffError as error:
        say(f"{dist.get_rank()}: {type(error).__name__}: {error}".replace("\n", " "))
    os._exit(0)


def main(model: str, loop: str = "", updates: str = "", *more: str) -> None:
    if model == "gathered_ahead":
        return gathered_ahead()
    if model == "ended":
        return ended(loop, updates, *more)
    if model == "full":
        return full(loop)
    let_threads_go()
    device = next(iter(more), "cpu")
    plain, one = Trained(model, None, device), Trained(model, updates, device)
    for n, _ in enumerate(zip(train(plain, loop), train(one, loop), strict=True)):
        if n == 0:
            limit = one.limit_further()
    got, expected = one.result(), plain.result()
    equal = len(got) == len(expected) and all(map(torch.equal, got, expected))
    del plain
    gc.collect()
    x = None if loop in ("synced_last", "gathered_throughout") else one.batch()
    # the model gets one that FSDP2 has cast, if it casts, and a device tells of all that it holds
    batch = 0 if x is None else x.nbytes * ((device == "cpu") - (model in ("mixed", "half")))
    run = partial(LOOPS[loop], one) if x is None else partial(one.step, x)
    assert one.planned is not None
    told = max(row.memory for row in one.planned.plans())
    within, close, figures = peaks(one.planned, run, lambda run: batch + peak(one, run), told)
    same_plan = len(set(everyone(f"{one.planned.sequence} {limit}"))) == 1
    moves = any(op.of for op in one.planned.sequence) or (model == "offloaded" and works(one.planned.sequence))
    all_of = zip(*everyone((equal, same_plan, within, close, moves)), strict=True)
    by_first("equal={} same_plan={} within={} close={} moves={}".format(*map(all, all_of)))
    by_first(f"{figures}")
    one.planned.close()

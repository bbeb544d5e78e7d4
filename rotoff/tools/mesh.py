"""Meshes of devices that are not there: a fake process group, on which FSDP2 and tensor parallelism shard a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from ..core.simulator import simulate
from ..errors import MeasureError, OptionError
from ..profile.estimate.devices import Device
from ..profile.estimate.estimate import Estimate
from ..solver import keep_all
from .planned_steps import PlannedMesh

AXES = ("fsdp", "tp")


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks. sizes: of its axes, by name; empty: there is one rank. link: B/s that a rank can send to the
    others; None: what the device says."""

    sizes: dict[str, int]
    link: float | None = None

    @classmethod
    def of(cls, text: Any, link: Any = None, pipeline: Any = None) -> Mesh:
        """Read text such as "fsdp=8,tp=2"; None: one rank. pipeline: the option, with which there is no mesh.

        Raises:
            OptionError: for an unknown axis, one that is given twice, or a size below 1.
        """
        if text is not None and pipeline is not None:
            raise OptionError(
                f"mesh={text!r} and pipeline={pipeline!r}: a plan is for one of them; leave the other out"
            )
        if link is not None:
            check_positive("link", link, "give bytes per second above 0")
            if text is None:
                raise OptionError(f"link={link!r} is for a mesh; give one, too, such as mesh='fsdp=8'")
        sizes: dict[str, int] = {}
        for part in () if text is None else text.split(",") if isinstance(text, str) else [text]:
            found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part) if isinstance(part, str) else None
            if found is None or found[1] not in AXES or found[1] in sizes or not int(found[2]):
                raise OptionError(
                    f"mesh is {text!r}; give the number of ranks on one or both of the axes fsdp and tp, such as"
                    " 'fsdp=8,tp=2'"
                )
            sizes[found[1]] = int(found[2])
        return cls({axis: sizes[axis] for axis in AXES if axis in sizes}, link)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items())

    def on(self, device: Device) -> Device:
        """The device of a rank."""
        return device if self.link is None else replace(device, interconnect=self.link)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `Checkpointable` that its ranks need."""
        return {"process_group": True} if self.sizes else {}

    @contextmanager
    def started(self) -> Iterator[Callable[[nn.Module], None] | None]:
        """Within, a fake process group of these ranks is the default one, whose collectives do nothing. Gives what
        shards a model in place; None: there is one rank.

        Raises:
            OptionError: if there is a default one already. MeasureError: also if the mesh does not divide the model.
        """
        if not self.sizes:
            yield None
            return
        import torch.distributed as dist

        if not dist.is_available() or dist.is_initialized():
            raise OptionError(
                f"mesh={str(self)!r} needs a process group of its own; plan in a process that has not called"
                " torch.distributed.init_process_group"
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        shape = (*self.sizes.values(),)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(shape))
        try:
            yield partial(_shard, init_device_mesh("cpu", shape, mesh_dim_names=(*self.sizes,)))
        except MeasureError as error:
            if "tp" not in self.sizes:
                raise
            cure = "must divide the numbers of heads, those of keys and values, too, and the widths of layers"
            raise MeasureError(f"{error}; tp={self.sizes['tp']} {cure}") from error
        finally:
            dist.destroy_process_group()

    def planned(self, profile: Estimate) -> PlannedMesh | None:
        """What its ranks have in common; None if there is one."""
        if not self.sizes:
            return None
        calls, sent = profile.collectives, dict[str, tuple[int, int, float]]()
        for one in () if calls is None else calls.every:
            count, nbytes, seconds = sent.get(name := _told(one.name), (0, 0, 0.0))
            sent[name] = count + 1, nbytes + one.nbytes, seconds + one.seconds
        plain = simulate(profile.chain, keep_all(profile.chain))
        waits = 0.0 if calls is None else calls.delay(plain)
        return PlannedMesh(str(self), math.prod(self.sizes.values()), profile.target.between, sent, waits)


ONE = Mesh({})  # one rank


def check_positive(name: str, given: Any, cure: str) -> None:
    """Raise OptionError if the option `name` is no number above 0."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise OptionError(f"{name} is {given!r}; {cure}")


def _told(collective: str) -> str:
    """The name of a collective for people."""
    kinds = {"scatter": "reduce-scatter", "gather": "all-gather", "reduce": "all-reduce", "to_all": "all-to-all"}
    return next((told for part, told in kinds.items() if part in collective), collective)


def _shard(mesh: Any, model: nn.Module) -> None:
    """Apply the model's own tensor parallel plan, and `fully_shard` to its blocks and to itself, in place.

    Raises:
        OptionError: if the model has no such plan, or the mesh does not divide what it splits.
    """
    from torch.distributed.fsdp import fully_shard

    if "tp" in mesh.mesh_dim_names:
        _in_tensor_parallel(model, mesh["tp"])
    if "fsdp" in mesh.mesh_dim_names:
        for block in (*blocks_of(model), model):
            fully_shard(block, mesh=mesh["fsdp"])


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model: the outermost modules with a number as their name that are called."""
    for name, child in model.named_children():
        if not name.isdigit() or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from blocks_of(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _in_tensor_parallel(model: nn.Module, mesh: Any) -> None:
    plan, expand = getattr(model, "tp_plan", None), getattr(model, "_expand_parallel_plan", None)
    if not plan or not callable(expand):
        raise OptionError(
            f"{type(model).__name__} has no tensor parallel plan (the tp_plan of a model of transformers 5), which"
            f" tp={mesh.size()} needs; leave tp out"
        )
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, expand(plan))

"""Groups of parameters for the chain of a step on a tape: which stages read them, what they take, what is expected."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..accelerator import block_bytes
from ..capture.unrepeatable import compiled
from ..core.chain import Chain
from ..core.parameters import ParameterGroup, in_parts
from ..core.sequence import FORWARDS, OpKind, Sequence, Value
from ..core.simulator import Machine
from ..core.steady_step import at_rest
from ..runtime.placed.placed_plan import PlacedGroup
from ..runtime.placed.tensor import checksum_bytes, placeable, room_of
from ..tape.contents import Content, Slot, is_plain
from ..tape.operators import tensors_of
from ..tape.tape import Known, Operation
from ..tensors.storage import rounded, storage_key
from .optimizer_probe import OptimizerProbe
from .recorded_step import RecordedStep
from .tape_chain import TapeChain

CAST = "aten::_to_copy"


class RecordedReads(RecordedStep):
    """A recorded step that also notes which operations read parameters, where they lie.

    reads: numbers of operations, and ids of parameters that they, or views right before them, read. kept: positions at
    which autograd has saved parameters that nothing has read since the operation before, and ids. staying: ids of those
    that its operations overwrite.
    """

    def __init__(self, known: Known, model: nn.Module) -> None:
        super().__init__(known, model)
        self.reads: set[tuple[int, int]] = set()
        self.kept: set[tuple[int, int]] = set()
        self.staying: set[int] = set()
        self._own = {p.untyped_storage()._cdata: id(p) for p in self.parameters}
        self._casts: dict[Content, int] = {}
        self._uses: Counter[int] = Counter()  # of casts, by id of the parameter

    def content_of(self, t: torch.Tensor) -> Content:
        storage = t.untyped_storage()
        if storage._cdata in self._own and not storage.resizable():  # it lies on the host; nobody changes it unseen
            return self._contents.setdefault(storage._cdata, self._resident(storage, t))
        return super().content_of(t)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in tensors_of(args, kwargs or {}):  # views, too: they ask for the bytes
            if is_plain(t) and (key := self._own.get(t.untyped_storage()._cdata)) is not None:
                self.reads.add((len(self.operations), key))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def trust(self, op: Operation, new: Iterable[Content]) -> None:
        new = list(new)
        super().trust(op, new)
        for content in op.contents():
            if content in self._casts:
                self._uses[self._casts[content]] += 1
        for reference in op.references:
            key = None if reference.content.held is None else self._own.get(reference.content.held._cdata)
            if key is not None and op.operator._schema.name == CAST:
                self._casts |= dict.fromkeys(new, key)

    def _written(self, *of: Any) -> Any:  # type: ignore[override]
        written = super()._written(*of)
        found = (self._own.get(t.untyped_storage()._cdata) for _, t in written)
        self.staying |= {key for key in found if key is not None}
        return written

    def pack(self, t: torch.Tensor) -> Any:
        packed = super().pack(t)
        if isinstance(packed, Slot) and packed.reference is None:
            key = self._own.get(t.untyped_storage()._cdata)
            if key is not None and (len(self.operations), key) not in self.reads:
                self.kept.add((packed.at, key))
        return packed

    @property
    def cast_again(self) -> set[int]:
        """The ids of parameters whose cast several operations read. Autocast keeps casts of leaf tensors alone, and
        what stands for a parameter is none."""
        return {key for key, uses in self._uses.items() if uses > 1}


@dataclass(frozen=True)
class TapeGroups:
    """The groups of a model's parameters. chain: with their costs.

    placed: their parameters. outside: those that stay on the device. beside: bytes that the device holds throughout:
    those, buffers, the batch, the caller's loss.
    """

    chain: Chain
    placed: tuple[PlacedGroup, ...]
    outside: tuple[nn.Parameter, ...]
    beside: int

    def levels(self, found: TapeChain, sequence: Sequence, during: bool) -> list[int]:
        """Return the most bytes that the device holds in each operation of `sequence`. Unless the updates come during
        the backward, a gradient of which the host has no copy stays for the caller to read."""
        updates = (OpKind.U, OpKind.H)
        moves = [op for op in sequence if not op.of and op.kind not in updates]
        own = iter(found.levels(replace(sequence, ops=tuple(moves), resident=[])))
        machine = Machine(self.chain, rest=at_rest(self.chain, sequence.ops, sequence.resident))
        leaving = {op.stage for op in sequence if op.kind is OpKind.OFFLOAD and op.of == "g"}
        levels, ran, stays = [], 0, 0
        for op in sequence:
            activations = [v for v in machine.device if not v.of and (v.stage or v.saved)]
            held = frozenset[int]().union(*(_contents(found, v, machine) for v in activations))
            charged = sum(machine.device[v] for v in activations)
            event = machine.step(op)
            if op.of or op.kind in updates:
                level = event.memory - charged + found.trace.size(held)
                level += found.runs[ran - 1].left_over(held) if ran and not machine.backward_phase else 0
            else:
                level = next(own) + event.parameter_memory
            ran = max(ran, op.stage) if op.kind in FORWARDS else ran
            levels.append(level + stays + self.beside)
            if op.kind is OpKind.U and op.stage not in leaving and not during:
                stays += self.chain.group(op.stage).grad_bytes
        return levels


def _contents(found: TapeChain, v: Value, machine: Machine) -> frozenset[int]:
    return found.forms[v.stage - 1][machine.form[v.stage]] if v.saved else found.handed[v.stage]


def groups_of(
    step: RecordedReads,
    found: TapeChain,
    model: nn.Module,
    probe: OptimizerProbe,
    host: bool,
    beside: int,
    outside: Iterable[int] = (),
) -> TapeGroups:
    """Group the parameters of each stage, or of the stages that share them.

    Args:
        host: whether the host may update a group. beside: bytes of the batch and the loss. outside: ids of parameters
            that stay on the device, beyond those that must.
    """
    block, begins = block_bytes(step.device), found.layout.begins
    readers: dict[int, set[int]] = {}
    reads = ((step.positions[min(n, len(step.positions) - 1)], key) for n, key in step.reads)
    for at, key in (*reads, *step.kept):
        readers.setdefault(key, set()).add(bisect_right(begins, at))
    every = list({id(p): p for p in model.parameters()}.values())
    unseen = (p for module in model.modules() if compiled(module) for p in module.parameters())
    staying = _sharing(every, model.buffers()) | {id(p) for p in unseen} | step.staying | step.cast_again | {*outside}
    members: dict[tuple[tuple[int, ...], bool, bool], list[nn.Parameter]] = {}
    for p in every:
        if id(p) in readers and id(p) not in staying and placeable(p):
            alike = tuple(sorted(readers[id(p)])), p.requires_grad, probe.updates(p)
            members.setdefault(alike, []).append(p)
    whole = sum(room_of(p) for several in members.values() for p in several)
    costs, placed = [], []
    for (stages, needs, updated), several in sorted(members.items(), key=lambda one: one[0]):
        for part in in_parts(several, map(room_of, several), whole):
            nbytes = sum(rounded(room_of(p), block) for p in part)
            states = tuple(map(probe.state_bytes, part))
            costs.append(
                ParameterGroup(
                    stages=stages,
                    bytes=nbytes,
                    grad_bytes=nbytes if needs else 0,
                    state_bytes=sum(states) if needs else 0,
                    update_time=probe.update_time(part) if needs else 0.0,
                    host_update_time=probe.host_update_time(part) if host and needs else None,
                    update_transient_bytes=probe.update_bytes(part) if updated else 0,
                    name=found.chain.stage(stages[0]).name,
                )
            )
            placed.append(PlacedGroup(tuple(part), states, costs[-1].name))
    grouped = {id(p) for group in placed for p in group.parameters}
    left = [p for p in every if id(p) not in grouped]
    beside += sum({storage_key(b): b.untyped_storage().nbytes() for b in model.buffers()}.values())
    beside += sum(p.nbytes * (1 + p.requires_grad) + probe.state_bytes(p) for p in left) + probe.update_bytes(left)
    beside += probe.unplaced_bytes(every) + checksum_bytes(block)
    return TapeGroups(replace(found.chain, parameters=tuple(costs)), tuple(placed), tuple(left), beside)


def _sharing(parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of tensors that share a storage with another one."""
    by_storage: dict[int, list[int]] = {}
    for tensor in (*parameters, *buffers):
        by_storage.setdefault(storage_key(tensor), []).append(id(tensor))
    return {one for several in by_storage.values() if len(several) > 1 for one in several}

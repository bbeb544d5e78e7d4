"""Groups of parameters for the chain of a step on a tape: which stages read them, what they take, what is expected."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..accelerator import block_bytes, is_accelerator
from ..core.chain import Chain
from ..core.parameters import ParameterGroup, in_parts
from ..core.sequence import FORWARDS, UPDATES, Op, OpKind, Sequence, Value, w
from ..core.simulator import Machine
from ..core.steady_step import at_rest, group_bytes
from ..runtime.placed.placed_plan import PlacedGroup, PlacedPlan
from ..runtime.placed.tensor import checksum_bytes, placeable, room_of
from ..runtime.sharded import Shards
from ..runtime.tape_placed import Lending, PlacedTape
from ..tape.contents import checksum_room
from ..tape.tape import Known
from ..tensors.modules import compiled
from ..tensors.storage import local, rounded, storage_key, stored
from .checkpointed import plain_levels
from .optimizer_probe import OptimizerProbe
from .recorded_step import OWN, Reads, RecordedStep
from .tape_chain import StageBackwards, TapeChain, is_within
from .tape_profile import TapeProfile


class RecordedLent(PlacedTape, RecordedStep):
    """The same, with parameters that lie on the host and are lent."""

    def __init__(self, known: Known, model: nn.Module, lending: Lending, *how: Any) -> None:
        super().__init__(known, lending, model, *how)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.lending.forward():
            return super().run(forward, *args, **kwargs)

    def __enter__(self) -> RecordedLent:
        self._own = self.lending.keys()
        self.lending.around = partial(self.region, OWN)
        super().__enter__()
        return self


@dataclass(frozen=True, eq=False)
class TapeGroups:
    """The groups of a model's parameters, and what a step by a plan that moves them holds.

    found: the step. chain: its chain, with what the groups cost. placed: their parameters. outside: those that stay on
    the device. on_host: where the host's memory is the device's, of each group, the most that the update there of one
    of its parameters takes, and with what the first one leaves behind. coming: of each group, bytes of the gradients
    that such a step gives it. beside: bytes that the device holds throughout: what is outside, buffers, the caller's
    loss. update: bytes that the update of what is outside takes. whole: the bytes with which the plain model and its
    optimizers run; expected: those of them that they take if no gradients are there when a step begins. backwards: of
    the stages, with the parameters' gradients; None if those are not known. ask: as for `TapeChain`. sharded: whether
    FSDP2 reads parameters wherever they lie.
    """

    found: TapeChain
    chain: Chain
    placed: tuple[PlacedGroup, ...]
    outside: tuple[nn.Parameter, ...]
    on_host: tuple[tuple[int, int], ...]
    coming: tuple[int, ...]
    beside: int
    update: int
    whole: int
    expected: int
    device: torch.device
    backwards: StageBackwards | None = None
    ask: Callable[..., list[int]] | None = None
    sharded: bool = False

    def levels(self, sequence: Sequence, during: bool = False) -> list[int]:
        """Return the most bytes that the device holds in each operation of `sequence`. Unless the updates come during
        the backward, a gradient of which the host has no copy stays for the caller to read."""
        if self.ask is not None:
            return self.ask(sequence, during)
        leaving = {op.stage for op in sequence if op.kind is OpKind.OFFLOAD and op.of == "g"}
        levels, stays, updated = list[int](), self.beside, set[int]()
        ran = ended = False  # whether the forward has ended, and the backward
        stage = len(self.chain)  # whose B has begun last
        shards = {v.stage for v in at_rest(self.chain, sequence.ops, sequence.resident).device if v.of == "w"}
        returned = max((one.nbytes for one in self.found.trace.made if one.returned), default=0)
        for op, level, machine, _ in self.found.followed(sequence, self.chain.parameters):
            if op.kind is OpKind.H:  # in the first step, the states of groups not updated yet do not exist
                again, first = self.on_host[op.stage - 1]
                missing = {v.stage for v in machine.device if v.of == "o"} - updated
                level += max(again, first - sum(self.chain.group(k).state_bytes for k in missing))
            updated |= {op.stage} if op.kind in UPDATES else set()
            stage = op.stage if op.kind is OpKind.B else stage
            level -= self._not_there(op, stage, machine)
            if op.of == "w" and op.kind in (OpKind.DROP, OpKind.FREE):
                shards.discard(op.stage)
            if self.sharded and not ended:  # those on the host come back after the backward
                away = (v for v in machine.device if v.of == "w" and v.stage not in shards)
                level -= sum(group_bytes(self.chain, v) for v in away)
            if op.kind in FORWARDS and op.stage == len(self.chain) and not ran:  # when the forward ends
                ran = True
                level += checksum_room(returned, self.device)
            levels.append(level + stays)
            if op.kind is OpKind.B and not machine.next_backward:  # gradients of tensors of the model's code
                ended = True
                stays += max(0, sum(event.size for event in self.found.trace.backward if not event.resharded))
            if op.kind is OpKind.U and op.stage not in leaving and not during:
                stays += self.chain.group(op.stage).grad_bytes
        return [*levels[:-1], levels[-1] + self.update]

    def _not_there(self, op: Op, stage: int, machine: Machine) -> int:
        """Return the bytes of gradients that the machine charges in an operation once the B of `stage` has begun, and
        that are not there: in that B, those that come after its peak; and what the first reader of a parameter gives
        it, which autograd keeps among the step's other gradients; less what has come before the B of its group."""
        if (of := self.backwards) is None:
            return 0
        after, arrived = 0, sum(of.arriving[stage:])
        if op.kind is OpKind.B:
            peak = self.found.runs[stage - 1].backward_peaks[machine.form[stage]]
            after = max(0, min(of.arriving[stage], arrived + peak - of.staying[stage]))
        begun = (self.chain.group(v.stage) for v in machine.device if v.of == "g")
        shared = sum(group.grad_bytes for group in begun if min(group.stages) < stage)
        pairs = zip(self.chain.parameters, self.coming, strict=True)
        charged = sum(nbytes for group, nbytes in pairs if max(group.stages) >= stage)
        return after + min(shared, charged - arrived)

    def placement(self, sequence: Sequence, during: bool, limit: int) -> PlacedPlan:
        """Return where `sequence` has the parameters. Unless the device is a CPU, a
        parameter lies where its gradient arrives: on the host, if the host updates it or receives the gradient."""
        numbers = frozenset(range(1, len(self.chain.parameters) + 1))
        resident = frozenset(at_rest(self.chain, sequence.ops, sequence.resident).device)
        moved = {op.stage for op in sequence if op.of == "w"}
        early: frozenset[Value] = frozenset()
        if apart := is_accelerator(self.device):
            leaving = {op.stage for op in sequence if op.kind is OpKind.OFFLOAD and op.of == "g"}
            on_host = leaving | {op.stage for op in sequence if op.kind is OpKind.H}
            resident |= {w(v.stage) for v in resident if not self.chain.group(v.stage).bytes}  # shards, with states
            early = frozenset(v for v in resident if v.of == "w" and v.stage in on_host)
            resident -= early
        trace = self.found.trace
        alone = plain_levels(replace(trace, saved=(), backward=()))[0]  # a forward that saves nothing
        kept = sum(group_bytes(self.chain, v) for v in resident)
        return PlacedPlan(
            groups=self.placed,
            resident=resident,
            moved=frozenset(moved | {k for k in numbers if w(k) not in resident}),
            early=early,
            outside=self.outside,
            during=during,
            room=max(0, limit - self.beside - self.chain.input_bytes - alone - kept),
            on_host=all(one.host_update_time is not None for one in self.chain.parameters if one.grad_bytes)
            or not apart,
        )


def _group_of(
    part: list[nn.Parameter],
    stages: tuple[int, ...],
    probe: OptimizerProbe,
    host: bool,
    block: int,
    found: TapeChain,
    reads: Reads,
    device: torch.device,
    shards: Shards | None,
) -> ParameterGroup:
    """Return the costs of parameters that are placed together. host: whether it may update them. block: bytes of the
    allocator. Shards that need gradients, which lie in one tensor, are with their states; on a CPU, all lie on the
    host."""
    needs = any(p.requires_grad for p in part)
    own = part if shards is None else [shards.of[id(p)].data for p in part]
    nbytes = sum(rounded(room_of(t), block) for t in own)
    gradients = gradient_bytes(part, reads, block)
    state_bytes = sum(map(probe.state_bytes, part)) if needs else 0  # those of frozen parameters lie on the host
    if shards is not None:
        gradients = rounded(sum(t.nbytes for t in own), block) if needs else 0
        state_bytes += nbytes if needs and is_accelerator(device) else 0
        nbytes = 0 if needs or not is_accelerator(device) else nbytes
    return ParameterGroup(
        stages=stages,
        bytes=nbytes,
        grad_bytes=gradients,
        state_bytes=state_bytes,
        update_time=probe.update_time(part) if needs else 0.0,
        host_update_time=probe.host_update_time(part) if host and needs else None,
        update_transient_bytes=probe.update_bytes(part) if any(map(probe.updates, part)) else 0,
        name=found.chain.stage(stages[0]).name,
    )


def gradient_bytes(parameters: Iterable[nn.Parameter], reads: Reads, block: int) -> int:
    """Return the bytes on the device of the gradients of `parameters`; those that are parts of one tensor keep it."""
    found = {reads.larger.get(id(p), (id(p), room_of(p))) for p in parameters if p.requires_grad}
    return sum(rounded(nbytes, block) for _, nbytes in found)


def _updated_on_host(
    part: Iterable[nn.Parameter], states: tuple[int, ...], probe: OptimizerProbe, device: torch.device
) -> tuple[int, int]:
    """Return the bytes that the largest update of a group takes on the host, beside its state and with it, where the
    host's memory is the device's."""
    here = any(map(probe.updates, part)) and not is_accelerator(device)
    taken = [probe.update_bytes([p]) if here else 0 for p in part]
    return max(taken), max(n + here * state for n, state in zip(taken, states, strict=True))


def groups_of(
    profile: TapeProfile,
    found: TapeChain,
    reads: Reads,
    model: nn.Module,
    probe: OptimizerProbe,
    host: bool,
    outside: Iterable[int] = (),
    shards: Shards | None = None,
) -> TapeGroups:
    """Group the parameters of each stage, or of the stages that share them; or the shards that are gathered at once.

    Args:
        found: a chain of `profile.moving`. host: whether the host may update a group. outside: ids of
            parameters that stay on the device, beyond those that must.
    """
    device, block = profile.device, block_bytes(profile.device)
    every, movable = movable_of(model, reads.staying | {*outside}, shards)
    whole = sum(map(room_of, movable))
    costs, placed, on_host, coming = [], [], [], []
    if shards is None:
        parts = parts_of(movable, reads, found.layout.begins, probe, whole)
    else:
        parts = _shards_of(movable, found, shards)
    for stages, part in parts:
        states = tuple(map(probe.state_bytes, part))
        costs.append(_group_of(part, stages, probe, host, block, found, reads, device, shards))
        placed.append(PlacedGroup(tuple(part), states))
        on_host.append(_updated_on_host(part, states, probe, device))
        given = [p for p in part if id(p) in reads.given]
        coming.append(gradient_bytes(given, reads, block) if shards is None else costs[-1].grad_bytes)
    grouped = {id(p) for group in placed for p in group.parameters}
    left = [p for p in every if id(p) not in grouped]
    gradients = gradient_bytes(left, reads, block)
    beside = sum({storage_key(b): rounded(b.untyped_storage().nbytes(), block) for b in model.buffers()}.values())
    beside += sum(rounded(local(p).nbytes, block) + probe.state_bytes(p) for p in left) + gradients
    beside += probe.unplaced_bytes(every)
    beside += checksum_bytes(block) + 2 * rounded(8, block)
    read = whole if shards is not None and not is_accelerator(device) else sum(one.bytes for one in costs)
    resting = beside + profile.batch_bytes + read + sum(one.state_bytes for one in costs)
    updating = resting + sum(one.grad_bytes for one in costs) + probe.update_bytes(every)
    updating += sum(one.nbytes for one in profile.trace.made if one.returned)
    events = tuple(event for event in profile.trace.backward if not event.kept or event.size > 0)
    with_gradients = plain_levels(replace(profile.trace, backward=events))[0]  # which stay
    return TapeGroups(
        found,
        replace(found.chain, parameters=tuple(costs)),
        tuple(placed),
        tuple(left),
        tuple(on_host),
        tuple(coming),
        beside,
        update=probe.update_bytes(left),
        whole=max(resting + sum(one.grad_bytes for one in costs) + plain_levels(profile.trace)[0], updating),
        expected=max(resting - gradients + with_gradients, updating),
        device=device,
        backwards=found.backwards(profile.trace),
        sharded=shards is not None,
    )


def parts_of(
    movable: Iterable[nn.Parameter], reads: Reads, begins: tuple[int, ...], probe: OptimizerProbe, whole: int
) -> list[tuple[tuple[int, ...], list[nn.Parameter]]]:
    """Return the parameters of each group, with the stages that read them: either all of them need a gradient or none,
    get one or not, as what no loss depends on, and are updated or not. whole: bytes of all."""
    members: dict[tuple[tuple[int, ...], bool, bool, bool], list[nn.Parameter]] = {}
    for p in movable:
        if id(p) in reads.at:
            stages = tuple(sorted({bisect_right(begins, position) for position in reads.at[id(p)]}))
            members.setdefault((stages, p.requires_grad, id(p) in reads.given, probe.updates(p)), []).append(p)
    found = sorted(members.items(), key=lambda one: one[0])
    return [(of[0], part) for of, some in found for part in in_parts(some, map(room_of, some), whole)]


def _shards_of(
    movable: list[nn.Parameter], found: TapeChain, shards: Shards
) -> list[tuple[tuple[int, ...], list[nn.Parameter]]]:
    """Return the same of shards: those of a unit that need gradients are one group, and the frozen ones. Of a unit
    without stages of its own, the root, gradients come when the backward ends."""
    parts, placed = [], {*map(id, movable)}
    names = [name for name in shards.units if name]
    for name, several in shards.units.items():
        inner = [other for other in names if other.startswith(f"{name}.")]
        own = (op for op in found.trace.ran if name and is_within(op, [name]) and not is_within(op, inner))
        stages = tuple(sorted({bisect_right(found.layout.begins, op.at) for op in own})) or (1,)
        part = [shard.parameter for shard in several if id(shard.parameter) in placed]
        for needs in (True, False):
            if alike := [p for p in part if p.requires_grad == needs]:
                parts.append((stages, alike))
    return sorted(parts, key=lambda one: one[0])


def waiting_plan(model: nn.Module, probe: OptimizerProbe, shards: Shards | None = None) -> PlacedPlan:
    """Return where parameters lie until a step is planned: on the host, all that can be placed, each by itself."""
    every, movable = movable_of(model, (), shards)
    moved = {id(p) for p in movable}
    return PlacedPlan(
        tuple(PlacedGroup((p,), (probe.state_bytes(p),)) for p in movable),
        frozenset(),
        frozenset(range(1, len(movable) + 1)),
        outside=tuple(p for p in every if id(p) not in moved),
        waits=True,
        on_host=probe.on_host(movable),
    )


def movable_of(
    model: nn.Module,
    staying: Iterable[int],
    shards: Shards | None = None,
    may: Callable[[nn.Parameter], bool] = placeable,
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return all parameters, and those that can be placed and are not among `staying`: not what shares its bytes, and
    what compiled code reads unseen; if FSDP2 has sharded some, these alone. may: whether a parameter is of a kind that
    can be."""
    if shards is not None:
        placed = [p for p, shard in zip(shards.parameters, shards.of.values(), strict=True) if placeable(shard.data)]
        return shards.every(model), placed
    every = list({id(p): p for p in stored(model.parameters())}.values())
    by_storage: dict[int, list[int]] = {}
    for tensor in (*every, *model.buffers()):
        by_storage.setdefault(storage_key(tensor), []).append(id(tensor))
    left = {*staying, *(one for several in by_storage.values() if len(several) > 1 for one in several)}
    left |= {id(p) for module in model.modules() if compiled(module) for p in stored(module.parameters())}
    return every, [p for p in every if id(p) not in left and may(p)]

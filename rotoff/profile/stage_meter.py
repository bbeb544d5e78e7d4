"""One stage, run in the ways that the machine knows, and what each run costs in bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..capture.collectives import CollectivesSeen, in_company
from ..capture.mutations import ChangedAttributes, ChangedBuffers
from ..capture.operations import OperationLog
from ..capture.sharding import gathers
from ..capture.unrepeatable import compiled
from ..core.chain import Stage
from ..errors import MeasureError
from ..runtime.overhead import UpkeepTimes
from ..runtime.replay import ReplayState
from ..tensors.convolutions import Algorithms
from ..tensors.rng import RNG_BYTES, Generators
from ..tensors.saved_tensors import saved_hooks
from ..tensors.stage import Behaviour, SavedKind, StageModule
from ..tensors.storage import storage_key
from ..tensors.tree import flatten
from .cuda_graphs import refuse_cuda_graphs
from .measured import Forward, Measured
from .memory.backward_memory import BackwardBytes, backward_bytes
from .memory.casts import kept_casts
from .memory.dropped import Dropped, dropped
from .memory.forward_memory import Kept, keep_everything
from .memory.skips import lying
from .selective.graph import describe, structure
from .selective.variant_meter import FormMeter
from .selective.variant_run import WholeStage
from .selective.variants import Policy, unfit
from .timing.context import MeasurementContext
from .timing.convergence import Repeats
from .timing.harness import Run, backward, contiguous, expanded, get_edges, ones, permuted, within_backward
from .timing.overhead import UpkeepMeter
from .timing.stage_timing import End, Timings, copy_bandwidth, time_stage
from .timing.timing_cache import KnownTimes, StageTimes, check_times

# A collective's thread may be the last to let go of a buffer, which the log of this thread does not see. Stages that
# communicate are run a few times more, always as often, since all processes must take part, and the run that seems to
# leave least counts.
COLLECTIVE_TRIES = 3
LOOKS = 3  # runs by which known times are judged

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})  # whose bytes are those of one storage


class Meter:
    """Measures stages on one bench.

    Args:
        forms: whether to look for smaller forms too; a policy says what they keep. algorithms: other ones that
            convolutions may run by. alone: whether each process makes a plan of its own.
    """

    def __init__(
        self,
        bench: MeasurementContext,
        forms: bool | Policy = False,
        algorithms: Sequence[Algorithms] = (),
        alone: bool = True,
    ) -> None:
        self.bench = bench
        self._alone = alone
        self.allocator = bench.allocator
        self.rng_bytes = RNG_BYTES if bench.device.type == "cpu" else 0  # on the device, of a generator's state
        policy = None if isinstance(forms, bool) else forms
        self._forms = self.form_meter(policy, bool(forms), algorithms) if forms or algorithms else None
        self._lasting: set[int] = set()  # storages that are there throughout the step
        self._counted: set[int] = set()  # storages of the input that stay whatever is dropped, and are counted
        self._timings: dict[Any, Timings] = {}  # by what stages of one kind have in common
        self._measured: dict[Any, tuple[Measured, StageModule]] = {}  # likewise, and the stage that was
        self._by_kind: dict[Any, Measured] = {}  # what `times` found
        self._upkeep = UpkeepMeter()
        self.samples_upkeep = True
        self.warm = False  # whether the stages have run in this process, and need no workspaces of a new size
        self.checked: StageTimes | None = None  # known times of the stage that tells whether they still hold

    def form_meter(self, policy: Policy | None, partial: bool, algorithms: Sequence[Algorithms]) -> FormMeter:
        return FormMeter(self.bench, policy, partial, algorithms)

    def trust(self, known: KnownTimes | None) -> None:
        """Measure no times that are `known`, but look at one of them again if they say so."""
        self.samples_upkeep = known is None or known.upkeep is None
        self.checked = known.heaviest if known is not None else None
        self.warm = self.bench.device.type == "cpu" and known is not None and not known.checked

    def begin(self, value: Any) -> None:
        """What is measured next starts the chain: its input `value` is there throughout."""
        self._lasting = {storage_key(t) for t in flatten(value)[0]}
        self._counted = set()

    def stage(
        self, stage: StageModule, value: Any, last: bool, known: StageTimes | None = None, timed: bool = True
    ) -> tuple[Measured | None, Any]:
        """Measure `stage` on the input `value`; None where nothing that it makes needs a gradient. Also returns its
        output.

        last: whether the caller holds its output throughout. known: its times, where they need not be measured. timed:
        whether to measure times and smaller forms; else `times` does so later.
        """
        if self.bench.device.type == "cuda":
            refuse_cuda_graphs(stage)
        tensors, rebuild = flatten(value)
        run = Run(stage, tensors, rebuild, last, any(gathers(module) for module in stage.modules))
        leaves, changes = run.leaves(), ChangedBuffers(stage)
        watched = in_company() and not (run.collective or any(map(compiled, stage.every_module())))
        seen = CollectivesSeen()
        shapes: list[Any] = []  # of what autograd saves

        def note(tensor: torch.Tensor) -> torch.Tensor:
            shapes.append((tensor.shape, tensor.dtype))
            return tensor.detach()  # a tensor that its own node held would never go

        with saved_hooks(note, lambda t: t), seen if watched else nullcontext():
            outputs, rebuild_output = flatten(run.forward(leaves))  # workspaces and lazy tables come first
        self._refuse_subclasses(stage, outputs)
        needs = [t.requires_grad for t in outputs]
        kind = structure(stage.modules), describe(value, self._lasting), describe(outputs), tuple(shapes), last
        given = {id(t) for t in leaves if storage_key(t) in self._lasting}
        if not any(need and id(t) not in given for t, need in zip(outputs, needs, strict=True)):
            measured = None
        elif kind in self._measured and (known is None or known is not self.checked):
            known_kind, like = self._measured[kind]
            measured = known_kind.of(stage, like)
        else:
            if not self.warm:
                with seen if watched else nullcontext():
                    backward(get_edges(outputs), ones(outputs), run.targets(leaves))
            del outputs, leaves
            run = self._checked(replace(run, collective=run.collective or seen.any))
            if self.bench.device.type == "cuda" and not run.collective:
                self._replay(run)
            measured, outputs = self._costs(run, changes)
            if timed:
                measured = self._with_times(run, measured, known)
            # a buffer that no operation reads is not seen in what stages of a kind have in common
            if measured.holds_for_its_kind and stage.buffers_read().keys() >= {*measured.behaviour.changed_buffers}:
                measured = replace(measured, kind=kind)
                self._measured[kind] = measured, stage
        detached = [t.detach().requires_grad_(need) for t, need in zip(outputs, needs, strict=True)]
        return measured, rebuild_output(detached)

    def times(
        self, stage: StageModule, value: Any, last: bool, measured: Measured | None, known: StageTimes | None = None
    ) -> tuple[Measured | None, Any]:
        """`measured`, of which `stage` measured bytes alone, with times and smaller forms; and the stage's output.

        last, known: as of `stage`.
        """
        tensors, rebuild = flatten(value)
        run = Run(stage, tensors, rebuild, last, measured is not None and measured.collective)
        outputs, rebuild_output = flatten(run.forward(run.leaves()))
        output = rebuild_output([t.detach().requires_grad_(t.requires_grad) for t in outputs])
        del outputs
        if measured is None:
            return None, output
        like = self._by_kind.get(measured.kind)
        if like is None or (known is not None and known is self.checked):
            like = self._with_times(run, measured, known)
            if measured.kind is not None:
                self._by_kind[measured.kind] = like
        return measured.with_times_of(like), output

    def _checked(self, run: Run) -> Run:
        """`run`, refused where processes with plans of their own would wait for each other."""
        if run.collective and self._alone and in_company():
            raise MeasureError(
                f"stage {run.stage.name!r} communicates with other processes, and processes with plans of their own"
                " would wait for each other; give Checkpointable process_group=True, so that all follow one plan"
            )
        return run

    def _replay(self, run: Run) -> None:
        """Run the forward as a replay does, on autograd's thread. cuDNN's choices of algorithms and the workspaces of
        cuBLAS belong to a thread; without this the first replay of a training would make them, beside all that its step
        holds."""
        state = ReplayState(Generators(self.bench.device), ())

        def again() -> None:
            with state.again():
                run.forward(run.leaves())

        within_backward(again, self.bench.device)

    def _costs(self, run: Run, changes: ChangedBuffers) -> tuple[Measured, list[torch.Tensor]]:
        """The bytes of a stage that keeps everything, or nothing; and its outputs."""
        generators = Generators(self.bench.device)
        drawn = generators.copies()
        casts = kept_casts(run, self.allocator)
        generators.put(drawn)
        forward = self._forward(run, changes, generators)
        stuck = forward.behaviour.unmanaged_bytes
        back, other_layout_bytes = self._backward(run, forward.outputs, forward.own_gradient_bytes)
        generators.put(drawn)  # so that whoever saves other tensors now has no better reason than what it remembers
        dropping = self._dropping(run, forward.shapes)
        kept_above = forward.log.peak() - forward.saved_bytes - stuck
        dropped_above = dropping.log.peak() - forward.output_bytes - stuck
        costs = Stage(
            name=run.stage.name,
            output_bytes=forward.output_bytes,
            saved_bytes=forward.saved_bytes,
            grad_bytes=sum(forward.own_gradient_bytes),
            forward_transient_bytes=max(0, kept_above),
            checkpoint_transient_bytes=max(0, dropped_above),
            backward_transient_bytes=back.peak,
        )
        measured = Measured(
            costs=costs,
            behaviour=replace(forward.behaviour, cast_bytes=sum(casts.values())),
            gradients=back.places,
            own_gradient_bytes=forward.own_gradient_bytes,
            lies=forward.lies._replace(spare=(max(0, -kept_above), max(0, -dropped_above))),
            begun_bytes=back.begun,
            output_retention=back.staying,
            other_layout_bytes=other_layout_bytes,
            held_bytes=self._held_bytes(run, dropping, stuck, forward.outputs),
            holds_others=bool(dropping.inputs or dropping.outputs),
            casts=casts,
            carried_bytes=forward.carried_bytes,
            collective=run.collective,
        )
        return measured, forward.outputs

    def _with_times(self, run: Run, measured: Measured, known: StageTimes | None) -> Measured:
        """`measured`, bytes of the stage of `run`, with its times and its smaller forms."""
        saved = measured.behaviour.saved
        operations = self._recorded(run, saved)
        end = self._end(saved, operations)
        timings, (forward, backward, tail) = self._timed_or_known(run, end, known)
        costs = replace(measured.costs, forward_time=forward, backward_time=backward, tail_time=tail)
        behaviour = replace(measured.behaviour, enough=end.enough)
        whole = WholeStage(run, costs, behaviour, measured.carried_bytes)
        costs, behaviour, no_forms = self._with_forms(whole, known, operations)
        if self.samples_upkeep:
            self.sample_upkeep(run, behaviour)
        host_bound = known is not None and known.host_bound
        return replace(
            measured,
            costs=costs,
            behaviour=behaviour,
            no_forms=no_forms,
            timings=timings,
            host_bound=host_bound,
        )

    def _forward(self, run: Run, changes: ChangedBuffers, generators: Generators) -> Forward:
        """Run the forward with everything kept. Of what it makes, only the outputs outlive this call."""
        drawn = generators.states()
        changes.look()
        attributes = ChangedAttributes(run.stage)
        leaves = run.leaves()
        versions = [t._version for t in leaves]
        kept = self._keep_everything(run, leaves, generators)
        outputs = kept.outputs
        self._refuse_subclasses(run.stage, kept.tensors)
        log = self.allocator.as_asked(kept.log, [*outputs, *kept.tensors])
        live = log.live()
        inputs = {storage_key(t) for t in leaves}
        kinds = kept.kinds(inputs)
        own = {one.address for one, kind in zip(kept.saved, kinds, strict=True) if kind is SavedKind.OWN and one.alive}
        made = {self.allocator.address(t) for t in outputs}
        tables = {storage_key(t) for t in outputs if self.allocator.address(t) not in live} - inputs  # of a module
        self._lasting |= tables
        carried_bytes = self.storage_bytes([t for t in outputs if storage_key(t) in inputs - self._lasting])
        saved_bytes = sum(size for ptr, size in live.items() if ptr in own | made)
        written = [n for n, (t, version) in enumerate(zip(leaves, versions, strict=True)) if t._version != version]
        behaviour = Behaviour(
            saved=kinds,
            own_outputs=tuple(storage_key(t) not in self._lasting for t in outputs),
            changed_buffers=changes.look(),
            changed_attributes=attributes.look(),
            draws=log.drew or generators.states() is not drawn,
            unmanaged_bytes=sum(live.values()) - saved_bytes,
            varying=run.stage.varying,
            modes=run.stage.modes(),
            for_nothing=frozenset(n for n, one in enumerate(kept.saved) if not one.alive),
        )
        return Forward(
            # nobody runs on the last stage's output
            outputs=[t.new_empty(0) if run.last else t.detach() for t in outputs],
            output_bytes=sum(size for ptr, size in live.items() if ptr in made) + carried_bytes,
            saved_bytes=saved_bytes + carried_bytes,
            carried_bytes=carried_bytes,
            own_gradient_bytes=tuple(self.gradient_bytes([t]) for t in outputs),
            lies=lying(leaves, outputs, [self.storage_bytes([t]) for t in outputs], kept.keys(inputs), written),
            behaviour=behaviour,
            shapes=[(one.shape, one.dtype) for one in kept.saved],
            log=log,
        )

    def _keep_everything(self, run: Run, leaves: list[torch.Tensor], generators: Generators) -> Kept:
        drawn = generators.copies()
        kept = keep_everything(run, leaves, self.allocator)
        for _ in range(COLLECTIVE_TRIES if run.collective else 0):
            generators.put(drawn)
            again = keep_everything(run, leaves, self.allocator)
            kept = again if again.live_bytes < kept.live_bytes else kept
            del again
        return kept

    def _with_forms(
        self, whole: WholeStage, known: StageTimes | None, operations: OperationLog | None
    ) -> tuple[Stage, Behaviour, str]:
        """The costs and the behaviour with smaller forms of the stage, or why there are none."""
        if self._forms is None:
            return whole.costs, whole.behaviour, "switched off"
        if whole.run.last:
            return whole.costs, whole.behaviour, "the last stage needs none"
        found = self._forms.find(whole, known.forms if known else None, operations)
        return replace(whole.costs, forms=found.forms), replace(whole.behaviour, forms=found.recipes), found.reason

    def _backward(
        self, run: Run, outputs: Sequence[torch.Tensor], gradient_bytes: Sequence[int]
    ) -> tuple[BackwardBytes, int]:
        """The bytes of the backward, and what it holds more where gradients lie otherwise than their tensors.

        gradient_bytes: of the gradient of each output.
        """
        back = backward_bytes(self.allocator, run)
        if run.last:  # whoever makes a loss of the outputs may give gradients that take nothing, and kernels copy
            alone = backward_bytes(self.allocator, run, expanded)
            levels = ((getattr(alone, name) - sum(gradient_bytes), name) for name in ("peak", "begun", "staying"))
            most = {name: max(level, getattr(back, name)) for level, name in levels}
            pairs = zip(back.places, alone.places, strict=True)
            places = tuple(a and a._replace(layout=max(a.layout, (b or a).layout)) for a, b in pairs)
            return back._replace(**most, places=places), 0
        if all(sum(size > 1 for size in t.shape) < 2 for t in outputs):  # one dimension lies in one way
            return back, 0
        ways = [permuted] if all(t.is_contiguous() for t in outputs) else [permuted, contiguous]
        strange = [backward_bytes(self.allocator, run, way) for way in ways]
        rows = zip(back.places, *(one.places for one in strange), strict=True)
        places = tuple(
            a and a._replace(from_permuted=max(b.layout if b else a.layout for b in row)) for a, *row in rows
        )
        return back._replace(places=places), max(0, *(one.peak - back.peak for one in strange))

    def _dropping(self, run: Run, shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> Dropped:
        """A forward that keeps its outputs alone; `shapes` are of what autograd saved when it kept all."""
        shapes_again: list[tuple[torch.Size, torch.dtype]] = []
        found = dropped(run, self.allocator, lambda t: shapes_again.append((t.shape, t.dtype)))
        if shapes_again != shapes:
            raise MeasureError(
                f"stage {run.stage.name!r} saves other tensors for backward each time that it runs on the same input,"
                " since it remembers something (a cache that grows, a counter); switch that off, as with"
                " use_cache=False"
            )
        return found

    def _held_bytes(self, run: Run, found: Dropped, stuck: int, outputs: Sequence[torch.Tensor]) -> int:
        """Bytes that stay whatever is dropped, `outputs` being those that are handed on; a tensor held by several
        stages counts once."""
        if run.collective:
            return stuck  # see `COLLECTIVE_TRIES`
        inputs = [t for n, t in enumerate(run.tensors) if n in found.inputs and storage_key(t) not in self._lasting]
        nbytes = found.staying + self.storage_bytes([t for t in inputs if storage_key(t) not in self._counted])
        counted = self._counted | {storage_key(t) for t in inputs} | {storage_key(outputs[n]) for n in found.outputs}
        self._counted = counted & {storage_key(t) for t in outputs}
        return nbytes

    def _timed_or_known(
        self, run: Run, end: End, known: StageTimes | None
    ) -> tuple[Timings | None, tuple[float, float, float]]:
        """Seconds of the forward, the backward and the tail; timings only where the times are not `known`."""
        if known is None:
            timings = self._times(run, end)
            return timings, timings.medians()
        if known is self.checked:
            check_times(known, self._looked_at(run))
        return None, (known.forward_time, known.backward_time, known.tail_time)

    def _times(self, run: Run, end: End) -> Timings:
        """Seconds of the forward, the backward and the tail, with those of the stages before that are of the same
        kind."""
        timings, repeats = Timings(), self.bench.repeats
        if not run.stage.varying:
            kind = structure(run.stage.modules), describe(run.rebuild(run.tensors)), end.enough, run.last
            timings = self._timings.setdefault(kind, timings)
        time_stage(run, end, repeats.at_least(1) if timings.forward else repeats, self.bench.device, timings)
        return timings

    def _looked_at(self, run: Run) -> list[float]:
        """Seconds that the forward and the backward take together, a few times."""
        timings = Timings()
        time_stage(run, End(), Repeats(LOOKS, LOOKS), self.bench.device, timings)
        return [sum(pair) for pair in zip(timings.forward, timings.backward, strict=True)]

    def copy_bandwidth(self, nbytes: float) -> float:
        """B/s at which a tensor of `nbytes` is copied on the device."""
        return copy_bandwidth(nbytes, self.bench.device)

    def sample_upkeep(self, run: Run, behaviour: Behaviour) -> None:
        """See what the runtime itself takes of a step of the stage."""
        self._upkeep.sample(run, behaviour)

    def upkeep_times(self) -> UpkeepTimes:
        """What the runtime itself takes, by the stages measured so far."""
        return self._upkeep.times()

    def _recorded(self, run: Run, kinds: Sequence[SavedKind]) -> OperationLog | None:
        """The operations of a forward, where they matter and can be seen."""
        if SavedKind.OWN not in kinds or run.collective or unfit(run.stage) is not None:
            return None
        try:
            log = self.bench.recorded(run)
        except Exception:  # a forward may break in any way under a dispatch mode
            return None
        return log if len(log.packs) == len(kinds) else None

    def _end(self, kinds: Sequence[SavedKind], log: OperationLog | None) -> End:
        """Where a replay may end. A stage that is compiled or gathers parameters may have something to do at its end,
        and so has one with an operation that autograd saves an argument of before it is written (the noise of
        ``rrelu``)."""
        if log is None:
            return End()
        own = [n for n, kind in enumerate(kinds) if kind is SavedKind.OWN]
        behind = log.operations[log.packs[own[-1]].before :]
        storages = {log.packs[n].storage for n in own}
        if None in storages or storages & {storage for op in behind for storage in op.writes}:
            return End()
        left_out, whole = (sum(op.seconds for op in ops) for ops in (behind, log.operations))
        return End(own[-1] + 1, left_out / whole if whole else 0.0)

    def gradient_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of the gradients of those `tensors` that need one."""
        return sum(self.allocator.rounded(t.numel() * t.element_size()) for t in tensors if t.requires_grad)

    def storage_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of the storages of `tensors`, each once."""
        return sum(
            self.allocator.rounded(n) for n in {storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values()
        )

    def plain(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of `tensor` are those of one storage."""
        return type(tensor) in PLAIN

    def _refuse_subclasses(self, stage: StageModule, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not self.plain(tensor):
                raise MeasureError(
                    f"stage {stage.name!r} makes or saves a {type(tensor).__name__}, whose bytes rotoff cannot move;"
                    " use plain tensors in what it returns and differentiates"
                )

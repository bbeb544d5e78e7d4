"""Measures one stage: its bytes (`stage_bytes`), its times and its smaller forms."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..accelerator import is_accelerator
from ..capture.collectives import CollectivesSeen, several_processes
from ..capture.mutations import ChangedBuffers
from ..capture.operations import OperationLog
from ..capture.sharding import gathers
from ..capture.unrepeatable import compiled
from ..core.chain import Stage
from ..errors import MeasureError
from ..runtime.overhead import OverheadTimes
from ..runtime.replay import ReplayState
from ..tensors.convolutions import Algorithms
from ..tensors.rng import RNG_BYTES, Generators
from ..tensors.saved_tensors import saved_hooks
from ..tensors.stage import Behaviour, SavedKind, StageModule
from ..tensors.storage import storage_key
from ..tensors.tree import flatten
from .cuda_graphs import refuse_cuda_graphs
from .measured import Measured
from .selective.graph import describe, structure
from .selective.variant_meter import FormMeter
from .selective.variant_run import WholeStage
from .selective.variants import FormPolicy, unfit
from .stage_bytes import ByteMeter
from .timing.context import MeasurementContext
from .timing.convergence import Repeats
from .timing.harness import Run, backward, get_edges, ones, within_backward
from .timing.overhead import LONG, OverheadMeter
from .timing.stage_timing import EarlyStop, Timings, copy_bandwidth, time_stage
from .timing.timing_cache import KnownForm, KnownTimes, StageTimes, check_times

CHECK_RUNS = 3  # runs that check whether known times still hold


class Meter(ByteMeter):
    """Measures the stages of a model.

    Args:
        forms: whether to look for smaller forms; a policy says what they keep.
        algorithms: further algorithms that convolutions may use.
        alone: whether each process makes its own plan.
    """

    def __init__(
        self,
        context: MeasurementContext,
        forms: bool | FormPolicy = False,
        algorithms: Sequence[Algorithms] = (),
        alone: bool = True,
    ) -> None:
        super().__init__(context)
        self._alone = alone
        self.rng_bytes = RNG_BYTES if context.device.type == "cpu" else 0  # of a generator's state, on the device
        policy = None if isinstance(forms, bool) else forms
        self._forms = self.form_meter(policy, bool(forms), algorithms) if forms or algorithms else None
        self._timings: dict[Any, Timings] = {}  # by the kind of stage
        self._measured: dict[Any, tuple[Measured, StageModule]] = {}  # by kind and `Profile.alike`, with the stage
        self._by_kind: dict[Any, Measured] = {}  # results of `times`
        self._overhead = OverheadMeter()
        self.samples_overhead = True
        self._warm = context.device.type == "cpu"  # whether no library keeps workspaces from its first backward on
        self.checked: StageTimes | None = None  # the known times that are checked

    def form_meter(self, policy: FormPolicy | None, partial: bool, algorithms: Sequence[Algorithms]) -> FormMeter:
        return FormMeter(self.context, policy, partial, algorithms)

    def estimate_forms(self) -> bool:
        """Estimate forms from now on instead of measuring them. Whether that is possible."""
        if self._forms is None or self._forms.algorithms:
            return False
        self._forms.estimates = True
        return True

    def trust(self, known: KnownTimes | None) -> None:
        """Use the `known` times instead of measuring; check one of them if `known` asks for it."""
        self.samples_overhead = known is None or known.overhead is None
        self.checked = known.heaviest if known is not None else None

    def stage(
        self, stage: StageModule, value: Any, last: bool, known: StageTimes | None = None, timed: bool = True
    ) -> tuple[Measured | None, Any]:
        """Measure `stage` on the input `value`; returns the measurement, None if no output needs a gradient, and the
        output.

        Args:
            last: whether the caller holds the output throughout.
            known: the stage's times, if they need not be measured, and whether all gradients that it receives have the
                layouts of their tensors.
            timed: whether to measure times and smaller forms; if not, `times` does so later.
        """
        if is_accelerator(self.context.device):
            refuse_cuda_graphs(stage)
        tensors, rebuild = flatten(value)
        run = Run(stage, tensors, rebuild, last, any(gathers(module) for module in stage.modules))
        leaves, changes = run.leaves(), ChangedBuffers(stage)
        watched = several_processes() and not (run.collective or any(map(compiled, stage.every_module())))
        seen = CollectivesSeen()
        shapes: list[Any] = []  # of the tensors that autograd saves

        def note(tensor: torch.Tensor) -> torch.Tensor:
            shapes.append((tensor.shape, tensor.dtype))
            return tensor.detach()  # a node that holds its own output would never be freed

        with saved_hooks(note, lambda t: t), seen if watched else nullcontext():
            outputs, rebuild_output = flatten(run.forward(leaves))  # also makes workspaces and lazy tables
        self._refuse_subclasses(stage, outputs)
        run = run.noted(leaves, outputs)
        needs = [t.requires_grad for t in outputs]
        alike, checks = known is not None and known.alike, known is not None and known is self.checked
        kind = structure(stage.modules), describe(value, self._lasting), describe(outputs), tuple(shapes), last
        given = {id(t) for t in leaves if storage_key(t) in self._lasting}
        if not any(need and id(t) not in given for t, need in zip(outputs, needs, strict=True)):
            measured = None
        elif (kind, alike) in self._measured and not checks:
            known_kind, like = self._measured[kind, alike]
            measured = known_kind.of(stage, like)
        else:
            if not self._warm or watched or any(map(compiled, stage.every_module())):
                edges = get_edges(outputs)
                with seen if watched else nullcontext():
                    backward(edges, ones(outputs), run.targets(leaves, edges))
                del edges
            del outputs, leaves
            run = self._require_one_plan(replace(run, collective=run.collective or seen.any))
            if is_accelerator(self.context.device) and not run.collective:
                self._replay(run)
            measured, outputs = self._costs(run, changes, alike)
            run = replace(run, outputs=outputs)
            if timed and (kind, not alike) in self._measured and not checks:  # times and forms are the same
                measured = measured.with_times_of(self._measured[kind, not alike][0])
            elif timed:
                measured = self._with_times(run, measured, known)
            # `kind` does not include buffers that no operation reads
            if measured.holds_for_its_kind and stage.buffers_read().keys() >= {*measured.behaviour.changed_buffers}:
                measured = replace(measured, kind=kind)
                self._measured[kind, alike] = measured, stage
        detached = [t.detach().requires_grad_(need) for t, need in zip(outputs, needs, strict=True)]
        return measured, rebuild_output(detached)

    def times(
        self, stage: StageModule, value: Any, last: bool, measured: Measured | None, known: StageTimes | None = None
    ) -> tuple[Measured | None, Any]:
        """Add times and smaller forms to `measured`, whose bytes `stage` measured; also returns the stage's output.

        Args:
            last, known: as in `stage`.
        """
        run, output = _passed(stage, value, last, measured)
        if measured is None:
            return None, output
        like = self._by_kind.get(measured.kind)
        if like is None or (known is not None and known is self.checked):
            like = self._with_times(run, measured, known)
            if measured.kind is not None:
                self._by_kind[measured.kind] = like
        return measured.with_times_of(like), output

    def forms(
        self, stage: StageModule, value: Any, last: bool, measured: Measured | None, wanted: Sequence[Any]
    ) -> tuple[Measured | None, Any]:
        """Measure those forms of `measured`, which were estimated, whose identities are `wanted`, and drop the others;
        also returns the stage's output."""
        run, output = _passed(stage, value, last, measured)
        if measured is None:
            return None, output
        bare = measured.without_forms("the limit does not need them")
        if not wanted:
            return bare, output
        like = self._by_kind.get(measured.kind)
        if like is None:
            whole = WholeStage(run, bare.costs, bare.behaviour, bare.backward_peak, bare.carried_bytes)
            assert self._forms is not None
            found = self._forms.find(whole, tuple(KnownForm(one, None) for one in wanted))
            costs, behaviour = replace(bare.costs, forms=found.forms), replace(bare.behaviour, forms=found.recipes)
            like = replace(bare, costs=costs, behaviour=behaviour, no_forms=found.reason)
            if measured.kind is not None:
                self._by_kind[measured.kind] = like
        return bare.with_times_of(like), output

    def _require_one_plan(self, run: Run) -> Run:
        """Return `run`; refuse it if processes with plans of their own would wait for each other."""
        if run.collective and self._alone and several_processes():
            raise MeasureError(
                f"stage {run.stage.name!r} communicates with other processes, which would wait for each other if each"
                " had a plan of its own; give Checkpointable process_group=True, so that all follow one plan"
            )
        return run

    def _replay(self, run: Run) -> None:
        """Run the forward as a replay does, on autograd's thread. cuDNN's choices of algorithms and cuBLAS's workspaces
        belong to a thread; without this, the first replay in training would make them on top of what its step holds."""
        state = ReplayState(Generators(self.context.device))

        def again() -> None:
            with state.again():
                run.forward(run.leaves())

        within_backward(again, self.context.device)

    def _with_times(self, run: Run, measured: Measured, known: StageTimes | None) -> Measured:
        """Return `measured` with the stage's times and smaller forms."""
        saved, operations = measured.behaviour.saved, None
        if known is not None:
            end = EarlyStop(known.early_stop)
        else:
            operations = self._recorded(run, saved)
            end = self._early_stop(saved, operations)
        timings, (forward, backward, tail) = self._timed_or_known(run, end, known)
        costs = replace(measured.costs, forward_time=forward, backward_time=backward, tail_time=tail)
        behaviour = replace(measured.behaviour, early_stop=end.early_stop)
        whole = WholeStage(run, costs, behaviour, measured.backward_peak, measured.carried_bytes)
        costs, behaviour, no_forms = self._with_forms(whole, known, operations)
        if self.samples_overhead and forward + backward < LONG:
            self.sample_overhead(run, behaviour)
        host_bound = known is not None and known.host_bound
        return replace(
            measured,
            costs=costs,
            behaviour=behaviour,
            no_forms=no_forms,
            timings=timings,
            host_bound=host_bound,
        )

    def _with_forms(
        self, whole: WholeStage, known: StageTimes | None, operations: OperationLog | None
    ) -> tuple[Stage, Behaviour, str]:
        """Return the stage's costs and behaviour with its smaller forms, and why there are none."""
        if self._forms is None:
            return whole.costs, whole.behaviour, "switched off"
        if whole.run.last:
            return whole.costs, whole.behaviour, "the last stage needs none"
        found = self._forms.find(whole, known.forms if known else None, operations)
        return replace(whole.costs, forms=found.forms), replace(whole.behaviour, forms=found.recipes), found.reason

    def _timed_or_known(
        self, run: Run, end: EarlyStop, known: StageTimes | None
    ) -> tuple[Timings | None, tuple[float, float, float]]:
        """Return the seconds of forward, backward and tail, and their timings unless the times are `known`."""
        if known is None:
            timings = self._times(run, end)
            return timings, timings.medians()
        if known is self.checked:
            check_times(known, self._check_runs(run))
        return None, (known.forward_time, known.backward_time, known.tail_time)

    def _times(self, run: Run, end: EarlyStop) -> Timings:
        """Measure the seconds of forward, backward and tail, together with those of earlier stages of the same kind."""
        timings, repeats = Timings(), self.context.repeats
        if not run.stage.varying:
            kind = structure(run.stage.modules), describe(run.rebuild(run.tensors)), end.early_stop, run.last
            timings = self._timings.setdefault(kind, timings)
        time_stage(run, end, repeats.at_least(1) if timings.forward else repeats, self.context.device, timings)
        return timings

    def _check_runs(self, run: Run) -> list[float]:
        """Return the seconds of forward and backward together in a few runs."""
        timings = Timings()
        time_stage(run, EarlyStop(), Repeats(CHECK_RUNS, CHECK_RUNS), self.context.device, timings)
        return [sum(pair) for pair in zip(timings.forward, timings.backward, strict=True)]

    def copy_bandwidth(self, nbytes: float) -> float:
        """Return the bandwidth at which a tensor of `nbytes` is copied on the device, in B/s."""
        return copy_bandwidth(nbytes, self.context.device)

    def sample_overhead(self, run: Run, behaviour: Behaviour) -> None:
        """Measure the interpreter's overhead in this stage."""
        self._overhead.sample(run, behaviour)

    def overhead_times(self) -> OverheadTimes:
        """Return the interpreter's overhead, from the stages measured so far."""
        return self._overhead.times()

    def _recorded(self, run: Run, kinds: Sequence[SavedKind]) -> OperationLog | None:
        """Return the operations of a forward, if they are needed and can be recorded."""
        if SavedKind.OWN not in kinds or run.collective or unfit(run.stage) is not None:
            return None
        try:
            log = self.context.recorded(run)
        except Exception:  # a forward may raise anything under a dispatch mode
            return None
        return log if len(log.packs) == len(kinds) else None

    def _early_stop(self, kinds: Sequence[SavedKind], log: OperationLog | None) -> EarlyStop:
        """Return where a replay may stop. It runs to its end if the stage is compiled or gathers parameters, since
        there may be work at its end, and if an operation writes a tensor after autograd saved it (the noise of
        ``rrelu``)."""
        if log is None:
            return EarlyStop()
        own = [n for n, kind in enumerate(kinds) if kind is SavedKind.OWN]
        behind = log.operations[log.packs[own[-1]].before :]
        storages = {log.packs[n].storage for n in own}
        if None in storages or storages & {storage for op in behind for storage in op.writes}:
            return EarlyStop()
        left_out, whole = (sum(op.seconds for op in ops) for ops in (behind, log.operations))
        return EarlyStop(own[-1] + 1, left_out / whole if whole else 0.0)


def _passed(stage: StageModule, value: Any, last: bool, measured: Measured | None) -> tuple[Run, Any]:
    """Return how `stage` runs on `value`, and its output."""
    tensors, rebuild = flatten(value)
    run = Run(stage, tensors, rebuild, last, measured is not None and measured.collective)
    leaves = run.leaves()
    outputs, rebuild_output = flatten(run.forward(leaves))
    detached = [t.detach() for t in outputs]
    result = rebuild_output([t.detach().requires_grad_(t.requires_grad) for t in outputs])
    return replace(run.noted(leaves, outputs), outputs=detached), result

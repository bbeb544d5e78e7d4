"""One stage, run in the ways that the machine knows, and what each run costs in bytes and seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..capture.changes import ChangedBuffers
from ..capture.operations import OperationLog, record_operations
from ..capture.saved_tensors import watch_saved
from ..capture.sharding import gathers
from ..capture.stage import Behaviour, SavedKind, StageModule, flatten, pieces, storage_key
from ..chain import Stage
from ..errors import MeasureError
from ..runtime.convolutions import Algorithms
from ..runtime.replay import RNG_BYTES, Generators
from .allocations import AllocationLog, mark, record
from .form_meter import FormMeter
from .forms import Policy, unfit
from .gradients import GradientPlace
from .known_times import StageTimes
from .skips import Lying, lying
from .steady import Repeats, Series
from .trial import Run, backward, clock, get_edges, handed_over, ones, permuted

# A collective's thread may be the last to let go of a buffer, which the log of this thread does not see. Sharded stages are
# run a few times more, always as often, since all processes must take part, and the run that seems to leave least counts.
COLLECTIVE_TRIES = 3
LEAST_TAIL = 0.01  # of a stage's forward: a shorter one is not worth timing, and counts as none
CUDA_BLOCK = 512  # bytes; the caching allocator rounds every request up to a multiple

T = TypeVar("T")
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})  # whose bytes are those of one storage


@dataclass(frozen=True)
class Measured:
    """Costs of a stage for the chain, and its behaviour for the runtime.

    gradients: where the backward leaves the gradient of each input tensor; None for those without. own_gradient_bytes: of
    each output tensor's gradient by itself, 0 for those without. lies: which tensors share storages. no_forms: why the
    stage has no smaller forms, if so. The costs count gradients like that, one by one; those that share or outgrow their bytes are `gradients.charge`'s business. So
    `backward_transient_bytes`, of the forms too, are the most that the backward holds above ā_i and δ_i: what of it is δ_{i-1}
    follows from that charge. begun_bytes: the same once ``B`` has let go of the outputs, so that it may be below 0. staying_bytes: the
    most where the outputs stay after all. strange_bytes: what the backward holds more where the gradients given are not contiguous. tail_time: seconds that a replay for its own backward alone leaves out (`runtime.tails`).
    """

    costs: Stage
    behaviour: Behaviour
    gradients: tuple[GradientPlace | None, ...]
    own_gradient_bytes: tuple[int, ...]
    lies: Lying
    begun_bytes: int
    staying_bytes: int
    strange_bytes: int = 0
    no_forms: str = ""
    tail_time: float = 0.0


class End(NamedTuple):
    """Where a replay for its own backward alone may end. enough: `Behaviour.enough`. share: of the seconds of the stage's operations,
    those behind, as they took when they were recorded."""

    enough: int = 0
    share: float = 0.0


class Meter:
    """Measures stages on one device.

    Args:
        device: where parameters and inputs are. repeats: timed runs, of which the median counts; None: until it is steady. forms: whether to look for
        smaller forms too; a policy says what they keep. algorithms: other ones that convolutions may run by.
    """

    def __init__(
        self,
        device: torch.device,
        repeats: int | None,
        forms: bool | Policy = False,
        algorithms: Sequence[Algorithms] = (),
    ) -> None:
        self.device = device
        self.repeats = Repeats.read(repeats)
        self.rng_bytes = RNG_BYTES if device.type == "cpu" else 0  # on the device, of a generator's state
        self.known_time: StageTimes | None = None  # of the stage that comes next, where it need not be measured
        policy = None if isinstance(forms, bool) else forms
        self._algorithms = algorithms
        self._forms = self.form_meter(policy, bool(forms)) if forms or algorithms else None
        self._lasting: set[int] = set()  # storages that are there throughout the step

    def form_meter(self, policy: Policy | None, partial: bool) -> FormMeter:
        """What finds and measures smaller forms."""
        return FormMeter(self.device, self.repeats, policy, partial, self._algorithms)

    def begin(self, value: Any) -> None:
        """What is measured next starts the chain: its input `value` is there throughout."""
        self._lasting = {storage_key(t) for t in flatten(value)[0]}

    def stage(self, stage: StageModule, value: Any, last: bool) -> tuple[Measured | None, Any]:
        """Measure `stage` on the input `value`; None where its output needs no gradient. Also returns its output.

        last: whether the caller holds its output throughout.
        """
        tensors, rebuild = flatten(value)
        run = Run(stage, tensors, rebuild, last)
        leaves, changes = run.leaves(), ChangedBuffers(stage)
        outputs, rebuild_output = flatten(run.forward(leaves))  # workspaces and lazy tables come first
        self._refuse_subclasses(stage, outputs)
        needs = [t.requires_grad for t in outputs]
        if any(needs):
            try:
                backward(get_edges(outputs), ones(outputs), run.targets(leaves))
            except RuntimeError as error:
                if "use_reentrant" not in str(error):
                    raise
                raise MeasureError(
                    f"stage {stage.name!r} has a reentrant torch.utils.checkpoint, which allows no gradients but by"
                    " .backward(); pass it use_reentrant=False"
                ) from None
            del outputs, leaves
            measured, outputs = self._costs(run, changes)
        else:
            measured = None
        detached = [t.detach().requires_grad_(need) for t, need in zip(outputs, needs, strict=True)]
        return measured, rebuild_output(detached)

    def _costs(self, run: Run, changes: ChangedBuffers) -> tuple[Measured, list[torch.Tensor]]:
        changes.look()
        generators = Generators(self.device)
        drawn = generators.states()
        leaves = run.leaves()
        versions = [t._version for t in leaves]
        outputs, saved, gathered, log = self._kept(run, leaves)
        for _ in range(COLLECTIVE_TRIES if any(gathers(m) for m in run.stage.modules) else 0):
            generators.put(drawn)
            again = self._kept(run, leaves)
            if sum(again[3].live().values()) < sum(log.live().values()):
                outputs, saved, gathered, log = again
            del again
        live = log.live()
        self._refuse_subclasses(run.stage, saved)
        changed = changes.look()
        draws = log.drew or generators.states() is not drawn
        inputs = {storage_key(t) for t in leaves}
        kinds = tuple(SavedKind.RESIDENT if storage_key(t) in gathered else self._kind(t, inputs, live) for t in saved)
        own = {self.address(t) for t, kind in zip(saved, kinds, strict=True) if kind is SavedKind.OWN}
        made = {self.address(t) for t in outputs}
        self._lasting |= {storage_key(t) for t in outputs if self.address(t) not in live} - inputs  # a module's tables
        own_outputs = tuple(storage_key(t) not in self._lasting for t in outputs)
        carried = [t for t in outputs if storage_key(t) in inputs - self._lasting]
        saved_bytes = sum(size for ptr, size in live.items() if ptr in own | made)
        output_bytes = sum(size for ptr, size in live.items() if ptr in made)
        stuck = sum(live.values()) - saved_bytes
        carried_bytes = self.storage_bytes(carried)  # of the input's, and charged to the output too
        saved_bytes, output_bytes = saved_bytes + carried_bytes, output_bytes + carried_bytes
        del carried
        own_gradients = tuple(self.gradient_bytes([t]) for t in outputs)
        written = [n for n, (t, version) in enumerate(zip(leaves, versions, strict=True)) if t._version != version]
        lies = lying(leaves, outputs, [self.storage_bytes([t]) for t in outputs], saved, written)
        # nobody runs on the last stage's output
        outputs = [t.new_empty(0) if run.last else t.detach() for t in outputs]
        shapes = [(t.shape, t.dtype) for t in saved]
        saved.clear()
        del leaves

        (backward_peak, begun_peak, staying_peak), places = self._backward_peak(run)
        strange_bytes = 0
        if not run.last and any(len(_strides(t)) > 1 for t in outputs):
            (strange_peak, _, _), strange_places = self._backward_peak(run, permuted)
            strange_bytes = max(0, strange_peak - backward_peak)
            pairs = zip(places, strange_places, strict=True)
            places = tuple(a and a._replace(passed_on=b is not None and b.strange) for a, b in pairs)
        leaves = run.leaves()
        shapes_again: list[tuple[torch.Size, torch.dtype]] = []

        def forget(tensor: torch.Tensor) -> None:
            shapes_again.append((tensor.shape, tensor.dtype))

        generators.put(drawn)  # so that whoever saves other tensors now has no better reason than what it remembers
        with watch_saved(forget):
            dropping = self.record(lambda: [t.detach() for t in flatten(run.forward(leaves))[0]])[1]
        if shapes_again != shapes:
            raise MeasureError(
                f"stage {run.stage.name!r} saves other tensors for backward each time that it runs on the same input, since it"
                " remembers something (a cache that grows, a counter); switch that off, as with use_cache=False"
            )
        end = self._end(run, kinds)
        known = self.known_time
        times = (known.forward_time, known.backward_time, known.tail_time) if known else self._times(run, end)
        above = log.peak() - saved_bytes - stuck, dropping.peak() - output_bytes - stuck
        lies = lies._replace(spare=(max(0, -above[0]), max(0, -above[1])))
        costs = Stage(
            name=run.stage.name,
            forward_time=times[0],
            backward_time=times[1],
            output_bytes=output_bytes,
            saved_bytes=saved_bytes,
            grad_bytes=sum(own_gradients),
            forward_transient_bytes=max(0, above[0]),
            checkpoint_transient_bytes=max(0, above[1]),
            backward_transient_bytes=backward_peak,
        )
        behaviour = Behaviour(kinds, own_outputs, changed, draws, stuck, end.enough, varying=run.stage.varying)
        reason = "switched off" if self._forms is None else "the last stage needs none"
        if self._forms is not None and not run.last:
            found = self._forms.find(run, costs, behaviour, carried_bytes, known.forms if known else None)
            costs, reason = replace(costs, forms=found.forms), found.reason
            behaviour = replace(behaviour, forms=found.recipes)
        return Measured(
            costs, behaviour, places, own_gradients, lies, begun_peak, staying_peak, strange_bytes, reason, times[2]
        ), outputs

    def _kept(
        self, run: Run, leaves: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], set[int], AllocationLog]:
        """A recorded forward: its outputs, what autograd saves, which storages of those are parameters', and the log."""
        saved: list[torch.Tensor] = []
        gathered: set[int] = set()  # parameters may be there only while the stage runs (FSDP)

        def keep(tensor: torch.Tensor) -> None:
            saved.append(tensor.detach())
            if storage_key(tensor) in {storage_key(p) for m in run.stage.modules for p in m.parameters()}:
                gathered.add(storage_key(tensor))

        with watch_saved(keep):
            outputs, log = self.record(lambda: flatten(run.forward(leaves))[0])
        return outputs, saved, gathered, log

    def _end(self, run: Run, kinds: Sequence[SavedKind]) -> End:
        """Where a replay may end. A stage that is compiled or gathers parameters may have something to do at its end, and so has one
        with an operation that autograd saves an argument of before it is written (the noise of ``rrelu``)."""
        own = [n for n, kind in enumerate(kinds) if kind is SavedKind.OWN]
        if not own or unfit(run.stage) is not None:
            return End()
        try:
            log = self.recorded(run)
        except Exception:  # a forward may break in any way under a dispatch mode
            return End()
        if len(log.packs) != len(kinds):
            return End()
        behind = log.operations[log.packs[own[-1]].before :]
        storages = {log.packs[n].storage for n in own}
        if None in storages or storages & {storage for op in behind for storage in op.writes}:
            return End()
        left_out, whole = (sum(op.seconds for op in ops) for ops in (behind, log.operations))
        return End(own[-1] + 1, left_out / whole if whole else 0.0)

    def _backward_peak(
        self, run: Run, given: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] = ones
    ) -> tuple[tuple[int, int, int], tuple[GradientPlace | None, ...]]:
        """Bytes above what ā and δ_i hold, from the start of ``B``, once it has let go of the outputs, which may be below
        0, and where those stay; and where it leaves the inputs' gradients. given: makes the gradients of the outputs.

        Parameter gradients are resident, but each one's fresh value is there until it has been added to them: it counts
        from its making to the mark that its hook leaves.
        """
        leaves = run.leaves()
        targets = run.targets(leaves)
        held: list[torch.Tensor] = []
        incoming: list[tuple[int, int]] = []  # (storage, output) of the gradients given
        watches: list[StorageWeakRef] = []  # of those, so that no other storage gets the key of one that is gone
        made: set[int] = set()

        def step() -> tuple[torch.Tensor | None, ...]:
            outputs = flatten(run.forward(leaves))[0]
            gradients = given(outputs)
            held.extend(t.detach() for t in outputs if run.last)
            held.extend(g for g in gradients if run.last)  # the caller may hold δ_L; autograd lets other δ_i go on its way
            needing = [n for n, t in enumerate(outputs) if t.requires_grad]
            incoming.extend((storage_key(g), n) for g, n in zip(gradients, needing, strict=True))
            watches.extend(StorageWeakRef(g.untyped_storage()) for g in gradients)
            made.update(self.address(t) for t in outputs)
            start = handed_over(outputs, gradients)
            self.mark("backward")
            del outputs  # as the interpreter does when B begins
            self.mark("begun")
            return backward(*start, targets)

        hooks = [p.register_hook(lambda _, n=n: self.mark(str(n))) for n, p in enumerate(run.parameters)]
        try:
            grads, log = self.record(step)
        finally:
            for hook in hooks:
                hook.remove()
        fresh = grads[len(grads) - len(run.parameters) :]
        ends = {self.address(piece): str(n) for n, g in enumerate(fresh) if g is not None for piece in pieces(g)}
        rest = log.after("backward")
        begun = rest.after("begun")
        given_back = rest.level() - begun.level()
        peaks = rest.peak(ends), given_back + begun.peak(ends), rest.without_release(made).peak(ends)
        return peaks, tuple(self._places(leaves, grads, dict(incoming)))

    def _places(
        self, leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], incoming: dict[int, int]
    ) -> Iterator[GradientPlace | None]:
        found = iter(grads)
        for leaf in leaves:
            gradient = next(found) if leaf.requires_grad else None
            if gradient is None:
                yield None
            else:
                key = storage_key(gradient)
                nbytes = self._rounded(gradient.untyped_storage().nbytes())
                yield GradientPlace(key, nbytes, incoming.get(key), not gradient.is_contiguous())

    def _times(self, run: Run, end: End) -> tuple[float, float, float]:
        """Median seconds of the forward, the backward and the tail.

        The tail is the median share that what comes after the last tensor saved has of one forward: the difference of two, each with
        its own noise, would be of no use where it is small.
        """
        tailed = end.share >= LEAST_TAIL and not run.last  # nobody takes the last stage's output from a replay
        width = 7 if tailed else 4
        ticks = clock(self.device)

        def series() -> list[Series]:
            spans = ticks.spans()
            found = [Series(spans[0::width]), Series(spans[2::width])]
            if tailed:
                parts = zip(spans[4::width], spans[5::width], strict=True)
                found.append(Series([behind / (before + behind or 1.0) for before, behind in parts], 1.0))
            return found

        for _ in self.repeats.rounds(series):
            leaves = run.leaves()
            ticks.tick()
            outputs = flatten(run.forward(leaves))[0]
            ticks.tick()
            edges, gradients = get_edges(outputs), ones(outputs)
            del outputs
            ticks.tick()
            backward(edges, gradients, run.targets(leaves))
            ticks.tick()
            if tailed:
                self._tail(run, end.enough, ticks.tick)
        medians = [statistics.median(one.seconds) for one in series()]
        return medians[0], medians[1], medians[0] * medians[2] if tailed else 0.0

    @staticmethod
    def _tail(run: Run, enough: int, tick: Callable[[], None]) -> None:
        """Run a forward; `tick` before it, when it has saved `enough` tensors, and at its end."""
        leaves = run.leaves()
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> None:
            saved.append(tensor.detach())
            if len(saved) == enough:
                tick()

        with watch_saved(keep):
            tick()
            outputs = run.forward(leaves)
        tick()
        del outputs

    def copy_bandwidth(self, nbytes: float) -> float:
        """B/s at which a tensor of `nbytes` is copied on the device: the median of five, after a first that does not count."""
        source, ticks = torch.zeros(max(1, int(nbytes)), dtype=torch.uint8, device=self.device), clock(self.device)
        source.clone()
        for _ in range(5):
            ticks.tick()
            source.clone()
            ticks.tick()
        return source.numel() / max(statistics.median(ticks.spans()[::2]), 1e-9)

    def gradient_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of the gradients of those `tensors` that need one."""
        return sum(self._rounded(t.numel() * t.element_size()) for t in tensors if t.requires_grad)

    def storage_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of the storages of `tensors`, each once."""
        return sum(self._rounded(n) for n in {storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())

    # -- where bytes are seen: here the device's allocator; an estimate has another way

    def record(self, run: Callable[[], T]) -> tuple[T, AllocationLog]:
        """Call `run` and log what is allocated meanwhile."""
        return record(run, self.device)

    def mark(self, name: str) -> None:
        """Leave a mark in the log being recorded."""
        mark(name)

    def recorded(self, run: Run) -> OperationLog:
        """The operations of a forward."""
        leaves = run.leaves()
        return record_operations(lambda: flatten(run.forward(leaves))[0], self.device)

    def address(self, tensor: torch.Tensor) -> int:
        """What tells the storage of `tensor` from others in a log."""
        return tensor.untyped_storage().data_ptr()

    def plain(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of `tensor` are those of one storage."""
        return type(tensor) in PLAIN

    def _refuse_subclasses(self, stage: StageModule, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not self.plain(tensor):
                raise MeasureError(
                    f"stage {stage.name!r} makes or saves a {type(tensor).__name__}, whose bytes rotoff cannot move; use plain"
                    " tensors in what it returns and differentiates"
                )

    def _kind(self, tensor: torch.Tensor, inputs: set[int], live: dict[int, int]) -> SavedKind:
        if storage_key(tensor) in inputs:
            return SavedKind.INPUT
        return SavedKind.OWN if self.address(tensor) in live else SavedKind.RESIDENT

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // CUDA_BLOCK) * CUDA_BLOCK if self.device.type == "cuda" else nbytes


def _strides(tensor: torch.Tensor) -> list[int]:
    """Those of dimensions with more than one number."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]

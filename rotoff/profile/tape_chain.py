"""The chain of a step from its trace: where to cut, and what each stage takes.

a_i are the contents that later stages need, ā_i those that autograd saves in stage i, with a_i. Contents that are
needed by more than `far` stages stay on the device for the whole step, as a part of a_0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ..core.chain import Chain, Form, LinkRates, Stage
from ..core.parameters import ParameterGroup
from ..core.sequence import COMPUTES, FORWARDS, UPDATES, Op, OpKind, Sequence, Value, a, abar
from ..core.simulator import Machine, early_stops
from ..core.steady_step import at_rest
from ..runtime.execution_plan import Layout
from ..runtime.placed.tensor import ALIGNMENT
from ..tensors.storage import rounded
from .trace import Ran, Trace

STAGES = 40  # by default; the solver takes seconds for 100
CROSSING = 0.25  # share of the bytes that a stage makes that it may pass on
USELESS = 0.1  # share of them that a stage must not pass on
COARSE = 12  # a model is cut into at least so many stages, however much they pass on
FAR = 3  # contents that cross more borders than this stay on the device
FORMS = 4  # smaller ones of a stage, at most
LEAST = 0.02  # share of ā by which one is smaller than the next
CALL = 3e-6  # seconds of Python and autograd for each operation


class _Uses:
    """Until which position each content is needed, and where the backward crosses only once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.at = [trace.ran[one.op].at for one in trace.made]
        self.last = list(self.at)
        for op in trace.ran:
            for c in op.reads:
                self.last[c] = max(self.last[c], op.at)
        self.saved: dict[int, list[int]] = {}  # by content, the positions of its saved tensors
        for saved in trace.saved:
            if saved.content is not None:
                c = trace.latest(saved.content)
                self.saved.setdefault(c, []).append(saved.at)
                self.last[c] = max(self.last[c], saved.at)

    def crossed_once(self) -> list[bool]:
        """For each position, whether the backward reads nothing from it on once it has read something before it."""
        many = self.trace.ran[-1].at + 2
        twice = [0] * (many + 1)
        earliest = many
        for event in self.trace.backward:
            at = event.reads
            if at is None:
                continue
            if at > earliest:
                twice[earliest + 1] += 1
                twice[min(at, many - 1) + 1] -= 1
            earliest = min(earliest, at)
        crossed, count = [], 0
        for change in twice[:many]:
            count += change
            crossed.append(not count)
        return crossed


def _places(uses: _Uses) -> Iterator[tuple[Ran, Ran, int, list[int]]]:
    """Yield where the model can be cut: the operations before and after, the position, and what crosses there."""
    trace, allowed, alive = uses.trace, uses.crossed_once(), list[int]()
    for before, op in pairwise(trace.ran):
        alive = [c for c in (*alive, *before.makes) if uses.last[c] > before.at]
        at = next((at for at in range(before.at + 1, op.at + 1) if allowed[at]), None)
        crossing = [c for c in alive if at is not None and uses.last[c] >= at]
        later = (trace.made[c].later for c in crossing)  # what is overwritten later would be copied
        if at is not None and crossing and not any(c is not None and uses.at[c] >= at for c in later):
            yield before, op, at, crossing


def _cuts(uses: _Uses, count: int) -> list[int]:
    """Return the positions at which to cut: around every n-th part of all bytes made, where the fewest bytes cross.
    Bytes that also cross the cut before count twice."""
    trace, places = uses.trace, {op.at: (at, crossing) for _, op, at, crossing in _places(uses)}
    total = trace.size(range(len(trace.made)))
    share, cuts, returned = total / max(count, 1), list[int](), list[int]()
    last, best, lowest, since, after = 0, 0, 0, 0, 0  # after: bytes made since `best`
    for before, op in pairwise(trace.ran):
        made = trace.size(before.makes)
        since, after = since + made, after + made
        returned += [c for c in before.makes if trace.made[c].returned]
        at, crossing = places.get(op.at, (0, []))
        stays = trace.size(c for c in (*crossing, *returned) if uses.at[c] >= last)
        if crossing and since >= share / 2 and stays < since * (1 - USELESS):
            price = sum(trace.made[c].nbytes * (1 if uses.at[c] >= last else 2) for c in crossing)
            if not best or price <= lowest:
                best, lowest, after = at, price, 0
        if since < 1.5 * share or not best:
            continue
        if lowest > since * CROSSING and since < total / COARSE:
            continue
        cuts.append(best)
        last, since, best = best, after, 0
    return [*cuts, best] if best and lowest <= since * CROSSING else cuts


def finest(trace: Trace, only_saved: bool) -> tuple[int, ...]:
    """Return the positions at which stages begin if they end wherever something new crosses, or only what autograd
    saves."""
    uses, before, begins = _Uses(trace), set[int](), [0]
    for _, _, at, crossing in _places(uses):
        new = {c for c in crossing if c not in before}
        before |= new
        if new and (not only_saved or all(trace.latest(c) in uses.saved for c in new)):
            begins.append(at)
    return tuple(begins)


def is_within(op: Ran, names: Collection[str]) -> str:
    """Return the first of `names` in a call of whose module the operation runs, or ""."""
    return next((name for name in names if op.module == name or op.module.startswith(f"{name}.")), "")


class _Cut:
    """What stages that begin at `begins` make, by stage. of_stage: of each content. stay: what stays on the device.
    handed: a_i. saved: what autograd saves of it there."""

    def __init__(self, uses: _Uses, begins: Several[int], far: float) -> None:
        self._trace, self._begins = uses.trace, begins
        made, many = uses.trace.made, len(begins)
        self.of_stage = [self._stage(at) for at in uses.at]
        until = [
            max(self._stage(last), i + (one.returned and i == many))
            for last, i, one in zip(uses.last, self.of_stage, made, strict=True)
        ]
        found = enumerate(self.of_stage)
        self.stay = {c for c, i in found if until[c] > i + far or (made[c].returned and i < many)}
        self.handed: list[list[int]] = [[] for _ in range(many + 1)]
        self.saved: list[set[int]] = [set() for _ in range(many + 1)]
        for c, i in enumerate(self.of_stage):
            for border in range(i, until[c]) if c not in self.stay else ():
                self.handed[border].append(c)
        for c, positions in uses.saved.items():
            if c not in self.stay and self.of_stage[c] in map(self._stage, positions):
                self.saved[self.of_stage[c]].add(c)

    def _stage(self, at: int) -> int:
        return bisect_right(self._begins, at)

    def layout(self, firsts: list[int], ends: list[int], forms: list[list[set[int]]]) -> Layout:
        """Return how to find the stages, from operation `firsts` to `ends` each, and their contents."""
        made, many, keys = self._trace.made, len(firsts), self._trace.keys(self._begins)

        def key(c: int) -> tuple[int, int]:
            return made[c].op - firsts[self.of_stage[c] - 1], made[c].out

        return Layout(
            tuple(self._begins),
            self._trace.end,
            tuple(keys[end - 1] for end in ends),
            tuple(tuple((self.of_stage[c], key(c)) for c in self.handed[i]) for i in range(1, many + 1)),
            tuple(tuple(frozenset(map(key, part)) for part in kept) for kept in forms),
            tuple(tuple(key(c) for c in sorted(self.stay) if self.of_stage[c] == i) for i in range(1, many + 1)),
        )


class StageBackwards:
    """grads: for each stage, the bytes of gradients when its backward begins. peaks: the most bytes that it holds, of
    gradients and of what autograd saved in the stage. arriving: the bytes that it makes of parameters' gradients.
    staying: its peaks, if these and those before them stay in the step. seconds: that it takes."""

    def __init__(self, trace: Trace, begins: Several[int], of_stage: Several[int], stay: Collection[int]) -> None:
        many = len(begins)
        self.grads, self.peaks, self.seconds = [0] * (many + 1), [0] * (many + 1), [0.0] * (many + 1)
        self.arriving, self.staying = [0] * (many + 1), [0] * (many + 1)
        left = [0] * (many + 1)  # by stage, what autograd has saved and is still to be read
        # how often each is let go of in its own stage: once for each call of a module that has saved it
        own = Counter(
            c
            for c, at in (event.freed for event in trace.backward if event.freed is not None)
            if c not in stay and bisect_right(begins, at) == of_stage[c]
        )
        for c in own:
            left[of_stage[c]] += trace.made[c].nbytes
        stage, gradients, arrived = 0, 0, 0  # stage 0: the loss
        for event in trace.backward:
            if stage:
                self.seconds[stage] += event.seconds
            if event.reads is not None:
                new = bisect_right(begins, event.reads)
                if new != stage:
                    stage = new
                    self.grads[stage] = self.grads[stage] or max(0, gradients)
            gradients += event.size
            if event.kept and event.size > 0:
                self.arriving[stage or many] += rounded(event.size, ALIGNMENT)
            arrived += rounded(-event.size, ALIGNMENT) if event.kept and event.size < 0 else 0
            if event.freed is not None:
                c, at = event.freed
                if c in own and bisect_right(begins, at) == of_stage[c]:
                    own[c] -= 1
                    left[of_stage[c]] -= 0 if own[c] else trace.made[c].nbytes
            if not stage:
                self.grads[many] = max(self.grads[many], gradients)
                continue
            self.peaks[stage] = max(self.peaks[stage], gradients + left[stage])
            self.staying[stage] = max(self.staying[stage], gradients + arrived + left[stage])


@dataclass(frozen=True, eq=False)
class TapeChain:
    """A chain with what its values are made of.

    handed: for each i from 0 on, the contents of a_i. forms: for each stage, those of ā_i in each of its forms, the
    whole one first. stay: those that stay on the device, which a_0 counts. runs: the stages. beside: bytes that a
    `mem_limit` counts beyond those of the chain: less than 0, since the chain counts the batch. ask: returns the
    `levels` of a plan that several processes follow.
    """

    chain: Chain
    layout: Layout
    trace: Trace
    handed: list[frozenset[int]]
    forms: list[list[frozenset[int]]]
    stay: frozenset[int]
    runs: list[StageRun]
    beside: int = 0
    ask: Callable[..., list[int]] | None = None

    def levels(self, sequence: Sequence, during: bool = False) -> list[int]:
        """Return the most bytes that each operation of `sequence` holds, in the terms of a `mem_limit`. during: as for
        `TapeGroups`."""
        if self.ask is not None:
            return self.ask(sequence, during)
        return [level + self.beside for _, level, _, _ in self.followed(sequence)]

    def followed(
        self, sequence: Sequence, parameters: Several[ParameterGroup] = ()
    ) -> Iterator[tuple[Op, int, Machine, Held]]:
        """Yield each operation of a sequence, the most bytes that it holds, and what is held once it has run.

        The chain charges each value by itself, and the first run of a stage as any other. Here contents that several
        values share count once, and are not made again where they are there; what the model's code still has of earlier
        stages counts in first runs.
        """
        chain = replace(self.chain, parameters=tuple(parameters))
        machine = Machine(chain, rest=at_rest(chain, sequence.ops, sequence.resident))
        held, ran, turned, gone = Held(self), 0, False, 0
        early = early_stops(sequence)
        for n, op in enumerate(sequence):
            turned |= machine.backward_phase and op.kind in COMPUTES
            before = machine.held_bytes
            event, own = machine.step(op, n in early), not op.of and op.kind not in UPDATES
            if op.kind in FORWARDS and op.stage > ran:
                ran = op.stage
                stays = self.contents(op.value, machine)
                most = held.nbytes + self.runs[op.stage - 1].first_peak(stays, held.contents)
                level = self.chain.input_bytes + event.parameter_memory + most
            elif op.kind is OpKind.B:
                most = self._backward_level(op.stage, machine.form[op.stage], held)
                level = self.chain.input_bytes + event.parameter_memory + most
            else:
                level = (before if op.kind in FORWARDS else event.memory) - (held.charged - held.nbytes)
                if op.kind in FORWARDS:
                    level += self.runs[op.stage - 1].again_peak(self.contents(op.value, machine), held.contents)
                elif own and op.kind is OpKind.PREFETCH:
                    new = self.contents(op.value, machine) - held.contents
                    level += self.trace.size(new) - machine.device[op.value]
                if ran and not turned:
                    level += self.runs[ran - 1].left_over(held.contents) + self._gathered(ran)
                if machine.backward_phase and not turned:
                    level -= self.chain.grad_bytes(len(self.runs))  # the caller has yet to make the loss
            if own:
                held.follow(machine, op)
            yield op, level - gone, machine, held
            gone += self._let_go[op.stage - 1] if op.kind is OpKind.B else 0

    def _gathered(self, ran: int) -> int:
        """Return the most bytes that FSDP2 has gathered, beside what stays, between the first runs of stage `ran` and
        of the next one, which begins within a call that it has gathered for, or the end of the forward."""
        return self.trace.passing if ran == len(self.runs) else self.trace.ran[self.runs[ran].first].gathering

    def _backward_level(self, i: int, form: int, held: Held) -> int:
        """Return the most bytes in the backward of stage i. held: when it begins."""
        run, size = self.runs[i - 1], self.trace.size
        most = held.nbytes - size(c for c in run.made if c in held.contents) + run.backward_peaks[form]
        if i == len(self.runs):  # before, the caller makes the loss
            most = max(most, held.nbytes + self.chain.grad_bytes(i))
            most = max([most, *(size(held.contents | one) + nbytes for one, nbytes in self._loss.items())])
        return most

    def backwards(self, trace: Trace) -> StageBackwards:
        """Return what the backwards of the stages hold in `trace`, the same step with the gradients of parameters."""
        begins, last = self.layout.begins, self.handed[-1]
        found = StageBackwards(
            trace, begins, [bisect_right(begins, trace.ran[c.op].at) for c in trace.made], {*self.stay, *last}
        )
        found.staying[-1] += trace.size(last)
        return found

    def held(self, sequence: Sequence) -> list[int | None]:
        """Return the bytes of all values on the device after each operation of `sequence`; None for ``B``."""
        size = self.trace.size
        return [
            None if op.kind is OpKind.B else size(self.stay.union(held.contents))
            for op, _, _, held in self.followed(sequence)
        ]

    @cached_property
    def _let_go(self) -> list[int]:
        """The bytes of what stays that each stage has made, and its backward lets go of: nobody else has it."""
        made, many = self.trace.made, len(self.trace.ran)
        alone = [c for c in self.stay if made[c].dies <= many]
        return [self.trace.size(c for c in alone if run.makes(c)) for run in self.runs]

    @cached_property
    def _loss(self) -> dict[frozenset[int], int]:
        """The most bytes that the loss and its backward hold, by what the caller still has of the forward."""
        waiting, gradients, most = self.trace.waiting - self.stay, 0, dict[frozenset[int], int]()
        for event in self.trace.backward:
            if event.reads is not None:
                break
            waiting, gradients = waiting - {event.gone}, gradients + event.size
            most[waiting] = max(most.get(waiting, 0), gradients)
        return most

    @cached_property
    def charging_first_runs(self) -> Chain:
        """The chain with the transients of first runs where these are larger. In a first run the model's code holds
        more than what a stage makes again."""
        stages = []
        for i, (stage, run) in enumerate(zip(self.chain.stages, self.runs, strict=True), start=1):
            known = [stage.forward_transient_bytes, *(form.forward_transient_bytes for form in stage.forms)]
            known.append(stage.checkpoint_transient_bytes or 0)
            kept = *self.forms[i - 1], self.handed[i]
            first = [run.first_peak(stays, self.handed[i - 1]) - self.trace.size(stays) for stays in kept]
            stages.append(charged(stage, [max(0, n - m) for n, m in zip(first, known, strict=True)]))
        return replace(self.chain, stages=tuple(stages))

    def contents(self, v: Value, machine: Machine) -> frozenset[int]:
        """Return what a value of an activation is made of."""
        return self.forms[v.stage - 1][machine.form[v.stage]] if v.saved else self.handed[v.stage]


def charged(stage: Stage, more: Several[int]) -> Stage:
    """Return a stage with so many bytes more in each of its forwards: with its forms, the whole one first, and without
    one."""
    return replace(
        stage,
        forward_transient_bytes=stage.forward_transient_bytes + more[0],
        checkpoint_transient_bytes=(stage.checkpoint_transient_bytes or 0) + more[-1],
        forms=tuple(
            replace(form, forward_transient_bytes=form.forward_transient_bytes + nbytes)
            for form, nbytes in zip(stage.forms, more[1:-1], strict=True)
        ),
    )


class Held:
    """What the activations that a machine holds are made of: a_0 does not count. nbytes: of it. charged: bytes that the
    chain charges for them."""

    def __init__(self, found: TapeChain) -> None:
        self._found = found
        self._values: dict[Value, tuple[frozenset[int], int]] = {}
        self._counts: Counter[int] = Counter()
        self.nbytes = self.charged = 0

    @property
    def contents(self) -> KeysView[int]:
        return self._counts.keys()

    def follow(self, machine: Machine, op: Op) -> None:
        """Follow an operation on activations that the machine has run, which changes values of its stage or of the one
        before alone."""
        made = self._found.trace.made
        for v in (a(op.stage), abar(op.stage), a(op.stage - 1), abar(op.stage - 1)):
            if v in self._values:
                contents, charged = self._values.pop(v)
                self.charged -= charged
                self._counts.subtract(contents)
                gone = [c for c in contents if not self._counts[c]]
                for c in gone:
                    del self._counts[c]
                self.nbytes -= sum(made[c].nbytes for c in gone)
            if v in machine.device and v != a(0):
                contents, charged = self._values[v] = self._found.contents(v, machine), machine.device[v]
                self.charged += charged
                self.nbytes += sum(made[c].nbytes for c in contents if c not in self._counts)
                self._counts.update(contents)


def chain_of(
    trace: Trace,
    rates: LinkRates,
    begins: Several[int],
    names: Collection[str] = (),
    far: float = FAR,
    beside: int = 0,
    forms: bool = True,
    like: TapeChain | None = None,
) -> TapeChain:
    """Return the chain of a step.

    Args:
        begins: the positions at which stages begin. names: of modules that give stages their names. beside: bytes of
            the batch. forms: whether stages have smaller ones. like: of a step of the same operations and stages, whose
            forms are taken.
    """
    firsts = [bisect_right([op.at for op in trace.ran], at - 1) for at in begins]
    cut = _Cut(_Uses(trace), begins, far)
    many, handed, saved, stay = len(begins), cut.handed, cut.saved, cut.stay
    backward = StageBackwards(trace, begins, cut.of_stage, {*stay, *handed[many]})
    for i in range(1, many + 1):  # a stage of which the backward reads nothing
        backward.grads[i] = backward.grads[i] or max(backward.grads[i - 1], trace.size(handed[i]))
        backward.peaks[i] = max(backward.peaks[i], backward.grads[i])
    costed, runs = [], list[StageRun]()
    ends = [*firsts[1:], len(trace.ran)]
    for i, (first, end) in enumerate(zip(firsts, ends, strict=True), start=1):
        before = runs[-1].left if runs else ()
        run = StageRun(trace, first, end, set(handed[i - 1]), set(handed[i]), saved[i], stay, before)
        # what the model returns stays with the caller
        peak = backward.peaks[i] + (trace.size(handed[i]) if i == many else 0)
        parts = like.runs[i - 1].kept[1:] if like is not None else run.parts() if forms else ()
        costs = run.stage(backward.seconds[i], backward.grads[i], backward.grads[i - 1], peak, parts)
        costed.append(replace(costs, name=is_within(trace.ran[first], names) or costs.name))
        runs.append(run)
    constant = trace.size(stay) + trace.beside + beside
    chain = Chain(tuple(costed), **rates._asdict(), input_bytes=constant, input_grad_bytes=backward.grads[0])
    whole = [[frozenset(part | run.handed) for part in run.kept] for run in runs]
    layout = cut.layout(firsts, ends, [run.kept for run in runs])
    return TapeChain(chain, layout, trace, list(map(frozenset, handed)), whole, frozenset(stay), runs, -beside)


def begins_of(trace: Trace, stages: int | Collection[str] = STAGES) -> tuple[int, ...]:
    """Return the positions at which stages begin. stages: about how many, or the names of modules that are one each."""
    uses = _Uses(trace)
    if isinstance(stages, int):
        return (0, *_cuts(uses, stages))
    places = _places(uses)
    return (0, *(at for before, op, at, _ in places if is_within(op, stages) != is_within(before, stages)))


def slope(one: tuple[Any, ...], other: tuple[Any, ...]) -> float:
    """Seconds that a byte less takes."""
    return float((other[1] - one[1]) / (one[0] - other[0]))


class StageRun:
    """The costs of one stage: operations `first` to `end`. before: what the model's code has of earlier stages when it
    begins, beside what stays. left: likewise, when it has ended."""

    def __init__(
        self,
        trace: Trace,
        first: int,
        end: int,
        entering: set[int],
        handed: set[int],
        saved: set[int],
        stay: set[int],
        before: Several[int] = (),
    ) -> None:
        self.trace, self.first, self.end, self.before = trace, first, end, before
        self.made = [c for op in trace.ran[first:end] for c in op.makes]
        self.left = [c for c in (*before, *self.made) if trace.made[c].dies >= end and c not in stay]
        self.entering, self.handed, self.saved, self.stay = entering, handed, saved, stay
        self.whole = saved | handed
        self._earlier = frozenset(before)
        self._near = {c for op in trace.ran[first:end] for c in (*op.reads, *op.makes)}
        self._known: dict[tuple[object, ...], int] = {}  # peaks, by what they depend on: many sequences ask for few
        # for each form of ā, what it keeps; the bytes of gradients and of the stage's own contents in its backward
        self.kept, self.backward_peaks = [saved], list[int]()

    def makes(self, c: int) -> bool:
        return self.first <= self.trace.made[c].op < self.end

    def stage(
        self, backward_seconds: float, grads: int, grads_before: int, peak: int, parts: Iterable[Collection[int]]
    ) -> Stage:
        size, ran = self.trace.size, self.trace.ran[self.first : self.end]
        seconds = sum(op.seconds for op in ran) + CALL * len(ran)
        transient = max(0, peak - size(self.whole) - grads - grads_before)
        self.backward_peaks, forms = [peak], []
        for part in map(set, parts):
            again = self._redo_seconds(self.saved - part)
            gone = size(self.whole) - size(part | self.handed)
            remade = self.again_peak(self.saved, part | self.handed)
            redone = max(transient + gone, remade - grads_before)
            own = size(c for c in part | self.handed if self.makes(c))
            self.backward_peaks.append(max(peak, grads + own + remade))
            forms.append(Form(size(part | self.handed), backward_seconds + again, self._transient(part), redone))
            self.kept.append(part)
        modules = [op.module for op in ran] or [""]
        seconds = max(seconds, 1e-7)
        until = self.trace.ran[self.end].at if self.end < len(self.trace.ran) else self.trace.end
        # what the last operation saves of its own result, which is before the next stage's first
        ends = {saved.content for saved in self.trace.saved if saved.at < until and saved.content in self.handed}
        return Stage(
            modules[0] if modules[0] == modules[-1] else f"{modules[0] or 'begin'}..{modules[-1]}",
            seconds,
            max(backward_seconds, 1e-7),
            size(self.handed),
            size(self.whole),
            grads,
            self._transient(self.saved),
            self._transient(set()),
            transient,
            tuple(forms),
            max(0.0, seconds - self._seconds(self._again(self.saved | ends, ()))),
        )

    def _transient(self, kept: set[int]) -> int:
        """Return the most bytes beyond what is kept and handed on when it runs again."""
        stays = kept | self.handed
        return max(0, self.again_peak(stays) - self.trace.size(stays - self.entering))

    def left_over(self, held: Collection[int]) -> int:
        """Return the bytes of what the model's code has when the stage has ended, beside what is `held`."""
        return self.trace.size(c for c in self.left if c not in held)

    def first_peak(self, stays: Collection[int], held: Collection[int]) -> int:
        """Return the most bytes of the stage's own in the first run, with what the model's code has of earlier stages
        that is not `held`."""
        return self._once(self._first_peak, frozenset(stays), self._earlier.intersection(held))

    def _once(self, peak: Callable[..., int], of: frozenset[int], held: frozenset[int]) -> int:
        key = peak.__name__, of, held
        if key not in self._known:
            self._known[key] = peak(of, held)
        return self._known[key]

    def _first_peak(self, stays: frozenset[int], held: frozenset[int]) -> int:
        made = self.trace.made
        dies: dict[int, int] = {}  # by operation, bytes that are gone when it begins
        level = most = 0
        for c in self.before:
            if c not in held:
                level += made[c].nbytes
                dies[made[c].dies] = dies.get(made[c].dies, 0) + made[c].nbytes
        for number in range(self.first, self.end):
            op = self.trace.ran[number]
            level -= dies.get(number, 0)
            most = max(most, level + op.peak)
            for c in op.makes:
                if c in self.stay:
                    continue
                level += made[c].nbytes
                if c not in stays:
                    dies[made[c].dies] = dies.get(made[c].dies, 0) + made[c].nbytes
            most = max(most, level - dies.get(number + 1, 0))
        return most

    def again_peak(self, wanted: Collection[int], kept: Collection[int] = ()) -> int:
        """Return the most bytes of their own while `wanted` are made again from what enters and is kept, as `Tape.make`
        does it. None of that is overwritten in the stage (`_places`), so nothing is copied."""
        of = frozenset(wanted)
        return self._once(self._again_peak, of, of.union(self._near).intersection(kept))

    def _again_peak(self, wanted: frozenset[int], kept: frozenset[int]) -> int:
        made, ran, size = self.trace.made, self.trace.ran, self.trace.size
        there = {*self.entering, *self.stay, *kept}
        wanted = wanted - there
        numbers = sorted(self._again(wanted, there))
        last = {c: n for n in numbers for c in ran[n].reads}
        level = most = 0
        for number in numbers:
            op = ran[number]
            changed, into = {c for c, _ in op.writes}, {c for _, c in op.writes if c is not None}
            most = max(most, level + op.copies + op.peak - op.gathered)
            level += size(set(op.makes) - into)
            ends = {*op.reads, *op.makes} - wanted - changed
            level -= size(
                c for c in ends if made[c].op >= self.first and c not in there and last.get(c, number) <= number
            )
        return most

    def parts(self) -> list[set[int]]:
        """Return what the smaller forms keep of what autograd saves.

        What is cheapest to make again for its bytes is left out first. Of the parts that come about, those on the
        convex hull of bytes and seconds are taken, without those next to the line through their neighbours.
        """
        made, left = self.trace.made, set(self.saved)
        inner = [c for c in self.saved - self.handed if made[c].again and made[c].nbytes]
        hull, least = [(self.trace.size(left), 0.0, set(left))], self.trace.size(self.whole) * LEAST
        for c in sorted(inner, key=lambda c: (self._redo_seconds({c}) / made[c].nbytes, c)):
            left.discard(c)
            again = self._again(self.saved - left, left | self.handed)
            left -= {one for one in inner if made[one].op in again}  # they are made, too
            size, seconds = self.trace.size(left), self._seconds(again)
            if hull[-1][0] - size < least:
                continue
            while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-2], (size, seconds)):
                hull.pop()
            hull.append((size, seconds, set(left)))
        while len(hull) > 1 + FORMS:
            rows = zip(hull, hull[1:], hull[2:], strict=False)
            bends = [(slope(b, c) - slope(a, b)) * (a[0] - c[0]) for a, b, c in rows]
            del hull[bends.index(min(bends)) + 1]
        return [part for _, _, part in hull[1:]]

    def _redo_seconds(self, gone: set[int]) -> float:
        """Return the seconds to make `gone` again, with the rest of ā there."""
        return self._seconds(self._again(gone, (self.saved - gone) | self.handed))

    def _seconds(self, ops: Collection[int]) -> float:
        return sum(self.trace.ran[n].seconds for n in ops) + CALL * len(ops)

    def _again(self, wanted: Collection[int], there: Collection[int]) -> set[int]:
        """Return the operations that make `wanted` again."""
        todo, ops = list(wanted), set[int]()
        while todo:
            number = self.trace.made[todo.pop()].op
            if number < self.first or number in ops:
                continue
            ops.add(number)
            todo += [c for c in self.trace.ran[number].reads if c not in there]
        return ops

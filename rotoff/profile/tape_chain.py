"""The chain of a model from the log of one recorded step: where to cut, and what each stage takes.

A stage is a run of segments. a_i are the contents that the next stage needs, ā_i those that autograd saves in stage i,
with a_i. Contents that are needed further on stay on the device for the whole step, as a part of a_0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ..core.chain import Chain, Form, Stage
from ..runtime.layout import Layout
from ..tape.contents import Content
from .recorded_step import END, GRADIENT, LOSS, OWN, Event, RecordedStep, Segment

STAGES = 40  # by default; the solver takes seconds for 100
CROSSING = 0.25  # share of the bytes that a stage makes that it may pass on
COARSE = 12  # a model is cut into at least so many stages, however much they pass on
FAR = 3  # contents that cross more borders than this stay on the device
SHARES = (0.75, 0.5, 0.25)  # of what autograd saves, kept by the smaller forms
CALL = 3e-6  # seconds of Python and autograd for each operation


class _Uses:
    """Where the contents of a recorded step are made and needed, by segment."""

    def __init__(self, step: RecordedStep) -> None:
        self.step = step
        self.firsts = [segment.first for segment in step.segments]
        self.made: list[list[Content]] = [[*op.made, *op.written()] for op in step.operations]
        self.last: dict[Content, int] = {}  # the last segment that needs it
        self.read: dict[Content, int] = {}  # the last operation that reads it
        for number, op in enumerate(step.operations):
            for reference in op.references:
                self.read[reference.content] = number
        for content, number in self.read.items():
            self.last[content] = self.segment(number)
        self.saved = [dict.fromkeys(map(_latest, segment.saved)) for segment in step.segments]
        for k, contents in enumerate(self.saved):
            for content in contents:
                self.last[content] = max(self.last.get(content, 0), k)

    def segment(self, number: int) -> int:
        return bisect_right(self.firsts, number) - 1

    def home(self, content: Content) -> int:
        return self.segment(content.op)

    def ends(self) -> list[int]:
        return [*self.firsts[1:], len(self.step.operations)]


def _latest(content: Content) -> Content:
    """Return what its storage has at the end, which is what autograd reads."""
    while content.next is not None:
        content = content.next
    return content


def size(contents: Iterable[Content]) -> int:
    return sum(content.nbytes for content in set(contents))


# -- where to cut


def _cuts(uses: _Uses, count: int) -> list[int]:
    """Return the segments before which to cut: around every n-th part of all bytes made, where the fewest bytes cross.
    Bytes that also cross the cut before count twice."""
    many = len(uses.firsts)
    made = [0] * many
    crossing: list[dict[Content, int]] = [{} for _ in range(many)]
    allowed = [True] * many
    for number, contents in enumerate(uses.made):
        home = uses.segment(number)
        for content in contents:
            made[home] += content.nbytes
            for k in range(home + 1, uses.last.get(content, home) + 1):
                crossing[k][content] = home
                if content.next is not None and content.next.op >= uses.firsts[k]:
                    allowed[k] = False  # it would be copied before it is overwritten
    for k, (first, after) in enumerate(pairwise([*uses.firsts, len(uses.made)])):
        allowed[k] &= after > first
    total = sum(made)
    share, cuts = total / max(count, 1), list[int]()
    last, best, since = 0, 0, 0

    def price(k: int) -> int:
        return sum(content.nbytes * (1 if home >= last else 2) for content, home in crossing[k].items())

    for k in range(1, many):
        since += made[k - 1]
        if allowed[k] and crossing[k] and since >= share / 2 and (not best or price(k) <= price(best)):
            best = k
        if since < 1.5 * share or not best:
            continue
        if price(best) > since * CROSSING and since < total / COARSE:
            continue
        cuts.append(best)
        last, since, best = best, sum(made[best:k]), 0
    return [*cuts, best] if best else cuts


# -- what the allocator did


def _operation_peaks(log: list[Event], many: int) -> list[int]:
    """Return the most bytes that each operation holds above those at its begin."""
    peaks, level, begins = [0] * many, 0, dict[str, int]()
    for event in log:
        if event.begins:
            begins[event.begins] = level
        elif event.ends:
            begins.pop(event.ends, None)
        level += event.size
        for name, start in begins.items() if event.size > 0 else ():
            if name.isdigit() and int(name) < many:
                peaks[int(name)] = max(peaks[int(name)], level - start)
    return peaks


@dataclass
class _Backward:
    """grads: for each stage, the bytes of gradients when its backward begins. peaks: the most bytes that it holds, of
    gradients and of what autograd saved in the stage."""

    grads: list[int]
    peaks: list[int]


def _backward(step: RecordedStep, uses: _Uses, stage_of: list[int], stay: Collection[Content]) -> _Backward:
    many = max(stage_of)
    found = _Backward([0] * (many + 1), [0] * (many + 1))
    live: dict[int, int] = {}  # gradients and what kernels take, by address
    mine: dict[tuple[int, int], int] = {}  # by address and segment, bytes of what autograd saved in that stage
    left = dict.fromkeys(range(len(uses.firsts)), 0)  # of these, by segment, what is still to be read
    for (ptr, k), content in step.fetched.items():
        if stage_of[uses.home(content)] == stage_of[k] and content not in stay:
            mine[ptr, k] = content.nbytes
            left[k] += content.nbytes
    owner: dict[int, int] = {}  # address -> segment, of what the backward has come to
    segment, in_own, gradients = -1, False, 0  # -1: the loss
    start = next(n for n, event in enumerate(step.log) if event.begins == LOSS)
    for event in step.log[start:]:
        if event.begins == END:
            break
        if OWN in (event.begins, event.ends):
            in_own = bool(event.begins)
        elif event.begins.startswith("stage "):
            segment = int(event.begins.removeprefix("stage "))
            owner.update({ptr: k for ptr, k in mine if k == segment})
            found.grads[stage_of[segment]] = found.grads[stage_of[segment]] or gradients
        elif event.begins.startswith(GRADIENT):
            gradients -= live.pop(int(event.begins.removeprefix(GRADIENT)), 0)
        elif in_own:
            pass
        elif event.size > 0:
            live[event.ptr] = event.size
            gradients += event.size
        elif event.size < 0 and event.ptr in live:
            gradients -= live.pop(event.ptr)
        elif event.size < 0 and (k := owner.pop(event.ptr, -1)) >= 0:
            left[k] -= mine[event.ptr, k]
        if segment < 0:
            found.grads[many] = max(found.grads[many], gradients)
            continue
        stage = stage_of[segment]
        saved = sum(nbytes for k, nbytes in left.items() if stage_of[k] == stage)
        found.peaks[stage] = max(found.peaks[stage], gradients + saved)
    return found


# -- the chain


def chain_of(step: RecordedStep, bandwidth: tuple[float, float], count: int = STAGES) -> tuple[Chain, Layout]:
    """Return the chain of a recorded step, and its layout. bandwidth: to the host and from it, B/s."""
    uses = _Uses(step)
    starts = [0, *_cuts(uses, count)]
    stage_of = [bisect_right(starts, k) for k in range(len(uses.firsts))]
    many = len(starts)
    of_stage = {c: stage_of[uses.segment(number)] for number, made in enumerate(uses.made) for c in made}
    needed = {c: stage_of[k] for c, k in uses.last.items()}
    returned = {c for c in step.returned if c in of_stage}
    until = {c: max(needed.get(c, i), i + (c in returned and i == many)) for c, i in of_stage.items()}
    far = {c for c, i in of_stage.items() if until[c] > i + FAR or (c in returned and i < many)}
    handed: list[list[Content]] = [[] for _ in range(many + 1)]
    saved: list[dict[Content, None]] = [{} for _ in range(many + 1)]
    for c, i in of_stage.items():
        for border in range(i, until[c]) if c not in far else ():
            handed[border].append(c)
    for k, contents in enumerate(uses.saved):
        saved[stage_of[k]].update({c: None for c in contents if of_stage.get(c) == stage_of[k] and c not in far})
    peaks = _operation_peaks(step.log, len(step.operations))
    backward = _backward(step, uses, stage_of, far)
    for i in range(1, many + 1):  # a stage of which the backward reads nothing
        backward.grads[i] = backward.grads[i] or max(backward.grads[i - 1], size(handed[i]))
    firsts = [uses.firsts[k] for k in starts]
    stages, layout_forms = [], []
    for i, (first, end) in enumerate(pairwise([*firsts, len(step.operations)]), start=1):
        run = _Stage(step, uses, peaks, first, end, set(handed[i - 1]), set(handed[i]), set(saved[i]), far)
        segments = [segment for k, segment in enumerate(step.segments) if stage_of[k] == i]
        seconds = sum(segment.backward_seconds for segment in segments)
        # what the model returns stays with the caller
        peak = backward.peaks[i] + (size(set(handed[i]) - saved[i].keys()) if i == many else 0)
        stage, kept = run.stage(_name(segments), seconds, backward.grads[i], backward.grads[i - 1], peak)
        stages.append(stage)
        layout_forms.append(tuple(frozenset((c.op - first, c.out) for c in contents) for contents in kept))
    layout = Layout(
        tuple(step.segments[k].place for k in starts),
        tuple(_key(step, first, end, i) for i, (first, end) in enumerate(pairwise([*firsts, len(uses.made)]), 1)),
        tuple(
            tuple((of_stage[c], (c.op - firsts[of_stage[c] - 1], c.out)) for c in handed[i]) for i in range(1, many + 1)
        ),
        tuple(layout_forms),
        tuple(tuple((c.op - firsts[i - 1], c.out) for c in far if of_stage[c] == i) for i in range(1, many + 1)),
    )
    constant = size(far) + _beside(step)
    chain = Chain(tuple(stages), *bandwidth, duplex=False, input_bytes=constant, input_grad_bytes=backward.grads[0])
    return chain, layout


def _beside(step: RecordedStep) -> int:
    """Return the bytes that the step holds beside the contents of its tape: states of generators, numbers that PyTorch
    wraps, copies of what is overwritten, what the tape does not see; and a generator's state that is put back."""
    live: dict[int, int] = {}
    in_own = False
    for event in step.log:
        if event.begins == LOSS:
            break
        if OWN in (event.begins, event.ends):
            in_own = bool(event.begins)
        elif event.size > 0 and not in_own:
            live[event.ptr] = event.size
        elif event.size < 0:
            live.pop(event.ptr, None)
    states = (op.state.nbytes for op in step.operations if op.state is not None and step.device.type == "cpu")
    return sum(size for ptr, size in live.items() if ptr not in step.returned_at) + max(states, default=0)


def _key(step: RecordedStep, first: int, end: int, stage: int) -> int:
    """Return the key of a stage, whose operations are known from now on as parts of this stage."""
    key = stage
    for op in step.operations[first:end]:
        key = op.continued(key)
        step.known.sure.add(key)
        step.known.held |= {(key, c.out) for c in (*op.made, *op.written()) if step.was_held(c)}
    return key


def _name(segments: list[Segment]) -> str:
    places = [segment.place[0] for segment in segments]
    return f"{places[0] or 'begin'}..{places[-1]}" if len(places) > 1 else places[0]


class _Stage:
    """The costs of one stage: operations `first` to `end`."""

    def __init__(
        self,
        step: RecordedStep,
        uses: _Uses,
        peaks: list[int],
        first: int,
        end: int,
        entering: set[Content],
        handed: set[Content],
        saved: set[Content],
        far: set[Content],
    ) -> None:
        self.step, self.uses, self.peaks, self.first, self.end = step, uses, peaks, first, end
        self.entering, self.handed, self.saved, self.far = entering, handed, saved, far
        self.whole = saved | handed

    def stage(
        self, name: str, backward_seconds: float, grads: int, grads_before: int, peak: int
    ) -> tuple[Stage, list[set[Content]]]:
        seconds = sum(self.step.seconds[self.first : self.end]) + CALL * (self.end - self.first)
        held = size(self.whole) + grads + grads_before
        transient = max(0, peak - held)
        kept, forms = [self.saved], []
        for share in SHARES:
            part = self._kept(share)
            if part == kept[-1] or not part:
                continue
            again = self._redo_seconds(self.saved - part)
            gone = size(self.whole) - size(part | self.handed)
            redone = max(transient + gone, self._again_peak(self.saved, part | self.handed) - grads_before)
            forms.append(Form(size(part | self.handed), backward_seconds + again, self._transient(part), redone))
            kept.append(part)
        stage = Stage(
            name,
            max(seconds, 1e-7),
            max(backward_seconds, 1e-7),
            size(self.handed),
            size(self.whole),
            grads,
            self._transient(self.saved),
            self._transient(set()),
            transient,
            tuple(forms),
        )
        return stage, kept

    def _transient(self, kept: set[Content]) -> int:
        """Return the most bytes beyond what is kept and handed on, in the first run and when it runs again."""
        stays = kept | self.handed
        return max(0, max(self._first_peak(stays), self._again_peak(stays)) - size(stays - self.entering))

    def _first_peak(self, stays: set[Content]) -> int:
        """Return the most bytes of the stage's own in the first run, with what the model's code holds of earlier
        ones."""
        death: Mapping[Content, int] = self.step.death
        never = len(self.uses.made) + 1
        dies: dict[int, list[Content]] = {}
        level = most = 0
        earlier = (c for made in self.uses.made[: self.first] for c in made)
        for content in earlier:
            if content not in self.entering and content not in self.far and death.get(content, never) > self.first:
                level += content.nbytes
                dies.setdefault(death.get(content, never), []).append(content)
        for number in range(self.first, self.end):
            level -= size(dies.get(number, ()))
            most = max(most, level + self.peaks[number])
            for content in self.uses.made[number]:
                if content in self.far:
                    continue
                level += content.nbytes
                if content not in stays:
                    dies.setdefault(death.get(content, never), []).append(content)
            most = max(most, level - size(dies.get(number + 1, ())))
        return most

    def _again_peak(self, wanted: set[Content], kept: Collection[Content] = ()) -> int:
        """Return the most bytes of their own while `wanted` are made again from what enters and is kept, as `Tape.make`
        does it."""
        there = {*self.entering, *self.far, *kept}
        wanted = wanted - there
        numbers, todo = set[int](), list(wanted)
        while todo:
            content = todo.pop()
            if content.op >= self.first and content.op not in numbers and content not in there:
                numbers.add(content.op)
                todo += self.step.operations[content.op].contents()
        last = {c: n for n in sorted(numbers) for c in self.step.operations[n].contents()}
        level = most = 0
        for number in sorted(numbers):
            op = self.step.operations[number]
            changed = {r.content for r in op.references if r.into is not None}
            mine = {c for c in changed if c.op >= self.first and c not in there}
            copied = {c for c in changed if c not in mine or c in wanted or last[c] > number}
            level += size(copied)
            most = max(most, level + self.peaks[number])
            level += size(op.made) - sum(c.nbytes for c in copied if c.next is None or c.next.op != number)
            ends = {*op.contents(), *op.made, *op.written()} - wanted - (changed - copied)
            level -= size(c for c in ends if c.op >= self.first and c not in there and last.get(c, number) <= number)
        return most

    def _kept(self, share: float) -> set[Content]:
        """Return `share` of what autograd saves, without what is cheapest to make again for its bytes."""
        inner = self.saved - self.handed
        left, room = set(inner), size(inner) * (1 - share)
        for content in sorted(inner, key=lambda c: (self.step.seconds[c.op] / (c.nbytes + 1), c.op, c.out)):
            if content.nbytes <= room and content.held is None:
                left.discard(content)
                room -= content.nbytes
        return left | (self.saved & self.handed)

    def _redo_seconds(self, gone: set[Content]) -> float:
        there = (self.saved - gone) | self.handed
        todo, ops = list(gone), set[int]()
        while todo:
            content = todo.pop()
            if content.op < self.first or content.op in ops:
                continue
            ops.add(content.op)
            todo += [r.content for r in self.step.operations[content.op].references if r.content not in there]
        return sum(self.step.seconds[n] for n in ops) + CALL * len(ops)

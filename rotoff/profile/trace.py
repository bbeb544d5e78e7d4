"""What one step on a tape did, in numbers alone: operations, the bytes that they make, and what the backward read.

A position counts operations and saved tensors, in the order of the forward. Stages begin at positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Number

import torch

from ..accelerator import block_bytes, charged, is_accelerator
from ..tape.contents import Content
from ..tape.tape import MASK, Key, Operation
from ..tensors.storage import rounded
from .allocations import BACKWARD
from .allocations import Event as Logged
from .recorded_step import ASIDE, BACK, END, GATHERED, LOSS, OWN, READ, STAGE, RecordedStep


@dataclass(frozen=True, slots=True)
class Made:
    """A content: what an operation wrote into a storage.

    op, out: the operation and which of its results. dies: the first operation that begins when the model's code has let
    go of it; one more than there are if the caller gets it. later: the content that took its place. again: whether
    it can be made again. returned: whether the caller has it when the backward begins. let_go: the first operation
    that begins when a graph that had saved it is gone.
    """

    op: int
    out: int
    nbytes: int
    dies: int
    later: int | None
    again: bool
    returned: bool
    let_go: int = 0


@dataclass(frozen=True, slots=True)
class Ran:
    """An operation.

    reads, makes: contents. writes: (content, what takes its place). peak: bytes that it holds at most beyond those
    before it, with what FSDP2 has gathered. gathered: bytes of that, which the backward has among its events.
    gathering: the most bytes that FSDP2 has held since the operation before, while it gathered. copies: of what no
    operation made and it overwrites. factor, term: its key is that of the operation before, times `factor`,
    plus `term`. at: its position. module: in whose call it runs. operator: its name. draws: whether it draws random
    numbers.
    """

    reads: tuple[int, ...]
    writes: tuple[tuple[int, int | None], ...]
    makes: tuple[int, ...]
    peak: int
    gathered: int
    gathering: int
    copies: int
    seconds: float
    factor: int
    term: int
    at: int
    module: str
    operator: str
    draws: bool


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved tensor that the backward has read. at: its position. content: None if no operation made it."""

    at: int
    content: int | None


@dataclass(frozen=True, slots=True)
class Event:
    """What the backward did.

    size: bytes of gradients that it allocated, or freed, or that FSDP2 had gathered and has let go of: `resharded`.
    freed: the content that autograd has let go of, and the position of its saved tensor. reads: the position of the
    saved tensor that it reads next, `seconds` after the event before. kept: whether a parameter's ``.grad`` keeps the
    bytes; once it has them, they are no longer the step's. gone: the content that the caller has let go of, before the
    backward reads anything. rests: whether the caller has made its loss: its backward begins, or the forward of another
    micro-batch. lasts: whether the bytes are more than those of a loss and stay when the step has ended, as buffers to
    receive in.
    """

    size: int = 0
    freed: tuple[int, int] | None = None
    reads: int | None = None
    seconds: float = 0.0
    kept: bool = False
    gone: int | None = None
    rests: bool = False
    lasts: bool = False
    resharded: bool = False


@dataclass(frozen=True)
class Trace:
    """One step. end: the position after its forward. beside: bytes that it holds beside its contents; states: those of
    them that only what is made again needs: generators' states, numbers, and copies of what is overwritten; unsharded:
    those that FSDP2 has gathered for all steps that are under way. passing: what it lets go of when the forward has
    ended. calls: of each module, the number of operations and the position at the begin and at the end of each of its
    calls."""

    made: tuple[Made, ...]
    ran: tuple[Ran, ...]
    saved: tuple[Saved, ...]
    backward: tuple[Event, ...]
    beside: int
    states: int
    unsharded: int
    passing: int
    end: int
    calls: Mapping[str, Several[tuple[int, int, int, int]]]

    def size(self, contents: Iterable[int]) -> int:
        return sum(self.made[c].nbytes for c in set(contents))

    @cached_property
    def waiting(self) -> frozenset[int]:
        """What the caller has after the forward, as an open region of autocast, and not in the backward."""
        return frozenset(c for c, one in enumerate(self.made) if one.dies > len(self.ran) and not one.returned)

    @cached_property
    def at_rest(self) -> tuple[int, frozenset[int]]:
        """When the caller's loss is made and its backward has yet to begin: the bytes that it has made and will let go
        of, and what the caller still has of the forward, beside what he has when the backward begins."""
        waiting, made = self.waiting, 0
        for event in self.backward:
            if event.rests or event.reads is not None:
                break
            waiting, made = waiting - {event.gone}, made + (0 if event.lasts else event.size)
        return made, waiting

    def keys(self, begins: Several[int]) -> list[Key]:
        """Return the key of each operation, as a tape counts them in the stages that begin there."""
        found, key, stage = [], 0, 0
        for op in self.ran:
            while stage < len(begins) and op.at >= begins[stage]:
                stage += 1
                key = stage
            key = (key * op.factor + op.term) & MASK
            found.append(key)
        return found

    def timed_by(self, other: Trace) -> Trace:
        """Return this with the shorter of the two times of each operation; `other` is the same step again."""
        ran = (replace(op, seconds=min(op.seconds, one.seconds)) for op, one in zip(self.ran, other.ran, strict=True))
        waits = iter([event.seconds for event in other.backward if event.seconds])
        backward = (
            replace(event, seconds=min(event.seconds, next(waits, event.seconds))) if event.seconds else event
            for event in self.backward
        )
        return replace(self, ran=tuple(ran), backward=tuple(backward))

    def latest(self, content: int) -> int:
        """What its storage has at the end, which is what autograd reads."""
        while (later := self.made[content].later) is not None:
            content = later
        return content


def trace_of(step: RecordedStep) -> Trace:
    """Return what a recorded step did."""
    contents = [content for op in step.operations for content in (*op.made, *op.written())]
    number = {content: n for n, content in enumerate(contents)}
    many, log = len(step.operations), _charged(step)
    made = tuple(
        Made(
            content.op,
            content.out,
            0 if content in step.elsewhere else _block(content.nbytes, step),
            step.death.get(content, many + (content in step.handed_out)),
            None if content.next is None else number.get(content.next),
            content.held is None and not step.was_held(content),
            content in step.returned,
            step.gone_at.get(content, 0),
        )
        for content in contents
    )
    # what FSDP still has gathered when the backward begins
    stays = {n for n, within in _there_at(log, END, READ) if GATHERED in within}
    peaks = _peaks(log, many, stays)
    firsts = [segment.first for segment in step.segments]
    ran = []
    for n, op in enumerate(step.operations):
        one, other = op.continued(0), op.continued(1)
        ran.append(
            Ran(
                tuple({number[c]: None for c in (r.content for r in op.references) if c in number}),
                tuple((number[r.content], number.get(r.into)) for r in op.references if r.into and r.content in number),
                tuple(number[c] for c in (*op.made, *op.written())),
                *peaks[n],
                sum(_block(c.nbytes, step) for c in {r.content for r in op.references if r.into} if c not in number),
                step.seconds[n],
                (other - one) & MASK,
                one,
                step.positions[n],
                step.segments[bisect_right(firsts, n) - 1].module,
                str(op.operator),
                _draws(op),
            )
        )
    saved = tuple(Saved(at, None if content is None else number.get(content)) for at, content in step.packed.items())
    states = [op.state.nbytes for op in step.operations if op.state is not None and step.device.type == "cpu"]
    states.append(max(states, default=0))  # one is put back while an operation runs again
    numbers = sum(map(_numbers, step.operations)) if step.device.type == "cpu" else 0
    again = sum(states) + numbers + sum(_block(nbytes, step) for nbytes in step.copies)
    beside, unsharded, passing = _beside(step, log, stays)
    return Trace(
        made,
        tuple(ran),
        saved,
        tuple(_backward(step, log, number, {log[n].ptr for n in stays})),
        beside + states[-1] + numbers,
        again,
        unsharded,
        passing,
        step.position,
        step.calls,
    )


def _block(nbytes: int, step: RecordedStep) -> int:
    """Return what a request of `nbytes` on the device of `step` counts."""
    return charged(rounded(nbytes, block_bytes(step.device)), step.device)


def _charged(step: RecordedStep) -> list[Logged]:
    """Return the log of `step`, with each block as large as it counts."""
    if not is_accelerator(step.device):
        return step.log
    sizes = (charged(abs(event.size), step.device) for event in step.log)
    return [e._replace(size=size if e.size > 0 else -size) for e, size in zip(step.log, sizes, strict=True)]


def _draws(op: Operation) -> bool:
    names = (argument.name for argument in op.operator._schema.arguments)
    given = dict(zip(names, op.args, strict=False)) | op.kwargs
    return op.state is not None and given.get("dropout_p") != 0  # attention without dropout


def _numbers(op: Operation) -> int:
    """Return the bytes of the numbers that an operation takes as tensors, which the compiled tape keeps."""
    taken = (isinstance(argument.type, torch.TensorType) for argument in op.operator._schema.arguments)
    given = zip(op.args, taken, strict=False)
    return sum(number_bytes(x) for x, as_tensor in given if as_tensor and isinstance(x, Number))


def number_bytes(number: Number) -> int:
    """Return the bytes of a number as a tensor."""
    return 16 if isinstance(number, complex) else 8


def _peaks(log: list[Logged], many: int, stays: set[int]) -> list[tuple[int, int, int]]:
    """Return the most bytes that each operation holds above those at its begin, with what FSDP has gathered by then, or
    has held while it gathered before, but for what `stays`: threads, as those of gloo, hold it for a moment longer than
    FSDP does. And the bytes of that; and the most that it has held while it gathered."""
    own, most, gathering = [0] * many, [0] * many, [0] * many
    level, begins = 0, dict[str, int]()
    gathered: dict[int, int] = {}  # parameters, by address; those that stay are beside the step
    there = before = 0  # bytes of them; the most since an operation has begun
    for n, event in enumerate(log):
        if event.begins:
            begins[event.begins] = level
        elif event.ends:
            begins.pop(event.ends, None)
        level += event.size
        if event.size > 0 and GATHERED in begins and n not in stays:
            gathered[event.ptr] = event.size
            there += event.size
        elif event.size < 0:
            there -= gathered.pop(event.ptr, 0)
        before = max(before, there)
        for name, start in begins.items() if event.size > 0 or event.begins else ():
            if name.isdigit() and (number := int(name)) < many:
                own[number] = max(own[number], level - start)
                most[number] = max(most[number], level - start + there, before)
                gathering[number] = max(gathering[number], before)
                before = there
    return [(whole, whole - alone, held) for whole, alone, held in zip(most, own, gathering, strict=True)]


def _backward(step: RecordedStep, log: list[Logged], number: dict[Content, int], unsharded: set[int]) -> list[Event]:
    """Return the events of the backward. unsharded: addresses of what FSDP2 has gathered when it begins."""
    live: dict[int, int] = {}  # gradients and what kernels take, by address: the numbers of their events
    events: list[Event] = []
    # by address, what autograd has of the segments that the backward has come to
    owner: dict[int, tuple[Content, int]] = {}
    waiting = {ptr: number[c] for ptr, c in step.handed_at.items() if c in number and c not in step.returned}
    shared = set[int]()  # addresses of gradients that a parameter has, and the backward still has, too
    seconds = iter(step.waits)
    in_own = rested = False
    start = next(n for n, event in enumerate(log) if event.begins == LOSS)
    for event in log[start:]:
        if event.begins == END:
            events.append(Event(seconds=next(seconds, 0.0)))
            break
        if event.begins in (OWN, ASIDE, BACKWARD) and not rested:
            rested = True
            events.append(Event(rests=True))
        if event.begins in (OWN, ASIDE, BACK) or event.ends == OWN:
            in_own = event.begins in (OWN, ASIDE)
        elif event.begins.startswith(STAGE):
            owner.update(step.fetched.get(int(event.begins.removeprefix(STAGE)), {}))
        elif event.begins.startswith(READ):
            events.append(Event(reads=int(event.begins.removeprefix(READ)), seconds=next(seconds, 0.0)))
        elif (given := step.given(event)) is not None:
            _note_given(events, live, shared, *given)
        elif event.size > 0:
            shared.discard(event.ptr)
            owner.pop(event.ptr, None)
            if not in_own:
                live[event.ptr] = len(events)
                events.append(Event(event.size))
        elif event.size < 0 and event.ptr in waiting:
            events.append(Event(gone=waiting.pop(event.ptr)))
        elif event.size < 0 and event.ptr in unsharded:
            unsharded.discard(event.ptr)
            events.append(Event(event.size, resharded=True))
        elif event.size < 0 and event.ptr in live:
            events.append(Event(-events[live.pop(event.ptr)].size))
        elif event.size < 0 and event.ptr in owner:
            content, at = owner.pop(event.ptr)
            events += [Event(freed=(number[content], at))] if content in number else []
    number_of_any_kind = rounded(torch.complex128.itemsize, block_bytes(step.device))
    lasting = {n for n in live.values() if events[n].size > number_of_any_kind}
    return [replace(event, lasts=True) if n in lasting else event for n, event in enumerate(events)]


def _note_given(events: list[Event], live: dict[int, int], shared: set[int], address: int, alone: bool) -> None:
    """Note that a parameter has the gradient at `address`. alone: and nothing else any more; what it has shared until
    now has counted twice, as its own and as the backward's."""
    if (n := live.get(address)) is None:
        return
    size, kept = events[n].size, address not in shared
    if alone:
        del live[address]
        events[n] = replace(events[n], kept=kept)
        events.append(Event(-size, kept=kept))
    else:
        shared.add(address)
        events += [Event(-size, kept=True), Event(size, kept=True)]


def _beside(step: RecordedStep, log: list[Logged], stays: set[int]) -> tuple[int, int, int]:
    """Return the bytes that the step holds beside the contents of its tape: states of generators, numbers that PyTorch
    wraps, copies of what is overwritten, what the tape does not see, what FSDP has gathered that `stays`. And the bytes
    of that, and of what it has gathered beside that when the forward ends."""
    there = [(n, within) for n, within in _there_at(log, LOSS) if log[n].ptr not in step.handed_at]
    gathered = {n for n, within in there if GATHERED in within}
    others = {n for n, within in there if OWN not in within} - gathered
    beside, unsharded, passing = (
        sum(log[n].size for n in several) for several in (others, gathered & stays, gathered - stays)
    )
    return beside + unsharded, unsharded, passing


def _there_at(log: list[Logged], *moments: str) -> list[tuple[int, set[str]]]:
    """Return the numbers of the events that have allocated what is there at the first of `moments`, each with the
    regions in which it did."""
    live: dict[int, tuple[int, set[str]]] = {}
    within = set[str]()
    for n, event in enumerate(log):
        if event.begins.startswith(moments):
            break
        if event.size > 0:
            live[event.ptr] = n, within
        elif event.size < 0:
            live.pop(event.ptr, None)
        else:
            within = within | {event.begins} if event.begins else within - {event.ends}
    return list(live.values())

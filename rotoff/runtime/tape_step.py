"""Runs a plan on a tape: one method for each operation of the machine.

The plan decides when contents are held, released, moved and made again. Whatever it has not made ready is made on
demand, so a plan can be slow, and never wrong. The first forward of a stage is the model's own code; `enter` is called
when the next stage begins. A forward that runs again is a slice of the tape. The backward calls `advance` when it reads
what a stage has saved.

Ownership: autograd's slots own the tape, the tape owns this step through its callback, and this step owns neither; so
dropping the graph frees everything.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import accumulate

import torch
from torch.autograd.profiler import record_function
from torch.autograd.variable import Variable

from ..core.sequence import FORWARDS, Op, OpKind, Value, a, abar
from ..errors import ExecutionError
from ..tape.contents import Content
from ..tape.hooks import taking_saved
from ..tape.tape import Tape
from ..tensors.storage import bytes_of
from .execution_plan import NO_LAYOUT, ExecutionPlan, Layout
from .held_check import HeldCheck
from .links.base import Link, Ticket
from .links.spill import Back, Spill
from .step_times import Recording

BEYOND = 1 << 20  # stages off the course; none of their operations is known, so a tape keeps what autograd saves
_METHODS = {kind: f"_{kind.name.lower()}" for kind in OpKind}
OFF_COURSE = 2  # operations and saved tensors after which what a step without a plan has saved leaves the device


class TapeStep:
    """One training step.

    Args:
        plan: the operations; None: all is off its course. layout: how to find stages and contents on the tape.
        take, give_back: lend a link to the host; None if the plan moves nothing.
        spill: where what is saved goes if the forward leaves its course; None: it is made again.
        check: of the bytes after each operation, if they are checked.

    Attributes:
        link: while the step has one. times: of the operations, if they are recorded. ended: whether its backward has.
        on_graph: called when the backward makes a graph of its own.
    """

    on_graph: Callable[[], object] = bool

    def __init__(
        self,
        plan: ExecutionPlan | None,
        layout: Layout = NO_LAYOUT,
        take: Callable[[], Link] | None = None,
        give_back: Callable[[Link], None] = lambda link: None,
        spill: Spill | None = None,
        check: HeldCheck | None = None,
    ) -> None:
        self._layout, self._take, self._give_back, self._check = layout, take, give_back, check
        self.times: Recording | None = None
        self._take_link()
        self._ops: tuple[Op, ...] = () if plan is None else plan.sequence.ops
        self._turn = 0 if plan is None else plan.forward_end
        self._early: frozenset[int] = frozenset() if plan is None else plan.early
        self._as_it_is = plan is not None and plan.keeps_all  # so it holds what autograd saves, and nothing else
        self._host = {} if plan is None else plan.host
        self._spill = spill
        self._away: dict[Content, Back] = {}
        self._next = 0  # the operation to run next
        self._stage = 0  # the stage of the forward
        self._backward = len(layout.begins) + 1  # the stage whose B autograd runs
        self._values: dict[Value, list[Content]] = {}  # the contents of each value on the device
        self._owners: Counter[Content] = Counter()  # in how many of them a content is
        self._copies: dict[Value, tuple[Ticket, int, list[Content], list[int]]] = {}  # on the host
        self._leaving: set[Value] = set()  # of these, those whose bytes on the device may still be read
        self._arriving: dict[Value, dict[Content, tuple[torch.UntypedStorage, Ticket]]] = {}
        self.ended = False
        self.left_course = plan is None  # whether the forward made other operations than planned
        self._queued = False

    def _take_link(self) -> None:
        self.link: Link | None = None
        if self._take is not None:
            self.link = self._take()
            self._link_back = weakref.finalize(self, self._give_back, self.link)  # also if its graph is dropped

    @contextmanager
    def forward(self, tape: Tape) -> Iterator[None]:
        """The model's forward runs within, once."""
        tape.on_ahead = self._ahead
        tape.on_backward = self.advance
        try:
            with taking_saved(tape):
                self._enter(tape, 1)
                self._look_ahead(tape)
                yield
                self._enter(tape, len(self._layout.begins) + 1)
        except BaseException:
            self._end(tape)
            raise
        finally:
            tape.ahead = -1

    # -- the forward

    def _look_ahead(self, tape: Tape) -> None:
        begins = (*self._layout.begins, self._layout.end + 1)  # what is not noted may follow the last that is
        tape.ahead = tape.position + OFF_COURSE if self.left_course else begins[tape.stage]

    def _ahead(self, tape: Tape) -> None:
        if tape.stage == len(self._layout.begins):  # the forward goes on beyond its planned end
            self._stage = -1
        self._enter(tape, tape.stage + 1)
        self._look_ahead(tape)

    def _enter(self, tape: Tape, stage: int) -> None:
        """The model's code comes to a stage: end the one before, and run what the plan does in between."""
        with torch._C._DisableTorchDispatch():
            if self.left_course or stage != self._stage + 1:
                self._enter_off_course(tape)
                return
            if self._stage:
                if tape.key != self._layout.keys[self._stage - 1]:
                    self._enter_off_course(tape)
                    return
                self._first_run(tape, self._ops[self._next])
            self._stage = stage
            last = stage > len(self._layout.begins)
            while not ((op := self._ops[self._next]).kind in FORWARDS and op.stage == stage):
                if last and self._next >= self._turn:
                    break
                self._run(tape, op)
            tape.enter(0 if last else stage)
            if not last:
                tape.keep = self._keeps(op)
                self._begin_span(self._next)

    def _keeps(self, op: Op) -> bool | frozenset[tuple[int, int]]:
        """What the first run of a stage keeps: what the backward reads, and not what a graph without one has saved."""
        if self._as_it_is:
            return True
        return self._layout.forms[op.stage - 1][op.form] if op.kind in (OpKind.F_ALL, OpKind.F_SEL) else False

    def _first_run(self, tape: Tape, op: Op) -> None:
        """The model's own code has run the stage of a forward operation."""
        self._end_span()
        self._hold(op.value, [] if self._as_it_is else self._handed(tape, op.stage))
        for key in () if self._as_it_is else self._layout.stay[op.stage - 1]:
            if (content := tape.content(op.stage, *key)) is not None:
                self._hold(a(-op.stage), [content])
        if op.kind is OpKind.F_NONE:
            self._release(tape, a(op.stage - 1))
        self._next += 1
        self._look(tape, self._next - 1)

    def _leave_course(self) -> None:
        self.left_course = True
        self._next = len(self._ops)

    def _enter_off_course(self, tape: Tape) -> None:
        """The forward runs other operations than the plan was made for: what is saved leaves the device at once, and
        is brought back on demand."""
        self._end_span()
        first, before = not self.left_course, tape.stage
        self._leave_course()
        if self._check is not None:
            self._check.off_course(tape.owned(before).values())
        if self._spill is not None:
            for stage in range(before) if first else ():
                self._move_away(tape, stage, tape.owned(stage))
            saved = {c: storage for c in tape.saved_contents(before) if (storage := c.storage(seen=True)) is not None}
            self._move_away(tape, before, saved)
            if first:
                self._release_all(tape)
            self._arrive_unread(list(self._arriving))
        tape.enter(max(before, BEYOND) + 1)
        if self._spill is not None and all(c in self._away for c in tape.saved_contents(before)):
            tape.let_go(before)  # what its new operations have made
        tape.keep = self._spill is not None

    def _move_away(self, tape: Tape, stage: int, storages: dict[Content, torch.UntypedStorage]) -> None:
        """What a stage has saved leaves the device."""
        assert self._spill is not None
        for content, storage in storages.items():
            if content not in self._away:
                self._away[content] = self._spill.put(storage)
        tape.empty(stage)

    def _bring(self, tape: Tape, stage: int) -> None:
        """Bring back what a stage off the course has saved."""
        tape.fill(stage, {c: self._away[c]() for c in tape.saved_contents(stage) if c in self._away})

    def _begin_span(self, index: int, run: Callable[[], object] = bool) -> None:
        """An operation begins, for who records times or profiles. run: what it does, but for what the model's code or
        autograd does. A profiler shows that much: a region that is open when its profile ends would write, when it ends
        within the next one, into memory that the profiler has freed."""
        if self.times is not None:
            self.times.begin(index)
        with record_function(f"rotoff: {self._ops[index]}") if torch.autograd._profiler_enabled() else nullcontext():
            run()

    def _end_span(self) -> None:
        if self.times is not None:
            self.times.end()

    def _look(self, tape: Tape, index: int) -> None:
        """Check the bytes after an operation."""
        if self._check is None:
            return
        stages = range(1, len(self._layout.begins) + 1)
        owned = [storage for stage in stages for storage in tape.owned(stage).values()]
        held = [content.held for contents in self._values.values() for content in contents if content.held is not None]
        arriving = [storage for coming in self._arriving.values() for storage, _ in coming.values()]
        self._check.after(index, [*owned, *held, *arriving])

    # -- one method for each operation

    def _run(self, tape: Tape, op: Op) -> None:
        self._begin_span(self._next, partial(getattr(self, _METHODS[op.kind]), tape, op))
        self._end_span()
        self._next += 1
        self._look(tape, self._next - 1)

    def _f_all(self, tape: Tape, op: Op) -> None:
        """Make ā_i: what the slots of the stage refer to and, unless its B comes next, a_i."""
        self._take_arriving(tape, op.stage)
        form = self._layout.forms[op.stage - 1][op.form] if op.form else None
        first = tape.begins[op.stage]
        saved = [
            content
            for content in tape.saved_contents(op.stage)
            if content.op >= first and (form is None or (content.op - first, content.out) in form)
        ]
        handed = [] if self._next in self._early else self._handed(tape, op.stage)
        try:
            made = tape.make([*saved, *handed])
        except RuntimeError:  # what it reads is not there yet: the backward makes it, or says what is lost
            return
        tape.fill(op.stage, {content: made[content] for content in saved})
        self._hold(abar(op.stage), handed, made)

    _f_sel = _f_all

    def _f_ck(self, tape: Tape, op: Op) -> None:
        self._take_arriving(tape, op.stage)
        handed = self._handed(tape, op.stage)
        self._hold(a(op.stage), handed, tape.make(handed))

    def _f_none(self, tape: Tape, op: Op) -> None:
        self._f_ck(tape, op)
        self._release(tape, a(op.stage - 1))

    def _offload(self, tape: Tape, op: Op) -> None:
        contents = dict.fromkeys(self._values.get(op.value, ()))
        storages = {content: content.held for content in contents if content.held is not None}
        if op.value.saved:
            planned, first = self._layout.forms[op.stage - 1][0], tape.begins[op.stage]
            owned = tape.owned(op.stage).items()
            storages.update({c: storage for c, storage in owned if (c.op - first, c.out) in planned})
        assert self.link is not None
        elsewhere = [c for c, storage in storages.items() if storage.device != self.link.device]
        self._hold(a(-op.stage), elsewhere, {c: storages.pop(c) for c in elsewhere})
        offset, room = self._host[self._next]
        sources = [bytes_of(storage) for storage in storages.values()]
        sizes = [source.numel() for source in sources]
        if sum(sizes) > room:
            return  # it is larger than when it was planned, and stays
        ticket = self.link.copy_out(sources, offset)
        if self.times is not None:
            self.times.copy(self._next, ticket)
        self._copies[op.value] = ticket, offset, list(storages), sizes
        self._leaving.add(op.value)
        self._lend(op.value, 1)

    def _free(self, tape: Tape, op: Op) -> None:
        if op.value in self._copies:
            self._release(tape, op.value)

    def _prefetch(self, tape: Tape, op: Op) -> None:
        if op.value not in self._copies:
            return
        assert self.link is not None
        ticket, offset, contents, sizes = self._copies[op.value]
        ends = list(accumulate(sizes, initial=offset))
        # another value may have brought a content that this one has, too, or may be about to
        shared = {c: one for other in self._arriving.values() for c, one in other.items()}
        within = self._stage <= len(self._layout.begins)  # the forward, whose code may have it still
        here = (c for c in contents if c not in shared and (c.storage(seen=True) if within else c.held) is not None)
        self._hold(op.value, list(here))
        coming = [
            (c, nbytes, first)
            for c, nbytes, first in zip(contents, sizes, ends, strict=False)
            if c.held is None and c not in shared
        ]
        targets = [self.link.allocate(nbytes) for _, nbytes, _ in coming]
        arrival = self.link.copy_in(targets, [first for _, _, first in coming], ticket)
        if self.times is not None:
            self.times.copy(self._next, arrival)
        own = {c: (target.untyped_storage(), arrival) for (c, _, _), target in zip(coming, targets, strict=True)}
        self._arriving[op.value] = own | {c: shared[c] for c in contents if c in shared}

    def _wait(self, tape: Tape, op: Op) -> None:
        if op.value not in self._arriving:
            return
        assert self.link is not None
        arrived = self._arriving.pop(op.value)
        for arrival in {id(one): one for _, one in arrived.values()}.values():
            self.link.wait(arrival)
        contents = self._copies[op.value][2]
        storages = {content: content.held for content in contents if content.held is not None}
        storages |= {content: storage for content, (storage, _) in arrived.items() if content.held is None}
        if op.value.saved:
            tape.fill(op.stage, storages)
        handed = set(self._handed(tape, op.stage))
        self._hold(op.value, [content for content in contents if content in handed], storages)

    def _drop(self, tape: Tape, op: Op) -> None:
        self._release(tape, op.value)

    # -- values

    def _take_arriving(self, tape: Tape, stage: int) -> None:
        """Wait for contents of a stage that another value brings, so that they are not there twice."""
        numbers = range(tape.begins[stage], tape.begins.get(stage + 1, BEYOND))
        for v, coming in self._arriving.items():
            for content, (storage, arrival) in coming.items():
                if content.held is None and content.op in numbers:
                    assert self.link is not None
                    self.link.wait(arrival)
                    self._hold(v, [content], {content: storage})

    def _arrive_unread(self, values: Iterable[Value]) -> None:
        """What is arriving of values goes: nobody reads it, but its copy holds the bytes until it has ended."""
        for v in values:
            for _, arrival in self._arriving.pop(v, {}).values():
                assert self.link is not None
                with suppress(ExecutionError):
                    self.link.wait(arrival)

    def _handed(self, tape: Tape, stage: int) -> list[Content]:
        keys = self._layout.handed[stage - 1] if stage else ()
        return [content for home, key in keys if (content := tape.content(home, *key)) is not None]

    def _hold(
        self, v: Value, contents: Iterable[Content], storages: dict[Content, torch.UntypedStorage] | None = None
    ) -> None:
        """Keep contents as a part of v. storages: where they are now, if the tape does not know."""
        held = self._values.setdefault(v, [])
        for content in contents:
            if content in held:
                continue
            held.append(content)
            if content.held is not None and content not in self._owners:
                continue  # the tape itself keeps what cannot be made again
            self._owners[content] += 1
            if storages is not None and content in storages:
                content.hold(storages[content])
            elif content.held is None and (storage := content.storage(seen=True)) is not None:
                content.hold(storage)

    def _release(self, tape: Tape, v: Value) -> None:
        """Let go of v on the device."""
        self._let_go(v)
        if v.saved:
            tape.empty(v.stage)

    def _release_all(self, tape: Tape, stays: bool = True) -> None:
        """Let go of all values. stays: but for what stays on the device, which operations that run again read: FSDP2
        has gathered the parameters to make it from only while the backward of their module runs."""
        for v in list(self._values):
            if v.stage > 0 or not stays:
                self._release(tape, v)

    def _lend(self, v: Value, copies: int) -> None:
        for content in self._copies[v][2]:
            content.lent += copies

    def _let_go(self, v: Value) -> None:
        if v in self._leaving and self.link is not None:
            self._leaving.remove(v)
            self.link.wait(self._copies[v][0])  # it holds the bytes until then
            self._lend(v, -1)
        for content in self._values.pop(v, ()):
            if content not in self._owners:
                continue
            self._owners[content] -= 1
            if not self._owners[content]:
                del self._owners[content]
                content.held = None

    # -- the backward

    def advance(self, tape: Tape, stage: int) -> None:
        """The backward reads what a stage has saved: run the plan up to its B."""
        if self._stage <= len(self._layout.begins) and not self.left_course:
            return  # within the forward
        if self.ended and not self.left_course:  # another backward through the graph: the whole plan again
            self.ended, self._queued, self._next, self._backward = False, False, 0, len(self._layout.begins) + 1
            self._take_link()
            for one in () if self._as_it_is else range(1, self._backward):
                tape.empty(one)  # the last B of the one before may have left something
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(lambda: self._end(tape))
            if torch.is_grad_enabled():
                self.on_graph()
        try:
            self._advance(tape, stage)
        except BaseException as error:
            self._failed(tape, error)
            raise

    def _failed(self, tape: Tape, error: BaseException) -> None:
        """The backward has failed."""
        self._end(tape)

    def _advance(self, tape: Tape, stage: int) -> None:
        if self._away:
            self._bring(tape, stage)
        if stage >= self._backward or not stage or self.left_course:
            return
        if self._backward <= len(self._layout.begins):
            self._gone(tape, self._backward)  # its B has ended
        ops = self._ops
        while self._next < len(ops):
            op = ops[self._next]
            if op.kind is not OpKind.B:
                self._end_span()
                self._run(tape, op)
                continue
            if op.stage < stage:
                break
            self._begin(tape, op.stage)
            self._end_span()
            self._begin_span(self._next)
            self._next += 1
            if op.stage == stage:
                break
            self._gone(tape, op.stage)  # autograd reads nothing of this stage

    def _begin(self, tape: Tape, stage: int) -> None:
        """Autograd begins the B of a stage: the slots own what it needs."""
        self._backward = stage
        tape.fetch(stage)
        for v in (abar(stage), a(stage)):
            self._let_go(v)

    def _gone(self, tape: Tape, stage: int) -> None:
        for v in (abar(stage), a(stage), a(stage - 1), a(-stage)):
            self._release(tape, v)
            self._copies.pop(v, None)
        self._arrive_unread((abar(stage), a(stage), a(stage - 1)))

    def _end(self, tape: Tape) -> None:
        """The backward has ended, or failed: release everything."""
        if self.times is not None:
            self.times.close(self._next >= len(self._ops) and not self.left_course)
            self.times = None
        self.ended = True
        self._release_all(tape, stays=self.left_course and not self._queued)
        self._copies.clear()
        self._leaving.clear()
        self._arrive_unread(list(self._arriving))
        if self.link is not None:
            self.link = None
            self._link_back()

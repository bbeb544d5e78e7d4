"""The machine: decides which sequences are legal, how many bytes they hold, and how long they take.

A value is on the device (arriving or usable), on the host, or both. Program order alone determines memory. Four lanes
determine time: compute, device to host, host to device, the host's updates. While copies run in both directions each
runs at its bidirectional bandwidth, if the chain has one. The rules of each operation:

========================  =============================================================================================
``F_all i``                needs the input of i (``a i-1`` or ``abar i-1``), makes ``abar i``
``F_sel i k``              the same, but makes ``abar i`` in its form k
``F_ck i``                 needs the input of i, makes ``a i``
``F_none i``               needs ``a i-1`` held as ``a``, makes ``a i``, drops ``a i-1``
``B i``                    needs ``abar i`` and the input of i; drops ``abar i``, ``a i``, ``a i-1``, on the host too
``offload v``              starts the copy to the host; the host holds v until the ``B`` that drops it
``free v``                 waits for that copy, releases the device bytes
``prefetch v``             takes device bytes, starts the copy back; v is usable after ``wait v``
``drop v``                 releases v without a copy
``U k``                    needs ``w k``, ``g k``, ``o k``; updates group k on the device; frees g k, the host's copies
``H k``                    needs g k offloaded, ``w k`` and ``o k`` on the host alone; updates group k on the host lane
========================  =============================================================================================

The caller holds a_0 and a_L, so both are always charged; ``B L`` drops ā_L, which contains a_L, and a_L stays charged.
An operation that drops a value occupies the compute lane until all copies of that value have ended. A forward that
`early_stops` names leaves out its `tail_time`.

A stage needs ``w k`` of every group k that it reads. The first ``B`` of a group allocates ``g k``; after the last one
``g k`` is whole. `steady_step` describes where parameters are between steps. The time is then that of a step in the
steady state of a training loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import InvalidSequenceError
from .chain import Chain, check_chain
from .lanes import Lanes
from .sequence import COMPUTES, FORWARDS, Op, OpKind, Sequence, Value, a, abar, g, o, w
from .sizes import format_bytes, parse_bytes
from .steady_step import PERIODS, AtRest, Readers, at_rest, check_end, check_group_value, check_updates, group_bytes
from .trace import Event as Event
from .trace import Trace as Trace

_Ran = tuple[str, float, float, int, int]  # lane, start, end, bytes on the device and on the host


class _Bytes(dict[Value, int]):
    """Bytes by value, and their sum; of_groups: the sum of those of parameters, their gradients and states."""

    def __init__(self, of: Mapping[Value, int]) -> None:
        super().__init__()
        self.total = self.of_groups = 0
        for v, nbytes in of.items():
            self[v] = nbytes

    def copy(self) -> _Bytes:
        return _Bytes(self)

    def __setitem__(self, v: Value, nbytes: int) -> None:
        self._add(v, nbytes - self.get(v, 0))
        super().__setitem__(v, nbytes)

    def __delitem__(self, v: Value) -> None:
        self._add(v, -self[v])
        super().__delitem__(v)

    def _add(self, v: Value, nbytes: int) -> None:
        self.total += nbytes
        self.of_groups += nbytes if v.of else 0

    def let_go(self, v: Value) -> None:
        """Forget a value that may be there."""
        if v in self:
            del self[v]


class Machine:
    """Runs operations one by one, to look at the state after each; `simulate` runs a whole sequence.

    Args:
        chain: the costs.
        mem_limit: bytes that no operation may exceed, or None.
        rest: parameters between steps, from `steady_step.at_rest`; by default all of them are on the host.
    """

    def __init__(self, chain: Chain, mem_limit: int | None = None, rest: AtRest | None = None) -> None:
        self.chain = chain
        self.mem_limit = mem_limit
        self.rest = at_rest(chain) if rest is None else rest
        self.device = _Bytes({a(0): chain.input_bytes, **self.rest.device})  # value -> bytes charged
        self.host = _Bytes(self.rest.host)  # only valid copies
        self.arriving: set[Value] = set(self.rest.arriving)
        self.form: dict[int, int] = {}  # stage -> form in which abar of that stage exists, on either side
        self.next_backward = len(chain)
        self.backward_phase = False
        self.events: list[Event] = []
        self._done_forward: set[int] = set()
        self._readers = Readers(chain)
        self._whole: set[int] = set()  # groups whose gradient is whole
        self._left: set[int] = set()  # groups whose gradient has been offloaded
        self._updated: set[int] = set()
        self._ends = [0.0]  # on the compute lane: the start of the first step, then the end of each
        self._clock = {"compute": 0.0}
        self._lanes = Lanes(chain.duplex, chain.bidirectional_shares)
        self._jobs: dict[int, int] = {}  # index of an event -> its job on a lane
        self._copies: dict[Value, int] = {}  # value -> the last copy that reads or writes it
        self._valid: dict[Value, int] = {}  # value -> the job that made the host's copy: an offload or a host update
        self._moved = {"d2h": 0, "h2d": 0}

    # -- what the machine holds

    @property
    def held_bytes(self) -> int:
        """Bytes of all values on the device and of the one gradient held between operations."""
        gradient = self.chain.grad_bytes(self.next_backward) if self.backward_phase else 0
        return self.device.total + gradient

    @property
    def host_bytes(self) -> int:
        return self.host.total

    def usable(self, v: Value) -> bool:
        """Whether v is on the device and has arrived."""
        return v in self.device and v not in self.arriving

    def input_of(self, i: int) -> Value | None:
        """The usable value that holds stage i's input, or None."""
        return next((v for v in (a(i - 1), abar(i - 1)) if self.usable(v)), None)

    # -- running

    def step(self, op: Op, early: bool = False) -> Event:
        """Run one operation. An operation that is refused changes nothing. early: whether it is one of `early_stops`.

        The event of a copy or of an update on the host has its times only once the step has finished.

        Raises:
            InvalidSequenceError: names the operation, its index, and what is missing or the bytes over the limit.
        """
        if op.of or op.kind is OpKind.U or op.kind is OpKind.H:
            wrong = check_group_value(self.chain, op.value if op.of else g(op.stage))
            if wrong:
                raise self._error(op, wrong)
        else:
            first = 0 if op.kind not in COMPUTES and not op.saved else 1
            if not first <= op.stage <= len(self.chain):
                raise self._error(op, f"the chain has stages 1 to {len(self.chain)}")
            if self.next_backward == 0:
                more = " but updates and moves of parameters" if self.chain.parameters else ""
                raise self._error(op, f"nothing may follow B 1{more}")
        before, again = self.device.of_groups, op.kind in FORWARDS and op.stage in self._done_forward
        if op.kind in FORWARDS:
            ran = self._forward(op, early)
        elif op.kind is OpKind.B:
            ran = self._backward(op)
        elif op.kind is OpKind.U:
            ran = self._update_on_device(op)
        elif op.kind is OpKind.H:
            ran = self._update_on_host(op)
        else:
            ran = self._move(op)
        event = Event(op, *ran, recompute=again, parameter_memory=max(before, self.device.of_groups))
        self.events.append(event)
        return event

    def next_step(self) -> None:
        """End this step and begin the next; the lanes continue.

        Raises:
            InvalidSequenceError: if ``B 1`` has not run, a value is left, or parameters are not where they were at the
                start.
        """
        self._check_end()
        del self.device[a(len(self.chain))]
        self.next_backward, self.backward_phase, self.events = len(self.chain), False, []
        self._jobs.clear()
        self._moved = dict.fromkeys(self._moved, 0)
        for noted in (self._done_forward, self._whole, self._left, self._updated):
            noted.clear()
        self._ends.append(self._clock["compute"])

    def finish(self) -> Trace:
        """The trace of the last step, once all its operations have run; its time is the mean of the last two.

        Raises:
            InvalidSequenceError: as for `next_step`.
        """
        self._check_end()
        start, end = self._ends[-1], self._clock["compute"]
        makespan = (end - self._ends[-2]) / 2 if len(self._ends) > 1 else end
        events = list(self.events)
        spans = {index: self._lanes.span(job) for index, job in self._jobs.items()}
        if start or spans:
            for n, event in enumerate(events):
                begun, done = spans.get(n, (event.start, event.end))
                events[n] = event._replace(start=begun - start, end=done - start)
        busy = sum(e.end - e.start for e in events if e.op.kind in COMPUTES)
        return Trace(
            makespan=makespan,
            peak_bytes=max(e.memory for e in events),
            host_peak_bytes=max(e.host_memory for e in events),
            events=tuple(events),
            d2h_bytes=self._moved["d2h"],
            h2d_bytes=self._moved["h2d"],
            recompute_time=sum(e.end - e.start for e in events if e.recompute),
            idle_time=makespan - busy,
        )

    def _check_end(self) -> None:
        if self.next_backward != 0:
            raise InvalidSequenceError(f"the sequence ends before B {self.next_backward}")
        left = [v for v in (*self.device, *self.host) if v.of in ("", "g") and v not in (a(0), a(len(self.chain)))]
        if left:
            cure = "update its group" if left[0].of and left[0].stage not in self._updated else "free it"
            raise InvalidSequenceError(
                f"{left[0]} is left at the end; {cure if left[0].of else 'drop it'} once it is no longer needed"
            )
        wrong = check_end(self.chain, self.rest, self.device, self.host, self.arriving, self._updated)
        if wrong:
            raise InvalidSequenceError(wrong)

    def _error(self, op: Op, reason: str) -> InvalidSequenceError:
        return InvalidSequenceError(reason, op, len(self.events))

    def _within_limit(self, op: Op, memory: int) -> int:
        """`memory`, the bytes held while `op` runs; an error if they exceed the limit."""
        if self.mem_limit is not None and memory > self.mem_limit:
            raise self._error(
                op,
                f"holds {memory} bytes ({format_bytes(memory)}), {memory - self.mem_limit} more than the limit of"
                f" {self.mem_limit} ({format_bytes(self.mem_limit)})",
            )
        return memory

    def _forward(self, op: Op, early: bool) -> _Ran:
        i, made = op.stage, op.value
        source = a(i - 1) if op.kind is OpKind.F_NONE else self.input_of(i)
        if source is None or not self.usable(source):
            needed = f"{a(i - 1)}" if op.kind is OpKind.F_NONE or i == 1 else f"{a(i - 1)} or {abar(i - 1)}"
            raise self._error(op, f"needs {needed}, {self._whereabouts(a(i - 1))}")
        holder = next((v for v in (made, abar(i)) if v in self.device), None)
        if holder is not None:
            raise self._error(op, f"makes {made}, but the device holds {holder} already")
        if made.saved and made in self.host:
            raise self._error(op, f"makes {made}, which is on the host; prefetch it instead")
        if op.form > len(self.chain.stage(i).forms):
            raise self._error(op, f"stage {i} has {len(self.chain.stage(i).forms)} smaller forms")
        self._need(op, self._readers.weights.get(i, ()))
        stage, form = self.chain.stage(i), self.chain.stage(i).form(op.form)
        size = form.saved_bytes if made.saved else stage.output_bytes
        transient = form.forward_transient_bytes if made.saved else (stage.checkpoint_transient_bytes or 0)
        memory, host = self._within_limit(op, self.held_bytes + size + transient), self.host_bytes
        dropped = [a(i - 1)] if op.kind is OpKind.F_NONE and i > 1 else []
        start, end = self._compute(stage.forward_time - (stage.tail_time if early else 0.0), dropped)
        self.device[made] = size
        if made.saved:
            self.form[i] = op.form
        for v in dropped:
            del self.device[v]
        if i == len(self.chain):
            self.backward_phase = True
        self._done_forward.add(i)
        return "compute", start, end, memory, host

    def _backward(self, op: Op) -> _Ran:
        i = op.stage
        if i != self.next_backward:
            raise self._error(op, f"the next backward is B {self.next_backward}")
        if not self.usable(abar(i)):
            raise self._error(op, f"needs {abar(i)}, {self._whereabouts(abar(i))}")
        if self.input_of(i) is None:
            raise self._error(op, f"needs the input of stage {i}, {self._whereabouts(a(i - 1))}")
        self._need(op, self._readers.weights.get(i, ()))
        form = self.chain.stage(i).form(self.form[i])
        begun = {v: group_bytes(self.chain, v) for v in self._readers.begun.get(i, ())}
        made = self.chain.grad_bytes(i - 1) + sum(begun.values())
        memory = self._within_limit(op, self.held_bytes + made + form.backward_transient_bytes)
        host = self.host_bytes
        dropped = [abar(i), a(i)] + ([a(i - 1)] if i > 1 and a(i - 1) in self.device else [])
        start, end = self._compute(form.backward_time, dropped)
        for v in dropped:
            self.device.let_go(v)
            self.host.let_go(v)
            self.arriving.discard(v)
        if i == len(self.chain):
            self.device[a(i)] = self.chain.output_bytes(i)  # the caller still holds the output
        self.next_backward = i - 1
        for v, nbytes in begun.items():
            self.device[v] = nbytes
        self._whole.update(v.stage for v in self._readers.whole.get(i, ()))
        return "compute", start, end, memory, host

    def _update_on_device(self, op: Op) -> _Ran:
        k = op.stage
        self._check_update(op)
        self._need(op, [v for v in (w(k), g(k), o(k)) if group_bytes(self.chain, v)])
        group = self.chain.group(k)
        memory, host = self._within_limit(op, self.held_bytes + group.update_transient_bytes), self.host_bytes
        start = self._arrived(w(k), g(k), o(k))
        self._clock["compute"] = end = start + group.update_time
        self.device.let_go(g(k))
        for v in (w(k), g(k), o(k)):
            self.host.let_go(v)
        self._updated.add(k)
        return "compute", start, end, memory, host

    def _update_on_host(self, op: Op) -> _Ran:
        k = op.stage
        self._check_update(op)
        lasts = self.chain.group(k).host_update_time
        if lasts is None:
            raise self._error(op, f"group {k} has no host_update_time, so the host cannot update it; use U {k}")
        if g(k) not in self.host:
            raise self._error(op, f"needs {g(k)} on the host; offload it first")
        for v in (w(k), o(k)):
            if v in self.device:
                raise self._error(op, f"needs {v} on the host alone; free or drop the device's copy first")
        memory, host = self._within_limit(op, self.held_bytes), self.host_bytes
        now = self._clock["compute"]
        job = self._lanes.issue("host", now, lasts, self._valid[g(k)])
        self._valid[w(k)] = self._valid[o(k)] = self._jobs[len(self.events)] = job
        del self.host[g(k)]
        self._updated.add(k)
        return "host", now, now, memory, host

    def _check_update(self, op: Op) -> None:
        if op.stage in self._updated:
            raise self._error(op, f"group {op.stage} is updated already; each group is updated once in a step")
        if op.stage not in self._whole:
            last = min(self.chain.group(op.stage).stages)
            raise self._error(op, f"{g(op.stage)} is not whole; it is once B {last} has run")

    def _need(self, op: Op, values: Iterable[Value]) -> None:
        for v in values:
            if not self.usable(v):
                raise self._error(op, f"needs {v}, {self._whereabouts(v)}")

    def _move(self, op: Op) -> _Ran:
        v, kind = op.value, op.kind
        self._check_move(op, v)
        memory = self._within_limit(op, self.held_bytes + (self.host[v] if kind is OpKind.PREFETCH else 0))
        lane, start, end = "compute", self._clock["compute"], self._clock["compute"]
        if kind is OpKind.OFFLOAD:
            self.host[v] = self.device[v]
            lane = "d2h"
            self._valid[v] = self._copy(lane, v, self.chain.d2h_bandwidth)
            if v.of == "g":
                self._left.add(v.stage)
        elif kind is OpKind.PREFETCH:
            self.device[v] = self.host[v]
            self.arriving.add(v)
            lane = "h2d"
            self._copy(lane, v, self.chain.h2d_bandwidth, self._valid.get(v))
        host = self.host_bytes
        if kind is OpKind.WAIT:
            end = self._clock["compute"] = self._arrived(v)
            self.arriving.discard(v)
        elif kind in (OpKind.FREE, OpKind.DROP):
            start, end = self._compute(0.0, [v])
            del self.device[v]
        return lane, start, end, memory, host

    def _check_move(self, op: Op, v: Value) -> None:
        kind, L = op.kind, len(self.chain)
        if v in (a(0), a(L), abar(L)):
            raise self._error(op, f"{v} is never moved or dropped")
        if kind is OpKind.PREFETCH:
            if v in self.device:
                raise self._error(op, f"{v} is on the device already")
            if v not in self.host:
                raise self._error(op, f"{v} is not on the host; offload it first")
        elif kind is OpKind.WAIT:
            if v not in self.arriving:
                raise self._error(op, f"{v} is not arriving; prefetch it first")
        elif not self.usable(v):
            raise self._error(op, f"needs {v}, {self._whereabouts(v)}")
        if v.of == "g" and kind is OpKind.DROP:
            raise self._error(op, f"{v} is never dropped; update its group, or offload and free it")
        if v.of == "g" and kind is OpKind.OFFLOAD and v.stage not in self._whole:
            raise self._error(op, f"{v} is not whole; it is once B {min(self.chain.group(v.stage).stages)} has run")
        on_host = v in self.host or (v.of == "g" and v.stage in self._left)  # the host gives up its g with H
        if kind is OpKind.OFFLOAD and on_host:
            raise self._error(op, f"{v} is on the host already")
        if kind is OpKind.FREE and not on_host:
            raise self._error(op, f"{v} is not on the host; offload it first{'' if v.of else ', or drop it'}")
        if kind is OpKind.DROP and v.of and not on_host:
            raise self._error(op, f"{v} has no valid copy on the host; offload it first")

    # -- time

    def _compute(self, duration: float, dropped: list[Value]) -> tuple[float, float]:
        """Occupy the compute lane until the work is done and all copies of the `dropped` values have ended."""
        start = self._clock["compute"]
        self._clock["compute"] = end = start + duration
        self._clock["compute"] = self._arrived(*dropped)
        for v in dropped:
            self._copies.pop(v, None)
        return start, end if duration > 0 else self._clock["compute"]

    def _arrived(self, *values: Value) -> float:
        """When the compute lane is free and the copies of all `values` have ended."""
        return max([self._clock["compute"], *(self._lanes.end(self._copies.get(v)) for v in values)])

    def _copy(self, lane: str, v: Value, bandwidth: float, after: int | None = None) -> int:
        size = self.device[v]
        job = self._lanes.issue(lane, self._clock["compute"], size / bandwidth, after)
        self._copies[v] = self._jobs[len(self.events)] = job
        self._moved[lane] += size
        return job

    def _whereabouts(self, v: Value) -> str:
        if v in self.arriving:
            return "which is still arriving; wait for it first"
        if v in self.device:
            return "which the device holds, but not in the form needed"
        if v in self.host:
            return "which is on the host; prefetch it and wait for it first"
        return "which the device does not hold"


def early_stops(ops: Iterable[Op]) -> frozenset[int]:
    """Indices of each ``F_all i`` or ``F_sel i k`` of a stage that has run before, whose next operation on the compute
    lane is ``B i``: it stops once it has saved its last tensor for backward."""
    found, done = set[int](), set[int]()
    latest: tuple[int, Op] | None = None  # on the compute lane
    again = False
    for n, op in enumerate(ops):
        if op.kind not in COMPUTES:
            continue
        if op.kind is OpKind.B and latest is not None and again and latest[1].stage == op.stage:
            found.add(latest[0])
        latest, again = (n, op), op.kind in (OpKind.F_ALL, OpKind.F_SEL) and op.stage in done
        if op.kind in FORWARDS:
            done.add(op.stage)
    return frozenset(found)


def simulate(
    chain: Chain, sequence: Iterable[Op], mem_limit: int | str | None = None, updates: str = "during"
) -> Trace:
    """Check a sequence and predict its step; with parameters, from the last two of four steps in a row.

    Args:
        chain: the costs, bytes and seconds.
        sequence: operations in program order. A `Sequence` also says what is resident between steps.
        mem_limit: bytes, as a number or a size such as ``"6 GiB"``; None for no limit.
        updates: "after" refuses updates before ``B 1``; "during" allows them.

    Raises:
        InvalidSequenceError: names the first operation that is not legal or exceeds `mem_limit`, and its index.
    """
    check_chain(chain)
    if not isinstance(sequence, Iterable):
        raise InvalidSequenceError(f"the sequence is {sequence!r}; give a rotoff.Sequence or a list of rotoff.Op")
    resident = sequence.resident if isinstance(sequence, Sequence) else []
    ops = tuple(sequence)
    for index, op in enumerate(ops):
        if not isinstance(op, Op):
            raise InvalidSequenceError("is not a rotoff.Op; make one with rotoff.parse(text)", op, index)
    check_updates(ops, resident, updates)
    machine = Machine(chain, None if mem_limit is None else parse_bytes(mem_limit), at_rest(chain, ops, resident))
    early = early_stops(ops)
    for period in range(PERIODS if chain.parameters else 1):
        if period:
            machine.next_step()
        for n, op in enumerate(ops):
            machine.step(op, n in early)
    return machine.finish()

"""The machine: which sequences are legal, what they hold, and how long they take.

A value is on the device (arriving or usable), on the host, or both. Program order alone decides memory; three lanes
(compute, device to host, host to device) decide time. The rules, op by op:

========================  =============================================================================================
``F_all i``, ``F_sel``     needs the input of i (``a i-1`` or ``abar i-1``), makes ``abar i``
``F_ck i``                 needs the input of i, makes ``a i``
``F_none i``               needs ``a i-1`` held as ``a``, makes ``a i``, drops ``a i-1``
``B i``                    needs ``abar i`` and the input of i; drops ``abar i``, ``a i``, ``a i-1`` and their host copies
``offload v``              starts the copy to the host; the host holds v until the ``B`` that drops it
``free v``                 waits for that copy, releases the device bytes
``prefetch v``             takes device bytes, starts the copy back; v is usable after ``wait v``
``drop v``                 releases v without a copy
========================  =============================================================================================

a_0 is the caller's: always held, always charged. a_L is the caller's too: its bytes stay charged after ``B L``, alone once
ā_L, which contained it, is gone. Whatever drops a value holds the compute lane until all copies of that value have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .chain import Chain, check_chain
from .errors import InvalidSequenceError
from .sequence import COMPUTES, FORWARDS, Op, OpKind, Value, a, abar
from .sizes import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class Event:
    """What the machine saw of one operation.

    lane: "compute", "d2h" or "h2d". start, end: seconds from the step's start. memory, host_memory: bytes held while it
    runs, transients and gradients included. recompute: a forward of a stage that had run before.
    """

    op: Op
    lane: str
    start: float
    end: float
    memory: int
    host_memory: int
    recompute: bool = False


@dataclass(frozen=True)
class Trace:
    """One simulated step.

    makespan: seconds. peak_bytes, host_peak_bytes: the most that device and host hold. events: one for each operation.
    d2h_bytes, h2d_bytes: bytes moved. recompute_time, idle_time: seconds of the compute lane spent on forwards run again,
    and on waiting.
    """

    makespan: float
    peak_bytes: int
    host_peak_bytes: int
    events: tuple[Event, ...]
    d2h_bytes: int
    h2d_bytes: int
    recompute_time: float
    idle_time: float

    def __str__(self) -> str:
        """The step in one line; `rotoff.render` draws it."""
        return (
            f"step {self.makespan:.6g} s ({self.recompute_time:.3g} s recomputed, {self.idle_time:.3g} s idle), peak"
            f" {format_bytes(self.peak_bytes)}, host {format_bytes(self.host_peak_bytes)},"
            f" {format_bytes(self.d2h_bytes)} to the host, {format_bytes(self.h2d_bytes)} back"
        )


class Machine:
    """Runs operations one by one; `step` raises where an operation is not legal.

    Args:
        chain: the costs. mem_limit: bytes that no operation may exceed, or None.
    """

    def __init__(self, chain: Chain, mem_limit: int | None = None) -> None:
        self.chain = chain
        self.mem_limit = mem_limit
        self.device: dict[Value, int] = {a(0): chain.input_bytes}  # value -> bytes charged
        self.host: dict[Value, int] = {}
        self.arriving: set[Value] = set()
        self.form: dict[int, int] = {}  # stage -> form in which abar of that stage exists, on either side
        self.next_backward = len(chain)
        self.backward_phase = False
        self.events: list[Event] = []
        self._done_forward: set[int] = set()
        self._clock = {"compute": 0.0, "d2h": 0.0, "h2d": 0.0}
        self._copy_end: dict[Value, float] = {}  # value -> end of the last copy that reads or writes it
        self._offload_end: dict[Value, float] = {}
        self._moved = {"d2h": 0, "h2d": 0}

    # -- what the machine holds

    @property
    def held_bytes(self) -> int:
        """Bytes of all values on the device and of the one gradient held between operations."""
        gradient = self.chain.grad_bytes(self.next_backward) if self.backward_phase else 0
        return sum(self.device.values()) + gradient

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    def usable(self, v: Value) -> bool:
        """Whether v is on the device and has arrived."""
        return v in self.device and v not in self.arriving

    def input_of(self, i: int) -> Value | None:
        """The usable value that holds stage i's input, or None."""
        return next((v for v in (a(i - 1), abar(i - 1)) if self.usable(v)), None)

    # -- running

    def step(self, op: Op) -> Event:
        """Run one operation; one that is refused changes nothing.

        Raises:
            InvalidSequenceError: naming the operation, its index, what is missing, or the bytes over the limit.
        """
        L = len(self.chain)
        first = 0 if op.kind not in COMPUTES and not op.saved else 1
        if not first <= op.stage <= L:
            raise self._error(op, f"the chain has stages 1 to {L}")
        if self.next_backward == 0:
            raise self._error(op, "nothing may follow B 1")
        if op.kind in FORWARDS:
            event = self._forward(op)
        elif op.kind is OpKind.B:
            event = self._backward(op)
        else:
            event = self._move(op)
        self.events.append(event)
        return event

    def finish(self) -> Trace:
        """The trace, once all operations have run.

        Raises:
            InvalidSequenceError: where ``B 1`` has not run or a value is left.
        """
        if self.next_backward != 0:
            raise InvalidSequenceError(f"the sequence ends before B {self.next_backward}")
        left = [v for v in (*self.device, *self.host) if v not in (a(0), a(len(self.chain)))]
        if left:
            raise InvalidSequenceError(f"{left[0]} is left at the end; drop it once it is no longer needed")
        makespan = max(self._clock.values())
        busy = sum(e.end - e.start for e in self.events if e.op.kind in COMPUTES)
        return Trace(
            makespan=makespan,
            peak_bytes=max(e.memory for e in self.events),
            host_peak_bytes=max(e.host_memory for e in self.events),
            events=tuple(self.events),
            d2h_bytes=self._moved["d2h"],
            h2d_bytes=self._moved["h2d"],
            recompute_time=sum(e.end - e.start for e in self.events if e.recompute),
            idle_time=makespan - busy,
        )

    def _error(self, op: Op, reason: str) -> InvalidSequenceError:
        return InvalidSequenceError(reason, op, len(self.events))

    def _within_limit(self, op: Op, memory: int) -> int:
        """`memory` bytes, held while `op` runs, where they are within the limit."""
        if self.mem_limit is not None and memory > self.mem_limit:
            raise self._error(
                op,
                f"holds {memory} bytes ({format_bytes(memory)}), {memory - self.mem_limit} more than the limit of"
                f" {self.mem_limit} ({format_bytes(self.mem_limit)})",
            )
        return memory

    def _forward(self, op: Op) -> Event:
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
        stage, form = self.chain.stage(i), self.chain.stage(i).form(op.form)
        size = form.saved_bytes if made.saved else stage.output_bytes
        transient = form.forward_transient_bytes if made.saved else (stage.checkpoint_transient_bytes or 0)
        memory, host = self._within_limit(op, self.held_bytes + size + transient), self.host_bytes
        dropped = [a(i - 1)] if op.kind is OpKind.F_NONE and i > 1 else []
        start, end = self._compute(stage.forward_time, dropped)
        self.device[made] = size
        if made.saved:
            self.form[i] = op.form
        for v in dropped:
            del self.device[v]
        if i == len(self.chain):
            self.backward_phase = True
        again = i in self._done_forward
        self._done_forward.add(i)
        return Event(op, "compute", start, end, memory, host, recompute=again)

    def _backward(self, op: Op) -> Event:
        i = op.stage
        if i != self.next_backward:
            raise self._error(op, f"the next backward is B {self.next_backward}")
        if not self.usable(abar(i)):
            raise self._error(op, f"needs {abar(i)}, {self._whereabouts(abar(i))}")
        if self.input_of(i) is None:
            raise self._error(op, f"needs the input of stage {i}, {self._whereabouts(a(i - 1))}")
        form = self.chain.stage(i).form(self.form[i])
        memory = self._within_limit(op, self.held_bytes + self.chain.grad_bytes(i - 1) + form.backward_transient_bytes)
        host = self.host_bytes
        dropped = [abar(i), a(i)] + ([a(i - 1)] if i > 1 and a(i - 1) in self.device else [])
        start, end = self._compute(form.backward_time, dropped)
        for v in dropped:
            self.device.pop(v, None)
            self.host.pop(v, None)
            self.arriving.discard(v)
        if i == len(self.chain):
            self.device[a(i)] = self.chain.output_bytes(i)  # the caller still holds the output
        self.next_backward = i - 1
        return Event(op, "compute", start, end, memory, host)

    def _move(self, op: Op) -> Event:
        v, kind, L = op.value, op.kind, len(self.chain)
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
        if kind is OpKind.OFFLOAD and v in self.host:
            raise self._error(op, f"{v} is on the host already")
        if kind is OpKind.FREE and v not in self.host:
            raise self._error(op, f"{v} is not on the host; offload it first, or drop it")

        memory = self._within_limit(op, self.held_bytes + (self.host[v] if kind is OpKind.PREFETCH else 0))
        lane, start, end = "compute", self._clock["compute"], self._clock["compute"]
        if kind is OpKind.OFFLOAD:
            self.host[v] = self.device[v]
            lane, (start, end) = "d2h", self._copy("d2h", v)
            self._offload_end[v] = end
        elif kind is OpKind.PREFETCH:
            self.device[v] = self.host[v]
            self.arriving.add(v)
            lane, (start, end) = "h2d", self._copy("h2d", v)
        host = self.host_bytes
        if kind is OpKind.WAIT:
            end = self._clock["compute"] = max(start, self._copy_end[v])
            self.arriving.discard(v)
        elif kind in (OpKind.FREE, OpKind.DROP):
            start, end = self._compute(0.0, [v])
            del self.device[v]
        return Event(op, lane, start, end, memory, host)

    # -- time

    def _compute(self, duration: float, dropped: list[Value]) -> tuple[float, float]:
        """Occupy the compute lane; it is held until the copies of what is dropped have ended."""
        start = self._clock["compute"]
        end = start + duration
        self._clock["compute"] = max([end] + [self._copy_end.pop(v, 0.0) for v in dropped])
        return start, end if duration > 0 else self._clock["compute"]

    def _copy(self, lane: str, v: Value) -> tuple[float, float]:
        size = self.device[v]
        after = self._offload_end.get(v, 0.0) if lane == "h2d" else 0.0
        lanes = [lane] if self.chain.duplex else ["d2h", "h2d"]
        start = max([self._clock["compute"], after] + [self._clock[name] for name in lanes])
        end = start + size / (self.chain.d2h_bandwidth if lane == "d2h" else self.chain.h2d_bandwidth)
        for name in lanes:
            self._clock[name] = end
        self._copy_end[v] = max(end, self._copy_end.get(v, 0.0))
        self._moved[lane] += size
        return start, end

    def _whereabouts(self, v: Value) -> str:
        if v in self.arriving:
            return "which is still arriving; wait for it first"
        if v in self.device:
            return "which the device holds, but not in the form needed"
        if v in self.host:
            return "which is on the host; prefetch it and wait for it first"
        return "which the device does not hold"


def simulate(chain: Chain, sequence: Iterable[Op], mem_limit: int | str | None = None) -> Trace:
    """Run `sequence` on the machine.

    Args:
        chain: the costs, bytes and seconds.
        sequence: operations in program order (a `Sequence` is one).
        mem_limit: bytes, as a number or a size such as ``"6 GiB"``; None for no limit.

    Raises:
        InvalidSequenceError: naming the first operation that is not legal or exceeds `mem_limit`, and its index.
    """
    check_chain(chain)
    if not isinstance(sequence, Iterable):
        raise InvalidSequenceError(f"the sequence is {sequence!r}; give a rotoff.Sequence or a list of rotoff.Op")
    machine = Machine(chain, None if mem_limit is None else parse_bytes(mem_limit))
    for index, op in enumerate(sequence):
        if not isinstance(op, Op):
            raise InvalidSequenceError("is no rotoff.Op; make one with rotoff.parse(text)", op, index)
        machine.step(op)
    return machine.finish()

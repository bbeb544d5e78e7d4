"""Parameters between steps: what device and host hold when a step of a training loop ends and the next begins.

A step ends in the state in which it began, so the state follows from the sequence. `Sequence.resident` names what the
device holds; all other ``w`` and ``o`` are on the host. Where this leaves a choice, the machine does the following:

- A resident value is *in flight* between steps if the text waits for it before any prefetch of it. Nothing else is in
  flight: a copy out that a step has issued continues by itself, and so does an update on the host.
- ``U`` invalidates the host's copy of a value. The copy leaves the host's bytes until an ``offload`` makes a new one.
- After ``B 1`` only updates and moves of ``w``, ``g`` and ``o`` may come. δ_0, a_0 and a_L are charged to the end of
  the step.
- ``prefetch g k`` and ``wait g k`` are legal, as for other values, once ``free g k`` has released the device's copy.
- ``H k``, like a copy, starts when all earlier operations of the text on the compute lane have ended. Otherwise, an
  update written after ``B 1`` could start before it. ``prefetch o k`` also waits for an update on the host.
- ``U k`` begins when all copies of ``w k``, ``g k`` and ``o k`` have ended. It may come at any time after g k is whole,
  and ``free g k`` at any time after ``H k``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from ..errors import InvalidSequenceError, OptionError
from .chain import Chain
from .sequence import UPDATES, Op, OpKind, Value, g, o, parse_value, w

WHEN = ("during", "after")
PERIODS = 4  # steps in a row; the time of a steady one is the mean of the last two


@dataclass(frozen=True)
class AtRest:
    """Parameters and states between steps.

    device: bytes of the values on the device. host: bytes of the values with a valid copy on the host. arriving: values
    on the device whose copy has not ended.
    """

    device: dict[Value, int] = field(default_factory=dict)
    host: dict[Value, int] = field(default_factory=dict)
    arriving: frozenset[Value] = frozenset()


def group_bytes(chain: Chain, v: Value) -> int:
    """Bytes of ``w k``, ``g k`` or ``o k``."""
    group = chain.group(v.stage)
    return {"w": group.bytes, "g": group.grad_bytes, "o": group.state_bytes}[v.of]


def check_group_value(chain: Chain, v: Value) -> str:
    """What is wrong with naming `v` of a group of parameters, or ""."""
    K = len(chain.parameters)
    if not 1 <= v.stage <= K:
        return f"the chain has parameter groups 1 to {K}" if K else "the chain has no parameters"
    return "" if group_bytes(chain, v) else f"{v} has 0 bytes, so it is always usable and never named"


def at_rest(chain: Chain, ops: Iterable[Op] = (), resident: Iterable[str] = ()) -> AtRest:
    """The state between steps that run `ops` and hold `resident`.

    The host has a valid copy of every value that is not resident. It has one of a resident value if the step updates it
    by ``H``, drops or frees it while it is frozen, or if the last of ``offload``, ``prefetch`` and ``U`` on it is not
    ``U``.

    Raises:
        InvalidSequenceError: if `resident` names a value that does not exist.
    """
    kept = dict.fromkeys(parse_value(text) for text in resident)
    if not chain.parameters and not kept:
        return AtRest()
    for v in kept:
        wrong = check_group_value(chain, v)
        if wrong:
            raise InvalidSequenceError(f"resident of the sequence names {v}: {wrong}")
    valid: dict[Value, bool] = {}
    waited: set[Value] = set()
    prefetched: set[Value] = set()
    for op in ops:
        if op.kind in UPDATES:
            valid.update(dict.fromkeys((w(op.stage), o(op.stage)), op.kind is OpKind.H))
        elif op.value.of and op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH):
            valid[op.value] = True
            prefetched |= {op.value} if op.kind is OpKind.PREFETCH else set()
        elif op.kind is OpKind.WAIT and op.value not in prefetched:
            waited.add(op.value)
        elif op.value.of and op.kind in (OpKind.DROP, OpKind.FREE) and _is_frozen(chain, op.value):
            valid[op.value] = True
    every = [v for k in range(1, len(chain.parameters) + 1) for v in (w(k), o(k)) if group_bytes(chain, v)]
    return AtRest(
        device={v: group_bytes(chain, v) for v in kept},
        host={v: group_bytes(chain, v) for v in every if v not in kept or valid.get(v, False)},
        arriving=frozenset(waited & set(kept)),
    )


def _is_frozen(chain: Chain, v: Value) -> bool:
    return not check_group_value(chain, v) and not chain.group(v.stage).grad_bytes


def check_end(
    chain: Chain,
    rest: AtRest,
    device: Mapping[Value, int],
    host: Mapping[Value, int],
    arriving: Set[Value],
    updated: Set[int],
) -> str:
    """A sentence on how the end of a step differs from its start, or ""."""
    for k, group in enumerate(chain.parameters, start=1):
        if group.grad_bytes and k not in updated:
            return f"the sequence ends without an update of group {k}; add U {k} or H {k}"
        for v in (w(k), o(k)):
            if (v in device) != (v in rest.device):
                where, cure = (
                    ("on the device", "free or drop it") if v in device else ("not on the device", "prefetch it")
                )
                return (
                    f"{v} is {where} at the end, unlike at the start; {cure} before the step ends, or change resident"
                )
            if (v in host) != (v in rest.host):
                return (
                    f"{v} has {'a' if v in host else 'no'} valid copy on the host at the end, unlike at the start;"
                    " offload it"
                )
            if (v in arriving) != (v in rest.arriving):
                return f"{v} is {'' if v in arriving else 'not '}arriving at the end, unlike at the start; wait for it"
    return ""


class Readers:
    """Lookup tables from stages to the values of their parameter groups."""

    def __init__(self, chain: Chain) -> None:
        self.weights: dict[int, list[Value]] = {}  # stage -> w of the groups that it reads
        self.begun: dict[int, list[Value]] = {}  # stage -> g of the groups whose first backward it is
        self.whole: dict[int, list[Value]] = {}  # stage -> g of the groups whose last backward it is
        for k, group in enumerate(chain.parameters, start=1):
            for i in group.stages if group.bytes else ():
                self.weights.setdefault(i, []).append(w(k))
            if group.grad_bytes:
                self.begun.setdefault(max(group.stages), []).append(g(k))
                self.whole.setdefault(min(group.stages), []).append(g(k))


def check_when(updates: str) -> None:
    """Raise OptionError if `updates` is neither "during" nor "after"."""
    if updates not in WHEN:
        raise OptionError(f"updates is {updates!r}; give {' or '.join(map(repr, WHEN))}")


def check_updates(ops: Iterable[Op], resident: Iterable[str], updates: str) -> None:
    """Check that updates come "during" the step, or "after" ``B 1`` with only ``w`` in flight between steps.

    Raises:
        OptionError: for another word. InvalidSequenceError: names the operation that comes too early.
    """
    check_when(updates)
    if updates == "during":
        return
    backward_done, kept, prefetched = False, set(resident), set()
    for index, op in enumerate(ops):
        if op.kind is OpKind.B and op.stage == 1:
            backward_done = True
        elif op.kind in UPDATES and not backward_done:
            raise InvalidSequenceError("with updates 'after' no group is updated before B 1 has run", op, index)
        elif op.kind is OpKind.PREFETCH:
            prefetched.add(op.value)
        elif op.kind is OpKind.WAIT and op.of == "o" and op.value not in prefetched and str(op.value) in kept:
            raise InvalidSequenceError("with updates 'after' only w may be in flight between steps", op, index)

"""Random legal sequences: a walk over the machine's own states, so that every rule of it is met."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

from rotoff import Chain, InvalidSequenceError, Machine, Op, OpKind, Sequence
from rotoff.solver.placement import (
    HOST_UPDATED,
    RESIDENT,
    STATE_STREAMED,
    STREAMED,
    STREAMED_HOST_UPDATED,
    Place,
    place,
)

FORWARD = (OpKind.F_ALL, OpKind.F_CK, OpKind.F_NONE)
MOVES = (OpKind.OFFLOAD, OpKind.FREE, OpKind.FREE, OpKind.PREFETCH, OpKind.WAIT, OpKind.DROP)


def random_sequence(chain: Chain, seed: int, wildness: float = 0.6, forms: bool = False) -> Sequence:
    """A legal sequence for `chain`, found by a random walk that heads for ``B 1``.

    wildness: how often, from 0 to 1, it does something that is not needed. forms: whether ``F_sel`` is used too.
    """
    rng = random.Random(seed)
    machine, ops = Machine(chain), []
    forwards = (*FORWARD, OpKind.F_SEL, OpKind.F_SEL) if forms else FORWARD
    kinds = (*forwards, *MOVES)

    def legal(op: Op) -> bool:
        trial = copied(machine)
        try:
            trial.step(op)
        except InvalidSequenceError:
            return False
        return _still_possible(trial)

    while machine.next_backward:
        op = None
        if rng.random() < wildness:
            kind = rng.choice(kinds)
            found = [op for op in _candidates(chain, kind) if legal(op)]
            if not found:
                continue
            op = rng.choice(found)
        else:
            op = _towards(machine, rng)
        machine.step(op)
        ops.append(op)
    machine.finish()
    return Sequence(tuple(ops), mode="random")


def copied(machine: Machine) -> Machine:
    """Another machine in the same state; what it holds in dicts, sets and lists is never changed itself."""
    other = copy.copy(machine)
    other._lanes = copy.deepcopy(machine._lanes)
    for name, value in vars(machine).items():
        if isinstance(value, (dict, set, list)):
            setattr(other, name, value.copy())
    return other


def _candidates(chain: Chain, kind: OpKind) -> list[Op]:
    L = len(chain)
    if kind is OpKind.F_SEL:
        return [Op(kind, i, k) for i, s in enumerate(chain.stages, start=1) for k in range(1, 1 + len(s.forms))]
    if kind in FORWARD:
        return [Op(kind, i) for i in range(1, L + 1)]
    return [Op(kind, i, saved=saved) for saved in (False, True) for i in range(1, L)]


def _still_possible(machine: Machine) -> bool:
    """Nothing made above the next backward, which nobody would ever drop."""
    top = machine.next_backward
    return all(v.stage <= top for v in machine.device) or not machine.backward_phase or top == len(machine.chain)


def _towards(machine: Machine, rng: random.Random) -> Op:
    """An operation that brings the next ``B`` nearer, by recompute or by the copy on the host."""
    b = machine.next_backward
    if any(v.saved and v.stage == b for v in machine.arriving):
        return Op(OpKind.WAIT, b, saved=True)
    target = b
    # Walk down to the deepest thing that can be done now.
    want_saved = True
    while True:
        v = next((v for v in machine.device if v.stage == target and v.saved == want_saved), None)
        if target == b and want_saved and v is not None and machine.input_of(b) is not None:
            return Op(OpKind.B, b)
        if target == b and want_saved and v is not None:
            target, want_saved = b - 1, False
        for saved in (False, True):
            w = next((w for w in machine.arriving if w.stage == target and w.saved == saved), None)
            if w is not None:
                return Op(OpKind.WAIT, target, saved=saved)
        for saved in (want_saved,) if want_saved else (False, True):
            w = next((w for w in machine.host if w.stage == target and w.saved == saved), None)
            if w is not None and w not in machine.device:
                return Op(OpKind.PREFETCH, target, saved=saved)
        if machine.input_of(target) is not None:
            if want_saved:
                return Op(OpKind.F_ALL, target)
            return Op(rng.choice([OpKind.F_CK, OpKind.F_ALL]), target)
        target, want_saved = target - 1, False


# -- random legal steps with parameters, and steps beside them that are legal or not


PLACES = (RESIDENT, HOST_UPDATED, STATE_STREAMED, STREAMED, STREAMED_HOST_UPDATED, Place(weights=False, state=True))


def placed(chain: Chain, rng: random.Random, updates: str) -> Sequence:
    acts = random_sequence(chain.without_parameters(), rng.randrange(10**6), wildness=0.3)
    spots = [
        rng.choice([p for p in PLACES if not p.host or group.host_update_time is not None])
        for group in chain.parameters
    ]
    return place(chain, acts, spots, updates, rng.randint(0, 3))


def mutants(data: dict, K: int, rng: random.Random) -> Iterator[dict]:
    """Sequences beside `data`: an operation moved, lost, twice, exchanged; a value gone for a while, or in flight
    between steps; other residents. The caller sends back whether to go on from the one it was given."""
    while True:
        ops, rest = list(data["ops"]), list(data["resident"])
        here, there = sorted(rng.randrange(len(ops)) for _ in range(2))
        kind, k, name = rng.randrange(10), rng.randint(1, K), rng.choice("wwwogg")
        fetched = [op for op in ops if op.startswith(("prefetch w", "prefetch o"))]
        if kind in (0, 1):
            ops.insert(here, ops.pop(there))
        elif kind in (2, 3):
            ops.insert(there, ops.pop(here))
        elif kind == 4:
            ops[here : here + 1] = rng.choice([[], [ops[here]] * 2])
        elif kind == 5:
            ops[here] = rng.choice([f"U {k}", f"H {k}"]) if ops[here][0] in "UH" else ops[there]
        elif kind == 6:
            word = rng.choice(["offload", "prefetch", "free", "wait", "drop"])
            ops.insert(here, f"{word} {name} {k}")
        elif kind == 7:
            ops[there:there] = [f"prefetch {name} {k}", f"wait {name} {k}"]
            ops[here:here] = rng.choice([[f"drop {name} {k}"], [f"offload {name} {k}", f"free {name} {k}"]])
        elif kind == 8 and fetched:  # from its place in this step to the end of the one before
            moved = rng.choice(fetched)
            ops.remove(moved)
            ops.append(moved)
            rest = sorted({*rest, moved.removeprefix("prefetch ")})
        else:
            rest = sorted(set(rest) ^ {f"{rng.choice('wo')} {k}"})
        mutant = {**data, "ops": ops, "resident": rest}
        if (yield mutant):
            data = mutant

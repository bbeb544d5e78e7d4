"""Random legal steps with parameters, and steps beside them that are legal or not."""

from __future__ import annotations

import random
from collections.abc import Iterator

from random_programs import random_sequence

from rotoff import Chain, Sequence
from rotoff.solver.placement import (
    HOST_UPDATED,
    RESIDENT,
    STATE_STREAMED,
    STREAMED,
    STREAMED_HOST_UPDATED,
    Place,
    place,
)

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

"""Random chains from a seed, for tests that report a figure over a fixed set."""

from __future__ import annotations

import random

from rotoff import Chain, Form, ParameterGroup, Stage


def seeded_chain(rng: random.Random, stages: int) -> Chain:
    """A heterogeneous chain: zeros, forms, transients of their own, links of several speeds, one or two lanes."""
    made = []
    for _ in range(stages):
        output = rng.choice([0, rng.randint(1, 20), rng.randint(1, 200)])
        saved = output + rng.choice([0, rng.randint(0, 300)])
        time = rng.choice([0.0, rng.random()])
        forms = []
        if rng.random() < 0.3:
            for _ in range(rng.randint(1, 2)):
                size = rng.randint(output, saved)
                forms.append(Form(size, time * rng.uniform(1, 4), rng.randint(0, 30), rng.randint(0, 30)))
        extra = {}
        if rng.random() < 0.5:
            most = {"grad_bytes": 50, "forward_transient_bytes": 60, "checkpoint_transient_bytes": 90}
            extra = {name: rng.randint(0, top) for name, top in (*most.items(), ("backward_transient_bytes", 60))}
        made.append(Stage("", time, 2 * time * rng.random(), output, saved, forms=tuple(forms), **extra))
    link = [10.0, 100.0, 1000.0]
    ends = {"input_bytes": rng.choice([0, 10, 100]), "duplex": rng.random() < 0.7}
    return Chain(tuple(made), rng.choice(link), rng.choice(link), **ends)


def seeded_group(rng: random.Random, stages: int, state: bool = False) -> Chain:
    """A chain with one group of parameters that one stage reads, or two; the host may update it, or not."""
    made = tuple(
        Stage("", rng.choice([0.5, 1.0, 2.0]), rng.choice([1.0, 2.0]), rng.choice([0, 2, 5]), rng.choice([5, 8, 12]))
        for _ in range(stages)
    )
    readers, size = tuple({rng.randint(1, stages), rng.randint(1, stages)}), rng.choice([5, 10, 20])
    host = rng.choice([None, 0.5, 2.0])
    group = ParameterGroup(readers, size, size, 2 * size if state else 0, rng.choice([0.1, 0.5]), host)
    link = rng.choice([4.0, 10.0, 40.0])
    return Chain(made, link, link, duplex=rng.random() < 0.7, parameters=(group,))

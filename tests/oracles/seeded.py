"""Random chains from a seed, for tests that report a figure over a fixed set."""

from __future__ import annotations

import random

from rotoff import Chain, Form, Stage


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

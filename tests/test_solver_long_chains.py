"""Plans for long, very uneven chains pass the machine: the search's own evaluator and the machine must not part."""

from __future__ import annotations

import random

import pytest

import rotoff


def uneven(seed: int, stages: int) -> rotoff.Chain:
    """Outputs from 1 to 100 MB, saved sets up to nine times that, times over two orders of magnitude."""
    rng = random.Random(seed)
    found = []
    for i in range(stages):
        output = int(10 ** rng.uniform(6, 8))
        saved = output + int(output * rng.uniform(0, 8))
        forward = 10 ** rng.uniform(-4, -2)
        backward = forward * rng.uniform(1, 3)
        extra = [int(output * rng.random()), int(saved * rng.random()), int(saved * rng.random())]
        found.append(rotoff.Stage(f"{i}", forward, backward, output, saved, output, *extra))
    return rotoff.Chain(tuple(found), 10e9, 10e9, input_bytes=found[0].output_bytes)


@pytest.mark.parametrize(("seed", "stages", "fraction"), [(2, 60, 0.3), (2, 60, 0.2), (3, 40, 0.3)])
def test_what_is_returned_passes_the_machine(seed: int, stages: int, fraction: float) -> None:
    chain = uneven(seed, stages)
    limit = int(rotoff.simulate(chain, rotoff.keep_all(chain)).peak_bytes * fraction)
    try:
        sequence = rotoff.solve(chain, limit)
    except rotoff.InfeasibleError as error:
        assert error.min_mem_limit > limit
    else:
        rotoff.simulate(chain, sequence, limit)

"""SuperNeurons (Wang et al., PPoPP 2018): its tables 1, 3, 4 and 5 from our chains, a 12 GB K40 behind 8 GB/s.

Tables 1 and 3 are about its own layers (tests/support/superneurons_layers.py has them as the paper counts them); tables
4 and 5 are about real networks, whose stages are blocks here. Parameters, their gradients and one momentum are taken
off the 12 GB.

    python benchmarks/papers/superneurons_2018.py        # a few minutes; CSV in benchmarks/results/papers/
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from network_chains import K40, network
from tables import write

from rotoff import Chain, InfeasibleError, Stage, keep_all, min_mem_limit, simulate, solve
from rotoff.solver.policies.moving_sets import heavy_stages
from rotoff.solver.policies.superneurons import layer_bytes, operations, segment_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from superneurons_layers import alexnet, chain_of, checkpoints, resnet

MIB, GB = 1 << 20, 10**9
COPIES = 3  # of the parameters: themselves, gradients, momentum
PAPER_TABLE_1 = {
    "AlexNet": (
        alexnet(),
        200,
        {"speed-centric": (14, 993.018), "memory-centric": (23, 886.23), "cost-aware": (17, 886.23)},
    ),
    "ResNet50": (
        resnet((3, 4, 6, 3)),
        32,
        {"speed-centric": (84, 455.125), "memory-centric": (118, 401), "cost-aware": (85, 401)},
    ),
    "ResNet101": (
        *(resnet((3, 4, 23, 3)), 32),
        {"speed-centric": (169, 455.125), "memory-centric": (237, 401), "cost-aware": (170, 401)},
    ),
}
PAPER_TABLE_3 = {256: (2.56, 0), 384: (3.72, 0), 512: (4.88, 0), 640: (6.03, 0), 896: (8.35, 0), 1024: (9.50, 0.88)}
PAPER_TABLE_4 = {"Caffe": 148, "MXNet": 480, "Torch": 152, "TensorFlow": 592, "SuperNeurons": 1920}
PAPER_TABLE_5 = {  # Caffe, MXNet, Torch, TensorFlow, SuperNeurons
    "alexnet": (768, 768, 1024, 1408, 1792),
    "vgg16": (48, 64, 48, 80, 224),
    "inception_v4": (16, None, None, 64, 240),
    "resnet50": (24, 80, 32, 128, 384),
    "resnet101": (16, 48, 16, 80, 256),
    "resnet152": (16, 32, 16, 48, 176),
}
IMAGES = {"alexnet": 227, "inception_v4": 299}


def table_1() -> list[dict[str, object]]:
    rows = []
    for name, (layers, batch, paper) in PAPER_TABLE_1.items():
        chain, marks = chain_of(layers, batch), checkpoints(layers)
        l_peak = max(layer_bytes(chain, i) for i in range(1, len(chain) + 1))
        segments = zip([1, *(i + 1 for i in marks)], marks, strict=False)
        most = max(segment_bytes(chain, first, i - 1) for first, i in segments if first < i)
        for technique, (extra, peak) in paper.items():
            trace = simulate(chain, operations(chain, 1 << 50, technique, marks))
            rows.append(
                {
                    "network": name,
                    "form": technique,
                    "extra": sum(event.recompute for event in trace.events),
                    "paper_extra": extra,
                    "peak_MiB": max(l_peak, most if technique == "speed-centric" else 0) / MIB,
                    "paper_peak": peak,
                    "least_limit_MiB": _least(chain, technique, marks) / MIB,
                }
            )
    return rows


def _least(chain: Chain, technique: str, marks: list[int]) -> int:
    try:
        solve(chain, 1, policy="superneurons", technique=technique, checkpoints=marks)
    except InfeasibleError as error:
        return error.min_mem_limit
    return 1


def figure_10() -> list[dict[str, object]]:
    """AlexNet at 200 images: the peak after each technique."""
    layers = alexnet()
    chain, marks = chain_of(layers, 200), checkpoints(layers)
    both_ways = sum(2 * s.saved_bytes for s in chain.stages)
    measured = {
        "baseline": (both_ways, 2189.437),
        "liveness": (simulate(chain, keep_all(chain)).peak_bytes, 1489.355),
        "+ offload": (_least(chain, "pool", marks), 1132.155),
        "+ recompute": (_least(chain, "cost-aware", marks), 886.385),
    }
    return [{"technique": name, "peak_MiB": size / MIB, "paper": paper} for name, (size, paper) in measured.items()]


def table_3() -> list[dict[str, object]]:
    rows, layers = [], alexnet()
    for batch, (without, with_cache) in PAPER_TABLE_3.items():
        chain, marks = chain_of(layers, batch), checkpoints(layers)
        room = K40.memory_bytes - COPIES * 244 * 10**6  # AlexNet's 61 million parameters
        row: dict[str, object] = {"batch": batch}
        for name, technique in (("without_GB", "pool"), ("cache_GB", "cache")):
            trace = simulate(chain, solve(chain, room, policy="superneurons", technique=technique, checkpoints=marks))
            row[name] = (trace.d2h_bytes + trace.h2d_bytes) / GB
        rows.append({**row, "paper_without_GB": without, "paper_cache_GB": with_cache})
    return rows


# -- what fits 12 GB


def fits_all(chain: Chain, limit: int) -> bool:
    return simulate(chain, keep_all(chain)).peak_bytes <= limit


def fits_policy(name: str) -> Callable[[Chain, int], bool]:
    def fits(chain: Chain, limit: int) -> bool:
        try:
            solve(chain, limit, policy=name)
        except InfeasibleError:
            return False
        return True

    return fits


def fits_superneurons(chain: Chain, limit: int) -> bool:
    marks = heavy_stages(chain)
    techniques = ("cost-aware", "memory-centric", "cache")
    return any(
        ops is not None and _peak(chain, ops) <= limit
        for t in techniques
        for ops in [operations(chain, limit, t, marks)]
    )


def _peak(chain: Chain, ops) -> int:
    return simulate(chain, ops).peak_bytes


def fits_joint(chain: Chain, limit: int) -> bool:
    return limit >= min_mem_limit(chain, "joint")


SYSTEMS = {"keep all": fits_all, "chen": fits_policy("chen"), "superneurons": fits_superneurons, "joint": fits_joint}


def largest(works: Callable[[int], bool], first: int, most: int) -> int | None:
    """The largest whole number from `first` to `most` that works, where smaller ones do too."""
    if not works(first):
        return None
    low, high = first, 2 * first
    while high < most and works(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def table_4(most: int) -> list[dict[str, object]]:
    """The deepest ResNet of 6, 32, n and 6 blocks at 16 images."""
    base = network("resnet50", 16, 224, K40, blocks=(6, 32, 2, 6))
    place = next(n for n, stage in enumerate(base.stages) if stage.name == "layer3 1")
    block = base.stages[place]
    one = 4 * (2 * 256 * 1024 + 9 * 256 * 256 + 2 * (2 * 256 + 1024))  # bytes of its parameters

    def chain_with(n: int) -> tuple[Chain, int]:
        stages = (*base.stages[:place], *([block] * (n - 1)), *base.stages[place + 1 :])
        return replace(base, stages=stages), K40.memory_bytes - COPIES * (base.meta["parameter_bytes"] + (n - 2) * one)

    rows = [{"system": name, "depth": depth, "n3": None, "source": "paper"} for name, depth in PAPER_TABLE_4.items()]
    for name, fits in SYSTEMS.items():
        n = largest(lambda n, fits=fits: chain_with(n)[1] > 0 and fits(*chain_with(n)), 2, most)
        rows.append(_depth(name, n, most))
    # One layer's peak whatever the depth (table 1's test has the machine say so for ResNet101): parameters alone grow.
    layers = chain_of(resnet((6, 32, 2, 6)), 16)
    l_peak = max(layer_bytes(layers, i) for i in range(1, len(layers) + 1)) + layers.output_bytes(len(layers))
    n = largest(lambda n: chain_with(n)[1] >= l_peak, 2, most)
    return [*rows, _depth("superneurons, by layers", n, most)]


def _depth(system: str, n: int | None, most: int) -> dict[str, object]:
    depth = None if n is None else 3 * (6 + 32 + n + 6) + 2
    source = "ours" + (", not searched further" if n == most else "")
    return {"system": system, "depth": depth, "n3": n, "source": source}


def at_batch(few: Chain, more: Chain, batches: tuple[int, int], batch: int) -> Chain:
    """The chain at any batch, from those at two: bytes are a constant (gradients of parameters) and a share for each
    image."""
    names = ("output_bytes", "saved_bytes", "grad_bytes", "forward_transient_bytes", "checkpoint_transient_bytes")

    def between(one: Stage, two: Stage) -> Stage:
        first, second = batches
        line = {n: (getattr(one, n), getattr(two, n)) for n in (*names, "backward_transient_bytes")}
        return replace(
            two, **{n: max(0, x + (y - x) * (batch - first) // (second - first)) for n, (x, y) in line.items()}
        )

    stages = tuple(between(one, two) for one, two in zip(few.stages, more.stages, strict=True))
    return replace(more, stages=stages, input_bytes=few.input_bytes // batches[0] * batch)


def table_5() -> list[dict[str, object]]:
    rows = []
    for name, paper in PAPER_TABLE_5.items():
        two = [network(name, batch, IMAGES.get(name, 224), K40) for batch in (16, 48)]
        room = K40.memory_bytes - COPIES * two[0].meta["parameter_bytes"]
        row: dict[str, object] = {"network": name}
        for system, fits in SYSTEMS.items():
            row[system] = largest(lambda n, fits=fits, c=two, r=room: fits(at_batch(*c, (16, 48), n), r), 1, 1 << 14)
        others = ("Caffe", "MXNet", "Torch", "TensorFlow", "SuperNeurons (paper)")
        rows.append(row | dict(zip(others, paper, strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="one table: 1, 3, 4 or 5")
    parser.add_argument("--deepest", type=int, default=1600, help="blocks of the third group to try at most")
    arguments = parser.parse_args()
    tables = {"table_1": table_1, "figure_10": figure_10, "table_3": table_3, "table_5": table_5}
    tables |= {"table_4": lambda: table_4(arguments.deepest)}
    for name, make in tables.items():
        if arguments.only is None or name.endswith(arguments.only):
            write(f"superneurons_2018_{name}", make())


if __name__ == "__main__":
    main()

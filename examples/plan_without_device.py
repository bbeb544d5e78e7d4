"""Plan the training of a GPT on a laptop, from shapes alone: no torch, no device, no model.

    python examples/plan_without_device.py --limit "12 GiB"
    python examples/plan_without_device.py --blocks 40 --width 5120 --tokens 8192 --limit "40 GiB" --out plans/

Bytes follow from the shapes of a transformer block in half precision whose attention saves no matrix; seconds from its
floating-point operations and what the device is given as sustaining. Where a device is at hand, `rotoff profile`
measures instead. With --out, the chain, the plan and (with matplotlib) two pictures are written there.
"""

import argparse
from pathlib import Path

import rotoff


def gpt(options: argparse.Namespace) -> rotoff.Chain:
    """Embedding, blocks, head with its loss; sizes in bytes, times in seconds."""
    hidden = options.tokens * options.width * 2  # one activation, two bytes a number
    stream = hidden / options.memory_rate  # reading or writing it once
    block_time = 24 * options.tokens * options.width**2 / options.flops
    head_time = 2 * options.tokens * options.width * options.vocabulary / options.flops
    logits = options.tokens * options.vocabulary * 2
    stages = [rotoff.Stage("embed", 2 * stream, 4 * stream, output_bytes=hidden, saved_bytes=hidden)]
    stages += [
        # Saved: two norms' inputs, q, k, v, attention's output, the middle of the MLP before and after its activation.
        rotoff.Stage(
            f"block{n}",
            block_time,
            2 * block_time,
            output_bytes=hidden,
            saved_bytes=17 * hidden,
            forward_transient_bytes=2 * hidden,
            backward_transient_bytes=4 * hidden,
        )
        for n in range(1, options.blocks + 1)
    ]
    stages.append(rotoff.Stage("head", head_time, 2 * head_time, 4, logits, backward_transient_bytes=logits))
    name = f"GPT, {options.blocks} blocks of width {options.width}, {options.tokens} tokens"
    return rotoff.Chain(tuple(stages), options.link, options.link, input_bytes=options.tokens * 8, name=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", default="12 GiB", help="bytes for one step, parameters and optimizer aside")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16384, help="in a batch: sequences times their length")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--flops", type=float, default=300e12, help="that the device sustains, per second")
    parser.add_argument("--memory-rate", type=float, default=1.5e12, help="bytes per second of the device's own memory")
    parser.add_argument("--link", type=float, default=25e9, help="bytes per second between device and host, each way")
    parser.add_argument("--out", type=Path, help="a folder for chain.json, sequence.json, plan.png and tradeoff.png")
    options = parser.parse_args()

    chain = gpt(options)
    try:
        sequence = rotoff.solve(chain, options.limit)
    except rotoff.InfeasibleError as error:
        raise SystemExit(str(error)) from None
    print(rotoff.render(chain, sequence))
    print()
    least = max(rotoff.min_mem_limit(chain, mode) for mode in ("remat", "offload"))
    peak = rotoff.simulate(chain, rotoff.keep_all(chain)).peak_bytes
    limits = [int(least + (peak - least) * n / 5) for n in range(6)]
    rows = rotoff.sweep(chain, limits, refine=0.5)
    print(rows)
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    chain.save(options.out / "chain.json")
    sequence.save(options.out / "sequence.json")
    try:
        from rotoff import plot
    except ModuleNotFoundError as error:
        print(error)
        return
    plot.save(plot.timeline(chain, sequence), options.out / "plan.png")
    plot.save(plot.tradeoff(chain, rows), options.out / "tradeoff.png")


if __name__ == "__main__":
    main()

"""Commands that show chains and sequences: show (text), plot (pictures and traces)."""

from __future__ import annotations

import argparse
import sys

from ..core.chain import Chain
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..report.chrome_trace import chrome_trace, save_chrome_trace
from ..report.summary import fates, group_fates, ranges
from ..report.terminal import has_colour, render
from ..solver import keep_all
from .command import (
    Command,
    UsageError,
    add_chain,
    add_json,
    add_sequence,
    check_suffix,
    print_json,
    read_chain,
    read_sequence,
    size,
)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain(parser)
    add_sequence(parser, optional=True)
    parser.add_argument(
        "--mem-limit", type=size, metavar="SIZE", help="a line at this limit (default: the sequence's own)"
    )
    parser.add_argument("--width", type=int, metavar="N", help="characters in a line (default: the terminal's)")
    parser.add_argument("--ops", action="store_true", help="print the operations themselves, one a line")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="(default: auto; NO_COLOR is respected)"
    )
    add_json(parser)


def _show(options: argparse.Namespace) -> int:
    chain = read_chain(options.chain)
    if options.sequence is None:
        if options.ops:
            raise UsageError("--ops needs a sequence")
        print_json(_stage_rows(chain)) if options.json else print(stage_table(chain))
        return 0
    sequence = read_sequence(options.sequence)
    if options.ops:
        simulate(chain, sequence)
        print(sequence)
        return 0
    if options.json:
        simulate(chain, sequence)
        words = [
            {"stage": f.stage, "name": chain.stage(f.stage).name, "fate": f.word, "runs": f.runs}
            for f in fates(sequence)
        ]
        groups = [{"group": f.group, "name": chain.group(f.group).name, "fate": f.word} for f in group_fates(sequence)]
        told = {"mode": sequence.mode, "mem_limit": sequence.mem_limit, "stages": words}
        print_json({**told, "parameters": groups} if chain.parameters else told)
        return 0
    colour = {"always": True, "never": False}.get(options.color, has_colour(sys.stdout))
    print(render(chain, sequence, options.mem_limit, width=options.width, colour=colour))
    return 0


def stage_table(chain: Chain) -> str:
    """A chain as text, a line for each stage, and the sums."""
    longest = max([4, *(len(stage.name) for stage in chain.stages)])
    wide = min(longest, 40)
    head = (
        f"{'stage':>5} {'name':<{wide}} {'forward':>10} {'backward':>10} {'saved':>11} {'output':>11} {'transient':>11}"
    )
    lines = [head]
    for i, s in enumerate(chain.stages, start=1):
        name = s.name if len(s.name) <= wide else f"…{s.name[-wide + 1 :]}"
        transient = max(s.forward_transient_bytes, s.backward_transient_bytes)
        held = f"{format_bytes(s.saved_bytes):>11} {format_bytes(s.output_bytes):>11} {format_bytes(transient):>11}"
        lines.append(f"{i:>5} {name:<{wide}} {s.forward_time * 1e3:>7.4g} ms {s.backward_time * 1e3:>7.4g} ms {held}")
    everything = simulate(chain, keep_all(chain))
    link = f"{format_bytes(chain.d2h_bandwidth)}/s to the host, {format_bytes(chain.h2d_bandwidth)}/s back"
    way = "both at once" if chain.duplex else "one at a time"
    if min(chain.bidirectional_shares) < 1:
        way += " at {:.0%} and {:.0%} of that".format(*chain.bidirectional_shares)
    lines += [
        "",
        f"{chain.name or 'chain'}: {len(chain)} stages; keeping everything takes {everything.makespan:.4g} s and"
        f" {format_bytes(everything.peak_bytes)}, of which the input {format_bytes(chain.input_bytes)}",
        f"link: {link}, {way}",
    ]
    return "\n".join([*lines, *_group_table(chain)])


def _group_table(chain: Chain) -> list[str]:
    """Lines for the groups of parameters, and their sums; empty if there are no groups."""
    if not chain.parameters:
        return []
    wide = min(40, max([4, *(len(group.name) for group in chain.parameters)]))
    head = (
        f"{'group':>5} {'name':<{wide}} {'stages':>8} {'parameters':>11} {'gradients':>11} {'states':>11}"
        f" {'update':>10}"
    )
    lines = ["", f"{head} {'on the host':>11}"]
    for k, group in enumerate(chain.parameters, start=1):
        name = group.name if len(group.name) <= wide else f"…{group.name[-wide + 1 :]}"
        sizes = " ".join(f"{format_bytes(n):>11}" for n in (group.bytes, group.grad_bytes, group.state_bytes))
        times = f"{group.update_time * 1e3:>7.4g} ms" if group.grad_bytes else f"{'frozen':>10}"
        on_host = "" if group.host_update_time is None else f"{group.host_update_time * 1e3:.4g} ms"
        lines.append(f"{k:>5} {name:<{wide}} {ranges(group.stages):>8} {sizes} {times} {on_host:>11}".rstrip())
    sums = [sum(getattr(g, name) for g in chain.parameters) for name in ("bytes", "grad_bytes", "state_bytes")]
    told = ", ".join(
        f"{words} {format_bytes(n)}" for words, n in zip(("parameters", "gradients", "states"), sums, strict=True)
    )
    return [*lines, "", f"{told}: {format_bytes(sum(sums))} in all"]


def _stage_rows(chain: Chain) -> dict[str, object]:
    everything = simulate(chain, keep_all(chain))
    return {**chain.to_dict(), "keep_all": {"makespan": everything.makespan, "peak_bytes": everything.peak_bytes}}


def _plot_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain(parser)
    add_sequence(parser, optional=True)
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help=".png, .svg, .pdf, or .json for a Perfetto trace"
    )
    parser.add_argument(
        "--mem-limit", type=size, metavar="SIZE", help="a line at this limit (default: the sequence's own)"
    )
    parser.add_argument("--title", default="", help="(default: the chain's name and the step's costs)")
    add_json(parser)


def _plot(options: argparse.Namespace) -> int:
    suffix = check_suffix(options.output, (".png", ".svg", ".pdf", ".json"))
    chain = read_chain(options.chain)
    sequence = None if options.sequence is None else read_sequence(options.sequence)
    if suffix == ".json":
        if sequence is None:
            raise UsageError(
                "a trace needs a sequence; give SEQ.json, or a picture (.png, .svg, .pdf) to draw the chain"
            )
        save_chrome_trace(options.output, chain, sequence)
        if options.json:
            print_json(chrome_trace(chain, sequence))
    else:
        from .. import plot

        if sequence is None:
            figure = plot.stages(chain, title=options.title)
        else:
            figure = plot.timeline(chain, sequence, options.mem_limit, title=options.title)
        plot.save(figure, options.output)
        if options.json:
            print_json({"written": options.output})
    if not options.json:
        print(f"written to {options.output}")
    return 0


COMMANDS = (
    Command(
        "show",
        "print a plan on one screen, or a chain as a table",
        "rotoff show chain.json sequence.json",
        _show_arguments,
        _show,
    ),
    Command(
        "plot",
        "draw a plan's timeline, or a chain's stages; or export a trace for Perfetto",
        "rotoff plot chain.json sequence.json -o plan.png",
        _plot_arguments,
        _plot,
        "Pictures need matplotlib (the extra rotoff[plot]); a trace opens at https://ui.perfetto.dev.",
    ),
)

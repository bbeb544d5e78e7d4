"""Commands that make, compare and show sequences, without torch: solve, sweep, show."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import Any

from ..core.chain import Chain
from ..core.sequence import MODES, Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..errors import OptionError
from ..io.progress import Bar
from ..report.chain_table import chain_table, keep_all_line
from ..report.chrome_trace import save_chrome_trace
from ..report.expected_step import ShownStep, keep_all_step, shown_step
from ..report.summary import fates, group_fates
from ..report.terminal import render
from ..solver import solve, sweep
from ..solver.bounds import min_mem_limit
from ..solver.policies import PLACEMENTS, POLICIES
from .command import Add, add_command, answer, asked, ending_in, listed, one_option

_LIMIT = "the limit counts everything that a step of the chain holds, its input (the batch) included"
_PICTURES = (".png", ".svg", ".pdf")


def _path(path: str) -> str:
    """The path of the file that an argument names."""
    return "/dev/stdin" if path == "-" else path


def _solve(options: argparse.Namespace) -> int:
    chain, search = Chain.load(_path(options.chain)), asked(options)
    with Bar("searching") as bar:
        if "policy" not in search:
            search["progress"] = lambda done, best: bar(done, f"{best:.4g} s")
        sequence = solve(chain, **search)
    if options.output:
        sequence.save(options.output)
    answer(options, sequence.to_dict, render(chain, sequence))
    return 0


def _sweep(options: argparse.Namespace) -> int:
    chain, search = Chain.load(_path(options.chain)), asked(options)
    if "all" in search.get("policies", ()):
        search["policies"] = list(PLACEMENTS if chain.parameters else POLICIES)
    with Bar("sweeping") as bar:
        search["progress"] = lambda done, row: bar(done, f"{row.mode} {format_bytes(row.limit)}")
        made = sweep(chain, search.pop("mem_limit", None), **search)
    least = {mode: min_mem_limit(chain, mode) for mode in search.get("modes", MODES)}
    if options.output and options.output.lower().endswith(".csv"):
        made.save(options.output)
    elif options.output:
        from .. import plot

        plot.save(plot.tradeoff(chain, made), options.output)
    data = {"chain": chain.name, "keep_all": keep_all_step(chain).makespan, "min_mem_limits": least}
    smallest = ", ".join(f"{mode} {format_bytes(nbytes)}" for mode, nbytes in least.items())
    text = f"{made}\n\n{keep_all_line(chain)}; smallest limit: {smallest}"
    answer(options, lambda: {**data, "rows": [asdict(row) for row in made]}, text)
    return 0 if any(row.makespan is not None for row in made) else 1


def _show(options: argparse.Namespace) -> int:
    if options.chain == options.sequence == "-":
        raise OptionError("only one of the two files can be standard input")
    chain = Chain.load(_path(options.chain))
    if options.sequence is None:
        if options.output:
            raise OptionError("pictures and traces need a sequence; give SEQ.json")
        answer(options, chain.to_dict, chain_table(chain))
        return 0
    sequence, limit = Sequence.load(_path(options.sequence)), asked(options).get("mem_limit")
    step = shown_step(chain, sequence, None, limit)
    if not step.figures.fits:
        simulate(chain, sequence, step.figures.mem_limit)  # raises, and names the operation
    if options.output and options.output.lower().endswith(".json"):
        save_chrome_trace(options.output, chain, sequence)
    elif options.output:
        from .. import plot

        plot.save(plot.timeline(chain, sequence, limit), options.output)
    answer(options, lambda: _figures(chain, step), render(chain, sequence, limit))
    return 0


def _figures(chain: Chain, step: ShownStep) -> dict[str, Any]:
    """What a step does and costs, as JSON."""
    plan, trace, _, figures = step
    found: dict[str, Any] = {"mode": plan.mode, "mem_limit": figures.mem_limit}
    found |= {"overhead": figures.overhead, "with_batch": figures.with_batch}
    found |= {one.name: getattr(trace, one.name) for one in fields(trace) if one.name != "events"}
    found["stages"] = [{"stage": i, "name": chain.stage(i).name, "fate": word} for i, word in fates(plan).items()]
    groups = group_fates(plan).items() if chain.parameters else ()
    found["parameters"] = [{"group": k, "name": chain.group(k).name, "fate": word} for k, word in groups]
    names = ("lane", "start", "end", "memory", "host_memory", "recompute")
    found["events"] = [{**{k: getattr(e, k) for k in names}, "op": str(e.op)} for e in trace.events]
    return found


def _add_search(add: Add) -> None:
    add("chain", metavar="CHAIN.json", help="a file of `rotoff profile`; - for standard input")
    of = "of the search or the policy: refine=SECONDS (or false), host_limit=SIZE, mem_slots=N, ..."
    add("--option", type=one_option, action="append", metavar="NAME=VALUE", help=of)


def add_commands(commands: Any) -> None:
    add = add_command(
        commands,
        _solve,
        'rotoff solve chain.json --mem-limit "14 GiB" --mode joint -o sequence.json',
        "find the fastest sequence for one training step within a limit",
        f"Prints the plan as text; {_LIMIT}.",
    )
    _add_search(add)
    systems = (*POLICIES, *PLACEMENTS)
    add("--mem-limit", required=True, metavar="SIZE", help='such as "14 GiB"')
    add("--mode", choices=MODES, help="recompute and move, or only one (default: joint)")
    add("--policy", choices=systems, metavar="NAME", help=f"instead of a mode: {', '.join(systems)}")
    add("-o", "--output", metavar="SEQ.json", help="write the sequence to this file")
    add = add_command(
        commands,
        _sweep,
        'rotoff sweep chain.json --mem-limit "20 GiB" "14 GiB" "10 GiB" -o tradeoff.png',
        "plan for one limit or many in every mode: step time against bytes, and the certified bound",
        f"Exits with 1 if nothing fits; {_LIMIT}.",
    )
    _add_search(add)
    add("--mem-limit", nargs="+", metavar="SIZE", help="(default: 12, smallest to largest)")
    add("--modes", type=listed, metavar="NAMES", help=f"some of {','.join(MODES)} (default: all)")
    add("--policies", type=listed, metavar="NAMES", help="systems of the papers, or all")
    pictures = ending_in(*_PICTURES, ".csv")
    add("-o", "--output", type=pictures, metavar="FILE", help="a table (.csv) or a picture (.png, .svg, .pdf)")
    add = add_command(
        commands,
        _show,
        "rotoff show chain.json sequence.json",
        "check a plan, and print it on one screen, draw it, or write a trace; or show a chain",
        "Exits with 1 if the machine refuses the sequence; the message names the operation.\n"
        "Pictures need matplotlib (the extra rotoff[plot]); a trace opens at https://ui.perfetto.dev.",
    )
    add("chain", metavar="CHAIN.json", help="a file of `rotoff profile`; - for standard input")
    add("sequence", metavar="SEQ.json", nargs="?", default=None, help="of `rotoff solve`; else the chain is shown")
    traces = ending_in(*_PICTURES, ".json")
    add("-o", "--output", type=traces, metavar="FILE", help="a picture (.png, .svg, .pdf), or a Perfetto trace (.json)")
    add("--mem-limit", metavar="SIZE", help="refuse more bytes (default: the sequence's limit)")

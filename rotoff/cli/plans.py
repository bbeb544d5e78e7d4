"""Commands that make, compare and show sequences, without torch: solve, sweep, show."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import Any

from ..core.chain import Chain
from ..core.figures import table
from ..core.sequence import MODES, Sequence
from ..core.simulator import simulate
from ..core.sizes import format_bytes
from ..core.steady_step import WHEN
from ..io.files import save_json
from ..io.progress import Bar
from ..report.chain_table import chain_table, keep_all_line
from ..report.chrome_trace import save_chrome_trace
from ..report.expected_step import ShownStep, keep_all_step, shown_step
from ..report.summary import fates, group_fates
from ..report.terminal import render
from ..solver import solve, sweep
from ..solver.bounds import min_mem_limit
from ..solver.policies import PLACEMENTS, POLICIES
from ..solver.policies.nonpersistent import MOST_STATES, states_of
from .command import (
    Add,
    UsageError,
    add_chain,
    add_command,
    add_mem_slots,
    check_suffix,
    listed,
    named,
    print_json,
)

_LIMIT = "the limit counts everything that a step of the chain holds, its input (the batch) included"
_SYSTEMS = (*POLICIES, *PLACEMENTS)
_PICTURES = (".png", ".svg", ".pdf")


def _number(text: str) -> Any:
    """An int or a float, or the text itself, which may be a size."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, _number(value)


def _search(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("mem_slots", "refine", "host_limit")}


def _solve(options: argparse.Namespace) -> int:
    chain = Chain.load(named(options.chain))
    search = {"mode": options.mode, **_search(options)}
    if options.policy is not None:
        search |= {"policy": options.policy, **dict(options.option)}
    elif options.option:
        raise UsageError("--option needs --policy")
    with Bar("searching") as bar:
        if options.policy is None:
            search["progress"] = lambda done, best: bar(done, f"{best:.4g} s")
        sequence = solve(chain, options.mem_limit, **search)
    if options.output:
        sequence.save(options.output)
    if options.json:
        print_json(sequence.to_dict())
        return 0
    print(render(chain, sequence))
    if options.output:
        print(f"\nwritten to {options.output}")
    return 0


def _chosen(policies: list[str], chain: Chain) -> list[str]:
    """The requested systems; if "all" is among them, all that apply to the chain."""
    if "all" not in policies:
        return policies
    searchable = states_of(chain) <= MOST_STATES
    return [n for n in (PLACEMENTS if chain.parameters else POLICIES) if searchable or n != "nonpersistent"]


def _sweep(options: argparse.Namespace) -> int:
    suffix = check_suffix(options.output, (".csv", ".json", *_PICTURES))
    chain = Chain.load(named(options.chain))
    with Bar("sweeping") as bar:
        search = {"policies": _chosen(options.policies, chain), **_search(options)}
        search["progress"] = lambda done, row: bar(done, f"{row.mode} {format_bytes(row.limit)}")
        made = sweep(chain, options.mem_limit, options.modes, **search)
    least = {mode: min_mem_limit(chain, mode) for mode in options.modes}
    data = {"chain": chain.name, "keep_all": keep_all_step(chain).makespan, "min_mem_limits": least}
    data["rows"] = [asdict(row) for row in made]
    if suffix == ".csv":
        made.save(options.output)
    elif suffix == ".json":
        save_json(options.output, data)
    elif suffix is not None:
        from .. import plot

        plot.save(plot.tradeoff(chain, made), options.output)
    if options.json:
        print_json(data)
    elif options.output:
        print(f"written to {options.output}")
    else:
        smallest = ", ".join(f"{mode} {format_bytes(nbytes)}" for mode, nbytes in least.items())
        print(made, "", f"{keep_all_line(chain)}; smallest limit: {smallest}", sep="\n")
    return 0 if any(row.makespan is not None for row in made) else 1


def _show(options: argparse.Namespace) -> int:
    if options.chain == options.sequence == "-":
        raise UsageError("only one of the two files can be standard input")
    suffix = check_suffix(options.output, (*_PICTURES, ".json"))
    chain = Chain.load(named(options.chain))
    if options.sequence is None:
        if options.events or options.output:
            raise UsageError("operations, pictures and traces need a sequence; give SEQ.json")
        return _show_chain(chain, options)
    sequence = Sequence.load(named(options.sequence))
    step = shown_step(chain, sequence, None, options.mem_limit)
    limit = None if step.figures.fits else step.figures.mem_limit
    simulate(chain, sequence, limit, options.updates)  # raises if it is refused
    if suffix == ".json":
        save_chrome_trace(options.output, chain, sequence)
    elif suffix is not None:
        from .. import plot

        plot.save(plot.timeline(chain, sequence, options.mem_limit), options.output)
    if options.json:
        print_json(_figures(chain, step, options.events))
    elif options.output:
        print(f"written to {options.output}")
    elif options.events:
        rows = [
            (f"{e.start:.6g}", f"{e.end:.6g}", e.lane, format_bytes(e.memory), format_bytes(e.host_memory))
            + (f"{e.op}{'  (again)' if e.recompute else ''}",)
            for e in step.trace.events
        ]
        head = "start s", "end s", "lane", "device", "host", "operation"
        print(*table(head, rows, (2, 5)), "", step.trace, sep="\n")
    else:
        print(render(chain, sequence, options.mem_limit))
    return 0


def _show_chain(chain: Chain, options: argparse.Namespace) -> int:
    if options.json:
        whole = keep_all_step(chain)
        print_json({**chain.to_dict(), "keep_all": {"makespan": whole.makespan, "peak_bytes": whole.peak_bytes}})
    else:
        print(chain_table(chain))
    return 0


def _figures(chain: Chain, step: ShownStep, events: bool) -> dict[str, Any]:
    """What a step does and costs, as JSON."""
    plan, trace, _, figures = step
    found: dict[str, Any] = {"mode": plan.mode, "mem_limit": figures.mem_limit}
    found |= {"overhead": figures.overhead, "with_batch": figures.with_batch}
    found |= {one.name: getattr(trace, one.name) for one in fields(trace) if one.name != "events"}
    found["stages"] = [{"stage": i, "name": chain.stage(i).name, "fate": word} for i, word in fates(plan).items()]
    if chain.parameters:
        groups = group_fates(plan).items()
        found["parameters"] = [{"group": k, "name": chain.group(k).name, "fate": word} for k, word in groups]
    if events:
        names = ("lane", "start", "end", "memory", "host_memory", "recompute")
        found["events"] = [{**{k: getattr(e, k) for k in names}, "op": str(e.op)} for e in trace.events]
    return found


def _add_search(add: Add) -> None:
    add_mem_slots(add)
    add("--host-limit", type=_number, metavar="SIZE", help="bytes that may wait on the host (default: any)")
    add("--refine", type=float, default=True, metavar="SECONDS", help="about how long to search on exact bytes")
    add("--no-refine", dest="refine", action="store_false", help="use the dynamic programs alone")


def add_commands(commands: Any) -> None:
    add = add_command(
        commands,
        "solve",
        _solve,
        "find the fastest sequence for one training step within a limit",
        'rotoff solve chain.json --mem-limit "14 GiB" --mode joint -o sequence.json',
        f"Prints the plan as text; {_LIMIT}.",
    )
    add_chain(add)
    add("--mem-limit", required=True, metavar="SIZE", help='such as "14 GiB"')
    add("--mode", choices=MODES, default="joint", help="recompute and move, or only one (default: joint)")
    add("--policy", choices=_SYSTEMS, metavar="NAME", help=f"instead of a mode: {', '.join(_SYSTEMS)}")
    add("--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help="of the policy")
    _add_search(add)
    add("-o", "--output", metavar="SEQ.json", help="write the sequence to this file")
    add = add_command(
        commands,
        "sweep",
        _sweep,
        "plan for one limit or many in every mode: step time against bytes, and the certified bound",
        'rotoff sweep chain.json --mem-limit "20 GiB" "14 GiB" "10 GiB" -o tradeoff.png',
        f"Exits with 1 if nothing fits; {_LIMIT}.",
    )
    add_chain(add)
    add("--mem-limit", nargs="+", metavar="SIZE", help="(default: 12, smallest to largest)")
    add("--modes", type=listed, default=MODES, metavar="NAMES", help=f"some of {','.join(MODES)} (default: all)")
    add("--policies", type=listed, default=[], metavar="NAMES", help="systems of the papers, or all")
    _add_search(add)
    add("-o", "--output", metavar="FILE", help="a table (.csv, .json) or a picture (.png, .svg, .pdf)")
    add = add_command(
        commands,
        "show",
        _show,
        "check a plan, and print it on one screen, draw it, or write a trace; or show a chain",
        "rotoff show chain.json sequence.json",
        "Exits with 1 if the machine refuses the sequence; the message names the operation.\n"
        "Pictures need matplotlib (the extra rotoff[plot]); a trace opens at https://ui.perfetto.dev.",
    )
    add_chain(add)
    add("sequence", metavar="SEQ.json", nargs="?", help="a file of `rotoff solve`; else the chain is shown")
    add("-o", "--output", metavar="FILE", help="a picture (.png, .svg, .pdf), or a Perfetto trace (.json)")
    add("--mem-limit", metavar="SIZE", help="refuse more bytes (default: the sequence's limit)")
    add("--updates", choices=WHEN, default="during", help="after: refuse updates before B 1")
    add("--events", action="store_true", help="print every operation with its times and bytes")

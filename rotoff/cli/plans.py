"""Commands that make and check sequences, without torch: solve, compare, sweep, simulate."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import Any

from ..core.chain import Chain
from ..core.sequence import MODES
from ..core.simulator import Trace, simulate
from ..core.sizes import format_bytes
from ..core.steady_step import WHEN
from ..errors import InfeasibleError, OptionError
from ..io.json_file import save_json
from ..io.progress import Bar
from ..report.terminal import render
from ..solver import Sweep, keep_all, solve, sweep
from ..solver.bounds import lower_bound, min_mem_limit
from ..solver.policies import PLACEMENTS, POLICIES
from ..solver.policies.nonpersistent import MOST_STATES, states_of
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
    size_or_zero,
)

_LIMIT = "the limit counts everything that a step of the chain holds, its input (the batch) included"


# -- shared arguments


def _add_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mem-slots", type=int, default=50, metavar="N", help="slots of the joint dynamic program (default: 50)"
    )
    parser.add_argument(
        "--host-limit", type=size_or_zero, metavar="SIZE", help="bytes that may wait on the host (default: any)"
    )
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--refine", type=float, metavar="SECONDS", help="about how long to search on exact bytes")
    effort.add_argument("--no-refine", action="store_true", help="use the dynamic programs alone, without a search")


def _search(options: argparse.Namespace) -> dict[str, Any]:
    refine = False if options.no_refine else True if options.refine is None else options.refine
    return {"mem_slots": options.mem_slots, "refine": refine, "host_limit": options.host_limit}


_SYSTEMS = (*POLICIES, *PLACEMENTS)


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in (*_SYSTEMS, "all"):
            raise argparse.ArgumentTypeError(f"{name!r} is not a policy; policies are {', '.join(_SYSTEMS)}, or all")
    return names


def _chosen(policies: tuple[str, ...], chain: Chain) -> tuple[str, ...]:
    """The requested systems; if "all" is among them, all that apply to the chain."""
    if "all" not in policies:
        return policies
    searchable = states_of(chain) <= MOST_STATES
    names = PLACEMENTS if chain.parameters else POLICIES
    return tuple(name for name in names if searchable or name != "nonpersistent")


def _add_policies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies",
        type=_policies,
        default=(),
        metavar="NAMES",
        help="systems of the papers to compare with the modes, or all",
    )


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    for number in (int, float):
        try:
            return name, number(value)
        except ValueError:
            continue
    return name, value


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or not modes:
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {', '.join(MODES)}, separated by commas")
    return modes


def _summary(chain: Chain, trace: Trace) -> dict[str, Any]:
    """What a step costs, as JSON."""
    base = chain.compute_time
    found = {one.name: getattr(trace, one.name) for one in fields(trace) if one.name != "events"}
    makespan = found.pop("makespan")
    return {"makespan": makespan, "overhead": makespan / base - 1 if base else 0.0, **found}


# -- solve


def _solve_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain(parser)
    parser.add_argument("--mem-limit", type=size, required=True, metavar="SIZE", help='such as "14 GiB"')
    parser.add_argument(
        "--mode", choices=MODES, default="joint", help="recompute and move, or only one (default: joint)"
    )
    parser.add_argument("--policy", choices=_SYSTEMS, metavar="NAME", help=f"instead of a mode: {', '.join(_SYSTEMS)}")
    parser.add_argument(
        "--option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of that policy; may be repeated",
    )
    _add_search(parser)
    parser.add_argument("-o", "--output", metavar="SEQ.json", help="write the sequence to this file")
    add_json(parser)


def _solve(options: argparse.Namespace) -> int:
    chain = read_chain(options.chain)
    search = {"mode": options.mode, **_search(options)}
    if options.policy is not None:
        sequence = solve(chain, options.mem_limit, policy=options.policy, **search, **dict(options.option))
    elif options.option:
        raise UsageError("--option needs --policy")
    else:
        with Bar("searching") as bar:
            search["progress"] = lambda done, best: bar(done, f"{best:.4g} s")
            sequence = solve(chain, options.mem_limit, **search)
    if options.output:
        sequence.save(options.output)
    if options.json:
        print_json(sequence.to_dict())
    else:
        print(render(chain, sequence))
        if options.output:
            print(f"\nwritten to {options.output}")
    return 0


# -- compare


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain(parser)
    parser.add_argument("--mem-limit", type=size, required=True, metavar="SIZE", help='such as "14 GiB"')
    parser.add_argument("--modes", type=_modes, default=MODES, help=f"some of {','.join(MODES)} (default: all)")
    _add_policies(parser)
    _add_search(parser)
    add_json(parser)


def _compare(options: argparse.Namespace) -> int:
    chain = read_chain(options.chain)
    everything = simulate(chain, keep_all(chain))
    least = min(min_mem_limit(chain, mode) for mode in MODES)
    bound = lower_bound(chain, options.mem_limit) if options.mem_limit >= least else None
    rows: list[dict[str, Any]] = []
    with Bar("comparing") as bar:
        policies = _chosen(options.policies, chain)
        count = len(options.modes) + len(policies)
        for n, mode in enumerate(options.modes):
            bar(n / count, mode)
            search = {"mode": mode, **_search(options)}
            rows.append(
                {"mode": mode, "min_mem_limit": min_mem_limit(chain, mode), **_try(chain, options.mem_limit, **search)}
            )
        for n, policy in enumerate(policies, start=len(options.modes)):
            bar(n / count, policy)
            rows.append({"mode": policy, **_try(chain, options.mem_limit, policy=policy)})
    asked = {"chain": chain.name, "mem_limit": options.mem_limit, "lower_bound": bound}
    found = {**asked, "keep_all": _summary(chain, everything), "rows": rows}
    if options.json:
        print_json(found)
    else:
        _print_comparison(found, everything.makespan)
    return 0 if any(row["fits"] for row in rows) else 1


def _try(chain: Chain, mem_limit: int, **options: Any) -> dict[str, Any]:
    try:
        sequence = solve(chain, mem_limit, **options)
    except InfeasibleError as error:
        return {"fits": False, "why": str(error), "min_mem_limit": error.min_mem_limit}
    except OptionError as error:  # a policy that does not apply to such a chain
        return {"fits": False, "why": str(error)}
    return {"fits": True, **_summary(chain, simulate(chain, sequence))}


def _print_comparison(found: dict[str, Any], base: float) -> None:
    limit, bound = found["mem_limit"], found["lower_bound"]
    print(f"{found['chain'] or 'chain'}: {format_bytes(limit)}; keeping everything takes {base:.4g} s and", end=" ")
    print(format_bytes(found["keep_all"]["peak_bytes"]))
    print(
        f"\n{'mode':<13} {'step s':>10} {'overhead':>9} {'recomputed s':>13} {'idle s':>9} {'moved':>11} {'peak':>11} "
        f"{'host':>11} {'smallest':>11}"
    )
    for row in found["rows"]:
        least = format_bytes(row["min_mem_limit"]) if "min_mem_limit" in row else ""
        if not row["fits"]:
            print(
                f"{row['mode']:<13} {'does not fit' if least else 'not for this chain: ' + row['why'][:60]:>80}"
                f" {least:>11}"
            )
            continue
        held = f"{format_bytes(row['peak_bytes']):>11} {format_bytes(row['host_peak_bytes']):>11} {least:>11}"
        lost = f"{row['recompute_time']:>13.4g} {row['idle_time']:>9.3g} {format_bytes(row['d2h_bytes']):>11}"
        print(f"{row['mode']:<13} {row['makespan']:>10.4g} {row['overhead']:>9.1%} {lost} {held}")
    if bound is not None:
        over = bound / base - 1 if base else 0.0
        print(f"{'bound':<13} {bound:>10.4g} {over:>9.1%}   no sequence is faster")


# -- sweep


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain(parser)
    parser.add_argument(
        "--mem-limit", type=size, nargs="+", metavar="SIZE", help="limits (default: 12, smallest to largest)"
    )
    parser.add_argument("--modes", type=_modes, default=MODES, help=f"some of {','.join(MODES)} (default: all)")
    _add_policies(parser)
    _add_search(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write a table (.csv, .json) or a picture (.png, .svg, .pdf)"
    )
    add_json(parser)


def _sweep(options: argparse.Namespace) -> int:
    suffix = check_suffix(options.output, (".csv", ".json", ".png", ".svg", ".pdf"))
    chain = read_chain(options.chain)
    with Bar("sweeping") as bar:
        search = {"policies": _chosen(options.policies, chain), **_search(options)}
        search["progress"] = lambda done, row: bar(done, f"{row.mode} {format_bytes(row.limit)}")
        made = sweep(chain, options.mem_limit, options.modes, **search)
    rows = [asdict(row) for row in made]
    if options.json:
        print_json({"chain": chain.name, "keep_all": chain.compute_time, "rows": rows})
    elif suffix is None:
        print(made)
    if options.output:
        _write_sweep(chain, made, rows, options.output, suffix or "")
        if not options.json:
            print(f"written to {options.output}")
    return 0 if any(row.makespan is not None for row in made) else 1


def _write_sweep(chain: Chain, made: Sweep, rows: list[dict[str, Any]], path: str, suffix: str) -> None:
    if suffix == ".csv":
        made.save(path)
    elif suffix == ".json":
        table = {"chain": chain.name, "keep_all": chain.compute_time, "rows": rows}
        save_json(path, table)
    else:
        from .. import plot

        plot.save(plot.tradeoff(chain, made), path)


# -- simulate


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    add_chain(parser)
    add_sequence(parser)
    parser.add_argument(
        "--mem-limit", type=size, metavar="SIZE", help="refuse a sequence that exceeds it (default: the sequence's own)"
    )
    parser.add_argument(
        "--updates",
        choices=WHEN,
        default="during",
        help="after: refuse updates of parameters before B 1 (default: during)",
    )
    parser.add_argument("--events", action="store_true", help="also print every operation with its times and bytes")
    add_json(parser)


def _simulate(options: argparse.Namespace) -> int:
    if options.chain == options.sequence == "-":
        raise UsageError("only one of the two files can be standard input")
    chain, sequence = read_chain(options.chain), read_sequence(options.sequence)
    limit = options.mem_limit if options.mem_limit is not None else sequence.mem_limit
    trace = simulate(chain, sequence, limit, options.updates)
    if options.json:
        print_json({**_summary(chain, trace), **({"events": _events(trace)} if options.events else {})})
        return 0
    if options.events:
        print(f"{'start s':>12} {'end s':>12} {'lane':<8} {'device':>11} {'host':>11}  operation")
        for e in trace.events:
            held = f"{format_bytes(e.memory):>11} {format_bytes(e.host_memory):>11}"
            print(f"{e.start:>12.6g} {e.end:>12.6g} {e.lane:<8} {held}  {e.op}{'  (again)' if e.recompute else ''}")
        print()
    print(trace)
    return 0


def _events(trace: Trace) -> list[dict[str, Any]]:
    return [
        {**{k: getattr(e, k) for k in ("lane", "start", "end", "memory", "host_memory", "recompute")}, "op": str(e.op)}
        for e in trace.events
    ]


COMMANDS = (
    Command(
        "solve",
        "find the fastest sequence for one training step within a limit",
        'rotoff solve chain.json --mem-limit "14 GiB" --mode joint -o sequence.json',
        _solve_arguments,
        _solve,
        f"Prints the plan as text; {_LIMIT}.",
    ),
    Command(
        "compare",
        "compare every mode within one limit, and with the certified bound",
        'rotoff compare chain.json --mem-limit "14 GiB"',
        _compare_arguments,
        _compare,
        f"Exits with 1 if nothing fits; {_LIMIT}.",
    ),
    Command(
        "sweep",
        "plan for many limits and modes: step time against bytes, as a table or a picture",
        'rotoff sweep chain.json --mem-limit "20 GiB" "14 GiB" "10 GiB" -o tradeoff.png',
        _sweep_arguments,
        _sweep,
    ),
    Command(
        "simulate",
        "check if a sequence is legal, how many bytes it holds, and how long it takes",
        'rotoff simulate chain.json sequence.json --mem-limit "14 GiB" --events',
        _simulate_arguments,
        _simulate,
        "Exits with 1 if the machine refuses the sequence; the message names the operation.",
    ),
)

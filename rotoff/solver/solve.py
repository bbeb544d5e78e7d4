"""`solve`: the planner's one door, for a mode or for a system of the papers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..core.chain import Chain, check_chain
from ..core.sequence import Sequence
from ..core.sizes import parse_bytes
from ..core.steady_step import check_when
from ..errors import OptionError
from .anneal import Budget
from .bounds import check_mode
from .policies import check_policy, run
from .search import Problem, as_sequence, best_candidate, parse_host_limit, parse_slots

_OF_MODES = ("refine", "host_limit", "progress", "updates")


def solve(
    chain: Chain,
    mem_limit: int | str,
    mode: str = "joint",
    mem_slots: int = 50,
    refine: bool | float = True,
    host_limit: int | str | None = None,
    progress: Callable[[float, float], None] | None = None,
    updates: str | None = None,
    *,
    policy: str | None = None,
    **options: Any,
) -> Sequence:
    """The fastest sequence found for one training step within `mem_limit`, or what a system of the papers does there.

    Args:
        chain: the costs of the stages.
        mem_limit: bytes on the device, as a number or a size such as ``"6 GiB"``.
        mode: "joint" recomputes and moves, "remat" only recomputes, "offload" only moves.
        mem_slots: N, the slots of the joint dynamic program (fewer on long chains where a search follows).
        refine: search on exact bytes after the dynamic programs; True for the default effort, a number for about that many
            seconds (the effort is a count of plans, so equal inputs give equal sequences), False for none.
        host_limit: bytes that may wait on the host at any time; None for no limit.
        progress: called now and then with (fraction of the search done, best step time in seconds).
        updates: when groups of parameters are updated: "during" the step (the default of all modes), as soon or as late as it
            pays, or "after" ``B 1``, as where the caller's own ``optimizer.step()`` runs then. Parameters, gradients and states
            move in modes "joint" and "offload"; in "remat" they stay.
        policy: instead of a mode, the name of a system of the papers ("greedy", "dynprog", "vdnn", ...: see
            `rotoff.solver.policies`), which then alone decides; all arguments after `mem_limit` belong to modes.
        options: of that policy.

    Returns:
        A `Sequence` with `mode` (the policy's name where one was given), `mem_limit` and `resident`; its `meta` holds the
        predicted makespan, peak_bytes, host_peak_bytes and the source of the plan. It passes
        ``simulate(chain, sequence, mem_limit, updates)``.

    Raises:
        InfeasibleError: where nothing fits; its `min_mem_limit` does (with a `host_limit`: without it, or none was found).
        LimitError, OptionError: for a bad argument.
    """
    check_chain(chain)
    limit = parse_bytes(mem_limit)
    if policy is not None:
        given = {"mode": mode, "mem_slots": mem_slots, "refine": refine, "host_limit": host_limit, "progress": progress}
        check_alone(policy, given)
        return run(policy, chain, limit, options if updates is None else {**options, "updates": updates})
    if options:
        raise OptionError(f"{next(iter(options))} is no argument of solve; options go with a policy")
    host = None if host_limit is None else parse_host_limit(host_limit)
    check_mode(mode)
    when = "during" if updates is None else updates
    check_when(when)
    problem = Problem(chain, limit, host, parse_slots(mem_slots), Budget.of(refine), when)
    best = best_candidate(problem, mode, progress)
    return as_sequence(problem, best, mode)


def check_alone(policy: str, given: Mapping[str, Any]) -> None:
    """Raise OptionError where an argument of the modes was `given` another value than its default beside a policy."""
    check_policy(policy)
    defaults = {name: p.default for name, p in inspect.signature(solve).parameters.items()}
    for name, value in given.items():
        if value is not defaults[name] and value != defaults[name]:
            raise OptionError(f"{name} is {value!r}, but policy {policy!r} decides alone; leave out {name} or the policy")


def check_mode_options(options: Mapping[str, Any]) -> None:
    """Raise OptionError or LimitError where `options` are none of `solve` for a mode, beside the mode and the slots."""
    for name in options:
        if name not in _OF_MODES:
            raise OptionError(f"{name} is no option; a mode has {', '.join(_OF_MODES)}, and others go with a policy")
    if (host_limit := options.get("host_limit")) is not None:
        parse_host_limit(host_limit)
    Budget.of(options.get("refine", True))
    if (updates := options.get("updates")) is not None:
        check_when(updates)

"""`solve`: plans a chain, in a mode or by a policy of the papers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..core.chain import Chain, check_chain
from ..core.modes import check_mode
from ..core.sequence import Sequence
from ..core.sizes import parse_bytes
from ..core.steady_step import check_when
from ..errors import OptionError, nearest
from .anneal import Budget
from .policies import check_policy, run
from .search import Problem, as_sequence, best_candidate, parse_host_limit
from .slots import parse_slots

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
    """Plan one training step of a chain within `mem_limit`: the fastest sequence found, or the plan of a policy.

    Args:
        chain: the costs of the stages.
        mem_limit: bytes on the device, as a number or a size such as ``"6 GiB"``.
        mode: "joint" recomputes and offloads, "remat" only recomputes, "offload" only offloads.
        mem_slots: N, the slots of the joint dynamic program, whose plan counts where no search follows.
        refine: effort of the search on exact bytes after the dynamic programs: True for the default, a number for about
            that many seconds, False for none. The effort is a count of plans, so equal inputs give equal sequences. A
            number below the default's also ends at a plan within 0.1 % of a bound.
        host_limit: bytes that may be on the host at any time; None for no limit.
        progress: called during the search with (fraction done, best step time in seconds).
        updates: when groups of parameters are updated: "during" the step (the default), at the best moment, or "after"
            ``B 1``, for callers that then run ``optimizer.step()``. Parameters, gradients and states move in modes
            "joint" and "offload", and stay in "remat".
        policy: the name of a system of the papers ("greedy", "dynprog", "vdnn", ...: see `rotoff.solver.policies`). It
            replaces the mode; the arguments of modes, except `updates`, then keep their defaults.
        options: options of the policy.

    Returns:
        A `Sequence` that passes ``simulate(chain, sequence, mem_limit, updates)``, with `mode` (or the policy's name),
        `mem_limit` and `resident`. Its `meta` has the predicted makespan, peak_bytes, host_peak_bytes and the source of
        the plan.

    Raises:
        InfeasibleError: if nothing fits. Its `min_mem_limit` fits (with a `host_limit`: if that is left out).
        LimitError, OptionError: for a bad argument.
    """
    check_chain(chain)
    limit = parse_bytes(mem_limit)
    if policy is not None:
        given = {"mode": mode, "mem_slots": mem_slots, "refine": refine, "host_limit": host_limit, "progress": progress}
        check_alone(policy, given)
        return run(policy, chain, limit, options if updates is None else {**options, "updates": updates})
    if options:
        raise OptionError(f"{next(iter(options))} is not an argument of solve; an option of a policy needs policy=")
    host = None if host_limit is None else parse_host_limit(host_limit)
    check_mode(mode)
    when = "during" if updates is None else updates
    check_when(when)
    problem = Problem(chain, limit, host, parse_slots(mem_slots), Budget.of(refine), when)
    return as_sequence(problem, best_candidate(problem, mode, progress), mode)


def check_alone(policy: str, given: Mapping[str, Any]) -> None:
    """Raise OptionError if an argument of the modes was `given` together with a policy."""
    check_policy(policy)
    defaults = {name: p.default for name, p in inspect.signature(solve).parameters.items()}
    for name, value in given.items():
        if value is not defaults[name] and value != defaults[name]:
            raise OptionError(
                f"{name} is {value!r}, and policy {policy!r} does not use it; leave out {name} or the policy"
            )


def check_mode_options(options: Mapping[str, Any]) -> None:
    """Raise OptionError or LimitError for `options` that `solve` does not accept with a mode."""
    for name in options:
        if name not in _OF_MODES:
            said = f"{name} is not an option; a mode has {', '.join(_OF_MODES)}, and others need policy="
            raise OptionError(said + nearest(name, inspect.signature(solve).parameters))
    if (host_limit := options.get("host_limit")) is not None:
        parse_host_limit(host_limit)
    Budget.of(options.get("refine", True))
    if (updates := options.get("updates")) is not None:
        check_when(updates)

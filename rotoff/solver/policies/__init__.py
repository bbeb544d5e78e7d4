"""The systems of the papers as policies: each is a function (chain, mem_limit in bytes, **options) -> Sequence.

A policy raises `InfeasibleError` if nothing fits the limit by its own rules, whatever other systems could do; the
error's `min_mem_limit` is the smallest limit at which this policy is known to work. It raises `OptionError` for an
option that is not what its function says, and, if it places parameters, for a chain without any. `run` checks its
sequence on the machine, like any other; ``meta["source"]`` names the policy's choices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.chain import Chain
from ...core.sequence import Sequence
from ...core.simulator import simulate
from ...core.trace import figures
from ...errors import OptionError
from .autoswap import autoswap
from .dynprog import dynprog
from .moving_sets import greedy, tflms, vdnn, vdnn_plus_plus
from .overlap import overlap
from .placements import block_swap, by_hand, streaming, torchao_offload, zero_offload
from .pofo import pofo
from .revolve import revolve
from .rotor import rotor
from .segments import chen, periodic
from .superneurons import superneurons

Policy = Callable[..., Sequence]

POLICIES: Mapping[str, Policy] = {
    "greedy": greedy,
    "dynprog": dynprog,
    "vdnn": vdnn,
    "vdnn++": vdnn_plus_plus,
    "tflms": tflms,
    "autoswap": autoswap,
    "rotor": rotor,
    "revolve": revolve,
    "periodic": periodic,
    "chen": chen,
    "pofo": pofo,
    "overlap": overlap,
    "superneurons": superneurons,
}
# Policies that place parameters, with the best plan for the activations; those above plan activations alone.
PLACEMENTS: Mapping[str, Policy] = {
    "zero-offload": zero_offload,
    "torchao-offload": torchao_offload,
    "streaming": streaming,
    "block-swap": block_swap,
    "by-hand": by_hand,
}
# Policies that run every forward once, so that nothing has to be restored for a replay.
WITHOUT_RECOMPUTE = frozenset({"greedy", "dynprog", "vdnn", "vdnn++", "tflms", "autoswap", "overlap"})


def check_policy(name: Any, options: Mapping[str, Any] | None = None) -> Policy:
    """The policy called `name`.

    Raises:
        OptionError: if there is none, or it has no such option; the message lists the known ones.
    """
    policies = {**POLICIES, **PLACEMENTS}
    policy = policies.get(name) if isinstance(name, str) else None
    if policy is None:
        raise OptionError(f"policy is {name!r}; policies are {', '.join(policies)}")
    known = list(inspect.signature(policy).parameters)[2:]
    for option in options or {}:
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise OptionError(f"policy {name!r} has no option {option!r}; {has}")
    return policy


def run(name: str, chain: Chain, mem_limit: int, options: Mapping[str, Any]) -> Sequence:
    """The sequence of policy `name` within `mem_limit` bytes, checked by the machine.

    Raises:
        OptionError: for an unknown policy or option. InfeasibleError: if the policy fits nothing.
    """
    policy = check_policy(name, options)
    if name in POLICIES and chain.parameters:
        raise OptionError(
            f"policy {name!r} plans only activations; give chain.without_parameters(), or one of"
            f" {', '.join(PLACEMENTS)}"
        )
    with np.errstate(over="ignore", invalid="ignore"):  # times of copies over very slow links may overflow
        made = policy(chain, mem_limit, **options)
    meta = {"source": name, **made.meta, **figures(simulate(chain, made, mem_limit))}
    return replace(made, mode=name, mem_limit=mem_limit, meta=meta)

"""From a measured model and what the user asked for to a plan: the limit in the user's terms, and in the machine's."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any

from ..bounds import min_mem_limit
from ..cache import Cache
from ..chain import Chain
from ..errors import InfeasibleError, InvalidSequenceError, SequenceFormatError
from ..profile.measure import Profile
from ..rotor_names import NO_LIMIT
from ..sequence import Sequence
from ..simulator import simulate
from ..sizes import format_bytes
from ..solver import keep_all, solve
from ..solver.policies import WITHOUT_RECOMPUTE
from ..summary import in_words
from .agreement import agree_on_sequence
from .plan import ExecutionPlan, compile_sequence

logger = logging.getLogger("rotoff")


@dataclass(frozen=True)
class Request:
    """What `compute_sequence` was asked for."""

    mem_limit: int
    mode: str
    mem_slots: int
    options: dict[str, Any]
    policy: str | None = None  # a system of the papers, instead of the mode
    cache: Cache = field(default_factory=lambda: Cache(None))

    def __str__(self) -> str:
        return f"in mode {self.mode}" if self.policy is None else f"with policy {self.policy}"

    @property
    def replays(self) -> bool:
        """Whether forwards may run more than once."""
        return self.mode != "offload" if self.policy is None else self.policy not in WITHOUT_RECOMPUTE

    def solve(self, chain: Chain, limit: int) -> Sequence:
        """The sequence asked for, within `limit` bytes in the machine's terms."""
        key = self._key(chain, limit)
        if key is not None and (known := _known_sequence(self.cache, key, chain, limit)) is not None:
            return known
        sequence = self._solve(chain, limit)
        if key is not None:
            self.cache.keep("plan", key, sequence.to_dict())
        return sequence

    def _key(self, chain: Chain, limit: int) -> dict[str, Any] | None:
        """All that a sequence depends on; None where an option cannot be compared, such as a function."""
        from .. import __version__

        content = {k: v for k, v in chain.to_dict().items() if k not in ("name", "meta")}
        asked = {"limit": limit, "mode": self.mode, "slots": self.mem_slots, "policy": self.policy, "options": self.options}
        key = {"chain": content, "rotoff": __version__, **asked}
        try:
            json.dumps(key)
        except TypeError:
            return None
        return key

    def _solve(self, chain: Chain, limit: int) -> Sequence:
        if self.policy is not None:
            return solve(chain, limit, policy=self.policy, **self.options)
        return solve(chain, limit, mode=self.mode, mem_slots=self.mem_slots, **self.options)


def _known_sequence(cache: Cache, key: dict[str, Any], chain: Chain, limit: int) -> Sequence | None:
    """A sequence kept for `key`, if the machine accepts it."""
    found = cache.find("plan", key)
    if found is None:
        return None
    try:
        sequence = Sequence.from_dict(found)
        simulate(chain, sequence, limit)
    except (SequenceFormatError, InvalidSequenceError) as error:
        logger.warning("rotoff: a cached plan is ignored: %s", error)
        return None
    logger.info("rotoff: plan from the cache in %s", cache.directory)
    return sequence


def make_plan(profile: Profile, request: Request, group: Any = None) -> ExecutionPlan:
    """Plan under what is left of the user's limit once constants are taken off and the batch is added.

    group: of processes that follow one plan, or None.

    Raises:
        InfeasibleError: where nothing fits, in the terms of the user's limit.
    """
    chain, asked, least = profile.chain, request.mem_limit, profile.prefix_peak_bytes
    everything = compile_sequence(chain, keep_all(chain))
    if request.policy is None and own_bytes(profile, everything) <= asked:
        _report(profile, request, everything)
        return everything
    attempts = _attempts(profile, request)
    try:
        if asked < least:
            raise InfeasibleError("", min(min_mem_limit(chain, one.mode) - more for one, more in attempts))

        def search() -> Sequence:
            return _best(chain, asked, attempts)

        sequence = search() if group is None else agree_on_sequence(search, group)
    except InfeasibleError as error:
        raise _infeasible(request, max(least, error.min_mem_limit)) from None
    plan = compile_sequence(chain, sequence, sequence.mem_limit)
    _report(profile, request, plan)
    return plan


def least_limit(profile: Profile, request: Request) -> int:
    """The smallest limit, in the user's terms, that `make_plan` can keep in the request's mode."""
    found = min(min_mem_limit(profile.chain, one.mode) - more for one, more in _attempts(profile, request))
    return max(found, profile.prefix_peak_bytes, 1)


def solver_limit(profile: Profile, request: Request) -> int:
    """The limit that the request means in the machine's terms, at most: no step within the user's limit can have more."""
    return request.mem_limit + max(more for _, more in _attempts(profile, request))


def _attempts(profile: Profile, request: Request) -> list[tuple[Request, int]]:
    """What to solve, and the bytes to add to the user's limit for it.

    Snapshots for replays come off the limit, unless nothing is replayed: so joint is also asked for offload alone, or it
    would be behind that mode by these bytes.
    """
    offset = profile.resident_input_bytes - profile.stuck_bytes
    attempts = [(request, offset - profile.replay_bytes if request.replays else offset)]
    if request.policy is None and request.mode == "joint" and profile.replay_bytes:
        attempts.append((replace(request, mode="offload"), offset))
    return attempts


def _best(chain: Chain, asked: int, attempts: list[tuple[Request, int]]) -> Sequence:
    """The fastest sequence of all attempts.

    Raises:
        InfeasibleError: where none fits; `min_mem_limit` is in the user's terms.
    """
    found: list[Sequence] = []
    least: list[int] = []
    for request, more in attempts:
        if found and simulate(chain, found[0]).makespan <= chain.compute_time:
            break  # nothing can be faster
        try:
            if asked + more <= 0:
                raise InfeasibleError("", min_mem_limit(chain, request.mode))
            found.append(request.solve(chain, asked + more))
        except InfeasibleError as error:
            least.append(error.min_mem_limit - more)
    if not found:
        raise InfeasibleError("", min(least))
    return min(found, key=lambda sequence: simulate(chain, sequence).makespan)


def _infeasible(request: Request, least: int) -> InfeasibleError:
    needs = f"needs at least {format_bytes(least)} ({least} bytes) {request}"
    limit = f"the limit is {format_bytes(request.mem_limit)} ({request.mem_limit} bytes)"
    return InfeasibleError(f"the training step {needs}; {limit}", least)


def own_bytes(profile: Profile, plan: ExecutionPlan) -> int:
    """The machine's peak in the terms of the user's limit."""
    constant = profile.stuck_bytes + (profile.replay_bytes if plan.replayed else 0)
    return max(plan.trace.peak_bytes - profile.resident_input_bytes + constant, profile.prefix_peak_bytes)


def _report(profile: Profile, request: Request, plan: ExecutionPlan) -> None:
    trace, base = plan.trace, profile.chain.compute_time
    logger.info(
        "rotoff: planned %s, limit %s, predicted peak %s, step %.4g s (%+.1f %% over keeping everything), %s offloaded,"
        " %.4g s recomputed; %s",
        request,
        "none" if request.mem_limit >= NO_LIMIT else format_bytes(request.mem_limit),
        format_bytes(own_bytes(profile, plan)),
        trace.makespan,
        100 * (trace.makespan / base - 1) if base else 0.0,
        format_bytes(trace.d2h_bytes),
        trace.recompute_time,
        in_words(plan.sequence),
    )

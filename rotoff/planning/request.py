"""A request for a plan, and the sequence that the solver gives for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.chain import Chain
from ..core.sequence import MODES, Sequence
from ..errors import LimitError, OptionError
from ..io.progress import Bar
from ..solver import solve
from ..solver.in_flight import parse_in_flight, solve_in_flight
from ..solver.policies import check_policy
from ..solver.slots import parse_slots
from ..solver.solve import check_alone, check_mode_options


def check_options(mode: str, mem_slots: int, policy: str | None, options: dict[str, Any]) -> None:
    """Raise OptionError if one of these options is invalid."""
    if mode not in MODES:
        raise OptionError(f"mode is {mode!r}; it is one of {', '.join(MODES)}")
    parse_slots(mem_slots)
    if policy is None:
        check_mode_options(options)
    else:
        check_alone(policy, {"mode": mode, "mem_slots": mem_slots})
        check_policy(policy, options)


def check_limits(
    mem_limit: Any,
    device_limit: Any,
    optimizer: Any = None,
    policy: str | None = None,
    up_to: Any = None,
    in_flight: int = 1,
    grouped: bool = False,
    updates: str | None = None,
) -> None:
    """Raise LimitError or OptionError for arguments of `compute_sequence` that exclude each other; `grouped` says
    whether several processes plan together."""
    if (mem_limit is None) is (device_limit is None):
        raise LimitError(
            f"mem_limit is {mem_limit!r} and device_limit is {device_limit!r}; give one of them: mem_limit for what"
            " a step allocates, device_limit for all that the device holds"
        )
    parse_in_flight(in_flight)
    if in_flight > 1 and (device_limit is not None or policy is not None):
        raise OptionError(f"in_flight is {in_flight}; use it with a mem_limit and a mode alone")
    if device_limit is None and optimizer is not None:
        raise OptionError("optimizer needs a device_limit; a mem_limit is for a step, in which no optimizer runs")
    if device_limit is None and updates is not None:
        raise OptionError(f"updates is {updates!r} and needs a device_limit; a mem_limit is for a step without updates")
    if device_limit is not None and policy is not None:
        raise OptionError(f"policy is {policy!r}; with a device_limit give a mode alone")
    if up_to is not None and grouped:
        raise OptionError(
            "up_to is for one process; in a group measure the largest input in each, by model.measure(*largest)"
        )


@dataclass(frozen=True)
class Request:
    """The arguments of a `compute_sequence` call, with all else that the plan depends on."""

    mem_limit: int
    mode: str
    mem_slots: int
    options: dict[str, Any]
    policy: str | None = None  # a system of the papers, instead of the mode
    plain: bool = True  # whether the plain model may run if everything fits
    placed: bool = False  # whether the limit is for all that the device holds
    in_flight: int = 1  # micro-batches whose forwards run before the backward of the first

    def __str__(self) -> str:
        told = f"in mode {self.mode}" if self.policy is None else f"with policy {self.policy}"
        return told if self.in_flight == 1 else f"{told}, with {self.in_flight} micro-batches in flight"

    def solve(self, chain: Chain, limit: int, beside: int = 0) -> Sequence:
        """The requested sequence within `limit` bytes in the machine's terms. beside: as for `solve_in_flight`."""
        if self.policy is not None:
            return solve(chain, limit, policy=self.policy, **self.options)
        with Bar("planning") as bar:
            options = {"progress": lambda done, _: bar(done), **self.options}
            options |= {"mode": self.mode, "mem_slots": self.mem_slots}
            if self.in_flight > 1:
                return solve_in_flight(chain, limit, self.in_flight, beside, **options)
            return solve(chain, limit, **options)

"""A request for a plan, and the sequence that the solver gives for it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..core.chain import Chain
from ..core.sequence import MODES, Sequence
from ..errors import LimitError, OptionError
from ..io.progress import Bar
from ..runtime.placed.updates import parameters_of
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

    @property
    def updates(self) -> str:
        """When parameters are updated."""
        return str(self.options.get("updates") or "after")

    def __str__(self) -> str:
        told = f"in mode {self.mode}" if self.policy is None else f"with policy {self.policy}"
        return told if self.in_flight == 1 else f"{told}, with {self.in_flight} micro-batches in flight"

    def solve(self, chain: Chain, limit: int, beside: int = 0) -> Sequence:
        """The requested sequence within `limit` bytes in the machine's terms. beside: as for `solve_in_flight`."""
        if self.policy is not None:
            return solve(chain, limit, policy=self.policy, **self.options)
        with Bar("planning") as bar:
            options = {"progress": lambda done, _: bar(done), **self.options}
            options |= {"mode": self.mode, "mem_slots": self.mem_slots, "updates": self.updates}
            if self.in_flight > 1:
                return solve_in_flight(chain, limit, self.in_flight, beside, **options)
            return solve(chain, limit, **options)


def read_optimizers(given: Any, parameters: Iterable[nn.Parameter]) -> tuple[Optimizer, ...]:
    """The optimizers, or one, that `given` is or that trainers have wrapped; none for None, if all of the `parameters`
    are frozen.

    Raises:
        OptionError: for anything else, and if none of them updates one of the `parameters`.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if given is None and trained:
        raise OptionError(
            f"device_limit needs the optimizer, whose states count, since {len(trained)} parameters need gradients:"
            " compute_sequence(device_limit=..., optimizer=optimizer)"
        )
    found: list[Optimizer] = []
    for optimizer in given if isinstance(given, (list, tuple)) else () if given is None else (given,):
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        if not isinstance(optimizer, Optimizer):
            shown = repr(optimizer) if isinstance(optimizer, (str, type)) else f"a {type(optimizer).__name__}"
            raise OptionError(
                f"optimizer is {shown}; give a torch.optim.Optimizer of the model's parameters, such as"
                " torch.optim.Adam(model.parameters()), or a list of them"
            )
        found.append(optimizer)
    updated = {id(parameter) for one in found for parameter in parameters_of(one)}
    if trained and given is not None and updated.isdisjoint(map(id, trained)):
        names = ", ".join(type(one).__name__ for one in found) or "an empty list"
        raise OptionError(
            f"optimizer is {names}, which updates no parameter of the model; make it of model.parameters()"
        )
    return tuple(found)


def check_updates(optimizers: Several[Optimizer], request: Request) -> None:
    """Raise OptionError if a backward would have to update a parameter by several optimizers."""
    updated = [id(parameter) for one in optimizers for parameter in parameters_of(one)]
    if request.updates == "during" and len(updated) > len({*updated}):
        raise OptionError(
            'a parameter belongs to several optimizers, and updates="during" updates each by one alone; plan with'
            ' updates="after"'
        )

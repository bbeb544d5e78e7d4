"""Groups of parameters that are used, moved and updated together, in bytes and seconds.

Group k has three values: ``w k`` (its parameters), ``g k`` (their gradients) and ``o k`` (the optimizer's state). A
value of 0 bytes does not exist: it is always usable, and no operation may name it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import ChainError
from .chain_fields import check_name, clean, read, several

PARTS = 3  # more gain little, and plans of more groups take longer to find
LEAST_PART = 1 / 128
NEARLY = 0.05  # a part may be so much smaller than a third
T = TypeVar("T")
_FIELDS = ("name", "stages", "bytes", "grad_bytes", "state_bytes", "update_time", "update_transient_bytes")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are used, moved and updated together; by default a chain has one group for each stage.

    Args:
        stages: the stages that read them, counted from 1; a tied weight names two.
        bytes: bytes of the parameters.
        grad_bytes, state_bytes: bytes of the gradients and of the optimizer's state; 0 if the parameters are frozen.
        update_time: seconds on the compute lane, with parameters, gradients and state on the device.
        host_update_time: seconds on the host's own lane, measured with both links busy; None if the host cannot
            update them.
        update_transient_bytes: charged in addition to the three values while the device updates them.
        name: name of the group.
        extra: unknown fields of a file.

    Raises:
        ChainError: if a field is invalid; the message names the group, the field and the value.
    """

    stages: tuple[int, ...]
    bytes: int
    grad_bytes: int = 0
    state_bytes: int = 0
    update_time: float = 0.0
    host_update_time: float | None = None
    update_transient_bytes: int = 0
    name: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        check_name(self.name, "a group of parameters")
        where = f"parameters {self.name!r}" if self.name else "a group of parameters"
        stages = tuple(_stage(i, where) for i in several(self.stages, "stages", where, "numbers"))
        if not stages:
            raise ChainError(f"stages of {where} is empty; name at least one stage that reads them")
        if len(set(stages)) < len(stages):
            raise ChainError(f"stages of {where} is {list(stages)}; name each stage once")
        put(self, "stages", stages)
        times = ("update_time",) if self.host_update_time is None else ("update_time", "host_update_time")
        clean(self, where, times, ("bytes", "grad_bytes", "state_bytes", "update_transient_bytes"))
        if self.state_bytes and not self.grad_bytes:
            raise ChainError(
                f"state_bytes of {where} is {self.state_bytes}, but grad_bytes is 0; frozen parameters have no"
                " optimizer state"
            )

    def to_dict(self) -> dict[str, Any]:
        """The group as in a chain's file; `from_dict` is the reverse."""
        data = {**self.extra, **{name: getattr(self, name) for name in _FIELDS}, "stages": list(self.stages)}
        return data if self.host_update_time is None else {**data, "host_update_time": self.host_update_time}

    @classmethod
    def from_dict(cls, data: Any, k: int) -> ParameterGroup:
        """Group `k` from a chain's file; unknown fields are kept in `extra`.

        Raises:
            ChainError: if the object is no such group; the message begins with the group's number.
        """
        trained = ("update_time",) if isinstance(data, Mapping) and data.get("grad_bytes") else ()
        required = ("stages", "bytes", *trained)
        return read(cls, data, f"group {k} of the parameters", required, (*_FIELDS, "host_update_time"))


def in_parts(tensors: Iterable[T], sizes: Iterable[int], whole: int) -> list[list[T]]:
    """The tensors of a group in at most `PARTS` parts of nearly the same size, none of them much below a share
    `LEAST_PART` of all parameters, which are `whole`: a large group's parts are moved and updated one after another."""
    tensors, sizes = list(tensors), list(sizes)
    least = max(1.0, sum(sizes) / PARTS, LEAST_PART * whole)
    parts: list[list[T]] = [[]]
    held, left = 0, sum(sizes)
    for one, size in zip(tensors, sizes, strict=True):
        parts[-1].append(one)
        held, left = held + size, left - size
        if held >= least * (1 - NEARLY) and left >= least / 2:
            parts.append([])
            held = 0
    return parts


def _stage(value: Any, where: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ChainError(f"stages of {where} names {value!r}; stages are whole numbers from 1")
    return int(value)

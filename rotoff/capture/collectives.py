"""Communication with other processes within a forward or a backward.

A replay that leaves a collective out computes other numbers; one that runs in one process alone waits forever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.overrides import handle_torch_function

from ..tensors.eager_mode import EagerMode
from ..tensors.tree import flatten
from .interception import Patches
from .unrepeatable import UnrepeatableError

_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip
_BETWEEN_TWO = ("send", "recv", "recv_anysource", "isend", "irecv")


def several_processes() -> bool:
    """Whether this program runs in several processes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@cache
def _dtensor() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


class CollectivesSeen(EagerMode):
    """Notes whether a forward or a backward communicates with other processes: by a collective, or by an operation on a
    DTensor, whose collectives no mode sees (those of ``context_parallel``)."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.any |= "c10d" in func.namespace or any(issubclass(kind, _dtensor()) for kind in types)
        return func(*args, **(kwargs or {}))


class Collective:
    """A collective, as a function that a ``TorchFunctionMode`` sees.

    It returns when its tensors have arrived, even if the caller would wait for them later: replays do not call what
    waits, and a stage may end before that.

    Args:
        output: the position, among the arguments, of the tensors that it changes; None if it returns new ones.
    """

    def __init__(self, function: Callable[..., Any], output: int | None) -> None:
        self.__name__ = function.__name__
        self._function = function
        self._output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        if self._output is None:
            for tensor in flatten(result)[0]:
                torch.ops._c10d_functional.wait_tensor(tensor.detach())
        elif result is not None and self.__name__ not in _BETWEEN_TWO:  # the peer may wait for this process's next one
            result.wait()
        return result

    def written(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Sequence[torch.Tensor]:
        """Return the tensors that a call changes."""
        if self.__name__ in _BETWEEN_TWO:
            raise UnrepeatableError(
                f"the model's forward communicates with a single other process ({self.__name__}), which a replay"
                " cannot repeat; put it into a torch.autograd.Function"
            )
        return () if self._output is None else flatten(args[self._output])[0]


def as_collective(function: Any) -> Any:
    """Return the `Collective` for a function that modes see: a functional collective, or since torch 2.13 one of
    ``torch.distributed``. Other functions are returned as they are."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        if not str(function).startswith("_c10d_functional") or "wait_tensor" in str(function):
            return function
        return _KNOWN.setdefault(function, Collective(function, None))
    if getattr(function, "__module__", "") != "torch.distributed.distributed_c10d":
        return function
    return _KNOWN.setdefault(function, Collective(function, 0))


_KNOWN: dict[Any, Collective] = {}


@cache
def collectives_visible() -> Patches:
    """Make calls of process groups visible to modes."""
    groups = torch.distributed.ProcessGroup

    def visible(name: str) -> Callable[[Any], Any]:
        function = Collective(getattr(groups, name), 1)  # the same object in all steps, which compare calls

        def wrap(method: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if torch._C._is_torch_function_mode_enabled():
                    return handle_torch_function(function, (), *args, **kwargs)
                return method(*args, **kwargs)

            return call

        return wrap

    return Patches(*((groups, name, visible(name)) for name in (*_COLLECTIVES, *_BETWEEN_TWO) if hasattr(groups, name)))

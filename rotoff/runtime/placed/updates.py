"""An optimizer's step on some of its parameters, here or in a thread of the host, and which it has updated."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...tensors.tree import leaves
from ..sharded import dispatching
from .used_up import is_used_up


class Chunks:
    """A step of an optimizer in chunks; each updates some of its parameters, and each parameter is updated once.

    args, kwargs: what the caller gives ``optimizer.step()`` beside a closure.
    """

    def __init__(self, optimizer: Optimizer, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
        self._optimizer = optimizer
        self._arguments = args, kwargs or {}
        self.updated: set[int] = set()  # by id
        self._under_way: set[int] = set()
        every = [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]
        self._left = {id(p): (n, p) for n, p in every if not is_used_up(p)}
        self._numbers = {id(p): number for number, (_, p) in enumerate(every)}

    def step(
        self, parameters: Iterable[nn.Parameter] | None = None, gradients: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Update those of `parameters` that have not been updated yet; None: all that are left. gradients: by id of a
        parameter, its gradient if that is not in ``parameter.grad``."""
        gradients, known = gradients or {}, self._optimizer.state
        part = copy_of(self._optimizer)
        part.param_groups = [{**group, "params": []} for group in self._optimizer.param_groups]
        chosen: list[tuple[nn.Parameter, nn.Parameter]] = []  # and what stands for each
        for key in list(self._left) if parameters is None else map(id, parameters):
            if key not in self._left or (key not in gradients and self._left[key][1].grad is None):
                continue
            n, p = self._left.pop(key)
            group = part.param_groups[n]
            move_state(p, known.get(p, {}), scalars=bool(group.get("fused") or group.get("capturable")))
            chosen.append((p, _stand_in(p, gradients[key]) if key in gradients else p))
            group["params"].append(chosen[-1][1])
        if not chosen:
            return
        if gradients:
            part.state = defaultdict(dict, {used: known.get(p, {}) for p, used in chosen})
        own = {id(p) for p, _ in chosen}
        self._under_way |= own
        try:
            with dispatching():
                own_step(part, *self._arguments[0], **self._arguments[1])
        finally:
            for p, used in chosen if gradients else ():
                if state := part.state[used]:
                    known[p] = state
                if used.data_ptr() != p.data_ptr():  # the optimizer has replaced the data
                    p.data = used.data
        self._under_way -= own
        self.updated |= own

    def left(self) -> Any:
        """Return an optimizer of the parameters that are left. Of a group without any it has the first one, whose
        device its step may ask for, without its gradient."""
        made = copy_of(self._optimizer)
        made.param_groups = [
            {**group, "params": [p for p in every if id(p) in self._left] or [p.detach() for p in every[:1]]}
            for group in self._optimizer.param_groups
            for every in (group["params"],)
        ]
        return made

    def told(self) -> str:
        """Say which parameters have been updated, by their numbers in the optimizer's state_dict."""
        left = ", ".join(str(self._numbers[key]) for key in self._left)
        partly = ", ".join(map(str, sorted(self._numbers[key] for key in self._under_way)))
        return (
            f"of the parameters of {type(self._optimizer).__name__} it had updated {len(self.updated)}; those numbered"
            f" {partly or 'none'} may be updated in part, and those numbered {left or 'none'} are not"
        )


def copy_of(optimizer: Optimizer) -> Any:
    """Return an optimizer that shares the state of `optimizer`, for a step on other groups of parameters. It has no
    hooks, which a step that calls that of its base class would run."""
    made: Any = object.__new__(type(optimizer))
    made.__dict__.update(optimizer.__dict__)
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return made


def _stand_in(parameter: nn.Parameter, gradient: torch.Tensor) -> nn.Parameter:
    """The same parameter with another gradient."""
    made = nn.Parameter(parameter.detach())
    made.__dict__.update(parameter.__dict__)
    made.grad = gradient
    return made


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def move_state(parameter: torch.Tensor, state: dict[str, Any], scalars: bool = False) -> None:
    """Move an optimizer's state of a parameter to the parameter's device. scalars: move step counts, too."""
    for key, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.device == parameter.device:
            continue
        if scalars or tensor.numel() > 1 or (tensor.shape == parameter.shape and key != "step"):
            state[key] = tensor.to(parameter.device)


def read_by(optimizer: Optimizer, updated: Container[int]) -> list[Any]:
    """Return what a step reads beside gradients: its settings, and the versions of the parameters that it has updated,
    given by id, and of their states."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    settings = (value.tolist() if isinstance(value, torch.Tensor) else value for value in leaves(groups))
    own = [p for p in parameters_of(optimizer) if id(p) in updated]
    states = [t for p in own for t in optimizer.state.get(p, {}).values()]
    read = [*own, *(t for t in states if isinstance(t, torch.Tensor) and not t.is_inference())]
    return [*settings, *((id(tensor), tensor._version) for tensor in read)]


def own_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """One step of the optimizer's class, past the hooks on its steps."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer, *args, **kwargs)


def counts_changes(optimizer: Optimizer) -> bool:
    """Whether autograd counts what a step changes. PyTorch's own do not write through ``.data``, others may; so do
    kernels that unscale gradients."""
    own = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    return own and getattr(optimizer, "grad_scale", None) is None


class HostLane:
    """Runs updates one after the other, in a thread of the host's own where compute is elsewhere.

    Args:
        threaded: whether there is one.
    """

    def __init__(self, threaded: bool) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rotoff-host-updates") if threaded else None
        self._waiting: dict[int, Future[None]] = {}

    def run(self, k: int, update: Callable[[], None]) -> None:
        """Run the update of group k."""
        if self._pool is None:
            update()
        else:
            self._waiting[k] = self._pool.submit(update)

    def join(self, k: int | None = None) -> None:
        """Wait for the update of group k, or for all; raises what one of them raised, once none runs any more."""
        keys = list(self._waiting) if k is None else [k]
        found = [self._waiting.pop(key) for key in keys if key in self._waiting]
        failures = [error for one in found if (error := one.exception()) is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End the thread, once its updates have ended."""
        if self._pool is not None:
            self._pool.shutdown()

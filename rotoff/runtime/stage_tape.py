"""The calls of one stage in one step, as the model's own code made them; a replay makes them again.

A call is stored with its original arguments: a `Var` stands for each tensor that the step made, and all other arguments
(parameters, numbers, flags, functions) are stored as they are. So a replay repeats whatever Python decided, drew or
looked up in the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..errors import ExecutionError
from ..tensors.autocast import Autocast, autocast_as, autocast_now
from ..tensors.kernel_flags import KernelFlags, kernel_flags, kernels_as
from ..tensors.storage import View, copied, copy_of, storage_key, version_of
from ._follow import Var
from .arguments import NESTED, VALUES, replaced, tensors_of


class Seeded:
    """Stands for a generator of the model's own in an argument, with its state at the time of the call."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator.clone_state()


class Around(NamedTuple):
    """Grad mode, autocast and the flags that choose kernels of a call.

    autocast, kernels: None if as at the start of the stage."""

    grad: bool
    autocast: Autocast | None
    kernels: KernelFlags | None

    @classmethod
    def of(cls, grad: bool, autocast_before: Autocast | None, kernels_before: KernelFlags) -> Around | None:
        """Return the present settings; None if a replay has them anyway."""
        autocast = autocast_now() if autocast_before is not None or torch._C._is_any_autocast_enabled() else None
        if autocast == autocast_before:
            autocast = None
        kernels = None if (now := kernel_flags()) == kernels_before else now
        return None if grad and autocast is None and kernels is None else cls(grad, autocast, kernels)


# One call of torch: function, arguments, keyword arguments, a `Var` for each tensor that it returns, its settings (None
# if a replay has them anyway), and whether the course expects nobody to need its results. A plain tuple, which Python
# makes and takes apart several times faster than an object.
Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any], Sequence[Var | None], Around | None, bool]


class StageTape:
    """The calls of one stage, in order.

    name: of the stage. inputs, outputs: its tensors. running_dead: whether a run is in a dead call. needs_dead: whether
    some other call turned out to need a dead one. constants: by id, the tensors from before the stage that it reads,
    with their versions and, for parameters, whether they needed a gradient. before: by id or `Var`, each tensor that
    some call changes in place, and a copy of its content from before.
    """

    running_dead = needs_dead = False
    lost = ""  # the name of a function that changed, in place, a tensor of which there is no copy to restore
    brought: Callable[[], dict[int, torch.Tensor]] = dict  # by id of a parameter, its copy on the device
    _last: list[tuple[Call, list[Var]]] | None = None  # the last result of `_to_make`
    _counted = 0  # number of calls when it was made

    def __init__(self, name: str) -> None:
        self.calls: list[Call] = []
        self.inputs: list[Var] = []
        self.outputs: list[Var] = []
        self.constants: dict[int, tuple[torch.Tensor, int, bool | None]] = {}
        self.before: dict[int | Var, tuple[Any, torch.Tensor]] = {}
        self.name = name

    def run(
        self, given: Sequence[torch.Tensor], wanted: Sequence[Var] | None = None, everything: bool = False
    ) -> list[torch.Tensor]:
        """Make the calls again on the input's tensors `given`; returns the stage's outputs, or the tensors `wanted`.

        Raises:
            ExecutionError: if a tensor that a call reads was changed since.
        """
        return self.ready(given, wanted, everything)()

    def ready(
        self, given: Sequence[torch.Tensor], wanted: Sequence[Var] | None = None, everything: bool = False
    ) -> Callable[[], list[torch.Tensor]]:
        """Return a function that does what `run` does, once, and whose only operations are those of the calls."""
        switched = self._switched()
        returned = self.outputs if wanted is None else wanted
        values, changed = self._found(given)

        def run() -> list[torch.Tensor]:
            for tensor, needs in switched:  # a GAN thaws its discriminator before the backward of the generator's loss
                tensor.requires_grad_(needs)
            try:
                self._make(self._to_make(returned, everything or wanted is not None), values, changed)
            finally:
                for tensor, needs in switched:
                    tensor.requires_grad_(not needs)
            return [values[var] for var in returned]

        return run

    def _found(self, given: Sequence[torch.Tensor]) -> tuple[dict[Var, torch.Tensor], dict[int, torch.Tensor]]:
        """Return the tensors that a run starts from, and, by id of a constant, the tensors that replace it."""
        values: dict[Var, torch.Tensor] = dict(zip(self.inputs, given, strict=True))
        changed = self.brought()
        storages: dict[int, torch.UntypedStorage] = {}
        for key, (what, content) in self.before.items():
            clone = _changeable(content, storages)
            if isinstance(what, Var):
                values[what] = clone
            else:
                changed[key] = clone  # type: ignore[index]
        return values, changed

    def _make(
        self, calls: Sequence[tuple[Call, list[Var]]], values: dict[Var, torch.Tensor], changed: dict[int, torch.Tensor]
    ) -> None:
        """Make `calls`; release each tensor after its last use."""
        for call, dying in calls:
            self.running_dead = call[5]
            result, outputs = _made(call, values, changed), call[3]
            if isinstance(result, torch.Tensor) and len(outputs) == 1 and outputs[0] is not None:
                values[outputs[0]] = result
            else:
                for var, tensor in zip(outputs, tensors_of(result), strict=False):
                    if var is not None:
                        values[var] = tensor
            result = tensor = None  # type: ignore[assignment]  # or these names would keep dying tensors alive
            for var in dying:
                values.pop(var, None)

    def _switched(self) -> list[tuple[torch.Tensor, bool]]:
        """Return the parameters whose `requires_grad` has changed since, and what it was; raise if the content of a
        constant has changed."""
        if self.lost:
            raise ExecutionError(
                f"{self.lost} changed in place a tensor that stage {self.name!r} recomputes from, before rotoff had a"
                " copy of it; run the forward again (if a custom Function changed it, rotoff then makes a copy), or"
                " clone the tensor before this call"
            )
        switched = []
        for tensor, version, needs in self.constants.values():
            if needs is not None and tensor.requires_grad is not needs:
                switched.append((tensor, needs))
            if version_of(tensor) != version and id(tensor) not in self.before:
                what = f"{type(tensor).__name__.lower()} of shape {tuple(tensor.shape)}"
                raise ExecutionError(
                    f"a {what} was changed in place between the forward and the backward, and stage {self.name!r}"
                    " recomputes from it; change it after the last backward, or, if there is only one, plan with"
                    " mode='offload', which then recomputes nothing"
                )
        return switched

    def _to_make(self, returned: Sequence[Var], everything: bool) -> list[tuple[Call, list[Var]]]:
        """Return each call to make, with the tensors to release after it. Dead calls are left out, unless `everything`
        or another call needs them."""
        if not everything and self._last is not None and self._counted == len(self.calls):
            return self._last
        kept = set(returned)
        found: list[tuple[Call, list[Var]]] = []
        for call in reversed(self.calls):
            _, args, kwargs, outputs, _, dead = call
            if dead and not everything and not self.needs_dead:
                continue
            dying = []
            reads = vars_in(args)
            if kwargs:
                reads += vars_in(kwargs)
            reads += outputs  # type: ignore[arg-type]
            for var in reads:
                if var not in kept and var is not None:
                    kept.add(var)
                    dying.append(var)
            found.append((call, dying))
        found.reverse()
        if not everything:
            self._last, self._counted = found, len(self.calls)
        return found


def _changeable(content: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return a clone of `content`, since the run changes it and another may follow. storages: the clones so far, by the
    key of the cloned storage."""
    if content.layout is not torch.strided:
        return copied(content).requires_grad_(content.requires_grad)
    key = storage_key(content)
    if key not in storages:
        storages[key] = copy_of(content.untyped_storage())
    clone = View.of(content).on(storages[key])
    if not content.requires_grad or 0 in clone.stride():
        return clone.requires_grad_(content.requires_grad)
    with torch.enable_grad():  # autograd refuses in-place changes of leaves
        return clone.copy_(View.of(content).on(storages[key]).requires_grad_())


def _made(call: Call, values: dict[Var, torch.Tensor], changed: dict[int, torch.Tensor]) -> Any:
    function, args, kwargs, _, around, _ = call
    fixed = VALUES if changed else LEAVES
    args = [values[a] if type(a) is Var else a if type(a) in fixed else _argument(values, changed, a) for a in args]
    if kwargs:
        kwargs = {k: a if type(a) in fixed else _argument(values, changed, a) for k, a in kwargs.items()}
    if around is None:
        return function(*args, **kwargs)
    grad, autocast, kernels = around
    with ExitStack() as stack:
        if not grad:
            stack.enter_context(torch.no_grad())
        stack.enter_context(autocast_as(autocast or ()))
        if kernels is not None:
            stack.enter_context(kernels_as(kernels))
        return function(*args, **kwargs)


def _argument(values: dict[Var, torch.Tensor], changed: dict[int, torch.Tensor], leaf: Any) -> Any:
    kind = type(leaf)
    if kind is Var:
        return values[leaf]
    if kind in NESTED or isinstance(leaf, (tuple, dict)):
        # not a closure: it would refer to itself and keep the values alive until the garbage collector runs
        return replaced(leaf, partial(_argument, values, changed))
    if kind is Seeded:
        return leaf.generator.clone_state()
    return changed.get(id(leaf), leaf) if changed else leaf


LEAVES = VALUES | {torch.Tensor, torch.nn.Parameter}  # in which there is no `Var`


def vars_in(value: Any) -> list[Var]:
    """Return the `Var`s in the arguments of a call."""
    kind = type(value)
    if kind is Var:
        return [value]
    if kind is dict:
        value = value.values()
    elif kind is slice:
        value = value.start, value.stop, value.step
    elif kind is not tuple and kind is not list:
        nested = isinstance(value, (tuple, dict)) or kind in pytree.SUPPORTED_NODES
        return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is Var] if nested else []
    found: list[Var] = []
    for leaf in value:
        if type(leaf) is Var:
            found.append(leaf)
        elif type(leaf) not in LEAVES:
            found += vars_in(leaf)
    return found

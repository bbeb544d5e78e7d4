"""The calls of one stage in one step, as the model's own code made them; a replay makes them again.

A call is kept with the very arguments that it had: tensors that the step made are named by their `Var`, all else
(parameters, numbers, flags, functions) stands as it was. So whatever Python decided, drew or looked up on the way is in
the replay what it was in the first run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils import _pytree as pytree

from ..errors import ExecutionError
from ..tensors.autocast import Autocast, autocast_as, autocast_now
from ..tensors.storage import copied, version_of

TAG = "_rotoff_var"  # the attribute of a tensor that holds its `Var`


class Var:
    """A tensor that a step has met. Whoever looks at the tensor itself sees an attribute that copies and pickles as
    None.

    step: the forward that it belongs to. stage: which made it, 0 where no value holds it. tensor: what the model's own
    code has. dead: whether the call that made it was expected to be for nothing. hollow: whether its bytes have been
    taken from there; gone: or ever were. stays: whether they must not be taken.
    """

    __slots__ = ("__weakref__", "dead", "gone", "hollow", "stage", "stays", "step", "tensor")

    def __init__(self, step: object, stage: int, tensor: torch.Tensor) -> None:
        self.step = step
        self.stage = stage
        self.tensor = weakref.ref(tensor)
        self.hollow = self.gone = self.dead = False
        self.stays = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, _: Any) -> None:
        return None


class Seeded:
    """In an argument: a generator of the model's own, in the state that the call found it in."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator.clone_state()


class Around(NamedTuple):
    """What was set around a call, in so far as it is not as when the stage began: autocast, attention: None where they
    are."""

    grad: bool
    autocast: Autocast | None
    attention: list[SDPBackend] | None

    @classmethod
    def of(cls, grad: bool, autocast_before: Autocast | None, attends: bool) -> Around | None:
        """What is set now otherwise than when the stage began; attends: whether the kernels allowed for attention
        count."""
        autocast = autocast_now() if autocast_before is not None or torch._C._is_any_autocast_enabled() else None
        if autocast == autocast_before:
            autocast = None
        attention = _cur_sdpa_kernel_backends() if attends else None
        return None if grad and autocast is None and attention is None else cls(grad, autocast, attention)


class Call:
    """One call.

    outputs: what each tensor that it returns is, in order. around: what was set around it, None where that is as when
    the stage began. dead: whether nobody is expected to need what it makes.
    """

    __slots__ = ("args", "around", "dead", "function", "kwargs", "outputs")

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: Sequence[Var | None],
        around: Around | None,
        dead: bool = False,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.outputs = outputs
        self.around = around
        self.dead = dead


class StageTape:
    """What one stage did, in order.

    name: of the stage. running_dead: whether a run is in a call that is made for nothing; needs_dead: whether others
    have come to need those. inputs, outputs: the tensors that the stage was given and hands on. constants: by id,
    tensors that were there before the stage, with the version that it read and, of parameters, whether they needed a
    gradient. before: what was in those that it changes, by id, or by `Var`.
    """

    def __init__(self, name: str) -> None:
        self.calls: list[Call] = []
        self.inputs: list[Var] = []
        self.outputs: list[Var] = []
        self.constants: dict[int, tuple[torch.Tensor, int, bool | None]] = {}
        self.before: dict[int | Var, tuple[Any, torch.Tensor]] = {}
        self.name = name
        self.running_dead = self.needs_dead = False
        self.lost = ""  # the name of a function that changed what others read, with nothing to put it back from
        # by id, what stands for parameters that the plan has brought
        self.brought: Callable[[], dict[int, torch.Tensor]] = dict
        self._last: list[tuple[Call, list[Var]]] | None = None  # of `_to_make`
        self._counted = 0  # calls of which that was made

    def run(
        self, given: Sequence[torch.Tensor], wanted: Sequence[Var] | None = None, everything: bool = False
    ) -> list[torch.Tensor]:
        """Make the calls again on the input's tensors `given`; returns the stage's outputs, or the tensors `wanted`.

        Raises:
            ExecutionError: where a tensor that a call reads was changed since.
        """
        switched = self._switched()
        returned = self.outputs if wanted is None else wanted
        values, changed = self._found(given)
        for tensor, needs in switched:  # a GAN thaws its discriminator before the backward of the generator's loss
            tensor.requires_grad_(needs)
        try:
            self._make(self._to_make(returned, everything or wanted is not None), values, changed)
        finally:
            for tensor, needs in switched:
                tensor.requires_grad_(not needs)
        return [values[var] for var in returned]

    def _found(self, given: Sequence[torch.Tensor]) -> tuple[dict[Var, torch.Tensor], dict[int, torch.Tensor]]:
        """The tensors that a run starts from, and by id those that take the place of others."""
        values: dict[Var, torch.Tensor] = dict(zip(self.inputs, given, strict=True))
        changed = self.brought()
        for key, (what, content) in self.before.items():
            # a clone, since the run changes it and another may follow
            clone = copied(content).requires_grad_(content.requires_grad)
            if isinstance(what, Var):
                values[what] = clone
            else:
                changed[key] = clone  # type: ignore[index]
        return values, changed

    def _make(
        self, calls: Sequence[tuple[Call, list[Var]]], values: dict[Var, torch.Tensor], changed: dict[int, torch.Tensor]
    ) -> None:
        """Make `calls`, and let go of what no later one needs."""
        for call, dying in calls:
            self.running_dead = call.dead
            result = _made(call, values, changed)
            for var, tensor in zip(call.outputs, tensors_of(result), strict=False):
                if var is not None:
                    values[var] = tensor
            result = tensor = None  # type: ignore[assignment]  # which are in the way of what they made
            for var in dying:
                values.pop(var, None)

    def _switched(self) -> list[tuple[torch.Tensor, bool]]:
        """The parameters that now are otherwise than then, and whether they needed a gradient; raises where a constant
        was changed."""
        if self.lost:
            raise ExecutionError(
                f"{self.lost} changed in place a tensor that stage {self.name!r} recomputes from, which it did not when"
                " the model was measured; run the forward again, now that this is known"
            )
        switched = []
        for tensor, version, needs in self.constants.values():
            if needs is not None and tensor.requires_grad is not needs:
                switched.append((tensor, needs))
            if version_of(tensor) != version and id(tensor) not in self.before:
                what = f"{type(tensor).__name__.lower()} of shape {tuple(tensor.shape)}"
                raise ExecutionError(
                    f"a {what} was changed in place between the forward and the backward, and stage {self.name!r}"
                    " recomputes from it; change it after the backward, or plan with mode='offload', which recomputes"
                    " nothing"
                )
        return switched

    def _to_make(self, returned: Sequence[Var], everything: bool) -> list[tuple[Call, list[Var]]]:
        """The calls, those for nothing among them where `everything` or some other call needs that, and what no later
        one needs."""
        if not everything and self._last is not None and self._counted == len(self.calls):
            return self._last
        kept = set(returned)
        found: list[tuple[Call, list[Var]]] = []
        for call in reversed(self.calls):
            if call.dead and not everything and not self.needs_dead:
                continue
            dying = []
            reads = vars_in(call.args)
            if call.kwargs:
                reads += vars_in(call.kwargs)
            for var in (*reads, *call.outputs):
                if var not in kept and var is not None:
                    kept.add(var)
                    dying.append(var)
            found.append((call, dying))
        found.reverse()
        if not everything:
            self._last, self._counted = found, len(self.calls)
        return found


def _made(call: Call, values: dict[Var, torch.Tensor], changed: dict[int, torch.Tensor]) -> Any:
    fixed = VALUES if changed else LEAVES
    args = [
        values[a] if type(a) is Var else a if type(a) in fixed else _argument(values, changed, a) for a in call.args
    ]
    kwargs = call.kwargs and {
        k: a if type(a) in fixed else _argument(values, changed, a) for k, a in call.kwargs.items()
    }
    if call.around is None:
        return call.function(*args, **kwargs)
    grad, autocast, attention = call.around
    with ExitStack() as stack:
        if not grad:
            stack.enter_context(torch.no_grad())
        if attention is not None and attention != _cur_sdpa_kernel_backends():
            stack.enter_context(sdpa_kernel(attention))
        stack.enter_context(autocast_as(autocast or ()))
        return call.function(*args, **kwargs)


def _argument(values: dict[Var, torch.Tensor], changed: dict[int, torch.Tensor], leaf: Any) -> Any:
    kind = type(leaf)
    if kind is Var:
        return values[leaf]
    if kind in NESTED or isinstance(leaf, (tuple, dict)):
        # by no closure, which would refer to itself and keep the values until the collector runs
        return replaced(leaf, partial(_argument, values, changed))
    if kind is Seeded:
        return leaf.generator.clone_state()
    return changed.get(id(leaf), leaf) if changed else leaf


NESTED = frozenset({tuple, list, dict, slice})
VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis)})
LEAVES = VALUES | {torch.Tensor, torch.nn.Parameter}  # in which there is no `Var`


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with every leaf changed; tuples, lists, dicts and slices are looked into, and what pytrees know."""
    kind = type(value)
    if kind is tuple:
        return tuple([replaced(v, change) for v in value])
    if kind is list:
        return [replaced(v, change) for v in value]
    if kind is dict:
        return {k: replaced(v, change) for k, v in value.items()}
    if kind is slice:
        return slice(replaced(value.start, change), replaced(value.stop, change), replaced(value.step, change))
    if isinstance(value, (tuple, dict)) or kind in pytree.SUPPORTED_NODES:
        return pytree.tree_map(change, value)
    return change(value)


def vars_in(value: Any) -> list[Var]:
    """The `Var`s in the arguments of a call."""
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


def tensors_of(result: Any) -> Sequence[torch.Tensor]:
    """The tensors in what a call returned, in order."""
    if isinstance(result, torch.Tensor):
        return (result,)
    if type(result) in VALUES:
        return ()
    if type(result) in (tuple, list) and all(isinstance(leaf, torch.Tensor) for leaf in result):
        return result
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

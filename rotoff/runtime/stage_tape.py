"""The calls of one stage in one step, as the model's own code made them; a replay makes them again.

A call is kept with the very arguments that it had: tensors that the step made are named by their `Var`, all else (parameters, numbers, flags,
functions) stands as it was. So whatever Python decided, drew or looked up on the way is in the replay what it was in the first run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..capture.stage import copied
from ..errors import ExecutionError

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
TAG = "_rotoff_var"  # the attribute of a tensor that holds its `Var`


class Var:
    """A tensor that a step has met. Whoever looks at the tensor itself sees an attribute that copies and pickles as None.

    step: the forward that it belongs to. stage: which made it, 0 where no value holds it. tensor: what the model's own code has.
    dead: whether the call that made it was expected to be for nothing. hollow: whether its bytes have been taken from there; gone: or ever were. stays: whether they must not be taken.
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


class Call:
    """One call. outputs: what each tensor that it returns is, in order. dead: whether nobody is expected to need them. grad, autocast, attention: what was set around it, None where that
    is as when the stage began."""

    __slots__ = ("args", "attention", "autocast", "dead", "function", "grad", "kwargs", "outputs")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[Var | None, ...],
        grad: bool,
        autocast: Autocast | None,
        attention: tuple[bool, ...] | None,
        dead: bool = False,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.outputs = outputs
        self.grad = grad
        self.autocast = autocast
        self.attention = attention
        self.dead = dead


class StageTape:
    """What one stage did, in order.

    name: of the stage. running_dead: whether a run is in a call that is made for nothing; needs_dead: whether
    others have come to need those. inputs, outputs: the tensors that the stage was given and hands on. constants: by id, tensors that were there before the stage, with
    the version that it read. before: what was in those that it changes, by id, or by `Var`. modes: of parameters, whether they needed a
    gradient.
    """

    def __init__(self, name: str) -> None:
        self.calls: list[Call] = []
        self.inputs: list[Var] = []
        self.outputs: list[Var] = []
        self.constants: dict[int, tuple[torch.Tensor, int]] = {}
        self.before: dict[int | Var, tuple[Any, torch.Tensor]] = {}
        self.modes: dict[int, tuple[torch.Tensor, bool]] = {}
        self.name = name
        self.running_dead = self.needs_dead = False
        self.lost = ""  # the name of a function that changed what others read, with nothing to put it back from
        self._last: list[tuple[Call, list[Var]]] | None = None  # of `_to_make`
        self._counted = 0  # calls of which that was made

    def run(
        self, given: Sequence[torch.Tensor], wanted: Sequence[Var] | None = None, everything: bool = False
    ) -> list[torch.Tensor]:
        """Make the calls again on the input's tensors `given`; returns the stage's outputs, or the tensors `wanted`.

        Raises:
            ExecutionError: where a tensor that a call reads was changed since.
        """
        self._refuse_changed()
        returned = self.outputs if wanted is None else wanted
        values: dict[Var, torch.Tensor] = dict(zip(self.inputs, given, strict=True))
        changed: dict[int, torch.Tensor] = {}
        for key, (what, content) in self.before.items():
            # a clone, since the run changes it and another may follow
            clone = copied(content).requires_grad_(content.requires_grad)
            if isinstance(what, Var):
                values[what] = clone
            else:
                changed[key] = clone  # type: ignore[index]
        switched = [(tensor, needs) for tensor, needs in self.modes.values() if tensor.requires_grad is not needs]
        for tensor, needs in switched:  # a GAN thaws its discriminator before the backward of the generator's loss
            tensor.requires_grad_(needs)
        try:
            for call, dying in self._to_make(returned, everything or wanted is not None):
                self.running_dead = call.dead
                result = _made(call, values, changed)
                values.update(zip(call.outputs, tensors_of(result), strict=False))  # type: ignore[arg-type]
                values.pop(None, None)  # type: ignore[call-overload]
                del result  # which, as a loop's variable would be, is in the way of what it made
                for var in dying:
                    values.pop(var, None)
        finally:
            for tensor, needs in switched:
                tensor.requires_grad_(not needs)
        return [values[var] for var in returned]

    def _refuse_changed(self) -> None:
        if self.lost:
            raise ExecutionError(
                f"{self.lost} changed in place a tensor that stage {self.name!r} recomputes from, which it did not when the model was"
                " measured; run the forward again, now that this is known"
            )
        for tensor, version in self.constants.values():
            if tensor._version != version and id(tensor) not in self.before:
                what = f"{type(tensor).__name__.lower()} of shape {tuple(tensor.shape)}"
                raise ExecutionError(
                    f"a {what} was changed in place between the forward and the backward, and stage {self.name!r} recomputes from it;"
                    " change it after the backward, or plan with mode='offload', which recomputes nothing"
                )

    def _to_make(self, returned: Sequence[Var], everything: bool) -> list[tuple[Call, list[Var]]]:
        """The calls, those for nothing among them where `everything` or some other call needs that, and what no later one needs."""
        if not everything and self._last is not None and self._counted == len(self.calls):
            return self._last
        kept = set(returned)
        found: list[tuple[Call, list[Var]]] = []
        for call in reversed(self.calls):
            if call.dead and not everything and not self.needs_dead:
                continue
            dying = []
            for var in (*vars_in(call.args), *vars_in(call.kwargs), *(v for v in call.outputs if v is not None)):
                if var not in kept:
                    kept.add(var)
                    dying.append(var)
            found.append((call, dying))
        found.reverse()
        if not everything:
            self._last, self._counted = found, len(self.calls)
        return found


def _made(call: Call, values: dict[Var, torch.Tensor], changed: dict[int, torch.Tensor]) -> Any:
    def value_of(leaf: Any) -> Any:
        kind = type(leaf)
        if kind is Var:
            return values[leaf]
        if kind is Seeded:
            return leaf.generator.clone_state()
        return changed.get(id(leaf), leaf) if changed else leaf

    args = [value_of(a) if type(a) not in NESTED else replaced(a, value_of) for a in call.args]
    kwargs = {k: value_of(a) if type(a) not in NESTED else replaced(a, value_of) for k, a in call.kwargs.items()}
    if call.grad and call.autocast is None and call.attention is None:
        return call.function(*args, **kwargs)
    with ExitStack() as stack:
        if not call.grad:
            stack.enter_context(torch.no_grad())
        if call.attention is not None:
            stack.enter_context(attention_by(call.attention))
        for kind, enabled, dtype in call.autocast or ():
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        return call.function(*args, **kwargs)


NESTED = frozenset({tuple, list, dict, slice})


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


def vars_in(value: Any) -> Iterator[Var]:
    """The `Var`s in the arguments of a call."""
    kind = type(value)
    if kind is Var:
        yield value
    elif kind is tuple or kind is list:
        for v in value:
            if type(v) is Var:
                yield v
            elif type(v) in NESTED or isinstance(v, (tuple, list, dict)):
                yield from vars_in(v)
    elif kind is dict:
        for v in value.values():
            yield from vars_in(v)
    elif kind is slice:
        yield from vars_in((value.start, value.stop, value.step))
    elif isinstance(value, (tuple, dict)) or kind in pytree.SUPPORTED_NODES:
        yield from (leaf for leaf in pytree.tree_leaves(value) if type(leaf) is Var)


def tensors_of(result: Any) -> Sequence[torch.Tensor]:
    """The tensors in what a call returned, in order."""
    if isinstance(result, torch.Tensor):
        return (result,)
    if result is None or type(result) in (bool, int, float, torch.Size, torch.dtype, torch.device):
        return ()
    if type(result) in (tuple, list) and all(isinstance(leaf, torch.Tensor) for leaf in result):
        return result
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


_SDP = torch._C


def attention_flags() -> tuple[bool, ...]:
    """Which kernels attention may run by."""
    return (
        _SDP._get_flash_sdp_enabled(),
        _SDP._get_mem_efficient_sdp_enabled(),
        _SDP._get_math_sdp_enabled(),
        _SDP._get_cudnn_sdp_enabled(),
    )


class attention_by:
    """Within, attention runs by the kernels that `flags` allow."""

    def __init__(self, flags: tuple[bool, ...]) -> None:
        self._flags = flags

    def __enter__(self) -> None:
        self._outside = attention_flags()
        _set_attention(self._flags)

    def __exit__(self, *_: object) -> None:
        _set_attention(self._outside)


def _set_attention(flags: tuple[bool, ...]) -> None:
    flash, efficient, plain, cudnn = flags
    _SDP._set_sdp_use_flash(flash)
    _SDP._set_sdp_use_mem_efficient(efficient)
    _SDP._set_sdp_use_math(plain)
    _SDP._set_sdp_use_cudnn(cudnn)

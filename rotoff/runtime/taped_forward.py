"""The forward of a step of which nothing is known yet.

The model's own code runs once, while every call is put on one tape and nothing is kept for a backward. What it did is
then measured and planned, and the planned step runs the tape in place of the model's own code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ..capture.tape import Tape
from ..capture.undo import BeforeStep
from ..errors import MeasureError
from ..tensors.storage import storage_key
from ..tensors.tree import flatten
from .call_interception import as_call_of, following
from .live import NOTHING_EXPECTED, LiveForward
from .reads import Reads
from .replay import ReplayState, Surroundings
from .stage_tape import TAG, Call, StageTape, Var, autocast_now, tensors_of

FIRST = 1  # the one stage that there is
_HOOKS = frozenset(["register_hook", "register_post_accumulate_grad_hook", "retain_grad"])
CURE = "; measure the model before training, by model.measure(*sample)"


class UntapedError(Exception):
    """A forward did what no tape holds: it has to be run again."""


class _Span(NamedTuple):
    """A call of a module: the calls on the tape that it made, and what it returned."""

    module: nn.Module
    begin: int
    end: int
    outputs: list[Var]


class _Unstaged:
    """What a forward asks of a step without stages."""

    def enter(self, stage: int) -> None:
        raise AssertionError(f"there is no stage {stage}")

    def restore(self, var: Var) -> torch.Tensor:
        raise AssertionError("nothing has been hollowed")


class _Reads(Reads):
    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was there before the forward, with its graph, which the tape goes on from."""
        if id(tensor) not in self.tape.constants:
            self.pending.append((tensor, tensor._version))
            self.note_resident(tensor)
        return tensor


class _Taping(LiveForward):
    """Puts one forward on one tape, and notes which calls each module made."""

    def __init__(
        self,
        replay: ReplayState,
        surroundings: Surroundings,
        given: list[torch.Tensor],
        tape: StageTape,
    ) -> None:
        super().__init__(NOTHING_EXPECTED, _Unstaged(), surroundings.generators, given)
        self.reads = _Reads()
        for tensor in given:
            self.reads.note_resident(tensor)
        self.reads.places = {storage_key(tensor): n for n, tensor in enumerate(given)}
        self.spans: list[_Span] = []
        self.hooks: list[tuple[Call, RemovableHandle | None]] = []
        self.asked_nodes = False  # of the graph: hooks on them, and backward hooks of modules, are on no tape
        tape.inputs = [vars(tensor)[TAG] for tensor in given]
        self.begin_stage(FIRST, tape, replay.mark)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call(function, args, kwargs)
        if isinstance(result, torch.autograd.graph.Node) and not self.inside:
            self.asked_nodes = True
        if not self.inside and getattr(function, "__name__", "") in _HOOKS:
            named = [self._reference([], FIRST, one) for one in args]
            self.tape.calls.append(Call(partial(_hook, function, result), named, kwargs, (), None))
            self.hooks.append((self.tape.calls[-1], result))
        return result

    def called(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """In place of ``nn.Module.__call__``."""
        begin = len(self.tape.calls)
        result = super().called(original, module, *args, **kwargs)
        if not self.inside:
            found = [vars(tensor).get(TAG) for tensor in tensors_of(result)]
            self.spans.append(_Span(module, begin, len(self.tape.calls), [var for var in found if var is not None]))
        return result

    def left(self) -> list[Var]:
        """The tensors of its graph that somebody still holds."""
        vars_here = [var for var in self._vars if var.stage == FIRST]
        return [var for var in vars_here if (tensor := var.tensor()) is not None and tensor.requires_grad]


class _WholeTape(StageTape):
    """The tape of a forward; modules that the plan knows as one call are called as such."""

    spans: Sequence[_Span] = ()

    def _found(self, given: Sequence[torch.Tensor]) -> tuple[dict[Var, torch.Tensor], dict[int, torch.Tensor]]:
        with torch._C.DisableTorchFunction():  # no calls of the model's own
            return super()._found(given)

    def _make(
        self,
        calls: Sequence[tuple[Call, list[Var]]],
        values: dict[Var, torch.Tensor],
        changed: dict[int, torch.Tensor],
    ) -> None:
        at = 0
        for span in self.spans:
            super()._make(calls[at : span.begin], values, changed)
            at = span.end

            def run(span: _Span = span) -> list[torch.Tensor]:
                own = [
                    (call, [var for var in dying if var not in span.outputs])
                    for call, dying in calls[span.begin : span.end]
                ]
                super(_WholeTape, self)._make(own, values, changed)
                return [values[var] for var in span.outputs]

            as_call_of(span.module, run)
        super()._make(calls[at:], values, changed)


class TapedForward:
    """One forward of the model's own code on the tensors `given`, and what runs its tape.

    Use it in a training step whose course is not known: run the model's own code while it is `watched`; `let_go` forgets
    the graph that it made; and `again` makes the same calls, in the graph of the planned step.

    result: what the model's own code returned. usable: whether the tape is whole.
    """

    def __init__(self, model: nn.Module, value: Any, device: torch.device) -> None:
        self.usable = False
        self.result: Any = None
        self._before = BeforeStep(model, device)
        self._device = device
        self._given = flatten(value)[0]
        self._live: _Taping | None = None
        self._leaves: list[Any] = []
        self._told: dict[Var, dict[str, Any]] = {}  # attributes that the model's own code gave to what it returns
        self._spec: pytree.TreeSpec | None = None
        self._attributes: Sequence[tuple[nn.Module, str]] = ()
        self._stashed: list[Var] = []  # tensors that the model's own code holds elsewhere
        self._exchanged: list[tuple[Var, torch.Tensor]] = []  # and what is to take their place

    def put_back(self) -> None:
        """Have the model and the generators as they were."""
        self._before.put_back()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, the calls of the model's own forward are put on a new tape."""
        surroundings = Surroundings(self._device)
        self._replay = ReplayState(surroundings, ())
        self._tape = _WholeTape("of the whole model")
        self._live = _Taping(self._replay, surroundings, self._given, self._tape)
        if torch._C._is_any_autocast_enabled():
            self._live.autocast_before = autocast_now()
        with following(self._live):
            yield

    def let_go(self, recorded: Tape) -> None:
        """Forget the graph of what was run, and `recorded`.

        Raises:
            UntapedError: where the tape does not hold all that the forward did.
        """
        live, tape = self._live, self._tape
        assert live is not None
        for call, handle in live.hooks:
            if handle is not None and handle.id not in (handle.hooks_dict_ref() or ()):
                call.function = _removed
        changed = any(isinstance(what, Var) and now.requires_grad for what, now in tape.before.values())
        drawn_elsewhere = any(generator.device.type != "cpu" for generator, _ in recorded.generators)
        if tape.lost or changed or live.asked_nodes or recorded.opaque or drawn_elsewhere:
            raise UntapedError
        self.usable = True
        self._attributes = attributes = recorded.attributes
        left = self.result, [vars(module)[name] for module, name in attributes]
        self.result = None
        found, self._spec = pytree.tree_flatten(left)
        for leaf in found:
            var = vars(leaf).get(TAG) if isinstance(leaf, torch.Tensor) else None
            self._leaves.append(leaf if var is None else var)
            if var is not None:
                self._told[var] = _attributes(leaf)
        for module, name in attributes:
            vars(module)[name] = None
        found = left = leaf = None  # type: ignore[assignment]
        if live.left():
            gc.collect()
        self._stashed = live.left()
        tape.calls = [_as_called(call) for call in tape.calls]
        whole = {op.function for op in recorded.operations if isinstance(op.function, nn.Module)}
        tape.spans = _outermost([span for span in live.spans if span.module in whole])
        live.forget()
        self._live = None

    def again(self) -> Any:
        """Make the calls again, as they were; returns what the model's own code returned."""
        wanted = list(dict.fromkeys([*(leaf for leaf in self._leaves if isinstance(leaf, Var)), *self._stashed]))
        with self._replay:
            made = dict(zip(wanted, self._tape.run(self._given, wanted), strict=True))
        for var, told in self._told.items():
            vars(made[var]).update(told)
        leaves = [made[leaf] if isinstance(leaf, Var) else leaf for leaf in self._leaves]
        assert self._spec is not None
        result, left = pytree.tree_unflatten(leaves, self._spec)
        for (module, name), value in zip(self._attributes, left, strict=True):
            vars(module)[name] = value
        self._exchanged = [(var, made[var]) for var in self._stashed]
        return result

    def exchange(self) -> None:
        """After the planned forward: make the tensors of its graph that somebody holds those that `again` made.

        Raises:
            MeasureError: where one of them cannot be exchanged.
        """
        for var, tensor in self._exchanged:
            _put_in_place(var, tensor)
        self._exchanged.clear()


def _put_in_place(var: Var, tensor: torch.Tensor) -> None:
    """Make the tensor that somebody holds the one that the step made."""
    held = var.tensor()
    if held is None:
        return
    told = _attributes(held)
    var.tensor = lambda: None  # type: ignore[assignment]
    own = tensor.view_as(tensor) if tensor.grad_fn is not None else tensor  # to which nothing refers
    try:
        torch.utils.swap_tensors(held, own)
    except RuntimeError as error:
        raise MeasureError(
            f"the forward leaves a tensor of shape {tuple(tensor.shape)} that needs a gradient where the step that measures"
            f" it cannot exchange it ({error}){CURE}"
        ) from error
    vars(held).clear()
    vars(held).update(told)


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Those that the model's own code gave to `tensor`."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_rotoff")}


def _hook(
    register: Callable[..., Any], handle: RemovableHandle | None, tensor: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """Register a hook again; who holds its `handle` removes this one by it."""
    new = register(tensor, *args, **kwargs)
    if handle is not None:
        vars(handle).update(vars(new))


def _removed(*_: Any, **__: Any) -> None:
    """In place of a hook that the forward has removed."""


def _as_called(call: Call) -> Call:
    """The same, where a custom or scripted Function is called as the model's own code calls it."""
    function: Any = call.function
    of = getattr(function, "__self__", None)
    if isinstance(of, type) and issubclass(of, torch.autograd.Function):
        function = partial(_apply, of)
    elif isinstance(function, partial) and isinstance(function.args[0], torch.jit.ScriptFunction):
        function = function.args[0]
    else:
        return call
    return Call(function, call.args, call.kwargs, call.outputs, call.around, call.dead)


def _apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    return function.apply(*args, **kwargs)


def _outermost(spans: Sequence[_Span]) -> list[_Span]:
    """Those that are within no other, in order; calls that are modules themselves need none."""
    found: list[_Span] = []
    for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
        if span.begin < span.end and (not found or span.begin >= found[-1].end):
            found.append(span)
    return found

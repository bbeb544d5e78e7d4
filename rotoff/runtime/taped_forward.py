"""The forward of a step that has no plan yet.

The model's own code runs once; every call is recorded on one tape, and nothing is kept for a backward. These calls are
then measured and planned, and the planned step runs the tape instead of the model's own code.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..capture.interception import code_of
from ..capture.tape import Tape
from ..capture.undo import BeforeStep
from ..errors import MeasureError
from ..tensors.autocast import autocast_now
from ..tensors.rng import Generators
from ..tensors.tree import flatten
from ._follow import TAG, Var
from .call_interception import as_call_of, following
from .replay import ModuleState, ReplayState
from .stage_tape import Call, StageTape
from .taping import Span, Taping

logger = logging.getLogger("rotoff")

CURE = "; measure the model before training, by model.measure(*sample)"


class UntapedError(Exception):
    """A forward cannot be repeated from its tape, for the reason in the message: it has to be run again."""


class _WholeTape(StageTape):
    """The tape of a forward; a run makes each call within a call of the module that made it.

    spans: the calls of modules, in order of their beginning. whole: modules that the plan has as one call.
    """

    spans: Sequence[Span] = ()
    whole: Collection[Any] = ()

    def run(
        self, given: Sequence[torch.Tensor], wanted: Sequence[Var] | None = None, everything: bool = False
    ) -> list[torch.Tensor]:
        torch.autocast_increment_nesting()  # calls of one region share the casts of weights
        try:
            return super().run(given, wanted, everything)
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()

    def _found(self, given: Sequence[torch.Tensor]) -> tuple[dict[Var, torch.Tensor], dict[int, torch.Tensor]]:
        with torch._C.DisableTorchFunction():  # the model's own code does not make these calls
            return super()._found(given)

    def _make(
        self,
        calls: Sequence[tuple[Call, list[Var]]],
        values: dict[Var, torch.Tensor],
        changed: dict[int, torch.Tensor],
    ) -> None:
        def run(begin: int, end: int, held: Collection[Var]) -> None:
            own = [(call, [var for var in dying if var not in held]) for call, dying in calls[begin:end]]
            super(_WholeTape, self)._make(own, values, changed)

        passed: set[Var] = set()  # tensors that modules called as a whole return as they were given
        for span in self.spans:
            if span.module in self.whole:
                made = {var for call, _ in calls[span.begin : span.end] for var in call[3]}
                passed.update(var for var in span.outputs if var not in made)
        self._call(self.spans, 0, len(calls), passed, run, values)

    def _call(
        self,
        spans: Sequence[Span],
        begin: int,
        end: int,
        held: Collection[Var],
        run: Callable[[int, int, Collection[Var]], None],
        values: dict[Var, torch.Tensor],
    ) -> None:
        """Make the calls from `begin` to `end` by `run`, those in `spans` within a call of their module. The tensors
        `held` stay alive."""
        n = 0
        while n < len(spans):
            span, first = spans[n], n + 1
            n = next((k for k in range(first, len(spans)) if spans[k].number >= span.until), len(spans))
            run(begin, span.begin, held)
            as_call_of(span.module, partial(self._within, span, spans[first:n], held, run, values))
            begin = span.end
        run(begin, end, held)

    def _within(
        self,
        span: Span,
        inner: Sequence[Span],
        held: Collection[Var],
        run: Callable[[int, int, Collection[Var]], None],
        values: dict[Var, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Make the calls of a module; returns its outputs if the plan has it as one call."""
        outputs = span.outputs if span.module in self.whole else []
        self._call(inner, span.begin, span.end, {*held, *outputs}, run, values)
        return [values[var] for var in outputs]


class TapedForward:
    """One forward of the model's own code on the input `value`, recorded to be run again.

    Use it in a training step that has no plan: run the model's own code while it is `watched`; `let_go` releases its
    graph; and `again` makes the same calls in the graph of the planned step.

    value: the input. usable: whether the tape is complete.
    """

    def __init__(self, model: nn.Module, value: Any, device: torch.device) -> None:
        self.usable = False
        self.value = value
        self.result: Any = None
        self._recorded = Tape()
        self._ended = False  # whether the model's own code has run to its end
        self._before = BeforeStep(model, device)
        self._device = device
        self._given = flatten(value)[0]
        self._live: Taping | None = None
        self._opaque: Collection[nn.Module] = ()
        self._after: list[ModuleState] = []  # of these, when the model's own code had run
        self._leaves: list[Any] = []
        self._told: dict[Var, dict[str, Any]] = {}  # attributes that the model's own code set on tensors it returned
        self._spec: pytree.TreeSpec | None = None
        self._attributes: Sequence[tuple[nn.Module, str]] = ()
        self._stashed: list[Var] = []  # tensors that the model's own code holds elsewhere
        self._exchanged: list[tuple[Var, torch.Tensor]] = []  # these, with the tensors that will replace them

    def put_back(self) -> None:
        """Restore the model and the generators to their state before the forward."""
        self._before.put_back()

    @contextmanager
    def watched(self, recorded: Tape) -> Iterator[None]:
        """Record the calls of the model's own forward on a new tape. recorded: what is recorded of them meanwhile."""
        self._recorded = recorded
        generators = Generators(self._device)
        self._replay = ReplayState(generators)
        self._tape = _WholeTape("of the whole model")
        self._live = Taping(self._replay, generators, self._given, self._tape, recorded.opaque)
        if torch._C._is_any_autocast_enabled():
            self._live.autocast_before = autocast_now()
        with following(self._live), self._live.regions():
            yield
        self._ended = True

    def is_kept(self) -> bool:
        """Release the graph of the forward, whose recording has failed; returns whether it is `usable`."""
        if self._ended and not self.usable:
            try:
                self.let_go(self._recorded)
            except UntapedError as error:
                logger.warning("rotoff: the forward of this step runs once more, since %s", error)
        return self.usable

    def let_go(self, recorded: Tape) -> None:
        """Release the graph of the forward that was run.

        Raises:
            UntapedError: if the tape does not hold all that the forward did.
        """
        live, tape = self._live, self._tape
        assert live is not None
        live.settle()
        why = live.untaped
        if tape.lost:
            why = f"{tape.lost} changes in place a tensor that other calls read"
        if any(isinstance(what, Var) and now.requires_grad for what, now in tape.before.values()):
            why = "it changes in place an input that needs a gradient"
        if any(generator.device.type != "cpu" for generator, _ in recorded.generators):
            why = "it draws from a generator of its own on the device"
        if not live.within_functions.issubset(one for module in live.opaque for one in module.modules()):
            why = "a custom Function uses modules"
        if why:
            raise UntapedError(f"{why}; what it changes outside of the model (globals, iterators, files) changes twice")
        self.usable, self._opaque = True, live.opaque
        self._after = [ModuleState(module.modules(), holds=None) for module in live.opaque]
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
        tape.spans = sorted(live.spans, key=lambda span: span.number)
        live.forget()
        self._live = None

    def rewind(self, planned: Tape) -> None:
        """Restore the modules that are recorded as one call, before the step that calls them again. planned: what the
        step is expected to do."""
        self._tape.whole = {op.function for op in planned.operations if isinstance(op.function, nn.Module)}
        self._before.put_back_of(self._opaque)

    def again(self) -> Any:
        """Make the same calls again; returns what the model's own code returned."""
        wanted = list(dict.fromkeys([*(leaf for leaf in self._leaves if isinstance(leaf, Var)), *self._stashed]))
        with self._replay.again(graph=True):
            made = dict(zip(wanted, self._tape.run(self._given, wanted), strict=True))
        for state in self._after:
            state.put()
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
        """After the planned forward, turn the tensors of the first graph that something still holds into those that
        `again` made.

        Raises:
            MeasureError: if one of them cannot be exchanged.
        """
        pairs = [(held, tensor) for var, tensor in self._exchanged if (held := var()) is not None]
        # each `Var` is a weak reference, and swapping needs tensors without any
        self._tape, self._leaves, self._stashed = _WholeTape(""), [], []
        self._told.clear()
        self._exchanged.clear()
        while pairs:
            _put_in_place(*pairs.pop(0))


def _put_in_place(held: torch.Tensor, tensor: torch.Tensor) -> None:
    """Turn the tensor that something still holds into the one that the step made."""
    told = _attributes(held)
    own = tensor.view_as(tensor) if tensor.grad_fn is not None else tensor  # swapping needs one without references
    try:
        torch.utils.swap_tensors(held, own)
    except RuntimeError as error:
        raise MeasureError(
            f"the forward stores a tensor of shape {tuple(tensor.shape)} that needs a gradient, and the step that"
            f" measures the model cannot replace it there ({error}){CURE}"
        ) from error
    vars(held).clear()
    vars(held).update(told)


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that the model's own code set on `tensor`."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_rotoff")}


def _as_called(call: Call) -> Call:
    """Return `call`, with a custom or scripted Function called as the model's own code calls it."""
    code = code_of(call[0])
    if isinstance(code, type):
        return partial(_apply, code), *call[1:]
    return (code, *call[1:]) if isinstance(code, torch.jit.ScriptFunction) else call


def _apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    return function.apply(*args, **kwargs)

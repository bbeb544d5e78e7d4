"""Records one whole forward of the model on a single tape, including the hooks that it registers on its graph."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.utils.hooks import RemovableHandle

from ..capture.interception import Patches, other_generators, put_other_generators
from ..capture.module_recorder import one_call
from ..capture.recorder import HOOKS
from ..tensors.rng import Generators
from ..tensors.storage import version_of
from ._follow import TAG, Var
from .arguments import replaced, tensors_of
from .hollowing import current_key
from .live import NOTHING_EXPECTED, LiveForward
from .reads import Reads
from .replay import ModuleState, ReplayState
from .stage_tape import Call, Seeded, StageTape
from .torch_calls import WRITERS, FunctionProperties

FIRST = 1  # the only stage


class Span(NamedTuple):
    """A call of a module: its number among these calls, that of the next one after it ended, the range of calls that
    it made on the tape, and the tensors that it returned."""

    module: nn.Module
    number: int
    until: int
    begin: int
    end: int
    outputs: list[Var]


def _once(module: nn.Module, state: ModuleState, *args: Any, **kwargs: Any) -> Any:
    """Call a module in the state of the first call."""
    now = other_generators()
    state.put()
    try:
        return module(*args, **kwargs)
    finally:
        put_other_generators(now)


def _unchanging(leaf: Any) -> Any:
    """Return an argument as it is before a call, which may change it."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return Seeded(leaf) if isinstance(leaf, torch.Generator) else leaf


class _Reads(Reads):
    """Copies all arguments of a custom or scripted Function before its call, since it may change any of them in place.
    The tape stays connected to the graph from before it."""

    detaches = False

    def __init__(self) -> None:
        super().__init__({})
        self._guessed: list[tuple[int | Var, Tensor, int]] = []  # key of the copy, the original and its version

    def before_writing(
        self, known: FunctionProperties, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], stage: int
    ) -> Sequence[Tensor]:
        before = set(self.tape.before)
        written = super().before_writing(known, args, kwargs, given, stage)
        if known.owner is None:
            return written
        for key in self.tape.before.keys() - before:
            what = self.tape.before[key][0]
            if (tensor := what() if isinstance(what, Var) else what) is not None:
                self._guessed.append((key, tensor, version_of(tensor)))
        return ()

    def may_write(self, known: FunctionProperties, given: list[Tensor]) -> list[Tensor]:
        return [] if known.owner is None else [t for t in given if not isinstance(t, nn.Parameter)]

    def note_changed(
        self, known: FunctionProperties, given: list[Tensor], versions: Sequence[int], expected: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        super().note_changed(known, given, versions, [*expected, *self.may_write(known, given)])
        changed = [n for n, version in enumerate(versions) if version_of(given[n]) != version]
        if known.owner is not None:
            WRITERS.setdefault(known.owner, set()).update(changed)
        return [*expected, *(given[n] for n in changed)]

    def let_go(self) -> None:
        """Release the copies of tensors that were not changed."""
        for key, tensor, version in self._guessed:
            if version_of(tensor) == version:
                self.tape.before.pop(key, None)
        self._guessed.clear()


class Taping(LiveForward):
    """Records one forward on one tape, and which calls each module made.

    untaped: why the tape is incomplete; "" if it is complete. opaque: modules each of whose calls is recorded as one.
    within_functions: modules that custom Functions call.
    """

    def __init__(
        self,
        replay: ReplayState,
        generators: Generators,
        given: list[Tensor],
        tape: StageTape,
        found: Collection[nn.Module] = (),
    ) -> None:
        nobody: Any = None  # no stage is entered, and no tensor is hollow
        super().__init__(NOTHING_EXPECTED, nobody, generators, given)
        self.reads: _Reads = _Reads()
        for tensor in given:
            self.reads.note_resident(tensor)
        self.reads.places = {current_key(tensor): n for n, tensor in enumerate(given)}
        self.spans: list[Span] = []
        self.hooks: list[tuple[Call, RemovableHandle | None]] = []
        self.untaped = ""
        self.opaque: set[nn.Module] = set()
        self.within_functions: set[nn.Module] = set()
        self._found = found  # modules that the recorder, which sees the same calls, has found to be opaque
        self._entered = 0  # number of calls of modules so far
        # for each running call of a module, the number of the innermost around that no transform of torch.func runs
        self._untransformed: list[int | None] = [None]
        self._hidden: int | None = None  # the call whose inner calls are not recorded, because it uses torch.func
        self._within_hidden: set[Var | None] = set()  # made by calls that are not recorded, after all
        tape.inputs = [vars(tensor)[TAG] for tensor in given]
        self.begin_stage(FIRST, tape, replay)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside:
            return function(*args, **kwargs)
        if any(is_functorch_wrapped_tensor(t) for t in tensors_of((args, kwargs))):
            self._hidden = self._untransformed[-1]
            if self._hidden is not None:
                self.inside = True
                return function(*args, **kwargs)
        result = super().call(function, args, kwargs)
        if getattr(function, "__name__", "") in HOOKS:
            self.registered(partial(_hook, function, result), args, kwargs, result)
        if isinstance(result, torch.autograd.graph.Node):
            return self._node(result, args[0])
        return result

    def registered(
        self, again: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], handle: RemovableHandle | None
    ) -> None:
        """Record that a hook was registered on the graph; `again` registers it on the graph of a replay."""
        named = [self._reference([], FIRST, one) for one in args]
        self.tape.calls.append((again, named, kwargs, (), None, False))
        self.hooks.append((self.tape.calls[-1], handle))

    @contextmanager
    def regions(self) -> Iterator[None]:
        """Within, it is put on the tape that an outermost autocast region is left, and so its casts are let go."""
        clear, thread = torch.clear_autocast_cache, threading.get_ident()

        def cleared() -> None:
            if threading.get_ident() == thread:
                self.tape.calls.append((clear, (), {}, (), None, False))
            clear()

        with Patches((torch, "clear_autocast_cache", lambda _: cleared)):
            yield

    def _node(self, node: Any, tensor: Tensor) -> Any:
        """Return a stand-in for the autograd node that made `tensor`."""
        var = self._known(tensor)
        if var is None or var.stage != FIRST:
            return node  # it belongs to the caller's graph
        if _asks() == "torch.autograd.graph":  # C++ code there needs the real node
            self.untaped = "it asks for nodes of its graph"
            return node
        return Node(self, node, tensor)

    def called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any] | None = None
    ) -> Any:
        """Replaces the call of a module."""
        begin, number = len(self.tape.calls), self._entered
        with torch._C.DisableTorchFunction():  # these calls are not the model's
            state = ModuleState(module.modules(), holds=True)
            state.buffers = {
                (one, name): buffer
                for one in module.modules()
                for name, buffer in one._buffers.items()
                if buffer is not None and self._known(buffer) is not None  # the forward has put it there
            }
            before = replaced((args, kwargs), _unchanging)
        self._entered += 1
        given = tensors_of((args, kwargs))
        self._untransformed.append(number if peek_interpreter_stack() is None else self._untransformed[-1])
        opaque = self._is_opaque(module)
        try:
            result = super().called(module, args, kwargs, run)
        finally:
            self._untransformed.pop()
            if self._hidden == number:
                self._hidden, self.inside = None, False
                self.opaque.add(module)
        hidden = not opaque and (module in self.opaque or module in self._found)
        if hidden:
            self.opaque.add(module)
            within = {var for one in self.tape.calls[begin:] for var in one[3]}
            del self.tape.calls[begin:]
            self.spans = [span for span in self.spans if span.number < number]
            reference = partial(self._reference, [], FIRST)
            made, _ = self._made(tensors_of(result), given, self._origin)
            self._within_hidden |= within.difference(made)
            named = replaced(before, reference)
            self.tape.calls.append((module, *named, made, None, False))
        if opaque or hidden:
            self.tape.calls[-1] = (partial(_once, module, state), *self.tape.calls[-1][1:])
            return result
        found = [vars(tensor).get(TAG) for tensor in tensors_of(result)]
        outputs = [var for var in found if var is not None]
        self.spans.append(Span(module, number, self._entered, begin, len(self.tape.calls), outputs))
        return result

    def _run_code(
        self, function: Any, known: FunctionProperties, args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool
    ) -> Any:
        if known.code is None:  # `_once` sets the state of a module
            return self._run(function, args, kwargs)
        return super()._run_code(function, known, args, kwargs, expected)

    def reached(self, module: nn.Module) -> None:
        """Note a module that a custom Function calls. The recorder sees it, too: the module around becomes opaque."""
        self.within_functions.add(module)

    def _is_whole(self, module: nn.Module) -> bool:
        return self._is_opaque(module)

    def _is_opaque(self, module: nn.Module) -> bool:
        if one_call(module):
            self.opaque.add(module)
        return module in self.opaque

    def left(self) -> list[Var]:
        """Return the tensors of this forward's graph that something still holds, and that a call on the tape makes."""
        vars_here = [var for var in self.frames.every if var.stage == FIRST and var not in self._within_hidden]
        return [var for var in vars_here if (tensor := var()) is not None and tensor.requires_grad]

    def settle(self) -> None:
        """End the forward: drop the hooks that it has removed again, and the copies that are not needed."""
        gone = {id(call) for call, handle in self.hooks if handle and handle.id not in (handle.hooks_dict_ref() or ())}
        self.tape.calls[:] = [(_removed, *call[1:]) if id(call) in gone else call for call in self.tape.calls]
        self.reads.let_go()


class Node:
    """Stands for an autograd node of the recorded forward: hooks on it are put on the tape. Equals, and has the class
    of, the node."""

    def __init__(self, live: Taping, node: Any, tensor: Tensor | None) -> None:
        self._live, self._node = live, node
        self._tensor = tensor  # the tensor that it made; None if it was reached through another node

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if type(other) is Node else other)

    def __hash__(self) -> int:
        return hash(self._node)

    @property
    def next_functions(self) -> Any:
        return tuple((node and Node(self._live, node, None), n) for node, n in self._node.next_functions)

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self._register("register_hook", hook)

    def register_prehook(self, hook: Callable[..., Any]) -> RemovableHandle:
        return self._register("register_prehook", hook)

    def _register(self, name: str, hook: Callable[..., Any]) -> RemovableHandle:
        handle: RemovableHandle = getattr(self._node, name)(hook)
        if self._tensor is None:
            self._live.untaped = "it registers hooks on nodes of its graph that it reached through other nodes"
        else:
            register = partial(_register_on_node, name)
            self._live.registered(partial(_hook, register, handle), (self._tensor, hook), {}, handle)
        return handle


def _asks() -> str:
    """Return the name of the module whose code called torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals["__name__"].startswith(("rotoff.", "torch._dynamo.")):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals["__name__"])


def _register_on_node(name: str, tensor: Tensor, hook: Callable[..., Any]) -> Any:
    return getattr(tensor.grad_fn, name)(hook)


def _hook(
    register: Callable[..., Any], handle: RemovableHandle | None, tensor: Tensor, *args: Any, **kwargs: Any
) -> None:
    """Register a hook again; its old `handle` then removes the new one."""
    new = register(tensor, *args, **kwargs)
    if handle is not None:
        vars(handle).update(vars(new))


def _removed(*_: Any, **__: Any) -> None:
    """Replaces the registration of a hook that the forward has removed."""

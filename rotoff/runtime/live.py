"""Follows the model's own forward in a planned step.

Python runs the forward once, as it is written. A ``TorchFunctionMode`` intercepts each call of torch; wrappers
intercept custom autograd Functions, scripted functions and modules. Each call is recorded on the tape of its stage
(`stage_tape`), and a replay runs this tape. The expected `Course` says where a stage ends and which tensors no later
call needs. A tensor that the plan drops is *hollowed*: the tensor that the model's code still holds keeps its shape and
its graph, but not its bytes.

No value is taken from the course, so a forward that takes another one is still correct: all calls from the first one
that differs belong to the open stage. If a call reads a hollow tensor after all, a replay fills it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.course import OUTSIDE, Course
from ..capture.graph_attributes import tensors_within
from ..capture.interception import other_generators, put_other_generators
from ..capture.unrepeatable import compiled, takes_fast_path
from ..errors import ExecutionError
from ..tensors.autocast import Autocast
from ..tensors.convolutions import Algorithms, forward_by
from ..tensors.eager_mode import unseen, without
from ..tensors.kernel_flags import kernel_flags
from ..tensors.rng import Generators
from ..tensors.storage import versions_of
from ._follow import TAG, Var
from .arguments import NESTED, replaced, tensors_in, tensors_of
from .hollowing import Frames, current_key, is_shared, renew_graph
from .on_course import OnCourse
from .placed.brought import bring
from .placed.in_turn import InTurn
from .placed.lending import Lender
from .reads import Reads, is_among
from .replay import ReplayState
from .stage_tape import Around, Seeded, StageTape
from .torch_calls import FunctionProperties


class StageCallbacks(Protocol):
    """What a forward calls on the step that it belongs to."""

    def enter(self, stage: int) -> None:
        """End the stage before `stage`, whose first call is about to be made."""

    def restore(self, every: Sequence[Var]) -> list[torch.Tensor]:
        """Return the contents of hollow tensors."""

    def keep_before(self, key: int, every: Sequence[Var]) -> None:
        """Copy a storage that the open stage is about to change, for replays of earlier ones: `every` lies there."""


RETURNED = "_rotoff_returned"  # set on the stand-in for a parameter if a call returned the stand-in itself
NOTHING_EXPECTED = Course()


class LiveForward(OnCourse):
    """Follows one forward of the model.

    Attributes:
        tape: the tape of the open stage.
        outside: the tape of calls that belong to no stage.
        entered: the input tensors of the open stage.
        seen: whether a replay will save again what autograd saves now.
        dead: whether the course expects nobody to need the result of the present call.
        saved: for each tensor that autograd saved in the open stage, as of `StageRun`.
        dropped: one item for each tensor that autograd saved for a dead call.
        inside: whether calls run without being recorded. applying: whether that is because a custom Function runs.
        reads: which tensors from before the stages the calls read and change.
        frames: the tensors that the calls make.
        kept_more: whether a hollow tensor was needed after all, or still held when the forward ended.
        fills: whether such tensors are filled again; False if the stages' modules are run one by one.
        views_changed: whether a tensor that shares its storage was changed in place; graphs of views are made anew.
    """

    applying = _unsaved = False
    timed = False  # whether `_run` makes every call, since a subclass times them there

    def __init__(
        self, course: Course | None, step: StageCallbacks, generators: Generators, given: list[torch.Tensor]
    ) -> None:
        super().__init__(course or NOTHING_EXPECTED)
        self.tape = StageTape("")
        self.outside = StageTape("masks and tables")
        self.fills = course is not None
        self.reads = Reads(self.course.storages)
        self.frames = Frames(self.reads.resident)
        self.entered: set[Var] = set()
        self.autocast_before: Autocast | None = None  # when the stage began; None if it was off
        self.kernels_before = kernel_flags()  # when the stage began
        self.saved, self.dropped = [], []
        self._every = self.timed
        self.kept_more = self.views_changed = False
        self.algorithms: Algorithms | None = None  # of convolutions
        self.instead: dict[Var, torch.Tensor] = {}  # the tensor that calls get in place of a stage's input
        self.brought: dict[int, torch.Tensor] = {}  # by id of a placed parameter, the copy on the device that calls get
        self.newest: dict[int, torch.Tensor] = {}  # the last of those of all stages so far
        self.lender: Lender | None = None  # lends other parameters from the host
        self._in_turn: InTurn | None = None  # brings those of layers before the chain
        self._token = object()  # identifies this forward
        self._origin: tuple[object, int] = (self._token, OUTSIDE)  # of what the open stage makes
        self._outside: tuple[object, int] = self._origin
        self._step = step
        self._generators = generators
        self._drawn: tuple[object, ...] | None = None  # mark of the generators after the stage's last random call
        self._replay: ReplayState  # of the open stage
        self._begins: int  # where the tape was when the running call of a module or custom Function began
        self._covered: set[nn.Module]  # modules that it has called, and their submodules
        self._within = int(self.course is NOTHING_EXPECTED)
        self._aliases: dict[Var, torch.Tensor] = {}  # detached tensors of earlier stages that the open stage reads
        self._earlier: dict[int, list[Var]] | None = None  # tensors of other stages than the open one, by storage
        for tensor in given:
            self.reads.note_resident(tensor)
            self._tag(tensor, self._outside).stays = True

    def lend(self, lender: Lender | None, in_turn: InTurn | None) -> None:
        """Let calls that the plan does not cover find parameters that lie on the host."""
        self.lender, self._in_turn, self._unusual = lender, in_turn, bool(lender)
        if in_turn is not None:
            self.outside.brought = in_turn.all

    # -- stages

    def begin_stage(self, stage: int, tape: StageTape, replay: ReplayState) -> None:
        """Open a stage; `replay` is the state at its start."""
        if self._in_turn is not None:
            self._in_turn.end()
        self._stage, self._origin = stage, (self._token, stage)
        self._drawn, self._replay = None, replay
        self.tape = self.reads.tape = tape
        self.entered = set(tape.inputs)
        self._aliases, self._earlier = {}, None
        self._unusual = bool(
            self.instead or self.newest or self.lender or self.algorithms is not None or self.views_changed
        )
        for copy in self.brought.values():
            self.reads.note_resident(copy)  # so that its bytes stay when a view of it is let go
            if vars(copy).pop(TAG, None) is not None:  # another stage's
                setattr(copy, RETURNED, True)
        # what belongs to no stage may come first
        start = self.course.starts.get(stage, self._position)
        between = {row[1] for row in self._rows[self._position : start]}
        self.as_measured = self._position <= start and between <= {OUTSIDE}
        if self._skipped:
            skipped, self._skipped = self._skipped, []
            self._dying = [n for n in skipped if self._numbered.get(n) not in self.entered]
            self._let_go_all()

    def has_returned(self, copy: torch.Tensor) -> bool:
        """Whether a call has returned `copy`, the stand-in for a parameter, itself."""
        return TAG in vars(copy) or RETURNED in vars(copy)

    def crossing(self, stage: int) -> list[tuple[Var, int]]:
        """Return the tensors that enter the stage after `stage`, and their places among its measured outputs."""
        found: dict[Var, int] = {}
        numbers = list(self.course.crossing[stage - 1])
        if self._position > self.course.starts.get(stage + 1, self._position):  # what its first calls would have made
            numbers += [(n, -1) for n, _ in self.course.alive(self._position)]
        for n, at in numbers:
            var = self._numbered.get(n)
            if var is not None and (var.stage == self._stage or var in self.entered):
                found.setdefault(var, at)
        for var in found:
            if var.hollow:
                self._refill([var])
        return [(var, at) for var, at in found.items() if var() is not None]

    def handed(self, outputs: Sequence[torch.Tensor]) -> list[tuple[Var, int]]:
        """Return those of a stage's `outputs` that were made in a stage, and their places."""
        found: dict[Var, int] = {}
        for at, tensor in enumerate(outputs):
            var = self._known(tensor)
            if var is not None and var.stage != OUTSIDE:
                found.setdefault(var, at)
        return list(found.items())

    def finish(self) -> None:
        """End the forward: fill the hollow tensors that something still holds."""
        self._dying, self.instead = (), {}  # a view holds its base
        if self._position < len(self.course.calls):
            self._skip_to(len(self.course.calls))
        self._refill(self.frames.held())
        if self.astray is not None:  # what the plan has left to do drops values that the caller may hold now
            for var in self.frames.every:
                var.stays = True

    def results(self, result: Any, stage: int) -> list[tuple[Var, int]]:
        """Return the tensors in `result` that the last `stage` made."""
        return [(var, -1) for var, _ in self.handed(tensors_of(result)) if var.stage == stage]

    def forget(self) -> None:
        """Remove this forward's marks from all tensors that are left."""
        self.instead, self.brought, self.newest = {}, {}, {}
        if self._in_turn is not None:
            self._in_turn.end()
        self.reads.forget()
        self._aliases, self.reads = {}, Reads({})  # hooks in the graph hold this forward
        self.tape = self.outside = StageTape("")
        self.frames.forget()

    def _refill(self, every: Sequence[Var]) -> None:
        held = [(var, tensor) for var in self.frames.sharing(every) if (tensor := var()) is not None]
        if not held:
            return
        self.on_course = self.as_measured = False
        self.kept_more, self._earlier = True, None
        gone = [var for var, _ in held if not self.frames.put_back(var)]
        for var, content in zip(gone, self._step.restore(gone) if gone else (), strict=True):
            self.frames.fill(var, content)
        for var, _ in held:
            var.stays = True

    def _let_go(self, var: Var) -> None:
        if self.astray is None or var not in self._numbered.values():  # it may also have the number of another
            self.frames.hollow(var)

    # -- calls

    def _forget_since(self, tape: StageTape, count: int) -> None:
        """Forget the constants of `tape` after the first `count`: the call that reads them is not on it."""
        if len(tape.constants) > count:
            while len(tape.constants) > count:
                tape.constants.popitem()
            self._aliases = {var: alias for var, alias in self._aliases.items() if id(alias) in tape.constants}

    def _settings(self, grad: bool) -> Around | None:
        return Around.of(grad, self.autocast_before, self.kernels_before)

    def _made_for_nothing(self, made: Sequence[Var | None], stage: int, written: bool) -> bool:
        """Note that a dead call has made tensors; returns whether no replay makes them."""
        self.tape.needs_dead |= written  # other calls may read what this one changed
        for one in made:
            if one is not None:
                one.dead, one.stays = True, one.stays or stage == OUTSIDE
        return stage == OUTSIDE

    def _carefully(
        self,
        function: Any,
        known: FunctionProperties,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stage: int,
        expected: bool,
    ) -> tuple[Any, bool]:
        """Run a call that may change tensors, draw random numbers or get other tensors than the model's own. Returns
        its result, and whether it has changed anything. expected: whether it is the next one of the course."""
        given = tensors_in(args, kwargs)
        if self.views_changed:
            for tensor in given:
                renew_graph(tensor)
        if self.instead or self.newest or self.lender:
            if self.lender and isinstance(function, nn.Module):  # the calls in it are not recorded
                self.lender.lend(function.parameters())
            args, kwargs = self._with_aliases(args, kwargs, stage)
        versions = versions_of(given) if known.watched else ()
        written: Sequence[Tensor] = ()
        if known.writes or self.reads.changing or "out" in kwargs:
            written = self.reads.before_writing(known, args, kwargs, given, stage)
            if written and known.content:
                self._keep_earlier(written, expected)
                if not self.views_changed and any(is_shared(tensor) for tensor in written):
                    self.views_changed = self._unusual = True
        draws = known.draws is not None and stage != OUTSIDE and known.draws(args, kwargs)
        if draws and self._mark() != self._drawn:  # the model's own code has set the generators
            self.tape.calls.append((put, (self._generators, self._generators.copies()), {}, (), None, False))
        if stage != OUTSIDE and (known.code is not None or isinstance(function, nn.Module)):
            result = self._run_code(function, known, args, kwargs, expected)
        else:
            result = self._run(function, args, kwargs)
        if versions and versions != versions_of(given):
            written = self.reads.note_changed(known, given, versions, written)
        if draws:
            self._drawn = self._mark()
        if (self.instead or self.newest) and not written:
            result = self._unaliased(result, given)
        return result, bool(written)

    def _run_code(
        self, function: Any, known: FunctionProperties, args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool
    ) -> Any:
        """Run a call whose own code a replay runs again, in the same state."""
        self._begins, self._covered = len(self.tape.calls), set()
        if known.code is None:
            self._put_before_replay(self._replay.calls(function, buffers=not expected).put)
            result = self._run(function, args, kwargs)
            if self._replay.changed():
                self.tape.lost = f"the code of {type(function).__name__}"
            return result
        self._unsaved = True
        if self._replay.runs(known.code) or not expected:
            self._save_others()
        self.applying = True
        try:
            return self._run(function, args, kwargs)
        finally:
            self.applying = False

    def _save_others(self) -> None:
        """Let replays find the generators of Python and NumPy, at the present call, as they are now."""
        self._unsaved, self._replay.others = False, True
        self._put_before_replay(partial(put_other_generators, other_generators()))

    def _put_before_replay(self, state: Callable[[], None]) -> None:
        """Put a call of `state` on the tape before the present call, and before earlier ones of these, whose generators
        are those that the call began with."""
        self.tape.calls.insert(self._begins, (state, (), {}, (), None, False))

    def reached(self, module: nn.Module) -> None:
        """Note that a custom Function, which the course calls without any module, is about to call one."""
        if module in self._covered:
            return
        self._covered.update(module.modules())
        if self._unsaved:
            self._save_others()
        if self.lender:
            self.lender.lend(module.parameters())
        self._put_before_replay(self._replay.calls(module, buffers=True).put)
        self._leave_course(module)

    def _keep_earlier(self, written: Sequence[Tensor], expected: bool) -> None:
        """Before a call changes tensors of earlier stages: let replays of these find the old content, and let no tensor
        in the same storages be made again from before the change. No course that was measured has such a call."""
        if expected and self.astray is None:
            bases = [self._known(tensor if tensor._base is None else tensor._base) for tensor in written]
            if all(var is None or var.stage == self._stage for var in bases):
                return
        if self._earlier is None:
            self._earlier = {}
            for var in self.frames.every:
                if var.stage != self._stage and (key := self.frames.key(var)) is not None:
                    self._earlier.setdefault(key, []).append(var)
        for key in {current_key(tensor) for tensor in written}:
            if every := [var for var in self._earlier.get(key, ()) if var() is not None]:
                for var in every:
                    if var.hollow:
                        self.frames.put_back(var)
                    var.stays = True
                if every := [var for var in every if var.stage != OUTSIDE]:
                    self._step.keep_before(key, every)

    def _mark(self) -> tuple[object, ...]:
        if self._drawn is None:
            self._drawn = self._replay.mark()
        return self._generators.mark()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, nn.Module):
            if takes_fast_path(function):
                return unseen(function, *args, **kwargs)
            with without(self):
                return function(*args, **kwargs)
        if self.algorithms is None:
            return function(*args, **kwargs)
        with forward_by(self.algorithms):
            return function(*args, **kwargs)

    def _called_otherwise(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any] | None
    ) -> Any:
        """Run a call of a module that is not the next of the course, or that is called as a whole."""
        if self._within or module not in self.course.modules:
            return self._enter(module, args, kwargs, run)
        try:
            if self._enter_module(module):
                self._begin_next()
            return self._enter(module, args, kwargs, run)
        finally:
            self._log.append(None)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any] | None
    ) -> Any:
        own = run or module._compiled_call_impl or module._call_impl
        if not self._is_whole(module):
            return own(*args, **kwargs)
        if run is None and self._is_opaque(module):  # a tape may have the calls in a module that is opaque elsewhere
            if any(self._known(parameter) is not None for parameter in module.parameters()):
                raise ExecutionError(
                    f"{type(module).__name__}, which runs as a whole, is called by functional_call with parameters that"
                    " this forward has made, which it was not when it was measured; call model.measure(*sample) again"
                )
            self.inside = True  # what is asked here are not the model's calls
            for tensor in (*module.parameters(), *module.buffers()):
                self.reads.note_resident(tensor)
            reached = [var for tensor in tensors_within(module) if (var := self._known(tensor)) is not None]
            self._refill([var for var in reached if var.hollow])
            for var in reached:  # the module's code, and a replay of it, read these where they are
                var.stays = True
            self.inside = False
            return self.call(module, args, kwargs)
        row = self._rows[self._position]
        expected = self.on_course and not self._within and row[0] is module
        if expected:
            self._begin_next()
        self._within += 1
        try:
            result = own(*args, **kwargs)
        finally:
            self._within -= 1
        if expected:
            made, _ = self._made(tensors_of(result), (), self._origin)
            self._made_next(row[2], made, module)
        else:
            self._log.append(module)
        return result

    def _begin_next(self) -> None:
        """Prepare for the next call of the course, which may begin another stage."""
        self.inside = True
        self._let_go_all()
        if (stage := self._rows[self._position][1]) > self._stage:
            self._step.enter(stage)
        self.inside = False

    def _is_whole(self, module: nn.Module) -> bool:
        return module in self.course.whole or compiled(module)

    def _is_opaque(self, module: nn.Module) -> bool:
        return module in self.course.opaque or compiled(module)

    def applied(self, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces the call of a custom or a scripted Function."""
        return apply(*args, **kwargs) if self.inside else self.call(apply, args, kwargs)

    # -- what a call reads and makes

    def _refer_within(self, foreign: list[torch.Tensor], stage: int, leaf: Any) -> Any:
        """Return what `_reference` returns for an argument that is not a tensor."""
        if type(leaf) in NESTED or isinstance(leaf, (tuple, dict)):
            return replaced(leaf, partial(self._reference, foreign, stage))
        if type(leaf) is torch.Generator and leaf.device.type == "cpu" and leaf is not torch.default_generator:
            return Seeded(leaf)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    def _refer_made(self, var: Var, stage: int, leaf: torch.Tensor) -> Any:
        """Return what `_reference` returns for a tensor that this forward made."""
        if var.hollow:
            self._refill([var])
        if stage == OUTSIDE:
            return leaf if var.stays else var
        if var.stage == stage or var in self.entered:
            if var.dead and not self.dead:
                self.tape.needs_dead = True
            return var
        if (alias := self._aliases.get(var)) is None:
            # an earlier stage made it and the course does not expect it here: the tape itself keeps it alive
            alias = leaf.detach().requires_grad_(leaf.requires_grad)
            self._aliases[var] = self.reads.constant(alias)
        return alias

    def _made(
        self, outputs: Sequence[Tensor], given: Sequence[Tensor], origin: tuple[object, int]
    ) -> tuple[list[Var | None], bool]:
        """Return the `Var`s of a call's `outputs`, and whether any output is not among its inputs `given`."""
        found: list[Var | None] = []
        new = False
        for tensor in outputs:
            var = self._known(tensor)
            if not is_among(tensor, given):
                new = True
                var = var or self._tag(tensor, origin)
            found.append(var)
        return found, new

    def _unaliased(self, result: Any, given: Sequence[Tensor]) -> Any:
        """Return the original tensor if a call returned the stand-in that it was given for it."""
        if isinstance(result, Tensor):
            for one in given:
                if result is self.brought.get(id(one)) or result is self.instead.get(vars(one).get(TAG)):  # type: ignore[arg-type]
                    return one
        return result

    def _with_aliases(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], stage: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def alias(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if (copy := self.brought.get(id(leaf))) is not None:
                return copy
            if isinstance(leaf, nn.Parameter):  # the plan does not bring it to the device here
                if stage == OUTSIDE and self._in_turn is not None and (copy := self._in_turn.bring(leaf)) is not None:
                    return copy
                earlier = self.newest.get(id(leaf))  # of an earlier stage that has read it
                copy = self.lender.stand_in(leaf, earlier) if self.lender else None
                if copy is None and earlier is not None:
                    copy = bring(leaf, leaf.detach(), earlier)
                if copy is not None:
                    self.newest[id(leaf)] = self.brought[id(leaf)] = copy
                    return copy
            var: Any = vars(leaf).get(TAG)
            return self.instead.get(var, leaf)

        return replaced(args, alias), replaced(kwargs, alias)


def put(generators: Generators, copies: list[torch.Generator]) -> None:
    """A call on a tape: set the generators as the model's own code did."""
    generators.put(copies)

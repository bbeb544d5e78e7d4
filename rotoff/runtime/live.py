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

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..capture.collectives import several_processes
from ..capture.course import OUTSIDE, Course
from ..capture.places import Places, is_exact
from ..capture.tape import name_of
from ..capture.unrepeatable import compiled
from ..tensors.autocast import Autocast
from ..tensors.convolutions import Algorithms, forward_by
from ..tensors.eager_mode import EagerFunctionMode, without
from ..tensors.rng import Generators
from ..tensors.storage import versions_of
from .hollowing import GEOMETRY, empty, key_of, whole_base
from .placed.lending import Lender
from .reads import Reads, is_among
from .stage_tape import NESTED, TAG, VALUES, Around, Seeded, StageTape, Var, replaced, tensors_in, tensors_of
from .torch_calls import KNOWN, Known, find, same_call


class Stages(Protocol):
    """What a forward needs from its step."""

    def enter(self, stage: int) -> None:
        """End the stage before `stage`, whose first call is about to be made."""

    def restore(self, every: Sequence[Var]) -> list[torch.Tensor]:
        """Return the contents of hollow tensors."""


_Before = tuple[Sequence[int], Sequence[Tensor], bool]  # versions, tensors that will change, whether it draws

RETURNED = "_rotoff_returned"  # set on the stand-in for a parameter if a call returned the stand-in itself
NOTHING_EXPECTED = Course()
LETTING_GO = 0.2  # seconds
_ITER = Tensor.__iter__
is_grad_enabled, is_any_autocast_enabled = torch.is_grad_enabled, torch._C._is_any_autocast_enabled


class LiveForward(EagerFunctionMode):
    """Follows one forward of the model.

    Attributes:
        tape: the tape of the open stage.
        outside: the tape of calls that belong to no stage.
        entered: the input tensors of the open stage.
        seen: whether a replay will save again what autograd saves now.
        dead: whether the course expects nobody to need the result of the present call.
        saved, saved_shapes: the tensors that autograd saved in the open stage.
        on_course: whether the last call was an expected one.
        as_measured: whether the open stage has made exactly the expected calls so far.
        astray: a hash of all deviations from the course; None if there were none.
        unknown: whether calls were made that the course does not contain; False if calls were only left out.
        inside: whether calls run without being recorded.
        reads: which tensors from before the stages the calls read and change.
        kept_more: whether something still held a hollow tensor when the forward ended.
        fills: whether such tensors are filled again; False if the stages' modules are run one by one.
    """

    timed = False  # whether `_run` makes every call, since a subclass times them there

    def __init__(
        self, course: Course | None, stages: Stages, generators: Generators, given: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self.tape = StageTape("")
        self.outside = StageTape("masks and tables")
        self.fills = course is not None
        course = course or NOTHING_EXPECTED
        self.reads = Reads(course.storages)
        self.entered: set[Var] = set()
        self.autocast_before: Autocast | None = None  # when the stage began; None if it was off
        self.seen = self.dead = False
        self.saved: list[Any] = []
        self.saved_shapes: list[Any] = []
        self.on_course = self.as_measured = True
        self.astray: int | None = None
        self.unknown = False
        self._places = Places()
        self._skipped: list[int] = []  # tensors whose last uses were in calls that the forward left out
        self.kept_more = False
        self.algorithms: Algorithms | None = None  # of convolutions
        self.opaque_stages = course.opaque_stages
        self._whole = course.whole
        self.instead: dict[Var, torch.Tensor] = {}  # the tensor that calls get in place of a stage's input
        self.brought: dict[int, torch.Tensor] = {}  # by id of a placed parameter, the copy on the device that calls get
        self.lender: Lender | None = None  # lends other parameters from the host
        self._course = course
        self._token = object()  # identifies this forward in its `Var`s
        self._stages = stages
        self._generators = generators
        self._drawn: tuple[object, ...] | None = None  # mark of the generators after the stage's last random call
        self._begun: Callable[[], tuple[object, ...]]  # their mark when the stage began
        self._stage = OUTSIDE
        self._position = 0
        self._calls, self._count, self._held = course.calls, len(course.calls), course.held
        self._rows = course.rows
        self._numbered: dict[int, Var] = {}
        self._dying: tuple[int, ...] = ()
        self._hollowed: list[Var] = []
        self._vars: list[Var] = []
        self.inside = False
        self._unusual = False  # whether every call in the open stage needs `_before` and `_after`
        self._within = int(course is NOTHING_EXPECTED)  # depth of calls of modules that the course has as one call
        self._aliases: dict[Var, torch.Tensor] = {}  # detached tensors of earlier stages that the open stage reads
        for tensor in given:
            self.reads.note_resident(tensor)
            self._tag(tensor, OUTSIDE).stays = True

    # -- stages

    def begin_stage(self, stage: int, tape: StageTape, begun: Callable[[], tuple[object, ...]]) -> None:
        """Open a stage; `begun` returns the mark of the generators at its start."""
        self._stage = stage
        self._drawn, self._begun = None, begun
        self.tape = self.reads.tape = tape
        self.entered = set(tape.inputs)
        self._aliases = {}
        self._unusual = bool(
            self.instead or self.brought or self.lender or self.reads.changing or self.algorithms is not None
        )
        for copy in self.brought.values():
            if vars(copy).pop(TAG, None) is not None:  # another stage's
                setattr(copy, RETURNED, True)
        # what belongs to no stage may come first
        start = self._course.starts.get(stage, self._position)
        between = {call.stage for call in self._calls[self._position : start]}
        self.as_measured = self._position <= start and between <= {OUTSIDE}
        if self._skipped:
            skipped, self._skipped = self._skipped, []
            self._dying = tuple([n for n in skipped if self._numbered.get(n) not in self.entered])
            self._let_go_all()

    def has_returned(self, copy: torch.Tensor) -> bool:
        """Whether a call has returned `copy`, the stand-in for a parameter, itself."""
        return TAG in vars(copy) or RETURNED in vars(copy)

    def crossing(self, stage: int) -> list[tuple[Var, int]]:
        """Return the tensors that enter the stage after `stage`, and their places among its measured outputs."""
        found: dict[Var, int] = {}
        numbers = list(self._course.crossing[stage - 1])
        if self._position > self._course.starts.get(stage + 1, self._position):  # what its first calls would have made
            numbers += [(n, -1) for n, _ in self._course.alive(self._position)]
        for n, at in numbers:
            var = self._numbered.get(n)
            if var is not None and (var.stage == self._stage or var in self.entered):
                found.setdefault(var, at)
        for var in found:
            if var.hollow:
                self._refill([var])
        return [(var, at) for var, at in found.items() if var.tensor() is not None]

    def made_by(self, stage: int) -> dict[Var, int]:
        """Return the tensors that the course expects as outputs of `stage`, and their places among these."""
        found = [(self._numbered.get(n), at) for n, at in self._course.crossing[stage - 1]]
        return {var: at for var, at in found if var is not None}

    def handed(self, outputs: list[torch.Tensor]) -> list[tuple[Var, int]]:
        """Return those of a stage's `outputs` that were made in a stage, and their places."""
        found: dict[Var, int] = {}
        for at, tensor in enumerate(outputs):
            var = vars(tensor).get(TAG)
            if var is not None and var.step is self._token and var.stage != OUTSIDE:
                found.setdefault(var, at)
        return list(found.items())

    def hollow(self, var: Var) -> None:
        """Free the bytes of a tensor that the model's code may still hold."""
        tensor = var.tensor()
        if tensor is None or var.stays or var.hollow or tensor.is_conj() or tensor.is_neg():
            return
        if tensor.requires_grad and tensor.is_leaf:  # the graph holds it, since it is to get a gradient
            return
        base = tensor._base
        if base is not None:  # the graph of a view holds it
            known = vars(base).get(TAG)
            if (known is None or known.gone) and key_of(base) not in self.reads.resident:
                empty(base)
        empty(tensor)
        var.hollow = var.gone = True
        self._hollowed.append(var)

    def fill(self, var: Var, content: torch.Tensor) -> None:
        """Make `content` the bytes of a tensor."""
        tensor = var.tensor()
        if tensor is not None and (var.hollow or key_of(tensor) != key_of(content)):
            tensor.data = content
        var.hollow = False
        _has_its_own(var)

    def finish(self) -> None:
        """End the forward: fill the hollow tensors that something still holds."""
        self._dying, self.instead = (), {}  # a view holds its base
        if self._position < self._count:
            self._skip_to(self._count)
        self._vars = [var for var in self._vars if var.tensor() is not None]
        for var in self._vars:
            tensor = var.tensor()
            if tensor is not None and not var.gone and tensor._base is not None:  # its base shares its bytes
                whole_base(tensor)
                if (known := vars(tensor._base).get(TAG)) is not None:
                    known.hollow = False
        if several_processes():  # the thread of a collective lets go of its tensors a moment after it has ended
            end = time.monotonic() + LETTING_GO
            while any(var.hollow and var.tensor() is not None for var in self._hollowed) and time.monotonic() < end:
                time.sleep(1e-4)
        held = list(dict.fromkeys(var for var in self._hollowed if var.hollow and var.tensor() is not None))
        self.kept_more = bool(held)
        self._refill(held)

    def results(self, result: Any, stage: int) -> list[tuple[Var, int]]:
        """Return the tensors in `result` that the last `stage` made."""
        found = dict.fromkeys(vars(tensor).get(TAG) for tensor in tensors_of(result))
        return [(var, -1) for var in found if var is not None and var.stage == stage]

    def forget(self) -> None:
        """Remove this forward's marks from all tensors that are left."""
        self.instead, self.brought = {}, {}
        self.reads.forget()
        self._aliases, self.reads = {}, Reads({})  # hooks in the graph hold this forward
        self.tape = self.outside = StageTape("")
        for var in self._vars:
            if (tensor := var.tensor()) is not None:
                whole_base(tensor)
                vars(tensor).pop(TAG, None)
                vars(tensor).pop(GEOMETRY, None)

    def _refill(self, every: Sequence[Var]) -> None:
        held = [(var, tensor) for var in every if (tensor := var.tensor()) is not None]
        if not held:
            return
        self.on_course = self.as_measured = False
        for (var, tensor), content in zip(held, self._stages.restore([var for var, _ in held]), strict=True):
            tensor.data = content
            var.hollow, var.stays = False, True
            _has_its_own(var)

    # -- calls

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `function`, and record the call if a replay must repeat it."""
        if self.inside:
            return function(*args, **kwargs)
        known = KNOWN.get(function) or find(function)
        if not known.ordinary:
            if known.fact:
                return self.lender.answer(function, args, kwargs) if self.lender else function(*args, **kwargs)
            if known.returns_itself is not None and known.returns_itself(*args, **kwargs):
                return function(*args, **kwargs)
            if function is _ITER:
                return iter(self.call(torch.unbind, args, {}))
            if known.instead is not None:
                function = known.instead
        self.inside = True  # if a wrapper called this, the mode is still active
        try:
            return self._followed(function, known, args, kwargs)
        finally:
            self.inside = False

    def _followed(
        self, function: Callable[..., Any], known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run and record a call. One long function for speed: what only few calls need is in other functions."""
        k, token, reads = self._position, self._token, self.reads
        if self._within:
            k = -1
        elif not self.on_course or self._rows[k][0] is not function:
            k = self._expected_at(function, args, kwargs)
        stage, numbers, dead = self._stage, None, False
        if k >= 0:
            for number in self._dying:
                if (old := self._numbered.pop(number, None)) is not None and old.tensor() is not None:
                    self._let_go(old)
            _, stage, numbers, last_uses, dead = self._rows[k]
            if stage != self._stage and stage != OUTSIDE:
                self._stages.enter(stage)
        if reads.pending:
            reads.pending = []
        foreign: list[Tensor] = []  # those that the open stage has not made
        named = []
        for one in args:
            kind = type(one)
            if (
                kind is Tensor
                and (var := one.__dict__.get(TAG)) is not None
                and var.step is token
                and var.stage == stage != OUTSIDE
                and not (var.hollow or var.dead)
            ):  # made by the open stage, and not hollow
                named.append(var)
            elif kind in VALUES:
                named.append(one)
            else:
                named.append(self._reference(foreign, stage, one))
        named_kwargs = kwargs and {n: self._reference(foreign, stage, one) for n, one in kwargs.items()}
        written: Sequence[Tensor] = ()
        careful = not known.ordinary or self._unusual or (kwargs and "out" in kwargs)
        if careful:
            given = tensors_in(args, kwargs)
            args, kwargs, before = self._before(function, known, args, kwargs, given, stage)
        grad, saved = is_grad_enabled(), len(self.saved)
        self.seen, self.dead = stage != OUTSIDE, dead
        try:
            result = self._run(function, args, kwargs) if careful or self.timed else function(*args, **kwargs)
        except BaseException:
            del self.saved[saved:], self.saved_shapes[saved:]  # the model may catch the error and go on
            raise
        finally:
            self.seen = False
        if careful:
            result, written = self._after(known, result, given, before)
        if (
            type(result) is Tensor
            and TAG not in (attributes := result.__dict__)
            and not (foreign and is_among(result, foreign))
        ):
            var = attributes[TAG] = Var(token, stage, result)
            self._vars.append(var)
            made: Sequence[Var | None] = (var,)
        else:
            made, new = self._made(tensors_of(result), given if careful else tensors_in(args, kwargs), stage)
            var = made[0] if made else None
            if not written and not new:
                return result  # a query, or no work: x.to(x.dtype)
        if not self._within:
            if numbers is not None and len(made) == len(numbers):
                if len(numbers) == 1 and var is not None and numbers[0] is not None:
                    self._numbered[numbers[0]] = var
                    var.stays = var.stays or numbers[0] in self._held
                elif numbers:
                    self._number(numbers, made)
                self._position, self._dying = k + 1, last_uses
            else:
                self._leave_course(function)
            self._places.calls.append(function)
        if foreign and reads.pending and not written:
            reads.note()
        if dead:
            self.tape.needs_dead |= bool(written)  # other calls may read what this one changed
            for one in made:
                if one is not None:
                    one.dead, one.stays = True, one.stays or stage == OUTSIDE
            if stage == OUTSIDE:  # no replay makes it
                return result
        around = None
        if not grad or is_any_autocast_enabled() or self.autocast_before or known.attention:
            around = Around.of(grad, self.autocast_before, known.attention)
        tape = self.outside if stage == OUTSIDE else self.tape
        tape.calls.append((function, named, named_kwargs, made, around, dead))
        return result

    def _before(
        self,
        function: Any,
        known: Known,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
        stage: int,
    ) -> tuple[tuple[Any, ...], dict[str, Any], _Before]:
        """Prepare a call that may change tensors, draw random numbers or get other tensors than the model's own.
        Returns the arguments to use, and what `_after` needs."""
        if self.instead or self.brought or self.lender:
            if self.lender and isinstance(function, nn.Module):  # the calls in it are not recorded
                self.lender.lend(function.parameters())
            args, kwargs = self._with_aliases(args, kwargs)
        versions = versions_of(given) if known.watched else ()
        written: Sequence[Tensor] = ()
        if known.writes or self.reads.changing or "out" in kwargs:
            written = self.reads.before_writing(known, args, kwargs, given, stage)
        draws = known.draws is not None and stage != OUTSIDE and known.draws(args, kwargs)
        if draws and self._mark() != self._drawn:  # the model's own code has set the generators
            self.tape.calls.append((put, (self._generators, self._generators.copies()), {}, (), None, False))
        return args, kwargs, (versions, written, draws)

    def _after(self, known: Known, result: Any, given: list[Tensor], before: _Before) -> tuple[Any, Sequence[Tensor]]:
        """Return the result of a call that `_before` has prepared, and all tensors that the call has changed."""
        versions, written, draws = before
        if versions and versions != versions_of(given):
            written = self.reads.note_changed(known, given, versions, written)
        if draws:
            self._drawn = self._mark()
        if (self.instead or self.brought) and not written:
            result = self._unaliased(result, given)
        return result, written

    def _mark(self) -> tuple[object, ...]:
        if self._drawn is None:
            self._drawn = self._begun()
        return self._generators.mark()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(function, nn.Module):
            with without(self):
                return function(*args, **kwargs)
        if self.algorithms is None:
            return function(*args, **kwargs)
        with forward_by(self.algorithms):
            return function(*args, **kwargs)

    def called(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces ``nn.Module.__call__``."""
        if self._within or module not in self._course.modules:
            return self._enter(original, module, args, kwargs)
        entry = self._places.enter(module)
        try:
            k = self._course.entries.get(entry, -1)
            if k > self._position or (k == self._position and not self.on_course):
                self._skip_to(k)
            elif k == self._position and k < self._count and self._calls[k].stage not in (OUTSIDE, self._stage):
                self._begin_at(k)
            return self._enter(original, module, args, kwargs)
        finally:
            self._places.leave()

    def _enter(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._is_whole(module):
            return original(module, *args, **kwargs)
        if self._is_opaque(module):
            for tensor in (*module.parameters(), *module.buffers()):
                self.reads.note_resident(tensor)
            return self.call(module, args, kwargs)
        k = self._position
        expected = self.on_course and not self._within and k < self._count and self._calls[k].function is module
        if expected:
            self._begin_at(k)
        self._within += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._within -= 1
        self._places.calls.append(module)
        if expected:
            outputs, numbers = tensors_of(result), self._calls[k].outputs
            if len(outputs) == len(numbers):
                made, _ = self._made(outputs, (), self._stage)
                self._number(numbers, made)
                self._position, self._dying = k + 1, self._calls[k].last_uses
            else:
                self._leave_course(module)
        return result

    def _begin_at(self, k: int) -> None:
        """Prepare for call `k` of the course, which may begin another stage."""
        self.inside = True
        self._let_go_all()
        if (stage := self._calls[k].stage) not in (OUTSIDE, self._stage):
            self._stages.enter(stage)
        self.inside = False

    # -- other courses

    def _expected_at(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the place in the course of the next call, which is of `function`; -1 if the course has none."""
        k, calls = self._position, self._calls
        if self.on_course and k < self._count and same_call(calls[k].function, function):
            return k
        for key in self._places.keys(function):
            at = self._course.places.get(key, -1)
            if at < k or not same_call(calls[at].function, function):
                continue
            if is_exact(key) or self._reads_the_same(calls[at].reads, args, kwargs):
                self._skip_to(at)
                return at
        return -1

    def _skip_to(self, k: int) -> None:
        """Note that the forward left out the calls up to `k`. Tensors whose last use was there take the numbers of
        tensors of equal size that these calls would have made."""
        for numbers in (self._dying, *(call.last_uses for call in self._calls[self._position : k])):
            self._skipped.extend(numbers)
        self._dying = ()
        if k > self._position:
            self.astray = hash((self.astray, self._position, k))
            self.as_measured = False
            left = [var for n in sorted(self._skipped) if (var := self._numbered.get(n)) is not None and not var.hollow]
            for number, nbytes in self._course.alive(k):
                if number not in self._numbered and (found := _of_size(left, nbytes)) is not None:
                    left.remove(found)
                    self._numbered[number] = found
        self._position, self.on_course = k, True

    def _reads_the_same(self, numbers: tuple[int | None, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = [vars(tensor).get(TAG) for tensor in tensors_of((args, kwargs))]
        made = [None if var is None or var.stage == OUTSIDE else var for var in given]
        known = [None if number is None else self._numbered.get(number) for number in numbers]
        return made == [None if var is None or var.stage == OUTSIDE else var for var in known]

    def _leave_course(self, function: Any) -> None:
        if self.on_course:
            self.astray = hash((self.astray, self._position, name_of(function)))
        self.on_course = self.as_measured = False
        self.unknown = True

    def _is_whole(self, module: nn.Module) -> bool:
        return module in self._whole or compiled(module)

    def _is_opaque(self, module: nn.Module) -> bool:
        return module in self._course.opaque or compiled(module)

    def applied(self, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces the call of a custom or a scripted Function."""
        return apply(*args, **kwargs) if self.inside else self.call(apply, args, kwargs)

    # -- what a call reads, makes and changes

    def _reference(self, given: list[torch.Tensor], stage: int, leaf: Any) -> Any:
        """Return what the tape holds in place of one leaf of the arguments."""
        if not isinstance(leaf, Tensor):
            kind = type(leaf)
            if kind in VALUES:
                return leaf
            if kind is tuple and VALUES.issuperset(map(type, leaf)):
                return leaf
            if kind in NESTED or isinstance(leaf, (tuple, dict)):
                return replaced(leaf, partial(self._reference, given, stage))
            if kind is torch.Generator and leaf.device.type == "cpu" and leaf is not torch.default_generator:
                return Seeded(leaf)
            return leaf
        given.append(leaf)
        var: Var | None = leaf.__dict__.get(TAG)
        if var is None or var.step is not self._token:
            return self.reads.constant(leaf) if stage != OUTSIDE else leaf
        if var.hollow:
            self._refill([var])
        if stage == OUTSIDE:
            return leaf if var.stays else var
        if var.stage == stage or var in self.entered:
            if var.dead:
                self.tape.needs_dead = True
            return var
        if (alias := self._aliases.get(var)) is None:
            # an earlier stage made it and the course does not expect it here: the tape itself keeps it alive
            alias = leaf.detach().requires_grad_(leaf.requires_grad)
            self._aliases[var] = self.reads.constant(alias)
        return alias

    def _made(self, outputs: Sequence[Tensor], given: Sequence[Tensor], stage: int) -> tuple[list[Var | None], bool]:
        """Return the `Var`s of a call's `outputs`, and whether any output is not among its inputs `given`."""
        found: list[Var | None] = []
        new = False
        for tensor in outputs:
            var = tensor.__dict__.get(TAG)
            if var is not None and var.step is not self._token:
                var = None
            if not is_among(tensor, given):
                new = True
                var = var or self._tag(tensor, stage)
            found.append(var)
        return found, new

    def _number(self, numbers: tuple[int | None, ...], made: Sequence[Var | None]) -> None:
        for number, var in zip(numbers, made, strict=True):
            if number is not None and var is not None:
                self._numbered[number] = var
                if number in self._held:
                    var.stays = True

    def _tag(self, tensor: torch.Tensor, stage: int) -> Var:
        var = Var(self._token, stage, tensor)
        setattr(tensor, TAG, var)
        self._vars.append(var)
        return var

    def _let_go_all(self) -> None:
        """Hollow the tensors that no later call needs."""
        numbers, self._dying = self._dying, ()
        for number in numbers:
            if (var := self._numbered.pop(number, None)) is not None and var.tensor() is not None:
                self._let_go(var)

    def _let_go(self, var: Var) -> None:
        if self.astray is None or var not in self._numbered.values():  # it may also have the number of another
            self.hollow(var)

    def _unaliased(self, result: Any, given: Sequence[Tensor]) -> Any:
        """Return the original tensor if a call returned the stand-in that it was given for it."""
        if isinstance(result, Tensor):
            for one in given:
                if result is self.brought.get(id(one)) or result is self.instead.get(vars(one).get(TAG)):  # type: ignore[arg-type]
                    return one
        return result

    def _with_aliases(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def alias(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if (copy := self.brought.get(id(leaf))) is not None:
                return copy
            if self.lender and isinstance(leaf, nn.Parameter):  # the plan does not bring it to the device here
                self.lender.lend([leaf])
            var: Any = vars(leaf).get(TAG)
            return self.instead.get(var, leaf)

        return replaced(args, alias), replaced(kwargs, alias)


def _has_its_own(var: Var) -> None:
    """Note that a tensor was filled itself: if it is the base of views, its bytes are no longer only for them."""
    tensor = var.tensor()
    if tensor is not None and tensor._base is None:
        var.gone = False


def _of_size(every: list[Var], nbytes: int) -> Var | None:
    return next(
        (var for var in every if (t := var.tensor()) is not None and t.untyped_storage().nbytes() == nbytes), None
    )


def put(generators: Generators, copies: list[torch.Generator]) -> None:
    """A call on a tape: set the generators as the model's own code did."""
    generators.put(copies)

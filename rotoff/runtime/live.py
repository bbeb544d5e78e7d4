"""The model's own forward, running in a planned step.

Python runs the forward as it is written, once. A ``TorchFunctionMode`` sees each call of torch pass by; custom autograd Functions, scripted
functions and modules are seen by a wrapper. Each call is put on the tape of its stage (`stage_tape`), which a replay runs. The
expected `Course` says where a stage ends, and which tensors no call needs any more: what the plan wants gone is *hollowed*, so that the
tensor that the model's code still holds has its shape and its graph, and no bytes.

No value comes from the course. A forward that takes another one stays right: from the first call that differs, all that follows
belongs to the stage that is open. A hollow tensor that is asked for after all is filled again by a replay.
"""

from __future__ import annotations

import inspect
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..capture.course import OUTSIDE, Course
from ..capture.eager_mode import EagerFunctionMode, without
from ..capture.outside import Patches, without_checkpoints
from ..capture.stage import copied
from ..capture.unrepeatable import compiled
from .convolutions import Algorithms, forward_by
from .replay import Generators
from .stage_tape import NESTED, TAG, Autocast, Call, Seeded, StageTape, Var, attention_flags, replaced, tensors_of


class Stages(Protocol):
    """What a forward asks of its step."""

    def enter(self, stage: int) -> None:
        """The first call of `stage` is about to be made; the stage before has ended."""

    def restore(self, var: Var) -> torch.Tensor:
        """The bytes of a hollow tensor."""


NOTHING_EXPECTED = Course((), (), (), (), (), (), (), frozenset())


class LiveForward(EagerFunctionMode):
    """Follows one forward of the model.

    Attributes:
        tape: of the stage that is open.
        outside: of what belongs to no stage.
        entered: the tensors that the open stage was given.
        seen: whether a replay saves again what autograd saves now.
        dead: whether nobody is expected to need what the present call makes.
        saved, saved_shapes: what autograd saved in the open stage.
        on_course: whether all calls so far were the expected ones.
        astray: tells the course that was taken in place of the expected one; None while on course.
        inside: whether calls pass without being followed.
        kept_more: whether somebody holds a tensor in the end who is not known to.
        fills: whether hollow tensors that somebody still holds in the end are filled again: not where modules run one by one.
        resident: storages that were there before the stages.
    """

    def __init__(self, course: Course | None, stages: Stages, generators: Generators, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.tape = StageTape("")
        self.outside = StageTape("masks and tables")
        self.changing: set[int] = set()  # of the open stage: buffers that some call changes, by id
        self.entered: set[Var] = set()
        self.resident: dict[int, Any] = {}  # to weak references, which keep an address from being given to another storage
        self.places: dict[int, int] = {}  # of the open stage: storage -> number of the input that lies there
        self.surrounding_autocast: Autocast = ()
        self.seen = self.dead = False
        self.saved: list[Any] = []
        self.saved_shapes: list[Any] = []
        self.on_course = True
        self.astray: int | None = None
        self.kept_more = False
        self.fills = course is not None
        course = course or NOTHING_EXPECTED
        self.algorithms: Algorithms | None = None  # by which convolutions run
        self.opaque_stages = course.opaque_stages
        self._whole = course.whole
        self.instead: dict[Var, torch.Tensor] = {}  # what calls are given in place of a tensor that crosses
        self._course = course
        self._token = object()  # which its `Var`s share
        self._stages = stages
        self._generators = generators
        self._drawn: tuple[object, ...] | None = None  # how the last call of the stage that draws left them
        self._begun: Callable[[], tuple[object, ...]]  # and how it found them
        self._stage = OUTSIDE
        self._position = 0
        self._count = len(course.functions)
        self._numbered: dict[int, Var] = {}
        self._dying: tuple[int, ...] = ()
        self._hollowed: list[Var] = []
        self._vars: list[Var] = []
        self.inside = False
        self._within = int(course is NOTHING_EXPECTED)  # modules called as a whole around what runs
        self._read: list[tuple[torch.Tensor, int]] = []  # by the call under way, of what was there before the stage
        self._constants: dict[int, list[tuple[StageTape, torch.Tensor]]] = {}  # by storage, those that are no parameters
        self._aliases: dict[Var, torch.Tensor] = {}  # of the open stage: tensors that others made
        for tensor in given:
            self._note_resident(tensor)
            self._tag(tensor, OUTSIDE).stays = True

    def _note_resident(self, tensor: torch.Tensor) -> None:
        if (key := _key(tensor)) not in self.resident:
            self.resident[key] = StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else None

    # -- stages

    def begin_stage(self, stage: int, tape: StageTape, begun: Callable[[], tuple[object, ...]]) -> None:
        """Open a stage; `begun` is the mark of the generators that it finds."""
        self._stage = stage
        self._drawn, self._begun = None, begun
        self.tape = tape
        self.entered = set(tape.inputs)
        self._aliases = {}

    def crossing(self, stage: int) -> list[tuple[Var, int]]:
        """The tensors that `stage` hands to the next, and their places among the outputs that were measured."""
        found = [(self._numbered.get(n), at) for n, at in self._course.crossing[stage - 1]]
        return [(var, at) for var, at in found if var is not None and var.tensor() is not None]

    def handed(self, outputs: list[torch.Tensor]) -> list[tuple[Var, int]]:
        """The tensors that stages made of those that a stage returned, and their places among these."""
        found: dict[Var, int] = {}
        for at, tensor in enumerate(outputs):
            var = vars(tensor).get(TAG)
            if var is not None and var.step is self._token and var.stage != OUTSIDE:
                found.setdefault(var, at)
        return list(found.items())

    def hollow(self, var: Var) -> None:
        """Take the bytes of a tensor that the model's code may still hold."""
        tensor = var.tensor()
        if tensor is None or var.stays or var.hollow or tensor.is_conj() or tensor.is_neg():
            return
        base = tensor._base
        if base is not None:  # what the graph of a view holds
            known = vars(base).get(TAG)
            if (known is None or known.gone) and _key(base) not in self.resident:
                _empty(base)
        _empty(tensor)
        var.hollow = var.gone = True
        self._hollowed.append(var)

    def fill(self, var: Var, content: torch.Tensor) -> None:
        """Give a tensor its bytes back, or put them elsewhere."""
        tensor = var.tensor()
        if tensor is not None and (var.hollow or _key(tensor) != _key(content)):
            tensor.data = content
        var.hollow = False

    def finish(self) -> None:
        """The forward has returned: whoever still holds a hollow tensor keeps it for later."""
        self._dying = ()
        if self.on_course and self._position < self._count:
            self._leave_course(None)
        for var in self._vars:
            tensor = var.tensor()
            if tensor is not None and not var.gone and tensor._base is not None:  # its bytes are those of its base, too
                _whole_base(tensor)
                if (known := vars(tensor._base).get(TAG)) is not None:
                    known.hollow = False
        for var in self._hollowed:
            tensor = var.tensor()
            if var.hollow and tensor is not None:
                self.kept_more = True
                self._refill(var, tensor)

    def results(self, result: Any, stage: int) -> list[tuple[Var, int]]:
        """The tensors that the forward returned, of those that the last `stage` made."""
        found = dict.fromkeys(vars(tensor).get(TAG) for tensor in tensors_of(result))
        return [(var, -1) for var in found if var is not None and var.stage == stage]

    def forget(self) -> None:
        """Tensors that are left know nothing of this forward any more."""
        self.instead = {}
        self._aliases, self._constants, self._read, self.resident = {}, {}, [], {}  # hooks in the graph hold this forward
        self.tape = self.outside = StageTape("")
        for var in self._vars:
            if (tensor := var.tensor()) is not None:
                _whole_base(tensor)
                vars(tensor).pop(TAG, None)
                vars(tensor).pop(_GEOMETRY, None)

    def _refill(self, var: Var, tensor: torch.Tensor) -> None:
        self.on_course = False
        content = self._stages.restore(var)
        tensor.data = content
        var.hollow, var.stays = False, True

    # -- calls

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `function`, and put it on the tape where a replay must run it, too."""
        if self.inside:
            return function(*args, **kwargs)
        if function is torch.Tensor.__iter__:
            return iter(self.call(torch.unbind, args, {}))
        kind = _KINDS.get(function)
        if kind is None:
            kind = _kind(function)
        if kind is _FACT:
            return function(*args, **kwargs)
        self.inside = True  # the mode sees what is done here where a wrapper has called
        try:
            return self._followed(function, kind, args, kwargs)
        finally:
            self.inside = False

    def _followed(self, function: Callable[..., Any], kind: Written, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        k, within = self._position, self._within
        stage = self._stage
        expected = False
        if self.on_course and not within and k < self._count:
            one = self._course.functions[k]
            if one is function or _same(one, function):
                expected = True
                if self._dying:
                    self._let_go()
                stage = self._course.stages[k]
                if stage != OUTSIDE and stage != self._stage:
                    self._stages.enter(stage)
        given: list[torch.Tensor] = []
        self._read = []
        named = tuple([a if type(a) in _VALUES else self._reference(given, stage, a) for a in args])
        named_kwargs = {name: a if type(a) in _VALUES else self._reference(given, stage, a) for name, a in kwargs.items()}
        if self.instead:
            args, kwargs = self._with_aliases(args, kwargs)
        written = kind(args, kwargs) if kind is not _PURE else ()
        watched: list[torch.Tensor] = []
        versions = [t._version for t in given] if kind is _out else []
        if kind is _out and stage != OUTSIDE and (self.changing or _WRITERS):
            if _called(function) in _WRITERS:
                written = [*written, *(t for t in given if not isinstance(t, nn.Parameter))]
            watched = [t for t in given if id(t) in self.changing]  # which the call may change, or only read
        if (written or watched) and stage != OUTSIDE:
            self._note_read()
        for tensor in (*written, *watched) if function not in _NO_CONTENT else ():
            _whole_base(tensor)
            self._keep_before(tensor)
        draws = stage != OUTSIDE and _draws(function)
        if draws and self._mark() != self._drawn:  # the model's own code has set them
            self.tape.calls.append(Call(put, (self._generators, self._generators.copies()), {}, (), True, None, None))
        grad = torch.is_grad_enabled()
        self.seen = stage != OUTSIDE
        saved, self.dead = len(self.saved), expected and self._course.dead[k]
        try:
            result = self._run(function, args, kwargs)
        except BaseException:
            del self.saved[saved:], self.saved_shapes[saved:]  # the model may catch it and go another way
            raise
        finally:
            self.seen = self.dead = False
        if changed := [t for t, version in zip(given, versions, strict=False) if t._version != version]:
            self._note_changed(function, changed, written)
            written = [*written, *changed]
        outputs = tensors_of(result)
        if draws:
            self._drawn = self._mark()
        if not written and all(any(t is one for one in given) for t in outputs):
            return result  # a question, or nothing to do: x.to(x.dtype)
        if expected and len(outputs) == len(self._course.outputs[k]):
            made = self._noted(outputs, stage, given, self._course.outputs[k])
            self._position, self._dying = k + 1, self._course.last_uses[k]
        else:
            if not within:
                self._leave_course(function)
            made = self._noted(outputs, stage, given, ())
        if self._read and not written:
            self._note_read()
        attention = attention_flags() if function in _ATTENTION else None
        dead = expected and self._course.dead[k]
        for var in made if dead else ():
            if var is not None:
                var.dead = True
        tape = self.outside if stage == OUTSIDE else self.tape
        tape.calls.append(Call(function, named, named_kwargs, made, grad, self._autocast(), attention, dead))
        return result

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
        """In place of ``nn.Module.__call__``."""
        if self.inside or not self._is_whole(module):
            return original(module, *args, **kwargs)
        if module in self._course.opaque or compiled(module):
            for tensor in (*module.parameters(), *module.buffers()):
                self._note_resident(tensor)
            return self.call(module, args, kwargs)
        k = self._position
        expected = self.on_course and not self._within and k < self._count and self._course.functions[k] is module
        if expected:
            self.inside = True
            if self._dying:
                self._let_go()
            if (stage := self._course.stages[k]) not in (OUTSIDE, self._stage):
                self._stages.enter(stage)
            self.inside = False
        self._within += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._within -= 1
        if expected:
            outputs = tensors_of(result)
            if len(outputs) == len(self._course.outputs[k]):
                self._noted(outputs, self._stage, (), self._course.outputs[k])
                self._position, self._dying = k + 1, self._course.last_uses[k]
            else:
                self._leave_course(module)
        return result

    def _leave_course(self, function: Any) -> None:
        self.on_course = False
        self.astray = hash((self.astray or self._position, getattr(function, "__name__", type(function).__name__)))

    def _is_whole(self, module: nn.Module) -> bool:
        return module in self._whole or compiled(module)

    def applied(self, apply: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of a custom Function's or a scripted function's call."""
        return apply(*args, **kwargs) if self.inside else self.call(apply, args, kwargs)

    # -- what a call reads, makes and changes

    def _reference(self, given: list[torch.Tensor], stage: int, leaf: Any) -> Any:
        """What stands on the tape for one leaf of the arguments."""
        if not isinstance(leaf, torch.Tensor):
            if type(leaf) in NESTED or isinstance(leaf, (tuple, dict)):
                return replaced(leaf, partial(self._reference, given, stage))
            if type(leaf) is torch.Generator and leaf.device.type == "cpu" and leaf is not torch.default_generator:
                return Seeded(leaf)
            return leaf
        given.append(leaf)
        var: Var | None = vars(leaf).get(TAG)
        if var is None or var.step is not self._token:
            return self._constant(leaf) if stage != OUTSIDE else leaf
        if var.hollow:
            self._refill(var, leaf)
        if stage == OUTSIDE:
            return leaf if var.stays else var
        if var.stage == stage or var in self.entered:
            self.tape.needs_dead |= var.dead
            return var
        if (alias := self._aliases.get(var)) is None:
            # made by an earlier stage, and not expected here: the tape itself keeps it
            alias = leaf.detach().requires_grad_(leaf.requires_grad)
            self._aliases[var] = self._constant(alias)
        return alias

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was there before the stage."""
        if tensor.grad_fn is not None:  # of a graph that the replay must not reach
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        if id(tensor) not in self.tape.constants:
            self._read.append((tensor, tensor._version))
            self._note_resident(tensor)
        return tensor

    def _note_read(self) -> None:
        """What the call read that was there before the stage, its replay reads, too."""
        for tensor, version in self._read:
            self.tape.constants.setdefault(id(tensor), (tensor, version))
            if isinstance(tensor, nn.Parameter):
                self.tape.modes.setdefault(id(tensor), (tensor, tensor.requires_grad))
            self._constants.setdefault(_key(tensor), []).append((self.tape, tensor))

    def _keep_before(self, tensor: torch.Tensor) -> None:
        """A call is about to change `tensor`: replays of all who read what lies there need it as it is."""
        key = _key(tensor)
        content = None
        for tape, constant in self._constants.get(key, ()):
            if id(constant) not in tape.before:
                content = copied(constant) if content is None or content.shape != constant.shape else content
                tape.before[id(constant)] = constant, content.requires_grad_(constant.requires_grad)
        if key in self.places:
            del self.places[key]
            for var in self.tape.inputs:
                one = var.tensor()
                if one is not None and _key(one) == key and var not in self.tape.before:
                    self.tape.before[var] = var, copied(one).requires_grad_(one.requires_grad)

    def _note_changed(self, function: Callable[..., Any], changed: list[torch.Tensor], known: Any) -> None:
        """`function` has changed tensors; of those that nobody knew it would, replays may miss what was in them."""
        if all(any(t is one for one in known) for t in changed):
            return
        writes_to_arguments(function)
        for key in {_key(t) for t in changed if not any(t is one for one in known)}:
            for tape in (self.tape, *(tape for tape, _ in self._constants.get(key, ()))):
                if tape is not self.tape or key in self.places or any(_key(t) == key for t, _ in self._read):
                    tape.lost = getattr(_called(function), "__name__", type(function).__name__)

    def _noted(self, outputs: Any, stage: int, given: Any, numbers: tuple[int | None, ...]) -> tuple[Var | None, ...]:
        found: list[Var | None] = []
        held = self._course.held
        for n, tensor in enumerate(outputs):
            var = vars(tensor).get(TAG)
            if var is None or var.step is not self._token:
                var = None if any(tensor is one for one in given) else self._tag(tensor, stage)
            if numbers and (number := numbers[n]) is not None and var is not None:
                self._numbered[number] = var
                var.stays = var.stays or number in held
            found.append(var)
        return tuple(found)

    def _tag(self, tensor: torch.Tensor, stage: int) -> Var:
        var = Var(self._token, stage, tensor)
        setattr(tensor, TAG, var)
        self._vars.append(var)
        return var

    def _let_go(self) -> None:
        for number in self._dying:
            if (var := self._numbered.pop(number, None)) is not None:
                self.hollow(var)
        self._dying = ()

    def _autocast(self) -> Autocast | None:
        if not torch._C._is_any_autocast_enabled() and not self.surrounding_autocast:
            return None
        now = autocast_now()
        return None if now == self.surrounding_autocast else now

    def _with_aliases(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def alias(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and (var := vars(leaf).get(TAG)) in self.instead:
                return self.instead[var]
            return leaf

        return replaced(args, alias), replaced(kwargs, alias)


def put(generators: Generators, copies: list[torch.Generator]) -> None:
    """Of a tape: what the model's own code did to the generators."""
    generators.put_copies(copies)


def autocast_now() -> Autocast:
    """For each type of device, whether autocast is on and what it casts to; empty where it is off for all."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _same(one: Any, function: Any) -> bool:
    if type(one) is partial and type(function) is partial:  # of a scripted function
        return one.func is function.func and one.args == function.args
    return bool(one == function)


def _key(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


_GEOMETRY = "_rotoff_geometry"  # the attribute of a hollow tensor that holds how it lay


def _empty(tensor: torch.Tensor) -> None:
    if _GEOMETRY not in vars(tensor):
        setattr(tensor, _GEOMETRY, (tensor.storage_offset(), tensor.shape, tensor.stride()))
    tensor.data = _stub(tensor.dtype, tensor.device).expand(tensor.shape)


def _whole_base(tensor: torch.Tensor) -> None:
    """A change in place of a view asks how its base lies, and so has to find it in the storage of the view."""
    base = tensor._base
    if base is not None and (geometry := vars(base).pop(_GEOMETRY, None)) is not None:
        with torch.no_grad():
            base.data = torch.empty(0, dtype=base.dtype, device=base.device).set_(tensor.untyped_storage(), *geometry)


_STUBS: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _stub(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One number to stand for all of a tensor's: not a number, so that whoever reads it unseen shows."""
    found = _STUBS.get((dtype, device))
    if found is None:
        value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        found = _STUBS[dtype, device] = torch.full((), value, dtype=dtype, device=device)
    return found


# -- what is known of functions: whether they answer without a tensor's bytes, and which of their arguments they change


Written = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def _FACT(args: Any, kwargs: Any) -> Any:
    """Answers about a tensor that do not depend on its bytes."""
    return ()


def _PURE(args: Any, kwargs: Any) -> Any:
    return ()


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    first = args[0] if args else kwargs.get("input", kwargs.get("self"))
    return [t for t in (first if isinstance(first, (list, tuple)) else (first,)) if isinstance(t, torch.Tensor)]


def _set(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Of an attribute that is set: nothing where a tensor becomes what it is, as ``nn.Module.to`` does."""
    return [] if args[0] is args[-1] else _first(args, kwargs)


def _out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = kwargs.get("out")
    return [t for t in (found if isinstance(found, (list, tuple)) else (found,)) if isinstance(t, torch.Tensor)]


def _flagged(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Of a function that takes ``inplace``, as argument `place`."""
    return _first(args, kwargs) if (args[place] if len(args) > place else kwargs.get("inplace")) else []


def _statistics(
    first: int, training: int, name: str, default: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """Of batch norm and instance norm: the running statistics, which are arguments `first` and the next."""
    if not (args[training] if len(args) > training else kwargs.get(name, default)):
        return []
    found = [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [t for t in found if isinstance(t, torch.Tensor)]


def _by_schema(names: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = [args[n] if n < len(args) else kwargs.get(name) for n, name in names]
    flat = [t for one in found for t in (one if isinstance(one, (list, tuple)) else (one,))]
    return [t for t in flat if isinstance(t, torch.Tensor)]


_FACTS = frozenset(
    [
        "dim",
        "size",
        "numel",
        "nelement",
        "__len__",
        "ndimension",
        "element_size",
        "get_device",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "__hash__",
        "is_inference",
        "is_same_size",
    ]
)
_FACT_ATTRIBUTES = frozenset(
    [
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "layout",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_nested",
        "is_quantized",
        "itemsize",
        "nbytes",
        "names",
        "output_nr",
        "retains_grad",
        "is_mps",
        "is_xpu",
        "is_mkldnn",
        "is_sparse_csr",
        "is_xla",
        "is_ipu",
        "is_maia",
        "is_vulkan",
        "is_mtia",
        "_backward_hooks",
        "_version",
        "name",
        "_post_accumulate_grad_hooks",
        "grad",
    ]
)
_KINDS: dict[Any, Written] = {
    torch.nn.functional.batch_norm: partial(_statistics, 1, 5, "training", False),
    torch.nn.functional.instance_norm: partial(_statistics, 1, 5, "use_input_stats", True),
    torch.batch_norm: partial(_statistics, 3, 5, "training", False),
    torch.instance_norm: partial(_statistics, 3, 5, "use_input_stats", True),
}
_NO_CONTENT = frozenset([torch.Tensor.requires_grad_, torch.Tensor.detach_, torch.Tensor.share_memory_])  # change no numbers
_VALUES = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis)})
_ATTENTION = frozenset([torch.nn.functional.scaled_dot_product_attention, torch.nn.functional.multi_head_attention_forward])


_DRAWING = re.compile(
    "drop|rand|bernoulli|normal|uniform|multinomial|poisson|exponential|geometric|cauchy|rrelu|gumbel|attention|fractional|lstm|gru|rnn|apply"
)
_DRAWS: dict[str, bool] = {}


def _draws(function: Any) -> bool:
    """Whether a call may draw random numbers."""
    name = getattr(function, "__name__", "")
    found = _DRAWS.get(name)
    if found is None:
        found = _DRAWS[name] = not name or _DRAWING.search(name) is not None
    return found


def _kind(function: Any) -> Written:
    if isinstance(function, nn.Module) or _called(function) is not function:
        return _out  # and nothing is kept that belongs to a model
    kind = _find_kind(function)
    with suppress(TypeError):  # not hashable
        _KINDS[function] = kind
    return kind


_WRITERS: weakref.WeakSet[Any] = weakref.WeakSet()  # custom Functions and their like that were seen to change an argument


def writes_to_arguments(function: Callable[..., Any]) -> None:
    """From now on a call of `function` counts as one that changes what it is given."""
    if (called := _called(function)) is not function:
        _WRITERS.add(called)


def _called(function: Any) -> Any:
    """Whom a call that the mode does not see is of; `function` itself where it is one of torch's."""
    if type(function) is partial:  # a scripted function
        return function.args[0]
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner
    return function


def _find_kind(function: Any) -> Written:
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return _FACT if getattr(function.__self__, "__name__", "") in _FACT_ATTRIBUTES else _PURE
    if name in _FACTS:
        return _FACT
    if name == "__set__":
        return _set
    if name == "__setitem__" or (name.endswith("_") and not name.startswith("__")):
        return _first
    if name.startswith("__i") and name[3:-2] in _IN_PLACE:
        return _first
    schemas = [function._schema] if isinstance(function, torch._ops.OpOverload) else []
    if isinstance(function, torch._ops.OpOverloadPacket):
        schemas = [getattr(function, one)._schema for one in function.overloads()]
    written = {
        (n, arg.name)
        for schema in schemas
        for n, arg in enumerate(schema.arguments)
        if arg.alias_info is not None and arg.alias_info.is_write
    }
    if written:
        return partial(_by_schema, tuple(sorted(written)))
    if str(getattr(function, "__module__", "")).startswith("torch.nn.functional"):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return _out
        if "inplace" in signature.parameters:
            return partial(_flagged, list(signature.parameters).index("inplace"))
    return _out


_IN_PLACE = frozenset(
    ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul", "div"]
)


# -- calls that a ``TorchFunctionMode`` does not see

_FOLLOWED = threading.local()


@contextmanager
def following(live: LiveForward) -> Iterator[None]:
    """Within, in this thread, `live` sees all calls."""
    before = getattr(_FOLLOWED, "live", None)
    _FOLLOWED.live = live
    try:
        with _SEEN, without_checkpoints(), live:
            yield
    finally:
        _FOLLOWED.live = before


def _call(call: Any) -> Any:
    def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        live = getattr(_FOLLOWED, "live", None)
        return call(module, *args, **kwargs) if live is None else live.called(call, module, *args, **kwargs)

    return wrapped


def _apply(apply: Any) -> Any:
    def wrapped(cls: Any, *args: Any, **kwargs: Any) -> Any:
        live, bound = getattr(_FOLLOWED, "live", None), apply.__get__(None, cls)
        return bound(*args, **kwargs) if live is None else live.applied(bound, *args, **kwargs)

    return classmethod(wrapped)


def _script(call: Any) -> Any:
    def wrapped(function: Any, *args: Any, **kwargs: Any) -> Any:
        live = getattr(_FOLLOWED, "live", None)
        return call(function, *args, **kwargs) if live is None else live.applied(partial(call, function), *args, **kwargs)

    return wrapped


_SEEN = Patches(
    (nn.Module, "__call__", _call),
    (torch.autograd.Function, "apply", _apply),
    (torch.jit.ScriptFunction, "__call__", _script),
)

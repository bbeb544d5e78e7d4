"""`attach` plans a model in place: the model gets a forward that runs inside a limit and stays the same object.

Use it for loops that look at the model's class, signature or attributes, such as trainers. There is no wrapper: the
model's names, checkpoints and ``isinstance`` stay as they were.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from ..checkpointable import ATTACHED, Checkpointable
from ..core.sizes import NO_LIMIT, parse_share
from ..errors import OptionError
from ..planning.options import check_module
from .config import RotoffConfig, read_settings

logger = logging.getLogger("rotoff")
_OF_THE_WRAPPER = frozenset(inspect.signature(Checkpointable).parameters) - {"model"}


def attach(
    model: nn.Module, mem_limit: int | str | RotoffConfig | None = None, mode: str | None = None, **options: Any
) -> Checkpointable:
    """Run training forwards of `model` itself inside `mem_limit`; returns the `Checkpointable` that plans them.

    The model is measured and planned at its first training forward, or earlier by the result's `measure`. In `eval`
    mode (but for a frozen model) and without gradients its own forward runs. Anything that wraps the forward later
    (autocast by Accelerate, DDP) stays around the planned one. A deep copy of the model has a plan of its own. A pickle
    (``torch.save(model)``) has the model without a plan; attach it again after loading.

    Args:
        mem_limit: as for `Checkpointable.compute_sequence`; or a share such as ``"50%"`` of what keeping everything
            takes on the first training batch; or a `RotoffConfig`, whose fields `mode` and `options` override. None:
            "auto", unless there is a ``device_limit``.
        mode: as for `Checkpointable.compute_sequence`. None: the configuration's, or "joint".
        options: as for `Checkpointable.compute_sequence`, such as ``device_limit`` and ``optimizer``, and for
            `Checkpointable` itself, such as ``stages`` or ``forms``.

    Raises:
        OptionError: if the model is attached already. LimitError: also for two limits. MeasureError: as for
            `Checkpointable`.
    """
    check_module(model)
    if model.__dict__.get(ATTACHED) is not None:
        raise OptionError("the model is attached already; call rotoff.detach(model) first")
    given = read_settings(mem_limit, options if mode is None else {**options, "mode": mode})
    wrapper = {name: given.pop(name) for name in _OF_THE_WRAPPER if name in given}
    share = parse_share(given.get("mem_limit"))
    planned = Checkpointable(model, **wrapper)
    planned.compute_sequence(**(given if share is None else {**given, "mem_limit": NO_LIMIT}))
    attachment = Attachment(model, planned)
    attachment.share = None if share is None else (share, given)
    attachment.begin()
    return planned


class ForTrainer:
    """What the callbacks of trainers share: the model is planned when the training is set up; with a ``device_limit``
    once there is an optimizer.

    Args:
        mem_limit, options: as for `rotoff.attach`, such as ``device_limit``, which has the trainer's optimizer; a
            `RotoffConfig` holds all of them.

    Attributes:
        planned: the `Checkpointable` that plans the model, once there is a trainer.
    """

    def __init__(self, mem_limit: int | str | RotoffConfig | None = None, **options: Any) -> None:
        self._options = read_settings(mem_limit, options)
        self._steps_before = 0  # of the trainer, when training began
        self.planned: Checkpointable | None = None
        self._left: tuple[dict[str, Any], Attachment] | None = None  # by an earlier training, with its options

    @property
    def _placed(self) -> bool:
        return self._options.get("device_limit") is not None

    def _attach(self, model: nn.Module, processes: int) -> None:
        """Plan `model`; what another callback has attached is replaced, and an earlier training's plan goes on."""
        known, placed = model.__dict__.get(ATTACHED), self._placed
        if known is not None and known.by_callback:
            detach(model)
        options = {**({"process_group": True} if processes > 1 else {}), **self._options}
        if self._left is not None and self._left[0] == options and self._left[1].is_of(model):
            self._left[1].begin()
            return
        given = {name: option for name, option in options.items() if not placed or name in _OF_THE_WRAPPER}
        self.planned = attach(model, **{**given, "mem_limit": NO_LIMIT} if placed else given)
        attachment = model.__dict__[ATTACHED]
        attachment.by_callback, self._left = True, (options, attachment)

    def _begin(self, steps: int, optimizer: Any) -> None:
        """Before the first step, the trainer's number `steps`."""
        self._steps_before = steps
        if self.planned is not None and self._placed:
            later = {name: option for name, option in self._options.items() if name not in _OF_THE_WRAPPER}
            self.planned.compute_sequence(optimizer=optimizer, **later)

    def _end(self, steps: int) -> None:
        """After the training: log if it never called the model that it planned."""
        planned = self.planned
        if steps == self._steps_before or planned is None or planned.plans():
            return
        why = [*planned._steps.plain, *(said.removeprefix("rotoff: ") for said in planned._warned)] or [
            f"it never called the forward of {type(planned._model).__name__} in training mode. Give the callback the"
            " module that is called"
        ]
        logger.warning("rotoff: training has ended, and no step was planned or limited: %s", why[0])


def detach(model: nn.Module) -> None:
    """Restore the model's own forward; does nothing if the model is not attached.

    Raises:
        MeasureError: for anything but a module.
    """
    check_module(model)
    attachment = model.__dict__.pop(ATTACHED, None)
    if attachment is not None:
        attachment.restore()


def attached(model: nn.Module) -> Checkpointable | None:
    """The `Checkpointable` that plans `model`, or None if it is not attached."""
    attachment = model.__dict__.get(ATTACHED)
    return None if attachment is None else attachment.planned


class Attachment:
    """One model with a planned forward. original: the forward that it had. by_callback: whether another callback may
    replace it. share: of what keeping everything takes, and the arguments of `Checkpointable.compute_sequence`; until a
    step has shown how much that is.
    """

    by_callback = False
    share: tuple[float, dict[str, Any]] | None = None

    def __init__(self, model: nn.Module, planned: Checkpointable) -> None:
        self.model, self.planned = model, planned
        self.original: Callable[..., Any] = model.forward

        @functools.wraps(getattr(self.original, "__func__", self.original))
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Run the attachment of the model that it is called on, which may be a copy."""
            return self.__dict__[ATTACHED](*args, **kwargs)

        self.function = forward
        self._was_its_own = "forward" not in model.__dict__
        self._inside = False
        planned._plain = self.its_own

    def begin(self) -> None:
        """Give the model its planned forward."""
        self.model.__dict__[ATTACHED] = self
        self.model.forward = MethodType(self.function, self.model)

    def is_of(self, model: nn.Module) -> bool:
        """Whether it is of `model`, which has again the forward that it had."""
        return self.model is model and self.original == model.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return self.original(*args, **kwargs)
        self.planned.training = self.model.training
        if self.share is not None:
            self._plan_share(*self.share)
        return self.planned.forward(*args, **kwargs)

    def _plan_share(self, share: float, asked: dict[str, Any]) -> None:
        """Plan within a share of what the first step has shown, if there was one."""
        steps = self.planned._steps
        steps.settle()
        if steps.latest is not None:
            limit = max(1, int(share * self.planned.keep_all_memory))
            self.planned.compute_sequence(**{**asked, "mem_limit": limit})
            self.share = None

    def its_own(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward; calls of the model within it run its own forward, too."""
        before, self._inside = self._inside, True
        try:
            return self.original(*args, **kwargs)
        finally:
            self._inside = before

    def restore(self) -> None:
        if self._was_its_own:
            self.model.__dict__.pop("forward", None)
        else:
            self.model.forward = self.original
        self.planned.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None. The planned ``forward`` is pickled by name, so a loaded model has its class's forward."""
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """An attachment for the model's deep copy, with the same request; it is measured and planned again."""
        twin = memo[id(self)] = object.__new__(Attachment)
        if (group := self.planned._group) is not None:
            memo[id(group)] = group
        vars(twin).update(copy.deepcopy(vars(self), memo), _inside=False)
        twin.planned._plain = twin.its_own
        return twin

"""Where a forward is in the course that its plan expects: the next call, and which tensor has which number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..capture.course import OUTSIDE, Course
from ..capture.places import Places, is_exact
from ..capture.tape import name_of
from ..tensors.eager_mode import EagerFunctionMode
from ._follow import TAG, Follower, Var
from .arguments import tensors_of
from .torch_calls import same_call

UNEXPECTED: tuple[Any, ...] = (None, None, None, (), False)  # in place of a row of `Course.rows`


class OnCourse(Follower, EagerFunctionMode):
    """Matches the calls of one forward with those of its course.

    Attributes:
        on_course: whether the last call was an expected one.
        as_measured: whether the open stage has made exactly the expected calls so far.
        astray: a hash of all deviations from the course; None if there were none.
        unknown: whether calls were made that the course does not contain; False if calls were only left out.
    """

    def __init__(self, course: Course) -> None:
        super().__init__()
        self.on_course = self.as_measured = True
        self.astray: int | None = None
        self.unknown = False
        self.course = course
        self._rows, self._entries, self._held = course.rows, course.entry_rows, course.held
        self._stage = OUTSIDE  # the open one
        self._position = 0  # of the next call
        self._next_entry = 0  # the next call of a module, in `Course.entries`
        self._within = 0  # depth of calls of modules that the course has as one call
        self._numbered: dict[int, Var] = {}
        self._dying: Sequence[int] = ()  # tensors whose last use was in the last call
        self._skipped: list[int] = []  # tensors whose last uses were in calls that the forward left out
        self._places = Places()
        self._log: list[Any] = []  # what `_places` lacks: a function, the row of a module's call, or None for its end

    def _places_now(self) -> Places:
        places = self._places
        for event in self._log:
            if event is None:
                places.leave()
            elif type(event) is tuple:
                places.enter(event[0])
            else:
                places.calls.append(event)
        self._log.clear()
        return places

    def _expected(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the row of the course for the next call, which is of `function`; `UNEXPECTED` if it has none."""
        k, rows = self._position, self._rows
        if self._within:
            return UNEXPECTED
        if self.on_course and same_call(rows[k][0], function) and self._may_read(rows[k], args, kwargs):
            return rows[k]
        for key in self._places_now().keys(function):
            at = self.course.places.get(key, -1)
            if at < k or not (same_call(rows[at][0], function) and self._may_read(rows[at], args, kwargs)):
                continue
            if is_exact(key) or self._reads_the_same(at, args, kwargs):
                self._skip_to(at)
                return rows[at]
        return UNEXPECTED

    def _reads_the_same(self, k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call reads the tensors that call `k` of the course reads. Those from outside of the stages may
        differ where the course does not know them."""
        given = [vars(tensor).get(TAG) for tensor in tensors_of((args, kwargs))]
        known = [None if number is None else self._numbered.get(number) for number in self.course.calls[k].reads]
        numbered = set(self._numbered.values())

        def read(every: Sequence[Var | None]) -> list[Var | None]:
            return [var if var is not None and (var.stage != OUTSIDE or var in numbered) else None for var in every]

        return read(given) == read(known)

    def _skip_to(self, k: int) -> None:
        """Note that the forward left out the calls up to `k`. Tensors whose last use was there take the numbers of
        tensors of equal size that these calls would have made."""
        for numbers in (self._dying, *(row[3] for row in self._rows[self._position : k])):
            self._skipped.extend(numbers)
        self._dying = ()
        if k > self._position:
            self.astray = hash((self.astray, self._position, k))
            self.as_measured = False
            left = [var for n in sorted(self._skipped) if (var := self._numbered.get(n)) is not None and not var.hollow]
            for number, nbytes in self.course.alive(k):
                if number not in self._numbered and (found := _of_size(left, nbytes)) is not None:
                    left.remove(found)
                    self._numbered[number] = found
        self._position, self.on_course = k, True

    def _leave_course(self, function: Any) -> None:
        if self.on_course:
            self.astray = hash((self.astray, self._position, name_of(function)))
        self.on_course = self.as_measured = False
        self.unknown = True

    def _made_next(self, numbers: Sequence[int | None] | None, made: Sequence[Var | None], function: Any) -> None:
        """Note that a call has returned tensors `made`; numbers: those of the expected call, None if it was none."""
        self._log.append(function)
        if numbers is None or len(made) != len(numbers):
            self._leave_course(function)
            return
        for number, var in zip(numbers, made, strict=True):
            if number is not None and var is not None:
                self._numbered[number] = var
                if number in self._held:
                    var.stays = True
        self._dying = self._rows[self._position][3]
        self._position += 1

    def _enter_module(self, module: nn.Module) -> bool:
        """Note that a call of `module` begins; returns whether the next call belongs to another stage."""
        entry = self._places_now().enter(module)
        self._next_entry = self.course.order.get(entry, self._next_entry - 1) + 1
        k = self.course.entries.get(entry, -1)
        if k > self._position or (k == self._position and not self.on_course):
            self._skip_to(k)
        return k == self._position and self._rows[k][1] not in (OUTSIDE, self._stage)

    def made_by(self, stage: int) -> dict[Var, int]:
        """Return the tensors that the course expects as outputs of `stage`, and their places among these."""
        found = [(self._numbered.get(n), at) for n, at in self.course.crossing[stage - 1]]
        return {var: at for var, at in found if var is not None}


def _of_size(every: list[Var], nbytes: int) -> Var | None:
    return next((var for var in every if (t := var()) is not None and t.untyped_storage().nbytes() == nbytes), None)

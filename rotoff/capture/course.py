"""The calls that a plan expects of a model's forward: their order, the borders of stages, and the tensors that cross
them.

A step follows the model's own code and uses this to find its stages (`runtime.live`). No value is taken from it, so a
forward that makes other calls still runs correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from ..tensors.stage import StageModule
from .partition.cuts import used
from .partition.segment import Segment
from .partition.weight_casts import CastRegion, cast_regions
from .places import Entry
from .sharding import gathers
from .tape import Owned, RecordedCall, Ref, Tape, argument_leaves
from .unrepeatable import compiled
from .unused_results import OUTSIDE, beside_bytes, put_in_stages, with_calls


class ExpectedCall(NamedTuple):
    """One call that makes or changes tensors; a module that is called as a whole counts as one.

    Attributes:
        stage: to which it belongs, from 1, or `OUTSIDE`.
        outputs: the number of each returned tensor; None for a parameter or a buffer.
        last_uses: the tensors that no later call needs.
        dead: whether its result is never used.
        reads: the number of each tensor among its arguments; None for others.
    """

    function: Callable[..., Any]
    stage: int
    outputs: tuple[int | None, ...]
    last_uses: tuple[int, ...]
    dead: bool
    reads: tuple[int | None, ...]


@dataclass(frozen=True)
class Course:
    """What one forward is expected to do.

    Attributes:
        calls: in order.
        dead_bytes: as in `beside_bytes`.
        crossing: for each stage, the numbers of the tensors that it passes to the next, and their positions among the
            outputs of its `StageModule`; empty for the last.
        opaque: modules whose calls must also be one call in a replay.
        places: the index of a call by each of its keys (`places`).
        entries: for each call of a module, the index of the call that comes next.
        modules: those of the model.
        nbytes: of each tensor.
        random: whether a forward makes some of the calls at random.
        picks: as of `Tape`.
        held: tensors that stay whatever is dropped (`Tape.held`), so that dropping them frees nothing.
        casts: what autocast within the model keeps to the end of each of its regions.
        storages: of parameters that steps have met, for `runtime.reads`.
    """

    calls: tuple[ExpectedCall, ...] = ()
    dead_bytes: tuple[int, ...] = ()
    crossing: tuple[tuple[tuple[int, int], ...], ...] = ()
    opaque: frozenset[nn.Module] = frozenset()
    places: Mapping[Hashable, int] = field(default_factory=dict)
    entries: Mapping[Entry, int] = field(default_factory=dict)
    nbytes: tuple[int, ...] = ()
    modules: frozenset[nn.Module] = frozenset()
    random: bool = False
    picks: bool = False
    held: frozenset[int] = frozenset()
    casts: tuple[CastRegion, ...] = ()
    storages: dict[int, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def rows(self) -> tuple[tuple[Any, ...], ...]:
        """The calls without what they read, as plain tuples, which Python takes apart faster; and one that follows."""
        return *(tuple(call)[:-1] for call in self.calls), (None, OUTSIDE, (), (), False)

    @cached_property
    def entry_rows(self) -> tuple[tuple[Any, int, bool], ...]:
        """The calls of modules in order: the module, the call that comes next (-1 if the module is called as a whole),
        and whether this call belongs to another stage than the one before it. And one that follows."""
        stages = list(accumulate((call.stage for call in self.calls), lambda last, stage: stage or last, initial=1))
        found: list[tuple[Any, int, bool]] = []
        for (module, _), k in self.entries.items():
            whole = module is None or module in self.whole or compiled(module)
            found.append((module, -1 if whole else k, k < len(self.calls) and stages[k + 1] != stages[k]))
        return *found, (None, -1, False)

    @cached_property
    def order(self) -> dict[Entry, int]:
        """The place of each call of a module among `entries`."""
        return {entry: n for n, entry in enumerate(self.entries)}

    @cached_property
    def starts(self) -> dict[int, int]:
        """The first call of each stage."""
        return {call.stage: k for k, call in reversed(list(enumerate(self.calls)))}

    def alive(self, k: int) -> list[tuple[int, int]]:
        """Return the tensors that are made before call `k` and used by it or later, and their bytes."""
        finished = {n for call in self.calls[:k] for n in call.last_uses}
        made = dict.fromkeys(n for call in self.calls[:k] for n in call.outputs if n is not None)
        return [(n, self.nbytes[n]) for n in made if n not in finished]

    @cached_property
    def beside(self) -> frozenset[int]:
        """The stages that are open when something is made that belongs to no stage."""
        found, stage = set(), OUTSIDE
        for call in self.calls:
            if call.stage == OUTSIDE != stage and not call.dead:
                found.add(stage)
            stage = call.stage or stage
        return frozenset(found)

    @cached_property
    def whole(self) -> frozenset[Any]:
        """The modules that are called as a whole."""
        return frozenset(call.function for call in self.calls if isinstance(call.function, nn.Module))


def expected(tape: Tape, stages: Sequence[StageModule], before: Sequence[StageModule] = ()) -> Course:
    """Return the course of the forward on `tape`, cut into `stages`; before: stages through which no gradient flows."""
    stage_of: dict[int, int] = {}  # by an operation's id
    for i, stage in enumerate(stages, start=1):
        for segment in _segments(stage):
            stage_of.update((id(op), i) for op in segment.operations)
    casts = cast_regions(tape, stage_of, len(stages))
    outside = {id(op) for stage in before for segment in _segments(stage) for op in segment.operations}
    calls = [op for op in tape.operations if op.makes]
    needed = {id(op) for op in used(tape)}
    leaving = [_segments(stage)[-1].leaves or () for stage in stages]
    made = put_in_stages(tape, calls, stage_of, needed, outside, [set[int](), *map(set, leaving)])
    last: dict[int, int] = {}
    for op, k in with_calls(tape, calls):
        for n in op.touched:
            last.setdefault(n, k)
    lasting = set(tape.result_variables())
    last_uses: list[list[int]] = [[] for _ in range(len(calls) + 1)]
    for n, k in last.items():
        if n not in lasting and n in made:
            last_uses[k].append(n)
    crossing = tuple(tuple((n, at) for at, n in enumerate(one) if made.get(n, OUTSIDE) != OUTSIDE) for one in leaving)
    return Course(
        calls=tuple(
            ExpectedCall(
                function=op.function,
                stage=stage_of.get(id(op), OUTSIDE),
                outputs=op.outputs[: len(op.outputs) - op.beside],
                last_uses=tuple(last_uses[k]),
                dead=id(op) not in needed,
                reads=tuple(_numbers(op)),
            )
            for k, op in enumerate(calls)
        ),
        dead_bytes=beside_bytes(tape, calls, stage_of, needed, last, len(stages)),
        crossing=crossing,
        held=frozenset(n for n, variable in enumerate(tape.variables) if variable.storage in tape.held),
        opaque=frozenset(
            op.function for op in calls if isinstance(op.function, nn.Module) and _opaque(op.function, tape)
        ),
        places={key: k for k, op in reversed(list(enumerate(calls))) for key in op.keys},
        entries=tape.entries,
        modules=tape.modules,
        nbytes=tuple(variable.nbytes for variable in tape.variables),
        random=tape.random,
        picks=tape.picks or bool(tape.varying),
        casts=casts,
    )


def _numbers(op: RecordedCall) -> Iterator[int | None]:
    """Yield the variable of each tensor among the arguments of a call."""
    for leaf in argument_leaves((op.args, op.kwargs)):
        if isinstance(leaf, Ref):
            yield leaf.variable
        elif isinstance(leaf, (Owned, torch.Tensor)):
            yield None


def _opaque(module: nn.Module, tape: Tape) -> bool:
    return module in tape.opaque or compiled(module) or gathers(module)


def _segments(stage: StageModule) -> list[Segment]:
    return [module for module in stage.modules if isinstance(module, Segment)]

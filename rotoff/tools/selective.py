"""`selective_policy`: what PyTorch's checkpointing keeps of each block, so that a step stays inside a limit."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..checkpointable import Checkpointable
from ..core.figures import percent
from ..core.sizes import format_bytes, parse_bytes
from ..errors import InfeasibleError, OptionError, nearest
from ..planning.agreement import from_everyone
from ..profile.checkpointed import Block, CheckpointedStep
from ..profile.estimate.devices import Device, find
from ..profile.tape_chain import CALL, slope
from ..profile.tape_profile import TapeProfile
from ..solver.settings import NUMBERED
from ..tape.operators import kind_of, results_of, tensors_of
from ..tensors.eager_mode import EagerMode
from ..tensors.storage import version_of
from ..tensors.undo import put_back_tensor
from .estimate import estimated

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Kept = frozenset[int]  # numbers of operations
Content = tuple[torch.Tensor, torch.Tensor, int]  # a tensor, what it held, and its version


class SelectivePolicy(dict[str, Callable[[], Contexts]]):
    """What `selective_policy` chose: a ``context_fn`` for `torch.utils.checkpoint.checkpoint`, by the block's name.
    Blocks that are not in it run without a checkpoint. Prints as a table.

    peak_bytes: the most that a step allocates, in the terms of a `mem_limit`. keep_all_bytes: without checkpoints.
    overhead: seconds of recompute over those of the step, without those of the policy's own calls. kept: of each block,
    the operations whose results are kept.
    """

    peak_bytes: int
    keep_all_bytes: int
    overhead: float
    kept: dict[str, list[str]]

    def __str__(self) -> str:
        whole = f"keeping everything takes {format_bytes(self.keep_all_bytes)}"
        lines = [f"peak {format_bytes(self.peak_bytes)}, {whole}; recompute adds {percent(self.overhead)}"]
        for name, kept in self.kept.items():
            several = (f"{many} x {one}" if many > 1 else one for one, many in Counter(kept).items())
            lines.append(f"{name:<24} keeps {', '.join(several) or 'its input alone'}")
        return "\n".join(lines)


def selective_policy(
    model: nn.Module,
    *sample: Any,
    mem_limit: int | str | None = None,
    blocks: Iterable[str] | None = None,
    device: Device | str | None = None,
    **kwargs: Any,
) -> SelectivePolicy:
    """Choose what selective checkpointing keeps of each block, so that a step without rotoff fits `mem_limit`.

    For whatever checkpoints block by block: `torch.utils.checkpoint`, also under `torch.compile`, and torchtitan. A
    checkpoint per block moves nothing to the host and makes no part of a block alone, so `Checkpointable` needs fewer
    bytes.

    Args:
        model: the model, or a `Checkpointable` around it: without a sample, its last measurement is taken, and without
            a limit, its own. If that has a process group, all processes call this, and follow the first one's choice.
            Give one with ``backward_from="loss"`` if no gradient of the logits is asked for.
        sample, kwargs: arguments of the model, of the largest size in the training.
        mem_limit: bytes, or a size such as ``"6 GiB"``, as for `Checkpointable.compute_sequence`.
        blocks: names of the modules that may be checkpointed. None: the outermost numbered ones (``layers.0``).
        device: where the step will run, if not here: it is estimated as by `rotoff.estimate`. None: it is measured.

    Raises:
        OptionError: for a block that cannot be checkpointed. LimitError: for an invalid limit.
        InfeasibleError: if nothing fits; it names the smallest limit. MeasureError: if the step cannot run.
    """
    profile: TapeProfile
    wrapped = model if isinstance(model, Checkpointable) else None
    if device is not None:
        profile = estimated(model, sample, kwargs, find(device))
    else:
        wrapped = wrapped or Checkpointable(model)
        profile = (wrapped.measure(*sample, **kwargs) if sample or kwargs else wrapped).profile
    limit = parse_bytes(wrapped.mem_limit if mem_limit is None and wrapped is not None else mem_limit)
    choice = _Choice(profile, blocks)
    group = None if wrapped is None else wrapped._group
    return choice.policy(from_everyone(lambda: choice.within(limit), "choose what blocks keep", group)[0])


class _Choice:
    """What to keep of which blocks."""

    def __init__(self, profile: TapeProfile, names: Iterable[str] | None) -> None:
        self._trace, calls = profile.trace, profile.trace.calls
        state = torch.get_rng_state().nbytes if profile.device.type == "cpu" else 0
        found: dict[str, Block] = {}
        for name in calls if names is None else names:
            if names is None and ((numbered := NUMBERED.match(name)) is None or numbered.group() != name):
                continue
            if name not in calls:
                raise OptionError(f"blocks names {name!r}, which no step calls{nearest(name, calls)}")
            first, begins, end, ends = calls[name][0]
            block = Block(first, end, begins, ends, state + sum(op.copies for op in profile.trace.ran[first:end]))
            if not (reason := self._unfit(name, block)):
                found[name] = block
            elif names is not None:
                raise OptionError(f"blocks names {name!r}, which {reason}; leave it out")
        self._names = sorted(found, key=lambda name: found[name].first)
        self._step = CheckpointedStep(profile.trace, [found[name] for name in self._names])
        self._entering = set().union(*self._step.entering)
        self._hulls = [self._hull(n) for n in range(len(self._names))]

    def _unfit(self, name: str, block: Block) -> str:
        """Why a block cannot be checkpointed."""
        made, ran, many = self._trace.made, self._trace.ran, len(self._trace.calls[name])
        if many > 1:
            return f"is called {many} times in a step"
        later = [made[c].later for c in CheckpointedStep(self._trace, [block]).entering[0]]
        if any(c is not None and made[c].op >= block.first for c in later):
            return "has an input that is overwritten"
        for op in ran[block.first : block.end]:
            if not all(made[c].again for c in op.makes) and "c10d" not in op.operator:
                return f"has an operation whose result differs when it runs again ({op.operator})"
        return ""

    def _hull(self, n: int) -> list[tuple[int, float, Kept | None]]:
        """Bytes, seconds of recompute and kept operations of the ways to run block `n`, on their lower convex hull; the
        first one is to run it without a checkpoint."""
        ran, made, size, again = self._trace.ran, self._trace.made, self._trace.size, self._step.again[n]
        new = {op: size(c for c in ran[op].makes if c not in self._entering) for op in again}
        drawing = [op for op in again if ran[op].draws]  # those after one that is kept would draw other numbers
        able = [
            op
            for op in again
            if size(ran[op].makes) and not ran[op].writes and not ran[op].copies and op not in drawing[:-1]
            if all(made[c].later is None for c in ran[op].makes)
        ]
        able.sort(key=lambda op: self._seconds([op]) / max(new[op], 1), reverse=True)
        kept = [frozenset(able[:many]) for many in range(len(able), -1, -1)]
        hull: list[tuple[int, float, Kept | None]] = [(self._step.own_bytes(n), 0.0, None)]
        for part in kept:
            way = sum(new[op] for op in part), self._seconds(set(again) - part), part
            if way[0] >= hull[-1][0]:
                continue
            while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-2], way):
                hull.pop()
            hull.append(way)
        return hull

    def _seconds(self, ops: Collection[int]) -> float:
        return sum(self._trace.ran[op].seconds + CALL for op in ops)

    def within(self, limit: int) -> dict[int, Kept]:
        """What to keep of each block that is checkpointed: steps down the hulls in the order of seconds for a byte.
        Then what is not needed is taken back."""
        hulls = ((n, k, pair) for n, hull in enumerate(self._hulls) for k, pair in enumerate(pairwise(hull), start=1))
        moves = sorted((slope(*pair), n, k) for n, k, pair in hulls)

        def kept(levels: Mapping[int, int]) -> dict[int, Kept]:
            return {n: part for n, k in levels.items() if (part := self._hulls[n][k][2]) is not None}

        def after(many: int) -> dict[int, int]:
            return {n: k for _, n, k in moves[:many]}

        def peak(many: int) -> int:
            return self._step.peak(kept(after(many)))

        many = bisect_left(range(len(moves) + 1), True, key=lambda many: peak(many) <= limit)
        if many > len(moves):
            least, many = min((peak(many), many) for many in range(len(moves) + 1))
            if least > limit:
                raise InfeasibleError(
                    f"the step with checkpoints of {len(self._names)} blocks needs at least {format_bytes(least)}"
                    f" ({least} bytes); the limit is {format_bytes(limit)} ({limit} bytes); plans of"
                    " rotoff.Checkpointable need less",
                    least,
                )
        levels = after(many)
        for _, n, k in reversed(moves[:many]):
            if levels[n] == k and self._step.peak(kept({**levels, n: k - 1})) <= limit:
                levels[n] = k - 1
        return kept(levels)

    def policy(self, kept: Mapping[int, Kept]) -> SelectivePolicy:
        ran, found = self._trace.ran, SelectivePolicy()
        redone = sum(self._seconds(set(self._step.again[n]) - kept[n]) for n in kept)
        found.overhead = redone / (self._seconds(range(len(ran))) + sum(e.seconds for e in self._trace.backward))
        found.peak_bytes, found.keep_all_bytes, found.kept = self._step.peak(kept), self._step.peak({}), {}
        for n, ops in sorted(kept.items()):
            block, counts, calls = self._step.blocks[n], Counter[str](), set[tuple[str, int]]()
            for op in range(block.first, block.end):
                calls |= {(ran[op].operator, counts[ran[op].operator])} if op in ops else set()
                counts[ran[op].operator] += 1
            writes = any(op.copies for op in ran[block.first : block.end])
            found[self._names[n]] = _context_fn(frozenset(calls), writes)
            found.kept[self._names[n]] = [ran[op].operator for op in sorted(ops)]
        return found


def _context_fn(kept: frozenset[tuple[str, int]], writes: bool) -> Callable[[], Contexts]:
    """Return a ``context_fn`` that keeps these calls: an operator, and the number of its call within the block."""
    calls = {(reduce(getattr, name.split("."), torch.ops), number) for name, number in kept}
    operators = {operator for operator, _ in calls}

    def context_fn() -> Contexts:
        counts = Counter[tuple[bool, Any]]()  # PyTorch 2.11 also asks when the block runs again

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if operator not in operators:
                return CheckpointPolicy.PREFER_RECOMPUTE
            call = context.is_recompute, operator
            counts[call] += 1
            keep = (operator, counts[call] - 1) in calls
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        if get_proxy_mode() is not None:  # a compiler, which makes nothing again that the block writes
            return create_selective_checkpoint_contexts(policy)
        contexts = create_selective_checkpoint_contexts(policy) if kept else (nullcontext(), nullcontext())
        if not writes:
            return contexts
        written = _Written()
        return _both(written, contexts[0]), _as_before(written.before, contexts[1])

    return context_fn


class _Written(EagerMode):
    """Copies what a block overwrites and has not made, as buffers, before it does."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._own = set[int]()
        self.before: dict[int, Content] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for n, name in kind_of(func).writes if isinstance(func, torch._ops.OpOverload) else ():
            for t in tensors_of(args[n : n + 1], {name: (kwargs or {}).get(name)}):
                key = t.untyped_storage()._cdata
                if key not in self._own and key not in self.before:
                    self.before[key] = t, t.detach().clone(), version_of(t)
        results = func(*args, **(kwargs or {}))
        self._own |= {t.untyped_storage()._cdata for t in results_of(results) if isinstance(t, torch.Tensor)}
        return results


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


@contextmanager
def _as_before(before: Mapping[int, Content], within: AbstractContextManager[Any]) -> Iterator[None]:
    """While a block runs again, what it overwrites is as it was before."""
    after = [(t, t.detach().clone(), version_of(t)) for t, _, _ in before.values()]
    for content in before.values():
        put_back_tensor(*content)
    try:
        with within:
            yield
    finally:
        for content in after:
            put_back_tensor(*content)

"""The bytes of a step without a tape, of which PyTorch may checkpoint blocks, from the trace of one.

`torch.utils.checkpoint` keeps what enters a block until its backward has ended, and what a selective policy keeps until
the block runs again: at the first tensor that its backward reads, up to the last one that autograd saves in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import cached_property

from .trace import Trace


@dataclass(frozen=True)
class Block:
    """A part of the model that may be checkpointed: operations `first` to `end`, positions `begins` to `ends`.

    beside: bytes of generators' states and buffers that its checkpoint holds, and once more while the block runs again.
    """

    first: int
    end: int
    begins: int
    ends: int
    beside: int = 0


class CheckpointedStep:
    """A step of `blocks`, which do not overlap, in order."""

    def __init__(self, trace: Trace, blocks: Several[Block]) -> None:
        self.trace, self.blocks = trace, blocks

    def block_at(self, position: int) -> int | None:
        found = (n for n, block in enumerate(self.blocks) if block.begins <= position < block.ends)
        return next(found, None)

    @cached_property
    def _saved_in(self) -> list[list[tuple[int, int | None]]]:
        """Of each block, position and content of each tensor that autograd saves in it; those outside come last."""
        found: list[list[tuple[int, int | None]]] = [[] for _ in range(len(self.blocks) + 1)]
        for one in self.trace.saved:
            where = self.block_at(one.at)
            content = None if one.content is None else self.trace.latest(one.content)
            found[-1 if where is None else where].append((one.at, content))
        return found

    @cached_property
    def _event_blocks(self) -> list[int | None]:
        """Of each event of the backward, the block of what it reads or frees."""
        at = ((event.freed[1] if event.freed is not None else event.reads) for event in self.trace.backward)
        return [None if one is None else self.block_at(one) for one in at]

    @cached_property
    def again(self) -> list[range]:
        """Of each block, the operations that run again if nothing is kept."""
        found = []
        for block, saved in zip(self.blocks, self._saved_in, strict=False):
            last = max((at for at, _ in saved), default=-1)
            numbers = range(block.first, block.end)
            found.append(range(block.first, next((n for n in numbers if self.trace.ran[n].at > last), block.end)))
        return found

    @cached_property
    def entering(self) -> list[set[int]]:
        """Of each block, the contents that enter it."""
        made, ran = self.trace.made, self.trace.ran
        return [
            {c for n in range(block.first, block.end) for c in ran[n].reads if made[c].op < block.first}
            | {c for _, c in saved if c is not None and made[c].op < block.first}
            for block, saved in zip(self.blocks, self._saved_in, strict=False)
        ]

    def own_bytes(self, n: int) -> int:
        """Return the bytes that block `n` saves for its backward, beside what enters blocks."""
        others = set().union(*self.entering)
        return self.trace.size({c for _, c in self._saved_in[n] if c is not None and c not in others})

    def peak(self, kept: Mapping[int, Collection[int]]) -> int:
        """Return the most bytes that the step holds. kept: of each block that is checkpointed, the operations whose
        results are kept."""
        return self.levels(kept)[0]

    def levels(self, kept: Mapping[int, Collection[int]]) -> tuple[int, int]:
        """Return the most bytes, as `peak`, and those between forward and backward."""
        trace, made, size = self.trace, self.trace.made, self.trace.size
        last = {block: n for n, block in enumerate(self._event_blocks) if block in kept}

        def instance(c: int, block: int | None) -> tuple[int, int | None]:
            """What a block's backward reads: the content as the forward made it, or as the block makes it again."""
            if block is None or block not in kept or made[c].op in kept[block]:
                return c, None
            return (c, block) if self.blocks[block].first <= made[c].op < self.blocks[block].end else (c, None)

        holds: Counter[tuple[int, int | None]] = Counter()
        for event, block in zip(trace.backward, self._event_blocks, strict=True):
            if event.freed is not None:
                holds[instance(event.freed[0], block)] += 1
        released = {n: [c for op in kept[n] for c in trace.ran[op].makes] for n in kept}
        for n in kept:
            holds.update((c, None) for c in (*self.entering[n], *released[n]))
        held = {c for c, block in holds if block is None}
        plain = [n for n in range(len(self.blocks) + 1) if n not in kept]
        held |= {c for n in plain for _, c in self._saved_in[n] if c is not None}

        level = trace.beside - trace.states + sum(self.blocks[n].beside for n in kept)
        level, most, ended = self._run(range(len(trace.ran)), level, held)
        level -= size(c for c in ended if not made[c].returned)
        waiting, done = trace.waiting - held, set[int]()

        def let_go(one: tuple[int, int | None]) -> int:
            holds[one] -= 1
            return 0 if holds[one] or (one[1] is None and made[one[0]].returned) else made[one[0]].nbytes

        made_by_loss, there = trace.at_rest
        most, resting = max(most, level), level + made_by_loss + size(there - held)
        for n, (event, block) in enumerate(zip(trace.backward, self._event_blocks, strict=True)):
            if block is not None and block in kept and block not in done:
                done.add(block)
                copies = {c for c, where in holds if where == block}
                began = level + self.blocks[block].beside
                most = max(most, self._run(self.again[block], began, copies, kept[block])[1])
                level += size(copies) - sum(let_go((c, None)) for c in released[block])
            level += event.size
            waiting = frozenset() if event.reads is not None else waiting - {event.gone}
            most = max(most, level + size(waiting))
            if event.freed is not None:
                level -= let_go(instance(event.freed[0], block))
            if block is not None and last.get(block) == n:
                level -= sum(let_go((c, None)) for c in self.entering[block])
        return most, resting

    def _run(
        self, numbers: range, level: int, stays: Collection[int], kept: Collection[int] = ()
    ) -> tuple[int, int, list[int]]:
        """Run operations but those that are `kept`; return the bytes at the end, the most, and the contents that are
        gone after the end but for what `stays`."""
        made, most = self.trace.made, level
        leave: dict[int, list[int]] = defaultdict(list)
        for n in numbers:
            op = self.trace.ran[n]
            level -= self.trace.size(leave.pop(n, ()))
            if n in kept:
                continue
            most = max(most, level + op.peak)
            level += self.trace.size(op.makes)
            for c in op.makes:
                if c not in stays and made[c].later is None:
                    leave[max(made[c].dies, made[c].let_go, n + 1)].append(c)
            level -= self.trace.size(c for c, into in op.writes if into is not None and made[c].op in numbers)
            most = max(most, level)
        return level, most, [c for gone in leave.values() for c in gone]


def plain_levels(trace: Trace) -> tuple[int, int, int]:
    """Return the most bytes that the model holds without a tape, those between forward and backward, and those of the
    caller's loss."""
    made, there = trace.at_rest
    return *CheckpointedStep(trace, ()).levels({}), made + trace.size(there)

"""SuperNeurons: liveness, a tensor pool on the host behind an LRU cache on the device, and cost-aware recomputation.

Source: Wang et al., *SuperNeurons: Dynamic GPU Memory Management for Training Deep Neural Networks* (PPoPP 2018),
sections 3.2 to 3.4. *Checkpoints* are the compute-heavy layers (CONV, FC); the layers between two of them form a
segment.

- Liveness analysis is what the machine always does: ``B i`` drops ā_i and δ_i. Alone, it means keeping everything.
- Unified tensor pool: ā of CONV layers may leave. Without the cache each one does: out during the forwards up to the
  next checkpoint, back during the backwards from one checkpoint to the one before. With the cache (algorithm 2) an
  operation that does not fit evicts the least recently used ā of a CONV layer that is not its operand, so nothing moves
  if all fits; an evicted ā comes back just before a checkpoint's backward uses it, one checkpoint ahead if there is
  room.
- Cost-aware recomputation: layers between checkpoints are not kept. *Speed-centric*: a segment runs again once and is
  kept, O(N) forwards. *Memory-centric*: it runs again for each of its backwards and keeps one layer, n(n+1)/2 forwards
  for n. *Cost-aware*: speed-centric if |ā_s| + Σ |ā_q| + δ_e + δ_{e−1} + o_B(e) ≤ l_peak over the segment q = s+1..e
  after checkpoint s (`segment_bytes`), l_peak = max_i l_i and l_i = |ā_i| + |input of i| + δ_i + δ_{i−1} + o_B(i)
  (`layer_bytes`).

Interpretation:

- The unit is the stage. Checkpoints are `heavy_stages` unless given; all of them may move, since a chain does not
  say which is FC and those are small. The stages after the last checkpoint are kept: their backward follows at once
  (the paper's table 1 does not count Softmax either).
- The runtime is "dynamic": here the first technique that fits is used, in the paper's order: liveness, cache, cache
  with cost-aware recomputation, and with the memory-centric form of every segment. `techniques` fixes one.
- A convolution's backward needs no output of its own in cuDNN; a stage's backward here holds ā_i, its output included.
  So B of a checkpoint after a speed-centric segment may hold more than the paper counts.
- Execution order of fans and joins (algorithm 1), memory pool and workspaces are not part of a plan; see
  docs/papers.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.chain import Chain
from ...core.modes import as_tuple, whole_number
from ...core.sequence import (
    COMPUTES,
    B,
    F_all,
    Op,
    OpKind,
    Sequence,
    Value,
    a,
    abar,
    drop,
    free,
    offload,
    prefetch,
    wait,
)
from ...core.simulator import Machine, simulate
from ...errors import InvalidSequenceError, OptionError
from ..arrays import arrays
from .choose import within
from .lowering import peak_bytes
from .moving_sets import heavy_stages
from .segments import keep, sweep

TECHNIQUES = ("liveness", "cache", "cost-aware", "memory-centric", "speed-centric", "pool")
KEEPING = ("liveness", "cache", "pool")  # those without recompute


def layer_bytes(chain: Chain, i: int) -> int:
    """l_i: bytes that stage i's backward needs by itself."""
    return segment_bytes(chain, i, i)


def segment_bytes(chain: Chain, first: int, last: int) -> int:
    """Bytes that the last backward of a segment holds if the whole segment is kept."""
    c = arrays(chain)
    kept = int(c.saved[first - 1, 0] if first > 1 else c.out[0]) + int(c.saved[first : last + 1, 0].sum())
    return kept + int(c.grad[last] + c.grad[last - 1] + c.b_transient[last, 0])


def computed(chain: Chain, checkpoints: list[int], technique: str) -> list[Op]:
    """The forwards and backwards. Of a segment, the stages before a checkpoint, only the last output is kept for that.
    It is recomputed once and kept, or for each of its backwards from the checkpoint before it."""
    L, end = len(chain), max(checkpoints, default=0)
    if technique in KEEPING:
        return keep(1, L)
    l_peak = max(layer_bytes(chain, i) for i in range(1, L + 1))
    segments = list(zip([1, *(i + 1 for i in checkpoints)], checkpoints, strict=False))
    made: list[Op] = []
    for first, i in segments:
        made += [*sweep(first, i - 1), F_all(i), drop(a(i - 1))] if first < i else [F_all(i)]
    made += keep(end + 1, L)
    for first, i in reversed(segments):
        fits = technique == "cost-aware" and first < i and segment_bytes(chain, first, i - 1) <= l_peak
        if technique == "speed-centric" or fits:
            made += [*map(F_all, range(first, i)), *map(B, range(i, first - 1, -1))]
            continue
        for q in range(i - 1, first - 1, -1):
            made += [*sweep(first, q - 1), F_all(q), drop(a(q - 1))] if q > first else [F_all(q)]
            made.append(B(q + 1))
        made.append(B(first))
    return made


class Pool:
    """The machine, with an LRU cache before the host (algorithm 2); `run` appends what an operation needs before it."""

    def __init__(self, chain: Chain, mem_limit: int, checkpoints: list[int]) -> None:
        self.chain, self.limit, self.machine = chain, mem_limit, Machine(chain, mem_limit)
        self.mayleave = {abar(i) for i in checkpoints if i < len(chain)}
        self.recent: list[Value] = []  # the least recently used first
        self.ops: list[Op] = []

    def do(self, op: Op, operands: list[Value] | None = None) -> bool:
        """Run `op`; False if the machine refuses it, once the least recently used ā that are none of `operands` have
        left. None: nothing leaves for it."""
        while True:
            try:
                self.machine.step(op)
            except InvalidSequenceError:
                others = [] if operands is None else [v for v in self.recent if v not in operands]
                v = next(filter(self.machine.usable, others), None)
                if v is None or not (v in self.machine.host or self.do(offload(v))) or not self.do(free(v)):
                    return False
                self.recent.remove(v)
            else:
                self.ops.append(op)
                return True

    def run(self, op: Op, ahead: Value | None = None) -> bool:
        """Fetch the operands of `op`, make room and run it; start the prefetch of `ahead` if both fit. False if `op`
        does not fit."""
        operands = self._operands(op)
        for v in operands:
            fetched = v in self.machine.device or v not in self.machine.host or self.do(prefetch(v), operands)
            if not fetched or (v in self.machine.arriving and not self.do(wait(v))):
                return False
        if ahead is not None and ahead in self.machine.host and ahead not in self.machine.device:
            need = self.chain.grad_bytes(op.stage - 1) + self.chain.stage(op.stage).backward_transient_bytes
            if self.machine.held_bytes + self.machine.host[ahead] + need <= self.limit:
                self.do(prefetch(ahead))
                self._touch(ahead)
        if not self.do(op, operands):
            return False
        for v in (*operands, *((op.value,) if op.kind is OpKind.F_ALL else ())):
            self._touch(v)
        return True

    def _touch(self, v: Value) -> None:
        if v in self.recent:
            self.recent.remove(v)
        if v in self.mayleave and v in self.machine.device:
            self.recent.append(v)

    def _operands(self, op: Op) -> list[Value]:
        i = op.stage
        if op.kind not in COMPUTES:
            return []
        before = a(i - 1) if i == 1 or a(i - 1) in self.machine.device else abar(i - 1)
        return ([abar(i)] if op.kind is OpKind.B else []) + ([before] if i > 1 else [])


def operations(chain: Chain, mem_limit: int, technique: str, checkpoints: list[int]) -> tuple[Op, ...] | None:
    """The operations of one technique within `mem_limit` bytes, or None if it does not fit.

    Section 3.3.1, no cache ("pool"): each checkpoint is offloaded while the forward runs to the next one, and
    prefetched one checkpoint ahead. With the cache, what is prefetched during a checkpoint's backward is the ā that
    holds the input of the checkpoint before it.
    """
    pool, eager = Pool(chain, mem_limit, [] if technique == "liveness" else checkpoints), technique == "pool"
    back = 1 if eager else 2
    before = {i: abar(checkpoints[n - back]) for n, i in enumerate(checkpoints) if n >= back}
    leaving: Value | None = None
    for op in computed(chain, checkpoints, technique):
        made = eager and op.kind is OpKind.F_ALL and op.stage in checkpoints
        if made and leaving is not None and leaving.stage < op.stage - 1:
            pool.do(free(leaving))
            leaving = None
        if not pool.run(op, before.get(op.stage) if op.kind is OpKind.B else None):
            return None
        if made and leaving is not None:
            pool.do(free(leaving))
        if made:
            leaving = abar(op.stage) if op.stage < checkpoints[-1] else None
        if made and leaving is not None:
            pool.do(offload(leaving))
    return tuple(pool.ops)


def superneurons(
    chain: Chain, mem_limit: int, technique: str | None = None, checkpoints: Iterable[int] | None = None
) -> Sequence:
    """SuperNeurons within `mem_limit` bytes.

    Args:
        technique: "liveness", "pool" (every checkpoint moves), "cache", and with the cache the recomputations
            "speed-centric", "memory-centric" and "cost-aware"; None for the first of liveness, cache, cost-aware,
            memory-centric that fits.
        checkpoints: the compute-heavy stages; None for `heavy_stages`.
    """
    if technique not in (*TECHNIQUES, None):
        raise OptionError(f"technique is {technique!r}; techniques are {', '.join(TECHNIQUES)}")
    chosen = heavy_stages(chain) if checkpoints is None else _stages(chain, checkpoints)
    most = mem_limit + peak_bytes(chain) + chain.output_bytes(len(chain)) + 1
    name, ops = within("superneurons", mem_limit, lambda limit: _first(chain, limit, technique, chosen), most, steps=24)
    return Sequence(ops, meta={"source": f"superneurons, {name}"})


def _first(
    chain: Chain, limit: int, technique: str | None, checkpoints: list[int]
) -> tuple[str, tuple[Op, ...]] | None:
    for name in TECHNIQUES[:4] if technique is None else (technique,):
        ops = operations(chain, limit, name, checkpoints)
        if ops is not None and simulate(chain, ops).peak_bytes <= limit:
            return name, ops
    return None


def _stages(chain: Chain, checkpoints: Any) -> list[int]:
    return sorted({whole_number(i, "a stage of checkpoints", 1, len(chain)) for i in as_tuple(checkpoints)})

"""The profile of a step at a size that none has had: a recorded step, whose bytes change as those of fake tensors do.

The step has to make the same operations as the other one. Whether they can be made again is known from there.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..accelerator import capability, is_accelerator
from ..errors import MeasureError
from ..tape.tape import Key, Known
from ..tensors.tree import flatten
from .estimate.devices import Device
from .estimate.fake_trace import fake_step
from .tape_profile import TapeProfile
from .trace import Trace, trace_of

logger = logging.getLogger("rotoff")
LOSS = -1  # before the first one
SPARE = 3 << 19  # bytes by which more is charged, at most, where CUDA's allocator has given a larger block than asked


def at_size(near: TapeProfile, known: Known, model: nn.Module, args: Any, kwargs: Any) -> TapeProfile | None:
    """Return the profile of a step of `model`; None if kernels take otherwise at its size than at that of `near`, or
    make there what no fake ones do.

    Args:
        known: what is known of the operations; what is known of those of `near` holds for these, too.

    Raises:
        MeasureError: if it makes other operations than `near`, or as for `fake_step`.
    """
    given, rebuild = flatten((args, kwargs))
    if any(t.is_nested for t in given):
        raise MeasureError("a nested tensor has several sizes")
    pairs = zip(given, near.shapes, strict=True)
    same = [t.new_empty(shape, device="meta").requires_grad_(t.requires_grad) for t, shape in pairs]
    here = Device("here", 1 << 40, 1e11, {"float32": 1e12}, 1e10, 1e10, capability=capability(near.device))
    asked = fake_step(model, args, kwargs, here)
    if _operations(trace := trace_of(asked)) != _operations(near.trace):
        raise MeasureError("a step at this size makes other operations")
    args, kwargs = rebuild(same)
    recorded = fake_step(model, args, kwargs, here)
    before = trace_of(recorded)
    unknown = any(fake.nbytes < real.nbytes for fake, real in zip(before.made, near.trace.made, strict=True))
    if unknown or _shape_of(trace) != _shape_of(before) or asked.kernels != recorded.kernels:
        return None
    ratio = trace.size(range(len(trace.made))) / max(1, near.trace.size(range(len(near.trace.made))))

    nbytes = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in given}.values())
    # what no fake kernel takes may grow as the batch does, or as what the forward makes
    most = max(1.0, ratio, nbytes / max(1, near.batch_bytes))

    def grown(now: int, fake: int, real: int) -> int:
        """Return `now` and what a real step takes beyond a fake one, which may not fall with the size."""
        return now + int(max(0, real - fake) * most)

    ran = (
        replace(op, seconds=one.seconds * ratio, peak=grown(op.peak, fake.peak, one.peak))
        for op, fake, one in zip(trace.ran, before.ran, near.trace.ran, strict=True)
    )
    spare = SPARE if is_accelerator(near.device) else 0
    sizes = _sizes(near.trace, before, trace, most, spare)
    backward = tuple(
        replace(event, size=size, seconds=event.seconds * ratio)
        for event, size in zip(near.trace.backward, sizes, strict=True)
    )
    beside = grown(trace.beside, before.beside, near.trace.beside)
    trace = replace(trace, ran=tuple(ran), backward=backward, beside=beside)
    shapes = tuple(tuple(t.shape) for t in given)
    found = replace(near, trace=trace, batch_bytes=nbytes, shapes=shapes, seen=False, begins=near.cuts)
    held: dict[Key, list[int]] = {}
    for key, out in known.held:
        held.setdefault(key, []).append(out)
    logger.info("rotoff: an input of a new size, %s, is planned from fake tensors", list(map(list, shapes)))
    for begins in near.cuts:
        for key, one in zip(trace.keys(begins), near.trace.keys(begins), strict=True):
            if one in known.sure:
                known.sure.add(key)
            known.held |= {(key, out) for out in held.get(one, ())}
    return found


def _sizes(real: Trace, before: Trace, now: Trace, ratio: float, spare: int) -> Iterator[int]:
    """Yield the size of each event of the backward of `real` at the size of `now`; `before` is a fake step at that of
    `real`. What no fake kernel takes grows by `ratio`. spare: bytes by which larger blocks may be larger than asked."""
    fake = defaultdict[int, list[tuple[int, int]]](list)  # by saved tensor, bytes before and now
    for (at, size), (_, other) in zip(_allocated(before), _allocated(now), strict=True):
        if size > 0:
            fake[at].append((size, other))
    left = {at: list(pairs) for at, pairs in fake.items()}
    live = defaultdict[tuple[int, bool], list[int]](list)
    for (at, size), event in zip(_allocated(real), real.backward, strict=True):
        alive = live[abs(size), event.kept]
        if size > 0:
            if first := min(_alike(size, left.get(at, []), spare), key=lambda pair: size - pair[0], default=None):
                left[at].remove(first)
            pair = first or max(_alike(size, fake[at], spare), key=lambda pair: pair[1], default=None)
            alive.append(int(size * ratio) if pair is None else pair[1] + size - pair[0])
            yield alive[-1]
        else:
            yield -alive.pop(alive.index(min(alive))) if size else 0


def _alike(size: int, pairs: list[tuple[int, int]], spare: int) -> list[tuple[int, int]]:
    """Return those of `pairs` whose first number may have got a block of `size`."""
    return [pair for pair in pairs if 0 <= size - pair[0] <= (spare if size > spare else 0)]


def _allocated(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield the position of the saved tensor that was read last, and the size, of each event of the backward."""
    at = LOSS
    for event in trace.backward:
        at = at if event.reads is None else event.reads
        yield at, event.size


def _shape_of(trace: Trace) -> object:
    """What is the same at all batches."""
    made = [(one.op, one.out, one.dies, one.later) for one in trace.made]
    ran = [(op.reads, op.writes, op.makes, op.at) for op in trace.ran]
    return made, ran, trace.saved, [(event.size > 0, event.freed, event.reads) for event in trace.backward]


def _operations(trace: Trace) -> list[tuple[Any, ...]]:
    return [(op.at, op.module, op.reads, op.writes, op.makes) for op in trace.ran]

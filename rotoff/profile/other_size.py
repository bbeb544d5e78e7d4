"""The profile of a step at a size that none has had: bytes from fake tensors, times from a step at another size.

The step has to make the same operations as the other one. Whether they can be made again is known from there.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from torch import nn

from ..accelerator import capability
from ..errors import MeasureError
from ..tape.tape import Key, Known
from ..tensors.tree import flatten
from .estimate.devices import Device
from .estimate.fake_trace import fake_step
from .tape_profile import TapeProfile
from .trace import Event, Trace, trace_of

logger = logging.getLogger("rotoff")
LOSS = -1  # before the first one
MORE = 1.01  # what a kernel takes at a smaller size, over what it takes at the recorded one


def at_size(near: TapeProfile, known: Known, model: nn.Module, args: Any, kwargs: Any) -> TapeProfile | None:
    """Return the profile of a step of `model`; None if it makes other operations than the step `near`, or cannot be
    foretold.

    Args:
        known: what is known of the operations; what is known of those of `near` holds for these, too.
    """
    given, rebuild = flatten((args, kwargs))
    pairs = zip(given, near.shapes, strict=True)
    same = [t.new_empty(shape, device="meta").requires_grad_(t.requires_grad) for t, shape in pairs]
    here = Device("here", 1 << 40, 1e11, {"float32": 1e12}, 1e10, 1e10, capability=capability(near.device))
    try:
        trace = trace_of(fake_step(model, args, kwargs, here))
        if _operations(trace) != _operations(near.trace):
            return None
        args, kwargs = rebuild(same)
        again = trace_of(fake_step(model, args, kwargs, here))
    except MeasureError:
        return None
    ratio = trace.size(range(len(trace.made))) / max(1, near.trace.size(range(len(near.trace.made))))
    ran = (
        replace(op, seconds=one.seconds * ratio, peak=max(op.peak, int(one.peak * ratio)))
        for op, one in zip(trace.ran, near.trace.ran, strict=True)
    )
    whole, all_of = sum(event.seconds for event in trace.backward), sum(event.seconds for event in near.trace.backward)
    scale = ratio * all_of / whole if whole else 0.0
    backward, level = list[Event](), 0
    foretold, measured, computed = map(_levels, (trace, near.trace, again))
    unknown = {at: max(0, nbytes - computed.get(at, 0)) for at, nbytes in measured.items()}  # fake kernels take no more
    for event in trace.backward:
        backward.append(replace(event, seconds=event.seconds * scale))
        level += event.size
        if event.reads is not None and (more := unknown.get(event.reads, 0)):
            nbytes = foretold[event.reads] - level + int(more * max(MORE, ratio))
            backward += [Event(nbytes), Event(-nbytes)]
    beside = max(trace.beside, int(near.trace.beside * ratio)) + unknown[LOSS]
    trace = replace(trace, ran=tuple(ran), backward=tuple(backward), beside=beside)
    nbytes = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in given}.values())
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


def _levels(trace: Trace) -> dict[int, int]:
    """Return the most bytes of the backward from each saved tensor that it reads to the next one, by its position."""
    found, level, at = {LOSS: 0}, 0, LOSS
    for event in trace.backward:
        at = at if event.reads is None else event.reads
        level += event.size
        found[at] = max(found.get(at, 0), level)
    return found


def _operations(trace: Trace) -> list[tuple[Any, ...]]:
    return [(op.at, op.module, op.reads, op.writes, op.makes) for op in trace.ran]

"""The profile of a step at a size that none has had: bytes from fake tensors, times from a step at another size.

The step has to make the same operations as the other one. Whether they can be made again is known from there.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..accelerator import capability
from ..errors import MeasureError
from ..tape.tape import Key, Known
from .estimate.devices import Device
from .estimate.fake_trace import fake_step
from .tape_profile import TapeProfile
from .trace import Trace, trace_of

logger = logging.getLogger("rotoff")
SMALL = 512  # bytes


def at_size(near: TapeProfile, known: Known, model: nn.Module, args: Any, kwargs: Any) -> TapeProfile | None:
    """Return the profile of a step of `model`; None if it makes other operations than the step `near`, or cannot be
    foretold.

    Args:
        known: what is known of the operations; what is known of those of `near` holds for these, too.
    """
    here = Device("here", 1 << 40, 1e11, {"float32": 1e12}, 1e10, 1e10, capability=capability(near.device))
    try:
        trace = trace_of(fake_step(model, args, kwargs, here))
    except MeasureError:
        return None
    if _operations(trace) != _operations(near.trace):
        return None
    ratio = trace.size(range(len(trace.made))) / max(1, near.trace.size(range(len(near.trace.made))))
    ran = (
        replace(op, seconds=one.seconds * ratio, peak=max(op.peak, int(one.peak * ratio)))
        for op, one in zip(trace.ran, near.trace.ran, strict=True)
    )
    whole, all_of = sum(event.seconds for event in trace.backward), sum(event.seconds for event in near.trace.backward)
    scale = ratio * all_of / whole if whole else 0.0
    backward = (replace(event, seconds=event.seconds * scale) for event in trace.backward)
    beside = max(trace.beside, int(near.trace.beside * ratio)) + max(0, _small(near.trace) - _small(trace))
    trace = replace(trace, ran=tuple(ran), backward=tuple(backward), beside=beside)
    given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
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


def _small(trace: Trace) -> int:
    """Return the most bytes that small temporaries of the backward hold at once: kernels take the same at any size, and
    fake ones take none."""
    sizes = (event.size for event in trace.backward if abs(event.size) <= SMALL and not event.kept)
    return max(accumulate(sizes, initial=0))


def _operations(trace: Trace) -> list[tuple[Any, ...]]:
    return [(op.at, op.module, op.reads, op.writes, op.makes) for op in trace.ran]

"""A process's share of what its host has for all: the link, while all processes of the host copy at once, and the
host's memory.

Ranks of a pipeline measure in their first steps, at different moments, so their links are measured before, when all
ranks attach. Whoever is missing or late keeps nobody waiting: after `PATIENCE` seconds the others go on.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from ..core.chain import LinkRates
from ..runtime.links.bandwidth import BESIDE_BYTES
from ..runtime.links.pinned import local_processes
from ..runtime.links.pool import LinkPool
from ..solver.search import parse_host_limit

logger = logging.getLogger("rotoff")
PATIENCE = 60.0  # seconds from the arrival of a host's first process
_shares: dict[torch.device, LinkRates] = {}  # measured once: processes may attach several times, and not equally often


def with_host_share(options: dict[str, Any]) -> dict[str, Any]:
    """`options` whose `host_limit`, which is for all processes of the host, is this process's share."""
    if options.get("host_limit") is None or local_processes() == 1:
        return options
    return {**options, "host_limit": parse_host_limit(options["host_limit"]) // local_processes()}


def link_share(device: torch.device, directory: str | os.PathLike[str] | None = None) -> LinkRates | None:
    """The rates of the link of `device` while all processes of this host copy at once; None for a single process.

    If not all come in time, each counts on an equal share of its own rates. directory: as for `LinkPool`.
    """
    many = local_processes()
    if many == 1:
        return None
    if device not in _shares:
        together = _met(many)
        links = LinkPool(directory)
        rates = links.bandwidth(device, BESIDE_BYTES)
        links.close()
        _shares[device] = rates if together else rates.divided(many)
    return _shares[device]


def _met(many: int) -> bool:
    """Wait for the other processes of this host; whether all `many` have come in time."""
    everyone = dist.group.WORLD
    assert everyone is not None  # a pipeline has a group
    store = everyone.get_group_store()
    key = f"rotoff/{socket.gethostname()}"
    if store.add(key, 1) == 1:
        store.set(f"{key}/first", repr(time.monotonic()))
    end = float(store.get(f"{key}/first")) + PATIENCE  # all give up at the same moment, on the host's clock
    while time.monotonic() < end:
        if store.add(key, 0) >= many:
            return True
        time.sleep(0.01)
    logger.warning(
        "rotoff: not all of the %d processes on this host (LOCAL_WORLD_SIZE) came within %g s to measure the link at"
        " once, so this one plans with 1/%d of its bandwidth; call attach_schedule in all of them",
        many,
        PATIENCE,
        many,
    )
    return False

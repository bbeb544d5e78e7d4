"""Links for steps: each step that moves values has one to itself, so that two steps never share host bytes."""

from __future__ import annotations

import logging
import os
import threading

import torch

from ...accelerator import TYPES, is_accelerator
from ...core.chain import LinkRates
from ...errors import ExecutionError
from .bandwidth import PIECE_BYTES, bidirectional_shares, measure_bandwidth
from .base import Link
from .cuda import CudaStreams, StreamLink
from .file import FileLink

logger = logging.getLogger("rotoff")
_shares: dict[torch.device, tuple[float, float]] = {}  # results of `bidirectional_shares`, which depend on the machine


class LinkPool:
    """Makes links when they are needed, keeps idle ones, and closes all.

    Args:
        directory: where the CPU's links keep their files; None for the first suitable one.

    Attributes:
        share: the rates while all processes of this host copy at once, if they were measured. No plan counts on more.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self._directory = directory
        self.share: LinkRates | None = None
        self._idle: list[Link] = []
        self._closed = 0  # how often; a link taken before a close is closed when it comes back
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, device: torch.device, nbytes: int) -> Link:
        """A link for `device` with at least `nbytes` of host memory, until it is given back.

        Raises:
            ExecutionError: where the host cannot give them, or there is no link for such a device.
        """
        with self._lock:
            fitting = [link for link in self._idle if link.device == device]
            link = fitting[-1] if fitting else new_link(device, self._directory)
            if fitting:
                self._idle.remove(link)
            self._taken[id(link)] = self._closed
        try:
            link.reserve(nbytes)
            link.begin()
        except BaseException:
            self.give_back(link)
            raise
        return link

    def give_back(self, link: Link) -> None:
        with self._lock:
            if self._taken.pop(id(link), -1) == self._closed:
                self._idle.append(link)
                return
        link.close()

    def bandwidth(self, device: torch.device, nbytes: int, room: int = PIECE_BYTES) -> LinkRates:
        """Bytes per second for copies of `nbytes`, of each direction alone and while both are busy, where they can be.

        The link is closed again, since plans without moves need no host memory. room: as for `measure_bandwidth`.
        """
        link = new_link(device, self._directory)
        try:
            alone = measure_bandwidth(link, nbytes, room=room)
            if not link.queues:
                return LinkRates(*alone, duplex=False)
            if device not in _shares:
                try:
                    _shares[device] = bidirectional_shares(link)
                # a host without room for that has none for a plan that moves much either; a device may have it later
                except (ExecutionError, torch.OutOfMemoryError):
                    return LinkRates(*alone)
                logger.info(
                    "rotoff: while copies run both ways, %.0f %% of the bandwidth to the host are left, and %.0f %%"
                    " of that from it",
                    *(100 * share for share in _shares[device]),
                )
            return LinkRates(*alone, True, *(rate * share for rate, share in zip(alone, _shares[device], strict=True)))
        finally:
            link.close()

    def shared(self, rates: LinkRates) -> LinkRates:
        """`rates` of copies, but no more than `share`."""
        return rates if self.share is None else rates.at_most(self.share)

    def close(self) -> None:
        """Close idle links now, and those in use when they come back."""
        with self._lock:
            self._closed += 1
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()


def new_link(device: torch.device, directory: str | os.PathLike[str] | None = None) -> Link:
    """A link for `device`.

    Raises:
        ExecutionError: if there is none for such a device.
    """
    if device.type == "cpu":
        return FileLink(directory)
    if is_accelerator(device):
        return StreamLink(CudaStreams(device))
    raise ExecutionError(
        f"there is no link for a device of type {device.type!r}; rotoff moves values on {' and '.join(TYPES)}"
    )

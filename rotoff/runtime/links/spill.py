"""Where a step without a plan keeps what it moves off the device: in a file if that is the CPU, else in the memory of
the host."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from functools import partial

import torch

from ...errors import ExecutionError
from ...tensors.storage import bytes_of, memory_of
from .host_file import HostFile, check_directory, choose_directory

logger = logging.getLogger("rotoff")
GROWTH = 64 << 20  # bytes that the file gets at a time


Back = Callable[[], torch.UntypedStorage]  # brings a storage back to the device where it was


class Spill:
    """Keeps storages until it is collected.

    device: of the step; what lies elsewhere stays there. directory: of the file; None: the first of the usual temporary
    directories that is on a disk.
    """

    def __init__(self, device: torch.device, directory: str | os.PathLike[str] | None = None) -> None:
        self.device, self._directory = device, directory
        self._file: HostFile | None = None
        self._end = 0
        self._full = False

    def put(self, storage: torch.UntypedStorage) -> Back:
        """Copy a storage. If the disk has no room for it, it stays where it is, and the log says so once.

        Raises:
            rotoff.ExecutionError: if no directory is on a disk.
        """
        nbytes, device = storage.nbytes(), storage.device
        if device.type != "cpu" or self._full or self.device.type != "cpu":
            copy = bytes_of(storage).cpu()  # if that is another device
            return lambda: copy.to(device).untyped_storage()
        if self._file is None:
            chosen = choose_directory() if self._directory is None else check_directory(self._directory)
            self._file = HostFile(chosen)
            weakref.finalize(self, self._file.close)
        if self._end + nbytes > self._file.capacity:
            try:
                self._file.reserve(self._end + max(nbytes, GROWTH))
            except ExecutionError as error:
                self._full = True
                logger.warning(
                    "rotoff: a step without a plan may exceed the limit, since what it saves cannot leave the device:"
                    " %s",
                    error,
                )
                return self.put(storage)
        begin, self._end = self._end, self._end + nbytes
        self._file.write(memory_of(storage), begin)
        return partial(self._read, begin, nbytes)

    def _read(self, begin: int, nbytes: int) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(nbytes)
        assert self._file is not None
        self._file.read(memory_of(storage), begin)
        return storage

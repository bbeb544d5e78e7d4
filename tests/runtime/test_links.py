"""Both links as the interpreter meets them: bytes there and back, errors as sentences, nothing left behind."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_link import Lane, RecordingLink
from torch.multiprocessing.reductions import StorageWeakRef

import rotoff
from rotoff.runtime.links import host_file
from rotoff.runtime.links import pool as link_pool
from rotoff.runtime.links.file import FileLink
from rotoff.runtime.links.host_file import filesystem_of
from rotoff.runtime.links.pool import LinkPool

LINKS = {"file": FileLink, "streams": RecordingLink}


@pytest.fixture(params=LINKS)
def link(request: pytest.FixtureRequest) -> Any:
    link = LINKS[request.param]()
    yield link
    link.close()


@pytest.fixture
def file_link() -> Any:
    link = FileLink()
    yield link
    link.close()


LARGE = 1 << 20  # bytes that a file link does not copy at once


def some_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rotoff")]


def descriptors() -> set[int]:
    """Of files without a name."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found |= {int(name)} if "deleted" in os.readlink(f"/proc/self/fd/{name}") else set()
        except OSError:  # the listing's own
            continue
    return found


def reserved(link: FileLink, nbytes: int) -> int:
    """The descriptor of the file that `link` makes to hold so many bytes."""
    before = descriptors()
    link.reserve(nbytes)
    (made,) = descriptors() - before
    return made


class TestEveryLink:
    def test_a_part_of_a_storage_is_copied_alone(self, link: Any):
        link.reserve(10)
        whole = torch.zeros(30, dtype=torch.uint8)
        written = link.copy_out([some_bytes(10)], 0)
        link.wait(link.copy_in([whole[10:20]], 0, written))
        assert torch.equal(whole[10:20], some_bytes(10))
        assert not whole[:10].any()
        assert not whole[20:].any()

    def test_a_copy_outside_of_the_reserved_bytes_is_refused(self, link: Any):
        link.reserve(100)
        with pytest.raises(rotoff.ExecutionError, match="95 to 105 leaves the 100 bytes reserved"):
            link.copy_out([some_bytes(10)], 95)
        link.wait(link.copy_out([some_bytes(10)], 90))

    def test_device_memory_goes_once_it_is_waited_for_and_dropped(self, link: Any):
        link.reserve(1000)
        source = some_bytes(1000)
        gone = weakref.ref(source)
        written = link.copy_out([source], 0)
        link.wait(written)
        del source
        assert gone() is None
        target = link.allocate(1000)
        gone = weakref.ref(target)
        read = link.copy_in([target], 0, written)
        link.wait(read)
        del target
        assert gone() is None


class TestFileLink:
    def test_a_link_that_nobody_closes_ends_with_its_last_reference(self):
        gc.collect()
        others, before = threads(), descriptors()
        link = FileLink()
        link.reserve(LARGE)
        ticket = link.copy_out([some_bytes(LARGE)], 0)
        del link
        gc.collect()
        assert (threads(), descriptors()) == (others, before)
        ticket.join()

    def test_the_file_is_private_and_has_no_name(self, file_link: FileLink):
        before = set(os.listdir(file_link.directory))
        status = os.fstat(reserved(file_link, 4096))
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0
        assert status.st_size == 4096
        assert status.st_blocks * 512 >= 4096  # a full disk shows now, not in the step
        assert not [name for name in set(os.listdir(file_link.directory)) - before if "rotoff" in name]

    def test_short_writes_and_reads_are_continued(self, file_link: FileLink, monkeypatch: pytest.MonkeyPatch):
        pwrite, preadv = os.pwrite, os.preadv
        monkeypatch.setattr(host_file.os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:100], offset))
        monkeypatch.setattr(host_file.os, "preadv", lambda fd, data, offset: preadv(fd, [data[0][:70]], offset))
        file_link.reserve(1000)
        written = file_link.copy_out([some_bytes(1000)], 0)
        target = file_link.allocate(1000)
        file_link.wait(file_link.copy_in([target], 0, written))
        assert torch.equal(target, some_bytes(1000))

    @pytest.mark.parametrize("nbytes", [10, LARGE])
    def test_a_copy_that_nobody_awaits_lets_go_of_its_tensors(self, file_link: FileLink, nbytes: int):
        file_link.reserve(nbytes)
        source = some_bytes(nbytes)
        left = StorageWeakRef(source.untyped_storage())
        file_link.copy_out([source], 0)
        del source
        file_link.drain()
        assert left.expired()

    def test_a_truncated_file_is_an_error_not_a_hang(self, file_link: FileLink):
        file = reserved(file_link, 1000)
        written = file_link.copy_out([some_bytes(1000)], 0)
        file_link.wait(written)
        os.ftruncate(file, 500)
        with pytest.raises(rotoff.ExecutionError, match="reading 1000 bytes .*the file ends before"):
            file_link.wait(file_link.copy_in([file_link.allocate(1000)], 0, written))

    def test_a_disk_without_room_shows_in_reserve(self, file_link: FileLink):
        file = reserved(file_link, 1000)
        free = os.statvfs(file_link.directory)
        too_much = free.f_bavail * free.f_frsize * 2
        with pytest.raises(
            rotoff.ExecutionError, match=f"reserving {too_much - 1000} bytes in the offload directory .*; give a dir"
        ):
            file_link.reserve(too_much)
        assert file_link.capacity == 1000
        assert os.fstat(file).st_size == 1000
        file_link.wait(file_link.copy_out([some_bytes(1000)], 0))

    def test_an_interrupt_gets_through_a_wait(self):
        code = """
            import os, signal, sys, threading, torch
            sys.path.append(SUPPORT)
            from recording_link import LateFileLink
            link = LateFileLink(delay=600)
            link.reserve(8)
            ticket = link.copy_out([torch.ones(8, dtype=torch.uint8)], 0)
            try:
                threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
                link.wait(ticket)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            os._exit(0)
        """
        code = code.replace("SUPPORT", repr(str(Path(__file__).parents[1] / "support")))
        assert run_python(code) == "interrupted\n"


def test_a_step_on_another_stream_overwrites_no_host_bytes_that_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link is idle once a step has been issued. The next one may run on a stream that is ordered after nothing of
    it."""
    monkeypatch.setattr(link_pool, "new_link", lambda *_: RecordingLink())
    pool, device = LinkPool(), torch.device("cpu")

    def step() -> RecordingLink:
        link = pool.take(device, 64)
        assert isinstance(link, RecordingLink)
        value = link.allocate(64)
        link.access("make", [], [value.untyped_storage()])
        written = link.copy_out([value], 0)
        link.wait(written)
        link.release("free", [value.untyped_storage()])
        again = link.allocate(64)
        link.wait(link.copy_in([again], 0, written))
        link.access("use", [again.untyped_storage()], [])
        pool.give_back(link)
        return link

    link = step()
    with link.streams.compute_on(Lane("another stream", eager=True)):
        assert step() is link
    assert link.check() == []


class TestDirectory:
    def test_ram_is_refused(self):
        if filesystem_of("/dev/shm") not in host_file.IN_RAM:
            pytest.skip("no file system in RAM at /dev/shm")
        with pytest.raises(rotoff.ExecutionError, match="/dev/shm is in RAM \\(tmpfs\\).*give a directory on a disk"):
            FileLink("/dev/shm")

    def test_a_missing_one_is_refused(self, tmp_path: Path):
        with pytest.raises(rotoff.ExecutionError, match="nowhere does not exist; give a directory"):
            FileLink(tmp_path / "nowhere")

    def test_a_read_only_one_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(host_file, "filesystem_of", lambda path: "ext4")
        monkeypatch.setattr(host_file.os, "access", lambda *_: False)  # root may write anywhere
        with pytest.raises(rotoff.ExecutionError, match="is not writable; give a directory"):
            FileLink(tmp_path)

    def test_none_at_all_is_a_sentence(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(host_file, "filesystem_of", lambda path: "tmpfs")
        with pytest.raises(
            rotoff.ExecutionError, match="no writable directory on a disk for offloading among .*/var/tmp"
        ):
            FileLink()


def run_python(code: str, **environment: str) -> str:
    """What a new interpreter prints for `code`; its errors fail the test."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code)]
    told = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=told)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout

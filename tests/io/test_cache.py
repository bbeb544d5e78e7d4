"""What is kept on disk: plans and profiles, for the next process."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rotoff
from rotoff.errors import OptionError
from rotoff.io import cache as cache_module
from rotoff.io.cache import KEPT, Cache, code_of, default_directory
from rotoff.planning import step_planner


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "directory")
    key = {"limit": 5, "options": (1, 2)}
    assert cache.find(key) is None
    cache.keep(key, ["F_all 1", 0.1])
    assert Cache(tmp_path / "new" / "directory").find(key) == ["F_all 1", 0.1]
    assert cache.find({"limit": 6, "options": (1, 2)}) is None
    assert [p.suffix for p in cache.directory.iterdir()] == [".json"]  # no temporary file is left


DAMAGED = {
    "empty": "",
    "cut off": "{",
    "list": "[]",
    "number": "5",
    "binary": "\x00\x01",
    "nested": "[" * 100_000,
    "nested and whole": "[" * 5000 + "]" * 5000,
    "nested value": '{"key": 1, "value": ' + '{"a":' * 900 + "1" + "}" * 901,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_and_said(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path)
    cache.keep(1, 2)
    next(tmp_path.iterdir()).write_text(content)
    with caplog.at_level(logging.WARNING, "rotoff"):
        assert cache.find(1) is None
    assert "ignored" in caplog.text
    cache.keep(1, 3)
    assert cache.find(1) == 3


ENTRIES: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, other: path.symlink_to(other),
    "link to nothing": lambda path, _: path.symlink_to(path.with_name("nothing")),
    "link to a directory": lambda path, _: path.symlink_to(path.parent),
    "link to itself": lambda path, _: path.symlink_to(path),
    "endless link": lambda path, _: path.symlink_to("/dev/zero"),
    "hard link": lambda path, other: os.link(other, path),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: os.mknod(path, stat.S_IFSOCK | 0o600),
    "readable by all": lambda path, _: (path.write_text("{"), path.chmod(0o666)),
}


@pytest.mark.parametrize("put", ENTRIES.values(), ids=ENTRIES)
def test_what_is_no_entry_is_neither_read_nor_written_through(
    put: Callable[[Path, Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, other = Cache(tmp_path / "cache"), tmp_path / "other.json"
    cache.keep(1, 2)
    (path,) = cache.directory.iterdir()
    path.rename(other)
    other.write_text(content := other.read_text().replace('"value": 2', '"value": [2]') + " ")
    put(path, other)
    with caplog.at_level(logging.WARNING, "rotoff"):
        found = cache.find(1)
    hard = put is ENTRIES["hard link"]  # a file as any other, as a backup may leave it
    assert (found, "ignored" in caplog.text) == (([2], False) if hard else (None, True))
    cache.keep(1, 3)
    assert cache.find(1) == 3
    assert other.read_text() == content
    assert not path.is_symlink()
    assert [one.name for one in cache.directory.iterdir()] == [path.name]
    assert (path.stat().st_mode, cache.directory.stat().st_mode) == (stat.S_IFREG | 0o600, stat.S_IFDIR | 0o700)


BAD_DIRECTORIES: list[Any] = [
    "a\0b",
    "~nobody-here",
    "~nobody-here/cache",
    "half a pair \ud800",
    5,
    b"cache",
    ["cache"],
]


@pytest.mark.parametrize("given", BAD_DIRECTORIES, ids=repr)
def test_what_names_no_directory(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (Cache.of, lambda one: rotoff.Checkpointable(nn.Linear(2, 2), cache_directory=one)):
        with pytest.raises(OptionError, match="cache_directory is .*; give .*directory"):
            make(given)
    with pytest.raises(OptionError, match="host_directory is .*; give the path of a directory"):
        rotoff.Checkpointable(nn.Linear(2, 2), host_directory=given)
    if isinstance(given, str) and given.isascii() and "\0" not in given:
        monkeypatch.setenv("ROTOFF_CACHE", given)
        with pytest.raises(OptionError, match="ROTOFF_CACHE is .*; give the path of a directory"):
            default_directory()


def test_other_code_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, cache = tmp_path / "package", Cache(tmp_path / "cache")
    (package / "within").mkdir(parents=True)
    monkeypatch.setattr(cache_module, "PACKAGE", package)
    for name, content in (("within/a.py", "1"), ("within/a.py", "2"), ("b.so", "12"), ("b.so", "123")):
        code_of.cache_clear()
        (package / name).write_text(content)
        assert cache.find({"a": 1}) is None
        cache.keep({"a": 1}, content)
        assert cache.find({"a": 1}) == content


def test_what_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    Cache(tmp_path / "file").keep(1, 2)
    assert "cannot write to the cache directory" in caplog.text


def test_the_next_process_has_the_plan_without_a_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times are others, on a busy machine by more than a few percent."""
    monkeypatch.setattr(step_planner, "AS_GOOD", 2)

    def planned(**options: Any) -> rotoff.Sequence:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(14)))
        wrapped = rotoff.Checkpointable(model, cache_directory=tmp_path).measure(torch.randn(512, 32))
        return wrapped.compute_sequence(int(0.5 * wrapped.keep_all_memory), **options).sequence

    with caplog.at_level(logging.INFO, "rotoff"):
        first = planned(mode="remat")
        assert "from the cache" not in caplog.text
        assert planned(mode="remat").ops == first.ops
        assert caplog.text.count("from the cache") == 1
        planned(mode="remat", refine=False)
        planned(mode="joint")
    assert caplog.text.count("from the cache") == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_the_oldest_entries_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for n in range(KEPT):
        (tmp_path / f"plan-{n}.json").write_text("{}")
    cache.keep(1, 2)
    assert len(list(tmp_path.iterdir())) == KEPT
    assert cache.find(1) == 2


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROTOFF_CACHE", "off")
    assert default_directory() is None
    monkeypatch.setenv("ROTOFF_CACHE", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("ROTOFF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "rotoff"

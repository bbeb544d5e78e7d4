"""Files written whole or not at all, and paths that options name."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

import rotoff
from rotoff.io.files import write_whole

CHAIN = rotoff.Chain((rotoff.Stage(forward_time=1.0, backward_time=2.0),), 1.0, 1.0)


def test_the_text_is_there_and_nothing_beside_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.json", "one\r\ntwo\n")
    assert (tmp_path / "a.json").read_bytes() == b"one\r\ntwo\n"
    write_whole(tmp_path / "a.json", "three")
    assert (tmp_path / "a.json").read_text() == "three"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("saved", [CHAIN, rotoff.solve(CHAIN, 10)], ids=["chain", "sequence"])
def test_an_interrupted_save_leaves_what_was_there(
    saved: rotoff.Chain | rotoff.Sequence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    saved.save(path)
    before = path.read_text()

    def interrupted(source: str, target: str) -> None:
        assert Path(source).read_text() == before  # all of it was written elsewhere
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved.save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["file.json"]
    monkeypatch.undo()
    assert type(saved).load(path) == saved


def test_permissions_are_those_of_the_file_before_or_of_any_new_file(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    other.write_text("")
    write_whole(path, "")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    path.chmod(0o640)
    write_whole(path, "more")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_what_replaces_a_file_is_never_open_to_more(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "a", list[int]()
    path.write_text("")
    path.chmod(mode)
    copymode = shutil.copymode

    def noting(source: Path, target: Path) -> None:
        made.append(stat.S_IMODE(target.stat().st_mode))
        copymode(source, target)

    monkeypatch.setattr(shutil, "copymode", noting)
    write_whole(path, "private")
    assert made and not made[0] & ~mode
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_links_are_followed_and_pipes_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    read, written = os.pipe()
    write_whole(f"/dev/fd/{written}", "through")
    assert os.read(read, 100) == b"through"
    os.close(read)
    os.close(written)


BAD_DIRECTORIES: list[Any] = ["a\0b", "~nobody-here", "~nobody-here/file", "half a pair \ud800", b"file"]


@pytest.mark.parametrize("given", BAD_DIRECTORIES, ids=repr)
def test_what_names_no_directory(given: Any) -> None:
    nn = pytest.importorskip("torch.nn")
    with pytest.raises(rotoff.OptionError, match="host_directory is .*; give the path of a directory"):
        rotoff.Checkpointable(nn.Linear(2, 2), host_directory=given)

"""What is kept on disk: plans and times, for the next process."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from models import residual, same, train

import rotoff
from rotoff.cache import KEPT, Cache, default_directory
from rotoff.profile.known_times import KnownForm, StageTimes, find_times


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "directory")
    key = {"limit": 5, "options": (1, 2)}
    assert cache.find("plan", key) is None
    cache.keep("plan", key, ["F_all 1", 0.1])
    assert Cache(tmp_path / "new" / "directory").find("plan", key) == ["F_all 1", 0.1]
    assert cache.find("times", key) is None
    assert cache.find("plan", {"limit": 6, "options": (1, 2)}) is None
    assert [p.suffix for p in cache.directory.iterdir()] == [".json"]  # no temporary file is left


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "rotoff.cached", "version": 99}', "\x00\x01"])
def test_a_damaged_file_is_ignored_and_said(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path)
    cache.keep("plan", 1, 2)
    next(tmp_path.iterdir()).write_text(content)
    with caplog.at_level(logging.WARNING, "rotoff"):
        assert cache.find("plan", 1) is None
    assert "ignored" in caplog.text
    cache.keep("plan", 1, 3)
    assert cache.find("plan", 1) == 3


def test_a_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.keep("plan", 1, 2)
    path = next(tmp_path.iterdir())
    path.write_text(path.read_text().replace('"key": 1', '"key": 7'))
    assert cache.find("plan", 1) is None


def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    Cache(tmp_path / "file").keep("plan", 1, 2)
    assert "cannot write to the cache directory" in caplog.text


def test_the_oldest_entries_go(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for n in range(KEPT):
        (tmp_path / f"plan-{n}.json").write_text("{}")
    cache.keep("plan", 1, 2)
    assert len(list(tmp_path.iterdir())) == KEPT
    assert cache.find("plan", 1) == 2


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROTOFF_CACHE", "off")
    assert default_directory() is None
    monkeypatch.setenv("ROTOFF_CACHE", str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.delenv("ROTOFF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "rotoff"


def planned(directory: Path | None) -> rotoff.Checkpointable:
    torch.manual_seed(0)
    model, batch = residual()
    wrapped = rotoff.Checkpointable(model, cache_directory=directory).measure(batch())
    return wrapped.compute_sequence(wrapped.keep_all_memory * 6 // 10, mode="remat")


def test_a_second_model_of_the_same_kind_is_planned_from_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(tmp_path)
    kinds = [path.name.split("-")[0] for path in tmp_path.iterdir()]
    assert sorted(kinds) == ["plan", "times"]
    with caplog.at_level(logging.INFO, "rotoff"), monkeypatch.context() as patch:
        # nothing is timed and nothing is solved
        patch.setattr("rotoff.profile.meter.Meter._times", None)
        patch.setattr("rotoff.runtime.planning.solve", None)
        second = planned(tmp_path)
    assert second.chain == first.chain
    assert second.profile.tail_times == first.profile.tail_times
    assert second.sequence == first.sequence
    assert "times of 6 stages from the cache" in caplog.text
    assert "plan from the cache" in caplog.text
    _, batch = residual()
    plain = residual()[0]
    plain.load_state_dict(second.state_dict())
    assert same(train(second, batch), train(plain, batch))
    second.close()
    first.close()


def test_times_kept_in_an_older_form_are_not_misread(tmp_path: Path) -> None:
    cache, key = Cache(tmp_path), {"stages": ["a"]}
    more = {"link": [1.0, 2.0, True], "copy_bandwidth": None}
    cache.keep("times", key, {"stages": [["a", 3.0, 4.0, [[[0], 5.0]]]], **more})  # as they once were
    assert find_times(cache, key) is None
    cache.keep("times", key, {"stages": [["a", 3.0, 4.0, 0.5, [[[0], 5.0]]]], **more})  # nor without algorithms
    assert find_times(cache, key) is None
    cache.keep("times", key, {"stages": [["a", 3.0, 4.0, 0.5, [[[[0], "native"], 5.0]]]], **more})
    found = find_times(cache, key)
    assert found is not None
    assert found.stages == (StageTimes("a", 3.0, 4.0, 0.5, (KnownForm(((0,), "native"), 5.0),)),)


def test_a_cached_plan_that_the_machine_refuses_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = planned(tmp_path)
    for path in tmp_path.glob("plan-*"):
        entry = json.loads(path.read_text())
        entry["value"]["ops"] = entry["value"]["ops"][:-1]
        path.write_text(json.dumps(entry))
    assert planned(tmp_path).sequence == first.sequence
    assert "a cached plan is ignored" in caplog.text


def test_another_model_or_no_directory_finds_nothing(tmp_path: Path) -> None:
    planned(None)
    assert not list(tmp_path.iterdir())
    planned(tmp_path)
    torch.manual_seed(0)
    model, batch = residual()
    model[1].dropout.p = 0.5
    before = len(list(tmp_path.glob("times-*")))
    rotoff.Checkpointable(model, cache_directory=tmp_path).measure(batch())
    assert len(list(tmp_path.glob("times-*"))) == before + 1

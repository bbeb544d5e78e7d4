"""What is kept on disk: plans and times, for the next process."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import residual, same, train
from torch import nn

import rotoff
from rotoff.io.cache import KEPT, Cache, default_directory
from rotoff.profile.timing import timing_cache as known_times
from rotoff.profile.timing.timing_cache import (
    KnownForm,
    KnownTimes,
    StageTimes,
    TimesChanged,
    check_times,
    find_times,
)
from rotoff.runtime.overhead import UpkeepTimes


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


@pytest.fixture
def _an_even_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that were kept hold, however busy the machine is."""
    monkeypatch.setattr(known_times, "FAR", math.inf)


def planned(directory: Path | None) -> rotoff.Checkpointable:
    torch.manual_seed(0)
    model, batch = residual()
    wrapped = rotoff.Checkpointable(model, cache_directory=directory).measure(batch())
    return wrapped.compute_sequence(wrapped.keep_all_memory * 6 // 10, mode="remat")


@pytest.mark.usefixtures("_an_even_pace")
def test_a_second_model_of_the_same_kind_is_planned_from_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(tmp_path)
    kinds = [path.name.split("-")[0] for path in tmp_path.iterdir()]
    assert sorted(kinds) == ["plan", "times"]
    with caplog.at_level(logging.INFO, "rotoff"), monkeypatch.context() as patch:
        # nothing is timed and nothing is solved
        patch.setattr("rotoff.profile.stage_meter.Meter._times", None)
        patch.setattr("rotoff.planning.request.solve", None)
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
    more: dict[str, Any] = {"link": [1.0, 2.0, True], "copy_bandwidth": None}
    cache.keep("times", key, {"stages": [["a", 3.0, 4.0, [[[0], 5.0]]]], **more})  # as they once were
    assert find_times(cache, key) is None
    cache.keep("times", key, {"stages": [["a", 3.0, 4.0, 0.5, [[[0], 5.0]]]], **more})  # nor without algorithms
    assert find_times(cache, key) is None
    stages = [["a", 3.0, 4.0, 0.5, [[[[0], "native"], 5.0]]]]
    cache.keep("times", key, {"stages": stages, **more})  # nor without what the runtime takes
    assert find_times(cache, key) is None
    more["upkeep"] = UpkeepTimes(1.0, 2.0)._asdict()
    cache.keep("times", key, {"stages": stages, **more})  # nor without whether the device waits for the host
    assert find_times(cache, key) is None
    cache.keep("times", key, {"stages": [[*stages[0], True]], **more})
    found = find_times(cache, key)
    assert found is not None
    assert found.stages == (StageTimes("a", 3.0, 4.0, 0.5, (KnownForm(((0,), "native"), 5.0),), host_bound=True),)
    assert found.upkeep == UpkeepTimes(1.0, 2.0)


def test_times_that_hold_no_longer_are_measured_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where something else ran while they were measured: here they are made ten times as long in the file."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)]), torch.randn(4096, 256)

    def measured() -> rotoff.Chain:
        return rotoff.Checkpointable(model, cache_directory=tmp_path).measure(x).chain

    first = measured()
    (path,) = tmp_path.glob("times-*")
    entry = json.loads(path.read_text())
    for row in entry["value"]["stages"]:
        row[1], row[2] = 10 * row[1], 10 * row[2]
    path.write_text(json.dumps(entry))
    with caplog.at_level(logging.INFO, "rotoff"):
        again = measured()
    assert "times from the cache are not used" in caplog.text
    assert again.compute_time < 5 * first.compute_time
    kept = json.loads(path.read_text())["value"]["stages"]
    assert [row[1] for row in kept] == [stage.forward_time for stage in again.stages]


def test_known_times_are_judged_by_more_than_one_slow_run() -> None:
    known = StageTimes("a", 0.4, 0.6, 0.0, ())
    check_times(known, [1.0, 1.1, 7.0])
    check_times(known, [0.9, 1.0, 1.3])
    with pytest.raises(TimesChanged, match="'a' took 1 s when its times were kept and 1.3 s now"):
        check_times(known, [1.2, 1.3, 1.4])
    with pytest.raises(TimesChanged, match="0.8 s now"):
        check_times(known, [0.7, 0.8, 1.0])
    short = known._replace(forward_time=1e-6, backward_time=1e-6)
    link = (1.0, 1.0, True)
    assert KnownTimes((short, known), link).heaviest is known
    assert KnownTimes((short,), link).heaviest is None
    assert KnownTimes((known,), None, checked=False).heaviest is None


@pytest.mark.usefixtures("_an_even_pace")
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

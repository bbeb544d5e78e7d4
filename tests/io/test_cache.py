"""What is kept on disk: plans and profiles, for the next process."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ALL, fresh, residual, same, train
from torch import nn

import rotoff
from rotoff.errors import OptionError
from rotoff.io import cache as cache_module
from rotoff.io.cache import KEPT, Cache, code_of, default_directory
from rotoff.profile.timing import timing_cache as known_times
from rotoff.profile.timing.timing_cache import (
    KnownTimes,
    StageTimes,
    TimesChanged,
    check_times,
)


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "new" / "directory")
    key = {"limit": 5, "options": (1, 2)}
    assert cache.find("plan", key) is None
    cache.keep("plan", key, ["F_all 1", 0.1])
    assert Cache(tmp_path / "new" / "directory").find("plan", key) == ["F_all 1", 0.1]
    assert cache.find("times", key) is None
    assert cache.find("plan", {"limit": 6, "options": (1, 2)}) is None
    assert [p.suffix for p in cache.directory.iterdir()] == [".json"]  # no temporary file is left


DAMAGED = {
    "empty": "",
    "cut off": "{",
    "list": "[]",
    "of another version": '{"format": "rotoff.cached", "version": 99}',
    "binary": "\x00\x01",
    "nested": "[" * 100_000,
    "nested and whole": "[" * 5000 + "]" * 5000,
    "nested value": '{"format": "rotoff.cached", "version": 1, "key": 1, "value": ' + '{"a":' * 900 + "1" + "}" * 901,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_and_said(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path)
    cache.keep("plan", 1, 2)
    next(tmp_path.iterdir()).write_text(content)
    with caplog.at_level(logging.WARNING, "rotoff"):
        assert cache.find("plan", 1) is None
    assert "ignored" in caplog.text
    cache.keep("plan", 1, 3)
    assert cache.find("plan", 1) == 3


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
    cache.keep("plan", 1, 2)
    (path,) = cache.directory.iterdir()
    path.rename(other)
    other.write_text(content := other.read_text().replace('"value": 2', '"value": [2]') + " ")
    put(path, other)
    with caplog.at_level(logging.WARNING, "rotoff"):
        found = cache.find("plan", 1)
    hard = put is ENTRIES["hard link"]  # a file as any other, as a backup may leave it
    assert (found, "ignored" in caplog.text) == (([2], False) if hard else (None, True))
    cache.keep("plan", 1, 3)
    assert cache.find("plan", 1) == 3
    assert other.read_text() == content
    assert not path.is_symlink()
    assert [one.name for one in cache.directory.iterdir()] == [path.name]
    assert (path.stat().st_mode, cache.directory.stat().st_mode) == (stat.S_IFREG | 0o600, stat.S_IFDIR | 0o700)


def test_a_directory_where_an_entry_should_be_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path)
    cache.keep("plan", 1, 2)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.WARNING, "rotoff"):
        assert cache.find("plan", 1) is None
        cache.keep("plan", 1, 3)
    assert [one.levelname for one in caplog.records] == ["WARNING", "WARNING"]


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


def test_a_file_of_another_key_is_not_taken(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.keep("plan", 1, 2)
    path = next(tmp_path.iterdir())
    path.write_text(path.read_text().replace('"key": 1', '"key": 7'))
    assert cache.find("plan", 1) is None


def test_other_code_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, cache = tmp_path / "package", Cache(tmp_path / "cache")
    (package / "within").mkdir(parents=True)
    monkeypatch.setattr(cache_module, "PACKAGE", package)
    for name, content in (("within/a.py", "1"), ("within/a.py", "2"), ("b.so", "12"), ("b.so", "123")):
        code_of.cache_clear()
        (package / name).write_text(content)
        assert cache.find("sequence", {"a": 1}) is None
        cache.keep("sequence", {"a": 1}, content)
        assert cache.find("sequence", {"a": 1}) == content


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
    monkeypatch.setattr(known_times, "TOLERANCE", math.inf)


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
    assert sorted(kinds) == ["plan", "profile"]
    with caplog.at_level(logging.INFO, "rotoff"), monkeypatch.context() as patch:
        # nothing is measured and nothing is solved
        patch.setattr("rotoff.profile.stage_meter.Meter.stage", None)
        patch.setattr("rotoff.planning.request.solve", None)
        second = planned(tmp_path)
    assert second.chain == first.chain
    assert second.sequence == first.sequence
    assert re.search(r"bytes and times of 6 stages \(\S+ to \S+\) from the cache", caplog.text)
    assert "plan from the cache" in caplog.text
    _, batch = residual()
    plain = residual()[0]
    plain.load_state_dict(second.state_dict())
    assert same(train(second, batch), train(plain, batch))
    second.close()
    first.close()


@pytest.mark.parametrize("name", [name for name in ALL if name != "stateful"])  # which has a function of its own
@pytest.mark.grid
def test_a_profile_from_the_cache_is_the_measured_one(name: str, tmp_path: Path) -> None:
    """In all of its fields, of another instance of the model, and as good to train by."""
    model, batch = fresh(name)
    x, plain = batch(), copy.deepcopy(model)
    first = rotoff.Checkpointable(copy.deepcopy(model), cache_directory=tmp_path).measure(x)
    wrapped = rotoff.Checkpointable(model, cache_directory=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotoff.profile.stage_meter.Meter.stage", None)
        wrapped.measure(x)
    ours, theirs = (vars(one.profile) for one in (wrapped, first))
    for field in ours.keys() - {"prefix", "stages", "behaviours"}:
        assert ours[field] == theirs[field]
    for one, other in zip(ours["behaviours"], theirs["behaviours"], strict=True):
        for field in vars(one).keys() - {"modes", "changed_buffers", "changed_attributes"}:
            assert getattr(one, field) == getattr(other, field)
        for a, b in zip(one.forms, other.forms, strict=True):
            assert (a.views, a.results) == (b.views, b.results)
    wrapped.compute_sequence(wrapped.min_mem_limit() + 4096)
    assert same(train(wrapped, batch), train(plain, batch))
    wrapped.close()
    first.close()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class WithFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)


def test_bytes_of_code_that_is_not_pytorchs_are_measured_in_each_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), WithFunction(), nn.Linear(8, 2)), torch.randn(4, 8)
    for _ in range(2):
        with caplog.at_level(logging.INFO, "rotoff"):
            rotoff.Checkpointable(model, cache_directory=tmp_path).measure(x)
    assert "profile of" not in caplog.text
    assert "times of" in caplog.text


def test_a_profile_that_was_kept_otherwise_is_not_misread(tmp_path: Path) -> None:
    chain = planned(tmp_path).chain
    (path,) = tmp_path.glob("profile-*")
    whole = path.read_text()
    for there, instead in [
        ('"stages": ["', '"stages": ["x'),
        ('"prefix": 0', '"prefix": 1'),
        ('{"SavedKind": "own"}', '{"SavedKind": "mine"}'),
        ('{"dtype": "float32"}', '{"dtype": "nn"}'),
        ('{"operation": "aten.', '{"operation": "none.'),
        ('{"Recipe": [', '{"Recipe": [0, '),
        ('{"Compact": ', '{"Other": '),
        ('"profile": {"Profile": [', '"profile": {"list": ['),
    ]:
        if there not in whole:
            assert there.startswith('{"Compact"')
            continue
        path.write_text(whole.replace(there, instead))
        assert [one.saved_bytes for one in planned(tmp_path).chain.stages] == [one.saved_bytes for one in chain.stages]
        assert instead not in path.read_text()  # measured, and kept again


@pytest.mark.parametrize("wrong", [None, -1, 10**400, "x", [], [[]], {"dtype": "float16"}, {"module": 99}], ids=repr)
def test_a_profile_with_another_value_is_not_taken(tmp_path: Path, wrong: Any) -> None:
    """Each place of it in turn, a few for each wrong value."""
    first = planned(tmp_path)
    (path,) = tmp_path.glob("profile-*")
    entry = json.loads(path.read_text())
    places = list(places_in(entry["value"]["profile"]))
    for place in places[len(repr(wrong)) :: len(places) // 3]:
        damaged = json.loads(json.dumps(entry))
        at = damaged["value"]["profile"]
        for key in place[:-1]:
            at = at[key]
        if at[place[-1]] == wrong:
            continue
        at[place[-1]] = wrong
        path.write_text(json.dumps(damaged))
        again = planned(tmp_path)
        assert [one.saved_bytes for one in again.chain.stages] == [one.saved_bytes for one in first.chain.stages]


def places_in(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each value within JSON."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        yield (key,)
        yield from ((key, *rest) for rest in places_in(one))


@pytest.mark.slow
def test_times_that_hold_no_longer_are_measured_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where something else ran while they were measured: here they are made ten times as long in the file. Where
    stages run all the same, one of them is looked at."""
    monkeypatch.setattr("rotoff.planning.course_meter.KNOWN_WHOLE", frozenset())
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)]), torch.randn(4096, 256)

    def measured() -> rotoff.Chain:
        return rotoff.Checkpointable(model, cache_directory=tmp_path).measure(x).chain

    first = measured()
    (path,) = tmp_path.glob("profile-*")

    def rows(entry: Any) -> Any:
        """Of each stage its name, the seconds of its forward and its backward, and more."""
        return [one["Stage"] for one in entry["value"]["profile"]["Profile"][1]["Chain"][0]]

    entry = json.loads(path.read_text())
    for row in rows(entry):
        row[1], row[2] = 10 * row[1], 10 * row[2]
    path.write_text(json.dumps(entry))
    with caplog.at_level(logging.INFO, "rotoff"):
        again = measured()
    assert "times from the cache are not used" in caplog.text
    assert again.compute_time < 5 * first.compute_time
    assert [row[1] for row in rows(json.loads(path.read_text()))] == [stage.forward_time for stage in again.stages]


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
    before = len(list(tmp_path.glob("profile-*")))
    rotoff.Checkpointable(model, cache_directory=tmp_path).measure(batch())
    assert len(list(tmp_path.glob("profile-*"))) == before + 1

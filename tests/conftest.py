"""Settings for all tests: hypothesis profiles, threads, and the skip of what needs a CUDA device."""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import pytest
from known_faults import KNOWN_FAULTS

# Of the processes that tests start, too: where each has a thread for every core, they wait for each other most of the
# time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests that compare bits on CUDA ask for deterministic algorithms, and cuBLAS has them only so. Read when torch first
# uses it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the tests for CUDA do without it
    pass
else:
    # The same examples on every run unless asked otherwise, so that a red run is red again for whoever looks into it:
    # HYPOTHESIS_PROFILE=explore searches anew. No deadline: the first call of a kernel or of torch is slow.
    _COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("default", derandomize=True, max_examples=9, **_COMMON)
    settings.register_profile("thorough", derandomize=True, max_examples=100, **_COMMON)
    settings.register_profile("explore", max_examples=1000, **_COMMON)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

try:
    import torch
except ImportError:  # planning is tested without it
    torch = None  # type: ignore[assignment]
else:
    torch.set_num_threads(1)


LITTLE = 0.01  # of the search's default effort


def pytest_report_header() -> list[str]:
    import rotoff

    return [
        f"rotoff {rotoff.__version__} from {os.path.dirname(rotoff.__file__)}, torch {torch and torch.__version__}",
        f"search: {LITTLE:.0%} of the default effort (fixture little_effort), all of it in tests marked full_search",
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    grids: set[object] = set()
    for item in items:
        if (mark := item.get_closest_marker("grid")) is None:
            continue
        first, part = item.function not in grids, crc32(item.name.encode()) % mark.kwargs.get("every", 6)
        grids.add(item.function)
        if part and not first:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if (reason := KNOWN_FAULTS.get(name)) is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    if torch is not None and torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What would begin after the time that ROTOFF_TESTS_END says (seconds since 1970) fails at once, so that results
    are written."""
    end = os.environ.get("ROTOFF_TESTS_END")
    if end is not None and time.time() > float(end):
        pytest.fail("the time that this run was given is over", pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def _old_objects_apart() -> None:
    """Collections, which tests of leaks ask for again and again, need not look through all that was imported before:
    seconds each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Convolutions on CUDA give the same bits each time."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        yield


@pytest.fixture(scope="session", autouse=True)
def _interrupts() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and some tests send it to themselves."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def little_effort(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test uses it (pyproject.toml). The search has a hundredth of its default effort, since any plan within the
    limit will do, unless the test is marked `full_search`; a link's bandwidth is timed once in a process, unless it is
    marked `full_timing`: that takes four times as long as all else of measuring a small model."""
    from rotoff.solver import anneal

    if request.node.get_closest_marker("full_search") is None:
        monkeypatch.setattr(anneal, "DEFAULT_SECONDS", LITTLE * anneal.DEFAULT_SECONDS)
    if torch is not None and request.node.get_closest_marker("full_timing") is None:
        from rotoff.runtime.links import pool

        monkeypatch.setattr(pool, "measure_bandwidth", functools.partial(timed_once, pool.measure_bandwidth))


RATES: dict[tuple[type, int], tuple[float, float]] = {}


def timed_once(measure: Any, link: Any, nbytes: int, **options: Any) -> tuple[float, float]:
    if (key := (type(link), nbytes)) not in RATES:
        RATES[key] = measure(link, nbytes, **options)
    return RATES[key]

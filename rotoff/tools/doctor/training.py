"""Checks of training under a limit: bytes and seconds against the predicted ones, gradients, waits and overlap."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ...core.sequence import COMPUTES
from ...core.simulator import Trace
from ...core.sizes import format_bytes
from ...runtime.links.cuda import CudaStreams
from .findings import ATTENTION, FAILED, OK, Finding
from .model import SmallModel

SHARES = (1.0, 0.7, 0.45)  # of the bytes between the smallest limit and keeping everything
ROUNDING = 1e-4  # largest difference / largest element of a gradient that another order of summation may cause
OFF = 0.15  # relative error of the predicted ratio to plain steps; a quiet machine is within a few percent
LOOSE = 1.25  # predicted bytes / measured bytes
LATE = 0.2  # share of the copies' time by which less may be hidden than predicted
PAIRS = 3  # least pairs of steps in each row
SLEEP = 2_000_000  # cycles before a late copy: about a millisecond
STEPS = 10  # times `ROUNDING` that parameters may differ after three steps on a GPU
REPORT = "and send the file"


def measured(small: SmallModel) -> Finding:
    """Cut the model into stages and measure it."""
    start = time.perf_counter()
    planned = small.planned
    seconds = time.perf_counter() - start
    least, most = planned.min_mem_limit(), planned.keep_all_memory
    chain = planned.chain
    link = {"d2h": chain.d2h_bandwidth, "h2d": chain.h2d_bandwidth, "duplex": chain.duplex}
    figures = {
        "size": vars(small.size),
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "stages": len(planned.chain),
        "smallest_limit": least,
        "keep_all_bytes": most,
        "keep_all_time": planned.profile.chain.compute_time,
        "bandwidth": link,
    }
    said = (
        f"{len(planned.chain)} stages measured in {seconds:.1f} s; a step takes {format_bytes(most)}, at the least"
        f" {format_bytes(least)}"
    )
    return Finding(OK, said, figures)


def gradients(small: SmallModel) -> Finding:
    """Compare gradients of planned steps with a plain step's: equal bit for bit on a CPU, up to rounding on a GPU."""
    exact = small.device.type == "cpu"
    plain = small.gradients(small.model)
    rows = [{"limit": None, **difference(small.gradients(small.model), plain)}]  # whether plain steps are repeatable
    for share in SHARES:
        limit = small.plan(share)
        rows.append({"share": share, "limit": limit, **difference(small.gradients(small.planned), plain)})
    figures = {"rows": rows}

    def wrong(row: dict[str, Any]) -> bool:
        far = row["largest"] is None or row["largest"] > ROUNDING
        return far or (exact and not row["bit_for_bit"])

    if wrong(rows[0]):
        what = "a plain step repeated from the same seed has other gradients, so no step can be repeated here"
        return Finding(FAILED, f"{what}; look for faulty memory or a broken build of torch", figures)
    if bad := [row for row in rows[1:] if wrong(row)]:
        limits = ", ".join(f"{row['share']:.0%}" for row in bad)
        return Finding(
            FAILED, f"not those of a plain step at limits {limits}; do not train with rotoff here, {REPORT}", figures
        )
    if all(row["bit_for_bit"] for row in rows[1:]):
        return Finding(OK, f"those of a plain step bit for bit, at {len(SHARES)} limits", figures)
    worst = max(row["largest"] for row in rows[1:])
    return Finding(OK, f"those of a plain step to {worst:.1e} of the largest element, at {len(SHARES)} limits", figures)


def difference(found: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> dict[str, Any]:
    """bit_for_bit: whether all gradients are equal. largest: the largest difference of an element, relative to the
    largest element of its gradient; None if that is not finite."""
    pairs = list(zip(found, plain, strict=True))
    far = [float((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(b.dtype).tiny)) for a, b in pairs]
    finite = all(value < float("inf") for value in far)
    return {"bit_for_bit": all(torch.equal(a, b) for a, b in pairs), "largest": max(far) if finite else None}


def odd_steps(small: SmallModel) -> Finding:
    """Compare gradients of planned steps with plain ones where copies come late (CUDA), under bfloat16 autocast, and
    where a block of the model is skipped."""
    cpu = small.device.type == "cpu"
    kinds: dict[str, Callable[[], AbstractContextManager[Any]]] = {} if cpu else {"late copies": late_copies}
    kinds["bfloat16"] = partial(torch.autocast, small.device.type, torch.bfloat16)
    kinds["a skipped block"] = small.off_course
    rows = []
    for kind, within in kinds.items():
        with within() if kind == "bfloat16" else nullcontext():  # whose step takes other bytes
            small.planned.measure(small.batch)
            limit = small.plan(SHARES[-1], "offload")
        with within():
            plain = small.gradients(small.model)
            rows.append({"kind": kind, "limit": limit, **difference(small.gradients(small.planned), plain)})
    small.planned.measure(small.batch)

    def wrong(row: dict[str, Any]) -> bool:
        most = ROUNDING * (100 if row["kind"] == "bfloat16" else 1)
        return row["largest"] is None or row["largest"] > most or (cpu and not row["bit_for_bit"])

    bad = [row["kind"] for row in rows if wrong(row)]
    if bad:
        said = f"other gradients than a plain step's with {', '.join(bad)}; do not train with rotoff here, {REPORT}"
        return Finding(FAILED, said, {"rows": rows})
    return Finding(OK, f"gradients of a plain step with {', '.join(kinds)}", {"rows": rows})


@contextmanager
def late_copies() -> Iterator[None]:
    """A sleep kernel before each copy of a CUDA link, so that a wait that is left out shows in the bytes."""
    copy = CudaStreams.copy

    def late(self: CudaStreams, stream: Any, pairs: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP)
        copy(self, stream, pairs)

    CudaStreams.copy = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaStreams.copy = copy  # type: ignore[method-assign]


def optimizer_steps(small: SmallModel) -> Finding:
    """Compare three AdamW steps under a `device_limit`, with updates after the backward and during it, with plain
    ones, and their seconds with the predicted ones."""
    plain, own = small.trained(None)
    rows: list[dict[str, Any]] = [own]
    for updates in ("after", "during"):
        found, figures = small.trained(updates)
        rows.append(figures | difference(found, plain))
    steps = ", ".join(f"{1e3 * row['step']:.0f} of {1e3 * row['predicted']:.0f} ms" for row in rows[1:])
    update = f"{1e3 * own['update']:.1f} of {1e3 * rows[1]['predicted_update']:.1f} ms"
    if any(row["largest"] is None or row["largest"] > STEPS * ROUNDING for row in rows[1:]):
        return Finding(
            FAILED, f"other parameters than after plain steps; do not train with rotoff here, {REPORT}", {"rows": rows}
        )
    said = f"parameters of plain steps; measured of predicted: steps {steps}, the updates of a plain step {update}"
    return Finding(OK, said, {"rows": rows})


def peak_bytes(small: SmallModel) -> Finding:
    """Compare the measured peak of a step with the limit and the prediction."""
    rows = []
    for share in SHARES:
        limit = small.plan(share)
        small.step(small.planned)
        row = {"share": share, "limit": limit, "predicted": small.planned.get_expected_memory()}
        rows.append(row | small.peak(small.planned))
    figures = {"rows": rows}
    said = ", ".join(f"{format_bytes(row['asked'])} of {format_bytes(row['predicted'])}" for row in rows)
    said = f"measured of predicted: {said}"
    if any(row["asked"] > row["limit"] for row in rows):
        return Finding(FAILED, f"{said}; a step exceeds its limit: lower limits by the difference, {REPORT}", figures)
    if any(row["asked"] > row["predicted"] or row["predicted"] > LOOSE * row["asked"] for row in rows):
        return Finding(
            ATTENTION, f"{said}; within the limits, but not as predicted: plans are not the best, {REPORT}", figures
        )
    over = max(row.get("given", 0) - row["limit"] for row in rows)
    if over > 0:
        cure = "PYTORCH_ALLOC_CONF=expandable_segments:True ends that"
        said += f"; the allocator leaves up to 1 MiB of a block unsplit, {format_bytes(over)} above a limit ({cure})"
    if retries := sum(row.get("retries", 0) for row in rows):
        return Finding(ATTENTION, f"{said}; the allocator ran out {retries} times and emptied its cache", figures)
    if any(row.get("given", 0) > row["limit"] + row.get("slack", 0) for row in rows):
        return Finding(ATTENTION, f"{said}, which is more than it leaves unsplit; {REPORT}", figures)
    return Finding(OK, said, figures)


def step_time(small: SmallModel) -> Finding:
    """Compare times of planned steps with alternating plain ones and with the prediction."""
    rows = []
    for share in SHARES:
        limit = small.plan(share)
        pairs: list[tuple[float, float]] = []
        start = time.perf_counter()
        while len(pairs) < 1 + PAIRS or time.perf_counter() - start < small.seconds:
            order = (small.model, small.planned) if len(pairs) % 2 else (small.planned, small.model)
            seconds = {id(run): small.timed(run) for run in order}
            pairs.append((seconds[id(small.model)], seconds[id(small.planned)]))
        del pairs[0]  # a warm-up
        predicted = small.planned.get_expected_makespan()
        ratio = statistics.median(ours / plain for plain, ours in pairs)
        expected = predicted / small.planned.profile.chain.compute_time
        rows.append(
            {
                "share": share,
                "limit": limit,
                "predicted": predicted,
                "measured": statistics.median(ours for _, ours in pairs),
                "plain": statistics.median(plain for plain, _ in pairs),
                "predicted_ratio": expected,
                "measured_ratio": ratio,
                "ratio_error": ratio / expected - 1,
                "pairs": len(pairs),
            }
        )
    figures = {"rows": rows, "load": os.getloadavg()[0]}
    said = ", ".join(f"{row['measured_ratio']:.2f} of {row['predicted_ratio']:.2f}" for row in rows)
    said = f"times a plain step, measured of predicted: {said}; a plain step takes {1e3 * rows[0]['plain']:.0f} ms"
    if max(abs(row["ratio_error"]) for row in rows) > OFF:
        cure = f"end other work on this machine (the load is {figures['load']:.1f}) and run this again"
        return Finding(
            ATTENTION, f"{said}; that is more than {OFF:.0%} off: {cure}; if it stays so, send the file", figures
        )
    return Finding(OK, said, figures)


def host_waits(small: SmallModel) -> Finding:
    """Count how often a planned step makes the host wait for the device."""
    if small.device.type == "cpu":
        return Finding(OK, "none possible on a CPU, which is its own host")
    rows: list[dict[str, Any]] = []
    for mode, run in ((None, small.model), ("joint", small.planned), ("offload", small.planned)):
        if mode is not None:
            small.plan(SHARES[-1], mode)
        small.step(run)
        with synchronisations(small.device) as places:
            run(small.batch).backward()
        rows.append({"mode": mode, "waits": len(places), "places": sorted(set(places))[:5]})
    figures = {"rows": rows}
    own = rows[0]["waits"]
    more = max(row["waits"] for row in rows[1:]) - own
    if more > 0:
        where = next(row["places"] for row in rows[1:] if row["waits"] - own == more)
        return Finding(
            ATTENTION,
            f"{more} more than in a plain step, at {', '.join(where)}; steps are slower for it: send the file",
            figures,
        )
    return Finding(OK, f"as many as in a plain step: {own}", figures)


@contextmanager
def synchronisations(device: torch.device) -> Iterator[list[str]]:
    """File and line of each wait of the host for the device within the block; torch detects most of them."""
    places: list[str] = []
    torch.cuda.synchronize(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
            said = [warning for warning in caught if "called a synchronizing CUDA operation" in str(warning.message)]
            places += [f"{warning.filename}:{warning.lineno}" for warning in said]


def overlap(small: SmallModel) -> Finding:
    """Measure the share of the copies' time that is hidden behind compute, in a plan that only offloads."""
    limit = small.plan(0.5, "offload")
    shares = []
    for _ in range(1 + PAIRS):
        with small.planned.record_step() as recorded:
            small.step(small.planned)
        trace = recorded.trace
        shares.append(hidden(trace))
    assert recorded.predicted is not None
    predicted, found, best = hidden(recorded.predicted), statistics.median(shares[1:]), max(shares[1:])
    moved = trace.d2h_bytes + trace.h2d_bytes
    figures = {"limit": limit, "moved": moved, "predicted": predicted, "measured": found, "best": best}
    said = (
        f"{found:.0%} of the copies' time is hidden behind compute ({best:.0%} in the best of {PAIRS} steps),"
        f" {predicted:.0%} predicted"
    )
    if best < predicted - LATE:
        cure = "other copies or a busy processor interfere, or the link is slower than when it was measured"
        return Finding(ATTENTION, f"{said}; {cure}: run this again on a quiet machine", figures)
    return Finding(OK, said, figures)


def hidden(trace: Trace) -> float:
    """The share of the copies' time in which operations compute; 1 if nothing is copied."""
    work = [(e.start, e.end) for e in trace.events if e.lane == "compute" and e.op.kind in COMPUTES]
    copies = [(e.start, e.end) for e in trace.events if e.lane != "compute"]
    total = sum(end - start for start, end in copies)
    return sum(_common(copy, work) for copy in copies) / total if total else 1.0


def _common(copy: tuple[float, float], work: Iterable[tuple[float, float]]) -> float:
    """Seconds of `copy` within `work`, whose spans do not overlap."""
    return sum(max(0.0, min(copy[1], end) - max(copy[0], start)) for start, end in work)

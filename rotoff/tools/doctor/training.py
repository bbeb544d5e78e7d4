"""Checks of training under a limit: bytes and seconds against the predicted ones, gradients, waits and overlap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ...accelerator import is_accelerator, noting_waits, sleep_on
from ...core.sequence import COMPUTES
from ...core.simulator import Trace
from ...core.sizes import format_bytes
from ...report.expected_step import keep_all_step
from ...runtime.links.cuda import CudaStreams
from .findings import ATTENTION, FAILED, Finding, judged
from .model import PAIRS, SHARES, SmallModel, difference

ROUNDING = 1e-4  # largest difference / largest element of a gradient that another order of summation may cause
OFF = 0.15  # relative error of the predicted ratio to plain steps; a quiet machine is within a few percent
LOOSE = 1.25  # predicted bytes / measured bytes
LATE = 0.2  # share of the copies' time by which less may be hidden than predicted
SLEEP = 2_000_000  # cycles before a late copy: about a millisecond
STEPS = 10  # times `ROUNDING` that parameters may differ after three steps on a GPU
WRONG = "do not train with rotoff here, and send the file"
Rows = list[dict[str, Any]]


def small_model(small: SmallModel) -> Finding:
    """Cut the model into stages and measure it."""
    start = time.perf_counter()
    planned = small.planned
    seconds, chain = time.perf_counter() - start, planned.chain
    least, most = planned.min_mem_limit(), planned.keep_all_memory
    figures = {
        "size": vars(small.size),
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "stages": len(chain),
        "smallest_limit": least,
        "keep_all_bytes": most,
        "keep_all_time": keep_all_step(chain).makespan,
        "bandwidth": {"d2h": chain.d2h_bandwidth, "h2d": chain.h2d_bandwidth, "duplex": chain.duplex},
    }
    sizes = f"a step takes {format_bytes(most)}, at the least {format_bytes(least)}"
    return judged(figures, f"{len(chain)} stages measured in {seconds:.1f} s; {sizes}")


def _differs(row: dict[str, Any], most: float, exact: bool) -> bool:
    """Whether a row of `difference` is beyond rounding, or if it must be exact, beyond equal."""
    return row["largest"] is None or row["largest"] > most or (exact and not row["bit_for_bit"])


def gradients(small: SmallModel) -> Finding:
    """Compare gradients of planned steps with a plain step's: equal bit for bit on a CPU, up to rounding on a GPU."""
    rows: Rows = [{"limit": None, **small.repeated}]
    rows += [row["gradients"] for row in small.steps]
    bad = [row for row in rows if _differs(row, ROUNDING, not is_accelerator(small.device))]
    limits = ", ".join(f"{row['share']:.0%}" for row in bad if "share" in row)
    close = "bit for bit"
    if not bad and not all(row["bit_for_bit"] for row in rows[1:]):
        close = f"to {max(row['largest'] for row in rows[1:]):.1e} of the largest element"
    noise = "a plain step repeated from the same seed has other gradients, so no step can be repeated here"
    return judged(
        {"rows": rows},
        "compared with a plain step's" if bad else f"those of a plain step {close}, at {len(SHARES)} limits",
        (rows[0] in bad, FAILED, f"{noise}; look for faulty memory or a broken build of torch"),
        (bad, FAILED, f"not the same at limits {limits}; {WRONG}"),
    )


def odd_steps(small: SmallModel) -> Finding:
    """Compare gradients of planned steps with plain ones where copies come late (CUDA), under bfloat16 autocast, and
    where a block of the model is skipped."""
    cpu = not is_accelerator(small.device)
    kinds: dict[str, Callable[[], AbstractContextManager[Any]]] = {} if cpu else {"late copies": late_copies}
    kinds["bfloat16"] = partial(torch.autocast, small.device.type, torch.bfloat16)
    kinds["a skipped block"] = small.off_course
    rows: Rows = []
    for kind, within in kinds.items():
        with within() if kind == "bfloat16" else nullcontext():  # whose step takes other bytes
            small.planned.measure(small.batch)
            limit = small.plan(SHARES[-1], "offload")
        with within():
            plain = small.gradients(small.model)
            rows.append({"kind": kind, "limit": limit, **difference(small.gradients(small.planned), plain)})
    small.planned.measure(small.batch)
    bad = [r["kind"] for r in rows if _differs(r, ROUNDING * (100 if r["kind"] == "bfloat16" else 1), cpu)]
    said = f"gradients of a plain step with {', '.join(kinds)}"
    return judged({"rows": rows}, said, (bad, FAILED, f"not the same with {', '.join(bad)}; {WRONG}"))


@contextmanager
def late_copies() -> Iterator[None]:
    """A sleep kernel before each copy of a CUDA link, so that a wait that is left out shows in the bytes."""
    copy = CudaStreams.copy

    def late(self: CudaStreams, stream: Any, pairs: Any) -> None:
        sleep_on(stream, self.device, SLEEP)
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
    rows: Rows = [own]
    for updates in ("after", "during"):
        found, figures = small.trained(updates)
        rows.append(figures | difference(found, plain))
    steps = ", ".join(f"{1e3 * row['step']:.0f} of {1e3 * row['predicted']:.0f} ms" for row in rows[1:])
    update = f"{1e3 * own['update']:.1f} of {1e3 * rows[1]['predicted_update']:.1f} ms"
    said = f"parameters of plain steps; measured of predicted: steps {steps}, the updates of a plain step {update}"
    bad = any(_differs(row, STEPS * ROUNDING, False) for row in rows[1:])
    return judged({"rows": rows}, said, (bad, FAILED, f"not the same parameters; {WRONG}"))


def peak_bytes(small: SmallModel) -> Finding:
    """Compare the measured peak of a step with the limit and the prediction."""
    rows = [row["peak"] for row in small.steps]
    said = ", ".join(f"{format_bytes(row['asked'])} of {format_bytes(row['predicted'])}" for row in rows)
    said = f"measured of predicted: {said}"
    exceeds = any(row["asked"] > row["limit"] for row in rows)
    loose = any(row["asked"] > row["predicted"] or row["predicted"] > LOOSE * row["asked"] for row in rows)
    over = max(row.get("given", 0) - row["limit"] for row in rows)
    if over > 0 and not exceeds and not loose:
        cure = "PYTORCH_ALLOC_CONF=expandable_segments:True ends that"
        said += f"; the allocator leaves up to 1 MiB of a block unsplit, {format_bytes(over)} above a limit ({cure})"
    retries = sum(row.get("retries", 0) for row in rows)
    beyond = any(row.get("given", 0) > row["limit"] + row.get("slack", 0) for row in rows)
    return judged(
        {"rows": rows},
        said,
        (exceeds, FAILED, "a step exceeds its limit: lower limits by the difference, and send the file"),
        (loose, ATTENTION, "within the limits, but not as predicted: plans are not the best; send the file"),
        (retries, ATTENTION, f"the allocator ran out {retries} times and emptied its cache"),
        (beyond, ATTENTION, "that is more than it leaves unsplit; send the file"),
    )


def step_time(small: SmallModel) -> Finding:
    """Compare times of planned steps with alternating plain ones and with the prediction."""
    rows = [row["time"] for row in small.steps]
    said = ", ".join(f"{row['measured_ratio']:.2f} of {row['predicted_ratio']:.2f}" for row in rows)
    said = f"times a plain step, measured of predicted: {said}; a plain step takes {1e3 * rows[0]['plain']:.0f} ms"
    cure = f"end other work on this machine (the load is {rows[-1]['load']:.1f}) and run this again"
    off = max(abs(row["ratio_error"]) for row in rows) > OFF
    return judged(
        {"rows": rows},
        said,
        (off, ATTENTION, f"that is more than {OFF:.0%} off: {cure}; if it stays so, send the file"),
    )


def host_waits(small: SmallModel) -> Finding:
    """Count how often a planned step makes the host wait for the device."""
    if not is_accelerator(small.device):
        return judged({}, "none possible on a CPU, which is its own host")
    rows: Rows = []
    for mode, run in ((None, small.model), ("joint", small.planned), ("offload", small.planned)):
        if mode is not None:
            small.plan(SHARES[-1], mode)
        small.step(run)
        with noting_waits(small.device) as places:
            run(small.batch).backward()
        rows.append({"mode": mode, "waits": len(places), "places": sorted(set(places))[:5]})
    own, worst = rows[0]["waits"], max(rows[1:], key=lambda row: row["waits"])
    more = f"{worst['waits'] - own} more than in a plain step, at {', '.join(worst['places'])}"
    slower = f"{more}; steps are slower for it: send the file"
    return judged({"rows": rows}, f"{own} in a plain step", (worst["waits"] > own, ATTENTION, slower))


def overlap(small: SmallModel) -> Finding:
    """Measure the share of the copies' time that is hidden behind compute, in a plan that only offloads."""
    limit, shares = small.plan(0.5, "offload"), []
    small.step(small.planned)  # which may leave its course, and shows how steps are to be followed
    for _ in range(PAIRS):
        with small.planned.record_step() as recorded:
            small.step(small.planned)
        shares.append(hidden(recorded.trace))
    assert recorded.predicted is not None
    predicted, found, best = hidden(recorded.predicted), statistics.median(shares), max(shares)
    moved = recorded.trace.d2h_bytes + recorded.trace.h2d_bytes
    figures = {"limit": limit, "moved": moved, "predicted": predicted, "measured": found, "best": best}
    said = (
        f"{found:.0%} of the copies' time is hidden behind compute ({best:.0%} in the best of {PAIRS} steps),"
        f" {predicted:.0%} predicted"
    )
    why = "other copies or a busy processor interfere, or the link is slower than when it was measured"
    return judged(figures, said, (best < predicted - LATE, ATTENTION, f"{why}: run this again on a quiet machine"))


def hidden(trace: Trace) -> float:
    """The share of the copies' time in which operations compute; 1 if nothing is copied."""
    work = [(e.start, e.end) for e in trace.events if e.lane == "compute" and e.op.kind in COMPUTES]
    copies = [(e.start, e.end) for e in trace.events if e.lane != "compute"]
    total = sum(end - start for start, end in copies)
    return sum(_common(copy, work) for copy in copies) / total if total else 1.0


def _common(copy: tuple[float, float], work: Iterable[tuple[float, float]]) -> float:
    """Seconds of `copy` within `work`, whose spans do not overlap."""
    return sum(max(0.0, min(copy[1], end) - max(copy[0], start)) for start, end in work)

"""The checks of `rotoff doctor`: whether all that training under a memory limit needs works on this machine, and how
well. `CHECKS` lists them."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..accelerator import described, finish, is_accelerator, memory_of, peaks
from ..checkpointable import Checkpointable
from ..core.figures import Figures
from ..core.sizes import format_bytes
from ..errors import InfeasibleError
from ..profile.allocations import logged, peak_of
from ..runtime.links.pinned import available_bytes, meminfo, pin
from ..tensors.torch_settings import bytes_by_default
from ..version import __version__

OK, ATTENTION, FAILED = VERDICTS = ("ok", "attention", "failed")  # from best to worst
TESTED = ((2, 11), (2, 15))  # the oldest and the newest torch that the tests ran with
HELD = 0.25  # share of a device's memory: if other processes hold more, the check says so
LITTLE = 4 << 30  # free bytes of the host: with less, plans for a GPU can offload very little
SLOW_LINK = (
    "the link is slow for a GPU: see that it sits in a slot of 16 lanes (nvidia-smi -q -d PCIE) and nothing else copies"
)
SLOW = 5e9  # B/s to or from a GPU: about half of PCIe 3 with 16 lanes
SEED = 1
SHARES = (1.0, 0.7, 0.45)  # of the bytes between the smallest limit and keeping everything
PAIRS = 8  # of timed steps at each
ROUNDING = 1e-4  # largest difference / largest element of a gradient that another order of summation may cause
STEPS = 10  # times `ROUNDING` that parameters may differ after three steps
OFF = 0.15  # relative error of the predicted ratio to plain steps; a quiet machine is within a few percent
LOOSE = 1.25  # predicted bytes / measured bytes
UNREGISTERED = (
    "the driver registers no pages of the process, so PyTorch's own allocator pins them, in powers of two; plan with a"
    " host_limit of half of the host's memory"
)
WRONG = "do not train with rotoff here, and send the file"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    verdict: one of `VERDICTS`. sentence: what was found, and what to do if that is not ok. figures: JSON values; bytes,
    seconds, bytes per second. error: the traceback of an exception in the check. check, seconds: its name and duration.
    """

    verdict: str
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    check: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.verdict:<9}  {self.check}: {self.sentence}"


@dataclass
class Report:
    """The findings so far on one device."""

    device: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The worst verdict; "failed" as long as not every check has run."""
        if len(self.findings) < len(CHECKS):
            return FAILED
        return max((finding.verdict for finding in self.findings), key=VERDICTS.index)

    def conclusion(self, path: str) -> str:
        """What to do, in a line: ``WORKS``, ``WORKS (but see CHECKS)`` or ``DO NOT USE (send path)``."""
        if self.verdict == FAILED:
            return f"DO NOT USE (send {path})"
        notes = [finding.check for finding in self.findings if finding.verdict == ATTENTION]
        return f"WORKS (but see {', '.join(notes)})" if notes else "WORKS"

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON, in the format of docs/command-line.md."""
        said = {"rotoff": __version__, "device": self.device, "verdict": self.verdict}
        return {"format": "rotoff.doctor", "version": 4, **said, "checks": [asdict(one) for one in self.findings]}


def judged(figures: dict[str, Any], said: str, *rules: tuple[object, str, str]) -> Finding:
    """The finding `said`, with the verdict and the words of the first of `rules` that holds: (whether, verdict, words).
    Without one it is ok."""
    for holds, verdict, more in rules:
        if holds:
            return Finding(verdict, f"{said}; {more}", figures)
    return Finding(OK, said, figures)


def examine(device: torch.device) -> Iterator[Report]:
    """Run all checks on `device`, and yield the report after each. An exception in one becomes its finding, and the
    others still run."""
    report, threads = Report(str(device)), torch.get_num_threads()
    for check in CHECKS:
        start = time.perf_counter()
        if not is_accelerator(device):  # a core for the thread that copies
            torch.set_num_threads(min(threads, max(1, len(os.sched_getaffinity(0)) - 1)))
        try:
            with bytes_by_default():
                finding = check(device)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            trace = traceback.format_exc()[-6000:]
            finding = Finding(FAILED, f"{said}; if that names no cure, send the file", error=trace)
        finally:
            torch.set_num_threads(threads)
        name = check.__name__.replace("_", " ")
        report.findings.append(replace(finding, check=name, seconds=time.perf_counter() - start))
        yield report


# -- the machine


def machine(device: torch.device) -> Finding:
    """Versions, the memory of device and host, and whether the driver registers that of the host."""
    room, total = available_bytes(), meminfo("MemTotal")
    figures: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    figures |= {"device": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"}  # a CPU, unless below
    figures |= {"system": platform.platform(), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    figures |= {"host_total": total, "host_room": room}
    held, said = 0.0, f"host {format_bytes(room or meminfo('MemAvailable') or 0)} free of {format_bytes(total or 0)}"
    if is_accelerator(device):
        free, total = memory_of(device)
        held = (total - free) / total
        figures |= described(device) | {"device_free": free, "device_total": total}
        said = f"CUDA {figures['cuda']}, device {format_bytes(free)} free of {format_bytes(total)}, {said}"
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = (".".join(map(str, version)) for version in TESTED)
    little = is_accelerator(device) and room is not None and room < LITTLE
    return judged(
        figures,
        f"{figures['device']}: torch {torch.__version__}, Python {figures['python']}, {figures['system']}, {said}",
        (
            not TESTED[0] <= release <= TESTED[1],
            ATTENTION,
            f"rotoff is tested with torch {low} to {high}, so read the other checks",
        ),
        (held > HELD, ATTENTION, "other processes hold the rest of the device: end them"),
        (
            little,
            ATTENTION,
            'plans can move little to the host; if it has more, set ROTOFF_HOST_MEMORY, such as "100 GiB"',
        ),
        (is_accelerator(device) and not _registers(device), ATTENTION, UNREGISTERED),
    )


def _registers(device: torch.device) -> bool:
    """Whether the driver registers memory of this process, which then has its exact size."""
    (segment,) = pin(1 << 20, device)
    with closing(segment):
        return bool(getattr(segment, "_address", 0))


# -- training


def planned_steps(device: torch.device) -> Finding:
    """Whether planned steps have a plain step's gradients (bit for bit on a CPU, up to rounding on a GPU), keep their
    limit, and take the predicted bytes and seconds, at each of `SHARES`; and how fast the link to the host is."""
    free = memory_of(device)[0] if is_accelerator(device) else 0
    model, batch = made(*next(size for least, size in SIZES if free >= least))
    batch = batch.to(device)
    for p in model.to(device).parameters():
        p.grad = torch.zeros_like(p)

    def step(run: nn.Module) -> None:
        """With the same random numbers each time; gradients accumulate."""
        torch.manual_seed(SEED)
        run(batch).sum().backward()

    def gradients(run: nn.Module) -> list[torch.Tensor]:
        found = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_zero_(found)
        step(run)
        return [gradient.clone() for gradient in found]

    step(model)  # so that libraries allocate their workspaces
    plain, rows = gradients(model), []
    repeated = difference(gradients(model), plain)
    with closing(Checkpointable(model).measure(batch)) as planned:
        least, most, link = planned.min_mem_limit(), planned.keep_all_memory, planned.chain.link._asdict()
        for share in SHARES:
            limit = int(least + share * (most - least))
            planned.compute_sequence(limit)
            row = {"share": share, "limit": limit, "predicted_bytes": planned.get_expected_memory()}
            row |= difference(gradients(planned), plain) | _peak(device, partial(step, planned))
            pair = partial(step, model), partial(step, planned)
            rows.append(row | _times(device, *pair, planned._figures))
    return steps_found(device, link, repeated, rows)


def steps_found(
    device: torch.device, link: dict[str, Any], repeated: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> Finding:
    """The finding for the figures of `planned_steps`. repeated: the `difference` of two plain steps."""
    exact = not is_accelerator(device)
    noisy, wrong = _differs(repeated, ROUNDING, exact), [row for row in rows if _differs(row, ROUNDING, exact)]
    limits = ", ".join(f"{row['share']:.0%}" for row in wrong)
    exceeds = any(row["asked"] > row["limit"] for row in rows)
    loose = any(not row["asked"] <= row["predicted_bytes"] <= LOOSE * row["asked"] for row in rows)
    retries = sum(row.get("retries", 0) for row in rows)
    off = max(abs(row["measured_ratio"] / row["predicted_ratio"] - 1) for row in rows)
    nbytes = ", ".join(f"{format_bytes(row['asked'])} of {format_bytes(row['predicted_bytes'])}" for row in rows)
    times = ", ".join(f"{row['measured_ratio']:.2f} of {row['predicted_ratio']:.2f}" for row in rows)
    close = "bit for bit" if all(row["bit_for_bit"] for row in rows) else "up to rounding"
    out, back = link["d2h_bandwidth"], link["h2d_bandwidth"]
    noise = "a plain step repeated from the same seed has other gradients, so no step can be repeated here"
    quiet = f"end other work on this machine (the load is {os.getloadavg()[0]:.1f}) and run this again"
    return judged(
        {"link": link, "repeated": repeated, "rows": rows},
        f"gradients {'differ' if wrong else f'of a plain step {close}'}; measured of predicted: {nbytes}; {times} times"
        f" a plain step, which takes {1e3 * rows[0]['plain']:.0f} ms; copies to the host {out / 1e9:.3g} GB/s, back"
        f" {back / 1e9:.3g} GB/s",
        (noisy, FAILED, f"{noise}; look for faulty memory or a broken build of torch"),
        (wrong, FAILED, f"gradients are not the same at limits {limits}; {WRONG}"),
        (exceeds, FAILED, "a step exceeds its limit: lower limits by the difference, and send the file"),
        (loose, ATTENTION, "bytes are within the limits, but not as predicted: plans are not the best; send the file"),
        (retries, ATTENTION, f"the allocator ran out {retries} times and emptied its cache"),
        (not exact and min(out, back) < SLOW, ATTENTION, SLOW_LINK),
        (off > OFF, ATTENTION, f"times are more than {OFF:.0%} off: {quiet}; if it stays so, send the file"),
    )


def optimizer_steps(device: torch.device) -> Finding:
    """Whether AdamW steps under a `device_limit`, with updates after the backward and during it, give the parameters of
    plain ones."""
    plain = trained(device, None)
    rows = [{"updates": updates} | difference(trained(device, updates), plain) for updates in ("after", "during")]
    bad = any(_differs(row, STEPS * ROUNDING, False) for row in rows)
    return judged({"rows": rows}, "parameters of plain steps", (bad, FAILED, f"not the same parameters; {WRONG}"))


CHECKS = (machine, planned_steps, optimizer_steps)


def _differs(row: dict[str, Any], most: float, exact: bool) -> bool:
    """Whether a `difference` is beyond rounding, or if it must be exact, beyond equal."""
    return row["largest"] is None or row["largest"] > most or (exact and not row["bit_for_bit"])


def difference(found: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> dict[str, Any]:
    """bit_for_bit: whether all tensors are equal. largest: the largest difference of an element, relative to the
    largest element of its tensor; None if that is not finite."""
    pairs = list(zip(found, plain, strict=True))
    far = [float((a - b).abs().max() / b.abs().max().clamp_min(torch.finfo(b.dtype).tiny)) for a, b in pairs]
    finite = all(value < float("inf") for value in far)
    return {"bit_for_bit": all(torch.equal(a, b) for a, b in pairs), "largest": max(far) if finite else None}


# From so many free bytes of a GPU on: blocks, channels, attention heads, positions and rows of a batch.
SIZES = ((18 << 30, (8, 1024, 16, 1024, 8)), (4 << 30, (8, 512, 8, 512, 8)), (0, (6, 256, 4, 128, 4)))


def made(layers: int, width: int, heads: int, context: int, rows: int) -> tuple[nn.Sequential, torch.Tensor]:
    """A transformer with dropout and a batch, on the CPU, the same each time."""
    torch.manual_seed(SEED)
    ends, how = (nn.Linear(width, n) for n in (width, 1)), (width, heads, 4 * width, 0.1, "gelu")
    blocks = (nn.TransformerEncoderLayer(*how, batch_first=True, norm_first=True) for _ in range(layers))
    return nn.Sequential(next(ends), *blocks, next(ends)), torch.randn(rows, context, width)


def _peak(device: torch.device, step: Callable[[], object]) -> dict[str, int]:
    """Peak bytes of a step above those held before, and on an accelerator the other figures of `peaks`."""
    if not is_accelerator(device):
        return {"asked": peak_of(logged(step, device)[1])}
    gc.collect()
    return peaks(device, step)


def _times(
    device: torch.device, plain: Callable[[], object], planned: Callable[[], object], figures: Figures
) -> dict[str, float]:
    """Seconds of planned steps and of alternating plain ones, and the predicted ones."""
    pairs = []
    for n in range(1 + PAIRS):
        order = (plain, planned) if n % 2 else (planned, plain)
        took = {step: seconds(device, step) for step in order}
        pairs.append((took[plain], took[planned]))
    plains, measured = zip(*pairs[1:], strict=True)  # after a warm-up
    return {
        "plain": statistics.median(plains),
        "measured": statistics.median(measured),
        "predicted": figures.step_time,
        "measured_ratio": statistics.median(b / a for a, b in pairs[1:]),
        "predicted_ratio": figures.step_time / figures.keep_all_time,
    }


def trained(device: torch.device, updates: str | None) -> list[torch.Tensor]:
    """The parameters of a model of the smallest of `SIZES` after three AdamW steps. updates: of a plan under a
    `device_limit` 1.3 times the smallest; None for plain steps."""
    model, batch = made(*SIZES[-1][1])
    batch = batch.to(device)
    run: Any = model.to(device) if updates is None else Checkpointable(model, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if updates is not None:
        how = {"optimizer": optimizer, "updates": updates, "refine": False}
        run.measure(batch)
        try:
            run.compute_sequence(device_limit=1, **how)
        except InfeasibleError as error:
            run.compute_sequence(device_limit=int(1.3 * error.min_mem_limit), **how)
    for n in range(3):
        torch.manual_seed(n)
        run(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [p.detach().cpu().clone() for p in model.parameters()]
    if updates is not None:
        run.close()
    return found


def seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of `run` on a device that has nothing else to do."""
    finish(device)
    start = time.perf_counter()
    run()
    finish(device)
    return time.perf_counter() - start

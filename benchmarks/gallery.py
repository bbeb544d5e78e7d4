"""Trains models of torchvision, timm and transformers two steps at half of what keeping everything needs, in mode
joint, and compares outputs, gradients, buffers and random states with the plain model's, bit for bit; prints one line
each.

    python benchmarks/gallery.py [--held-out] [--quick] [--library timm] [--only name,name] [--json FILE]
    [--jobs 2] [--varying] [--placed after] [--loop autocast]

Where half cannot be reached, the smallest limit that works is taken and printed as a share of keeping everything. A
model passes where all bits are equal and the measured peak is at most the predicted one. With --varying, every step has
another number of examples and, where the model takes it, of tokens; the limit is for the largest batch, and all peaks
must be within it. With --placed, three steps with AdamW run under a `device_limit` of half of what everything takes,
with parameters, gradients and optimizer states, and the states are compared, too. With --loop, the loop differs from
the usual one (`LOOPS`); a usual step comes last, whose peak is looked at.
Needs the extra ``gallery``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests" / "support")]

from allocated import own_again, peak_bytes  # noqa: E402
from gallery_models import HELD_OUT, LIBRARIES, Case  # noqa: E402

import rotoff  # noqa: E402


def tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def losses(output: Any) -> list[torch.Tensor]:
    """The model's own loss, or all that needs a gradient."""
    own = output.get("loss") if hasattr(output, "get") else None
    return [own] if own is not None else [t for t in tensors(output) if t.requires_grad]


def loss_of(output: Any) -> torch.Tensor:
    """A number to be made smaller."""
    return torch.stack([t if t.ndim == 0 else t.abs().square().mean() for t in losses(output)]).sum()


Batch = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call
SIZES = (4, 1.0), (2, 1.0), (3, 0.5), (6, 0.75), (5, 1.0), (2, 0.75)  # examples, and the share of the tokens


Loop = Callable[[nn.Module, Batch, int], Any]  # forward and backward of the n-th step; returns outputs


def usual(model: nn.Module, batch: Batch, n: int) -> Any:
    args, kwargs = batch
    output = model(*args, **kwargs)
    loss_of(output).backward()
    return output


def in_autocast(model: nn.Module, batch: Batch, n: int) -> Any:
    args, kwargs = batch
    with torch.autocast("cpu", torch.bfloat16):
        output = model(*args, **kwargs)
    loss_of(output).float().backward()
    return output


def accumulated(model: nn.Module, batch: Batch, n: int) -> Any:
    return [usual(model, batch, n) for _ in range(2)]


def two_in_one(model: nn.Module, batch: Batch, n: int) -> Any:
    args, kwargs = batch
    one, other = model(*args, **kwargs), model(*args, **kwargs)
    (loss_of(one) + 2 * loss_of(other)).backward()
    return one, other


def frozen_in_part(model: nn.Module, batch: Batch, n: int) -> Any:
    """The first half of the parameters is frozen in the second step."""
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(n != 1)
    return usual(model, batch, n)


def adapted(model: nn.Module, batch: Batch, n: int) -> Any:
    """Two thirds are frozen, and gradients reach them through the first layer, as adapters have it."""
    if n == 0:
        parameters = list(model.parameters())
        for parameter in parameters[: 2 * len(parameters) // 3]:
            parameter.requires_grad_(False)
        kinds = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        first = next(module for module in model.modules() if isinstance(module, kinds))
        first.register_forward_hook(lambda module, given, output: output.requires_grad_())
    return usual(model, batch, n)


LOOPS: dict[str, Loop] = {
    "usual": usual,
    "autocast": in_autocast,
    "accumulated": accumulated,
    "twice": two_in_one,
    "frozen": frozen_in_part,
    "adapters": adapted,
}


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer | None = None,
    gradients: bool = True,
    loop: Loop = usual,
) -> list[torch.Tensor]:
    """All that a step on each batch leaves: outputs, gradients, parameters, buffers, the states of optimizer and
    generator. optimizer: SGD if None. gradients: whether the steps leave any."""
    torch.manual_seed(1)
    np.random.seed(1)  # which masks of transformers are drawn with
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = []
    for n, batch in enumerate(batches):
        optimizer.zero_grad()
        seen += [t.detach().clone() for t in tensors(loop(model, batch, n))]
        if gradients:
            seen += [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    seen += [p.detach().clone() for p in model.parameters()]
    seen += [t.clone() for p in model.parameters() for t in tensors(optimizer.state.get(p, {}))]
    return [*seen, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True)
    )


def of_size(batch: Batch, examples: int, tokens: float) -> Batch:
    """`batch` with so many examples, those that it has over again, and with a share of its tokens."""
    count = tensors(batch)[0].shape[0]

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or len(leaf) != count:
            return leaf
        leaf = leaf.repeat(-(-examples // count), *[1] * (leaf.dim() - 1))[:examples]
        text = leaf.dim() > 1 and not (leaf.is_floating_point() or leaf.is_complex())
        return leaf[:, : max(1, int(tokens * leaf.shape[1]))] if text else leaf

    return pytree.tree_map(cut, batch)


def attempt_placed(build: Callable[[], Case], updates: str, loop: Loop, **options: Any) -> dict[str, Any]:
    """What came of one model whose parameters, gradients and optimizer states are placed, too."""

    def adamw(one: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-4, fused=True)

    torch.manual_seed(0)
    model, args, kwargs = build()
    model.train()
    twin = copy.deepcopy(model)
    batches = [(args, kwargs)] * 3
    expected = train(model, batches, adamw(model), updates == "after", loop)
    wrapped = rotoff.Checkpointable(twin).measure(*args, repeats=1, **kwargs)
    optimizer = adamw(wrapped)
    asked: dict[str, Any] = {"optimizer": optimizer, "updates": updates, **options}
    try:
        wrapped.compute_sequence(device_limit="1 TiB", **asked)
        limit = wrapped.keep_all_memory // 2
        try:
            wrapped.compute_sequence(device_limit=limit, **asked)
        except rotoff.InfeasibleError as error:
            limit = error.min_mem_limit
            wrapped.compute_sequence(device_limit=limit, **asked)
        result: dict[str, Any] = {"stages": len(wrapped.chain), "keep_all": wrapped.keep_all_memory, "limit": limit}
        got = train(wrapped, batches, optimizer, updates == "after", loop)
        result |= {"equal": same(got, expected), "predicted": wrapped.get_expected_memory()}
        del got, expected
        optimizer.zero_grad()

        def anew() -> None:
            own_again(wrapped, [optimizer])
            for module in wrapped.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.clone()
            wrapped.compute_sequence(device_limit=limit, **asked)

        one_step = step_of(wrapped, args, kwargs)

        def steps() -> None:
            for _ in batches:
                one_step()
                optimizer.step()
                optimizer.zero_grad()

        result["measured"] = peak_bytes(steps, before=anew) + sum(t.nbytes for t in tensors((args, kwargs)))
    finally:
        wrapped.close()
    result["passed"] = result["equal"] and result["measured"] <= result["predicted"] <= limit
    return result


def attempt(build: Callable[[], Case], loop: Loop = usual, varying: bool = False, **options: Any) -> dict[str, Any]:
    """What came of one model, whose first step is recorded; no "equal" if the plain model refuses the loop or other
    sizes. varying: whether batches are of `SIZES`, the limit being for the largest ones. options: for the solver."""
    torch.manual_seed(0)
    model, *batch = build()
    model.train()
    for share in (1.0, 0.0) if varying else (1.0,):  # without other lengths, where it takes none
        plain = copy.deepcopy(model)
        sizes = [(n, tokens if share else 1.0) for n, tokens in SIZES]
        same_size = [tuple(batch)] * (2 if loop is usual else 3)
        batches = [of_size(tuple(batch), *size) for size in sizes] if varying else same_size
        try:
            expected = train(plain, batches, loop=loop)
            break
        except Exception as error:
            if loop is usual and not varying:
                raise
            refused = f"{type(error).__name__}: {error}"
    else:
        return {"passed": False, "refused": refused}
    probe, limit = rotoff.Checkpointable(copy.deepcopy(model)), 0
    for args, kwargs in batches[3:5] or batches[:1]:  # the most examples, the most tokens
        probe.measure(*args, repeats=1, **kwargs)
        limit = max(limit, probe.keep_all_memory // 2, probe.min_mem_limit())
    result: dict[str, Any] = {"stages": len(probe.chain), "keep_all": probe.keep_all_memory}
    probe.close()
    for _ in range(2):
        wrapped = rotoff.Checkpointable(copy.deepcopy(model))
        try:
            got = train(wrapped.compute_sequence(limit, **options), batches, loop=loop)
            step_of(wrapped, *batches[0])()  # it may be another course
            for p in (*plain.parameters(), *wrapped.parameters()):  # a step adds to gradients that are there
                p.grad = torch.zeros_like(p) if p.requires_grad else None
            peaks = [peak_bytes(step_of(wrapped, *one)) for one in (batches if varying else batches[:1])]
            predicted, planned = wrapped.get_expected_memory(), sum(one.measured for one in wrapped.plans())
            break
        except rotoff.InfeasibleError as error:  # it needs more in such a step
            limit = 11 * error.min_mem_limit // 10
        finally:
            wrapped.close()
    equal = same(got, expected)
    if not equal and not same(train(copy.deepcopy(model), batches, loop=loop), expected):
        return {"passed": False, "refused": "two of its own runs differ"}
    result |= {"limit": limit, "equal": equal, "predicted": predicted, "measured": max(peaks)}
    result |= {"peaks": peaks, "planned": planned} if varying else {"plain": peak_bytes(step_of(plain, *batches[0]))}
    return result | {"passed": result["equal"] and max(peaks) <= (limit if varying else predicted)}


attempt_varying = partial(attempt, varying=True)


def step_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
    """A forward and a backward, whose first gradients exist before."""
    parts = [torch.ones_like(t) for t in losses(model(*args, **kwargs))]
    return lambda: torch.autograd.backward(losses(model(*args, **kwargs)), parts)


def report(case: tuple[str, str, argparse.Namespace]) -> tuple[str, str, dict[str, Any]]:
    library, name, options = case
    build, refine = (HELD_OUT if options.held_out else LIBRARIES)[library][name], not options.quick
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler's start and stop are no news
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    try:
        if options.placed:
            result = attempt_placed(build, options.placed, LOOPS[options.loop], refine=refine)
        else:
            result = attempt(build, LOOPS[options.loop], options.varying, refine=refine)
    except Exception as error:
        result = {"passed": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return library, name, {**result, "total_s": time.perf_counter() - start}


def line(library: str, name: str, r: dict[str, Any]) -> str:
    head = f"{library:12s} {name:36s}"
    if "error" in r:
        return f"{head} FAILED  {r['error'].splitlines()[0][:200]}"
    if "refused" in r:
        return f"{head} not tried, as the plain model cannot be compared: {r['refused'].splitlines()[0][:120]}"
    mib = 1 << 20
    verdict = (
        f"{'passed' if r['passed'] else 'FAILED'}  {'equal' if r['equal'] else 'DIFFERS':7s} {r['stages']:3d} stages"
    )
    limit = f"limit {r['limit'] / r['keep_all']:4.0%} of {r['keep_all'] / mib:7.1f} MiB"
    if "peaks" in r:
        peaks = ", ".join(f"{nbytes / r['limit']:.2f}" for nbytes in r["peaks"])
        return f"{head} {verdict}  {limit}  peaks {peaks} of it  {r['planned']} sizes measured  {r['total_s']:5.1f} s"
    plain = f" (plain {r['plain'] / mib:7.1f})" if "plain" in r else ""
    peaks = f"{r['predicted'] / mib:7.2f} predicted, {r['measured'] / mib:7.2f} measured"
    return f"{head} {verdict}  {limit}{plain}  peak {peaks}  {r['total_s']:5.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=sorted({*LIBRARIES, *HELD_OUT}), help="one library only")
    parser.add_argument("--held-out", action="store_true", help="the architectures that were not looked at meanwhile")
    parser.add_argument(
        "--quick", action="store_true", help="do not refine plans: the same checks, sooner, on slower plans"
    )
    parser.add_argument("--varying", action="store_true", help="another size of the batch in every step")
    parser.add_argument("--placed", default="", choices=["after", "during"], help="place parameters and states, too")
    parser.add_argument("--loop", default="usual", choices=list(LOOPS), help="another loop")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time, each on one thread")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    libraries = HELD_OUT if options.held_out else LIBRARIES
    missing = [library for library in libraries if library != "own" and find_spec(library) is None]
    if missing and options.library is None:
        print(f"left out, not installed: {', '.join(missing)}")
    chosen = [options.library] if options.library else [library for library in libraries if library not in missing]
    cases = [(library, name, options) for library in chosen for name in libraries[library] if not only or name in only]
    results = []
    with get_context("spawn").Pool(options.jobs, maxtasksperchild=8) as pool:
        for library, name, result in pool.imap(report, cases):
            print(line(library, name, result), flush=True)
            results.append({"library": library, "name": name, **result})
    for library in dict.fromkeys(library for library, *_ in cases):
        mine = [r for r in results if r["library"] == library and "refused" not in r]
        print(f"{library}: {sum(r['passed'] for r in mine)} of {len(mine)} pass")
    tried = [r for r in results if "refused" not in r]
    passed = sum(r["passed"] for r in tried)
    print(f"all: {passed} of {len(tried)} pass ({passed / max(1, len(tried)):.0%})")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))
    return 0 if passed == len(tried) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())

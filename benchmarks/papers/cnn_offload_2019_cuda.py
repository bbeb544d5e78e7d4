"""CPU offloading of CNNs (Hascoet et al., JSEA 2019) on a device: its table 1, and its table 2 measured.

Table 1: speed of pinning, and of copies from pageable and from pinned memory, each direction. Table 2: a training
iteration of VGG19 on 32 images of 128 by 128, plain; with PyTorch's ``save_on_cpu`` from pageable and from pinned
memory, copies in turn with compute; and by rotoff's policy "overlap", its mode "offload", and its mode "joint" at the
overlap's limit, the first of these also with values in float16 on the way (lossy).

    python benchmarks/papers/cnn_offload_2019_cuda.py        # needs a CUDA device and torchvision; about two minutes
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from network_chains import _torchvision
from tables import write
from torch import nn

import rotoff

PAPER_TABLE_1 = {
    "pinned allocation": 1.95,
    "device to host, pageable": 1.75,
    "device to host, pinned": 6.5,
    "host to device, pageable": 4.1,
    "host to device, pinned": 6.1,
}
PAPER_MS = {"save_on_cpu, pageable": 560, "save_on_cpu, pinned": 355, "policy overlap": 236}


def seconds(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a call, the device idle before and after."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def table_1(nbytes: int) -> list[dict[str, object]]:
    device = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    pinned = torch.ones(nbytes, dtype=torch.uint8).pin_memory()

    def pin() -> None:
        # Registered as rotoff does it; PyTorch's allocator would keep freed blocks and measure nothing from the second
        # on.
        host = torch.empty(nbytes, dtype=torch.uint8)
        assert int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, 0)) == 0
        assert int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())) == 0

    measured = {
        "pinned allocation": seconds(pin, 3),
        "device to host, pageable": seconds(lambda: pageable.copy_(device)),
        "device to host, pinned": seconds(lambda: pinned.copy_(device, non_blocking=True)),
        "host to device, pageable": seconds(lambda: device.copy_(pageable)),
        "host to device, pinned": seconds(lambda: device.copy_(pinned, non_blocking=True)),
    }
    return [{"operation": n, "GB/s": nbytes / s / 1e9, "paper_GB/s": PAPER_TABLE_1[n]} for n, s in measured.items()]


def table_2(batch: int, image: int) -> list[dict[str, object]]:
    x = torch.randn(batch, 3, image, image, device="cuda")
    target = torch.randint(0, 1000, (batch,), device="cuda")
    rows: list[dict[str, object]] = []

    def add(name: str, model: nn.Module, context: Callable[[], object] | None = None) -> None:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            if context is None:
                loss = nn.functional.cross_entropy(model(x), target)
            else:
                with context():
                    loss = nn.functional.cross_entropy(model(x), target)
            loss.backward()

        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        taken = seconds(step)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        rows.append({"case": name, "ms": 1e3 * taken, "peak_MiB": peak, "paper_ms": PAPER_MS.get(name)})

    model = vgg19()
    add("plain", model)
    add("save_on_cpu, pageable", model, lambda: torch.autograd.graph.save_on_cpu(pin_memory=False))
    add("save_on_cpu, pinned", model, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))
    planned = rotoff.Checkpointable(model).measure(x)
    limit = least_limit(planned, "overlap")
    for name, options in (
        ("policy overlap", {"policy": "overlap"}),
        ("mode offload", {"mode": "offload"}),
        ("mode joint", {}),
    ):
        add(name, planned.compute_sequence(limit, **options))
    half = rotoff.Checkpointable(model, offload_dtype=torch.float16).measure(x)
    add("policy overlap, float16 on the way", half.compute_sequence(least_limit(half, "overlap"), policy="overlap"))
    return rows


def vgg19() -> nn.Sequential:
    model = _torchvision().models.vgg19().cuda()
    return nn.Sequential(*model.features, model.avgpool, nn.Flatten(), *model.classifier)


def least_limit(planned: rotoff.Checkpointable, policy: str) -> int:
    """The smallest limit that the policy's own error names."""
    try:
        planned.compute_sequence(1, policy=policy)
    except rotoff.InfeasibleError as error:
        return error.min_mem_limit
    raise AssertionError("a training step in one byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="size of the copies of table 1")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=128)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; cnn_offload_2019.py predicts these tables without one")
    write("cnn_offload_2019_cuda_table_1", table_1(arguments.mib << 20))
    write("cnn_offload_2019_cuda_table_2", table_2(arguments.batch, arguments.image))


if __name__ == "__main__":
    main()

"""Estimating: the bytes that measuring finds, with no device and no bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from allocated import peak_bytes
from models import Does, fresh
from recorded_steps import recorded_chain
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import rotoff
from rotoff.profile.estimate.cuda_kernels import device_variants
from rotoff.profile.estimate.devices import find
from rotoff.profile.estimate.fake_kernels import FakeKernels

BYTES = (
    "output_bytes", "saved_bytes", "grad_bytes", "forward_transient_bytes", "checkpoint_transient_bytes",
    "backward_transient_bytes",
)  # fmt: skip


def pair(model: nn.Module, x: Any) -> tuple[rotoff.Chain, rotoff.Chain]:
    """The chain of a step that ran on the CPU, and the estimated one."""
    return recorded_chain(model, x), rotoff.estimate(model, x, device="CPU")


def values(chain: rotoff.Chain) -> list[tuple[str, int, int, int | None]]:
    return [(s.name, s.output_bytes, s.saved_bytes, s.grad_bytes) for s in chain.stages]


def test_gradient_accumulation_is_in_place_as_in_the_engine() -> None:
    twice = Does(lambda net, x: torch.cos(x) + torch.sin(x) + x.square())
    measured, estimated = pair(nn.Sequential(nn.Linear(64, 64), twice), torch.randn(256, 64))
    tensor = 256 * 64 * 4
    # beside the sum so far, which is the gradient left in the end: sin(x), -sin(x) and what is added. The loss and its
    # gradient, of 4 bytes each, count among what is there when the backward begins
    assert measured.stages[1].backward_transient_bytes == 3 * tensor - 8
    assert estimated.stages[1].backward_transient_bytes == 3 * tensor - 8


@pytest.mark.parametrize("wanted", [3, 12, ["1", "3"], "modules"])
@pytest.mark.grid
def test_estimate_uses_stages_of_checkpointable(wanted: Any) -> None:
    model, batch = fresh("residual")
    if wanted == "modules":
        wanted = [model.get_submodule("1"), model.get_submodule("2")]
    wrapped = rotoff.Checkpointable(model, stages=wanted)
    estimated = rotoff.estimate(wrapped, batch(), device="CPU")
    assert values(estimated) == values(recorded_chain(model, batch(), stages=wanted))
    assert len(estimated) != len(rotoff.estimate(model, batch(), device="CPU"))


def test_estimate_uses_forms_of_checkpointable() -> None:
    model, batch = fresh("residual")
    assert any(stage.forms for stage in rotoff.estimate(model, batch(), device="CPU").stages)
    without = rotoff.Checkpointable(model, forms=False)
    assert not any(stage.forms for stage in rotoff.estimate(without, batch(), device="CPU").stages)
    planned = rotoff.plan(without, batch(), mem_limit="1 GiB", device="CPU")
    assert not any(stage.forms for stage in planned.chain.stages)


def test_estimate_allocates_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.Dropout(0.1), nn.Linear(1024, 1024))
    x = torch.randn(4096, 1024)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    generator = torch.get_rng_state()
    gc.collect()
    assert peak_bytes(lambda: rotoff.estimate(model, x, device="H200")) < 4096 * 1024  # a quarter of one activation
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())


def test_real_meta_and_fake_models_give_equal_chains() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))

    real = rotoff.estimate(model(), torch.randn(4, 3, 16, 16), device="V100")
    with torch.device("meta"):
        meta = rotoff.estimate(model(), torch.randn(4, 3, 16, 16), device="V100")
    with torch._subclasses.FakeTensorMode():
        made, sample = model(), torch.randn(4, 3, 16, 16)
    fake = rotoff.estimate(made, sample, device="V100")
    assert real == meta == fake


@pytest.mark.parametrize(
    ("device", "width", "mask", "dtype", "kernel"),
    [
        ("H200", 64, False, torch.bfloat16, "cudnn"),
        ("H200", 256, False, torch.bfloat16, "cudnn"),
        ("H200", 64, True, torch.bfloat16, "cudnn"),
        ("H200", 60, False, torch.bfloat16, "flash"),  # no multiple of 8
        ("H200", 64, False, torch.float32, "efficient"),
        ("A100", 64, False, torch.bfloat16, "flash"),
        ("A100", 64, True, torch.bfloat16, "efficient"),
        ("K40", 64, False, torch.float32, "math"),
    ],
)
def test_attention_kernel_follows_device_and_switches(
    device: str, width: int, mask: bool, dtype: torch.dtype, kernel: str
) -> None:
    def attend(net: Any, x: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(512, 512, dtype=torch.bool, device=x.device).tril() if mask else None
        return F.scaled_dot_product_attention(x, x, x, attn_mask=seen)

    ran: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with torch._subclasses.FakeTensorMode(), device_variants(find(device)), Log():
        x = torch.empty(2, 4, 512, width, dtype=dtype, requires_grad=True)
        attend(None, x).sum().backward()
    fused = {f"_scaled_dot_product_{kind}_attention" for kind in ("cudnn", "flash", "efficient")}
    expected = set() if kernel == "math" else {f"_scaled_dot_product_{kernel}_attention"}
    assert fused & {name.split(".")[0] for name in ran} == expected
    x = torch.empty(2, 4, 512, width, dtype=dtype, device="meta", requires_grad=True)
    stage = rotoff.estimate(nn.Sequential(Does(attend)), x, device=device).stages[0]
    scores = 2 * 4 * 512 * 512 * dtype.itemsize
    assert (stage.saved_bytes >= scores) == (kernel == "math")


def test_estimated_sizes_are_rounded_as_by_the_allocator() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 5))
    assert [s.output_bytes for s in rotoff.estimate(model, torch.randn(2, 3), device="V100").stages] == [512, 512]
    assert [s.output_bytes for s in rotoff.estimate(model, torch.randn(2, 3), device="CPU").stages] == [40, 40]


def test_estimated_times_follow_the_data_sheet() -> None:
    """A large matrix product is bound by operations: 2 x 4096^3 forward, twice that backward; what is done to each element
    by the bytes that it reads and writes."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False)).to("meta")
    x = torch.empty(4096, 4096, device="meta", requires_grad=True)
    v100 = find("V100")
    seconds = 2 * 4096**3 / (v100.flops["float32"] * v100.compute_efficiency)
    stage = rotoff.estimate(model, x, device="V100").stages[0]
    assert stage.forward_time == pytest.approx(seconds, rel=0.01)
    assert stage.backward_time == pytest.approx(2 * seconds, rel=0.01)
    half = rotoff.estimate(model.half(), x.half(), device="V100").stages[0]
    assert half.forward_time == pytest.approx(seconds * 15.7 / 125, rel=0.2)
    moved = 2 * x.nbytes / (v100.memory_bandwidth * v100.memory_efficiency) + v100.launch_time
    assert rotoff.estimate(nn.Sequential(nn.GELU()), x, device="V100").stages[0].forward_time == pytest.approx(moved)


def test_estimated_chain_records_its_provenance(tmp_path: Path) -> None:
    chain = rotoff.estimate(nn.Sequential(nn.Linear(3, 5)), torch.randn(2, 3), device="RTX 4090")
    chain.save(tmp_path / "chain.json")
    meta = rotoff.Chain.load(tmp_path / "chain.json").meta
    assert meta["device"] == "RTX 4090"
    assert meta["times"].startswith("estimated")
    assert meta["inputs"] == [{"shape": [2, 3], "dtype": "float32"}]
    assert (meta["model"], meta["parameters"]) == ("torch.nn.modules.container.Sequential", 20)
    assert meta["versions"]["torch"] == torch.__version__


ASKED_FOR = """RTX 4080, RTX 5080, RTX 5090, RTX A6000, RTX 6000 Ada, A10, L4, L40S, A100 40GB, A100, H100, H100 PCIe, H100 NVL,
H200, GH200, B200, GB200, MI250, MI300X, MI325X, MI350X"""


@pytest.mark.parametrize("name", [name.strip() for name in ASKED_FOR.split(",")])
def test_the_rates_of_a_device_are_dense_ones(name: str) -> None:
    """Tensor cores double their rate from each type to the next one of half the bits: with a sparse rate in its row, a
    type would be twice or half as far from its neighbours."""
    device = find(name)
    flops = device.flops
    assert device.source
    assert flops["float16"] == flops["bfloat16"]
    assert flops.get("float8", 2 * flops["float16"]) == pytest.approx(2 * flops["float16"], rel=0.02)
    assert flops.get("tf32", flops["float16"] / 2) == pytest.approx(flops["float16"] / 2, rel=0.02)
    # no device computes so much for a byte of its memory without sparsity
    assert flops["float16"] / device.memory_bandwidth < 420


def test_unknown_device_error_lists_known_ones() -> None:
    with pytest.raises(rotoff.OptionError, match=r"device is 'H2000'; known ones are K40, Titan X, .*H200.*RTX 4090"):
        rotoff.estimate(nn.Sequential(nn.Linear(3, 5)), torch.randn(2, 3), device="H2000")


def test_registered_device_is_found() -> None:
    own = rotoff.Device("my box", 8 << 30, 100e9, {"float32": 1e12}, 10e9, 5e9, duplex=False)
    chain = rotoff.estimate(nn.Sequential(nn.Linear(3, 5)), torch.randn(2, 3), device=own)
    assert (chain.d2h_bandwidth, chain.h2d_bandwidth, chain.duplex) == (8e9, 4e9, False)
    rotoff.register_device(own)
    try:
        assert rotoff.estimate(nn.Sequential(nn.Linear(3, 5)), torch.randn(2, 3), device="MyBox") == chain
    finally:
        from rotoff.profile.estimate import devices

        del devices._known["mybox"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory_bandwidth": 0}, "memory_bandwidth of device 'x' is 0; give a number above 0"),
        ({"flops": {"float32": 1e12, "int3": 1e12}}, "has the type 'int3'; known ones are float64"),
        ({"flops": {"float16": 1e12}}, "has no 'float32'"),
        ({"compute_efficiency": 2.0}, "give a share up to 1"),
    ],
)
def test_invalid_device_is_refused(change: dict[str, Any], sentence: str) -> None:
    fields: dict[str, Any] = {
        "name": "x", "memory_bytes": 1, "memory_bandwidth": 1.0, "flops": {"float32": 1.0}, "d2h_bandwidth": 1.0,
        "h2d_bandwidth": 1.0,
    }  # fmt: skip
    with pytest.raises(rotoff.OptionError, match=sentence):
        rotoff.Device(**{**fields, **change})


def test_estimate_of_forward_that_reads_contents_is_refused() -> None:
    class Reader(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(rotoff.MeasureError, match="cannot run on fake tensors: DataDependent"):
        rotoff.estimate(Reader(4, 4), torch.randn(2, 4), device="V100")


LAST = torch.channels_last
CONVOLUTIONS: dict[str, tuple[list[nn.Module], torch.Tensor]] = {
    "several": (
        [nn.Conv2d(20, 68, 3, padding=1), nn.Conv2d(68, 64, 3), nn.Conv2d(64, 64, 3, stride=2, groups=64)],
        torch.randn(4, 20, 32, 32),
    ),
    "sequences": ([nn.Conv1d(32, 32, 3), nn.Conv1d(32, 32, 3, groups=4)], torch.randn(4, 32, 64)),
    "a sequence": ([nn.Conv1d(32, 32, 3)], torch.randn(1, 32, 64)),
    "a volume": ([nn.Conv3d(8, 8, 3)], torch.randn(1, 8, 8, 8, 8)),
    "transposed": ([nn.ConvTranspose2d(16, 16, 3, padding=1), nn.ConvTranspose2d(16, 16, 2, stride=2)], torch.randn(4, 16, 16, 16)),
    "groups": ([nn.Conv2d(32, 32, 3, groups=4)], torch.randn(1, 32, 16, 16)),
    "channels last": ([nn.Conv2d(16, 16, 3).to(memory_format=LAST)], torch.randn(1, 16, 16, 16).to(memory_format=LAST)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_copies_and_columns_of_convolutions_are_counted(kind: str) -> None:
    """Without them a convolution's transients would be estimated as next to nothing."""
    convolutions, x = CONVOLUTIONS[kind]
    model = nn.Sequential(*(layer for one in convolutions for layer in (one, nn.ReLU())))
    measured, estimated = pair(model, x.clone().requires_grad_())
    for one, other in zip(measured.stages, estimated.stages, strict=True):
        for name in BYTES:
            assert getattr(other, name) == pytest.approx(getattr(one, name), abs=0.02 * one.saved_bytes), (
                one.name,
                name,
            )
    assert any(stage.forward_transient_bytes > stage.output_bytes for stage in measured.stages)


# -- fake tensors as the kernels answer: types of statistics, grouped products


HALF, FULL = torch.bfloat16, torch.float32


def saved(run: Callable[[], torch.Tensor]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    found: list[tuple[torch.dtype, tuple[int, ...]]] = []
    with saved_tensors_hooks(lambda t: found.append((t.dtype, tuple(t.shape))), lambda _: None):
        run()
    return sorted(found, key=str)


def norms(x: torch.dtype, w: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    images, rows = (
        torch.randn(2, 8, 4, 4, dtype=x, requires_grad=True),
        torch.randn(2, 4, 8, dtype=x, requires_grad=True),
    )
    weight, bias = torch.ones(8, dtype=w, requires_grad=True), torch.zeros(8, dtype=w)
    mean, variance = torch.zeros(8, dtype=w), torch.ones(8, dtype=w)
    return {
        "layer": lambda: F.layer_norm(rows, (8,), weight, bias),
        "group": lambda: F.group_norm(images, 4, weight, bias),
        "batch": lambda: F.batch_norm(images, mean, variance, weight, bias, True),
        "instance": lambda: F.instance_norm(images, None, None, weight, bias),
    }


@pytest.mark.parametrize(("x", "w"), [(FULL, FULL), (HALF, HALF), (HALF, FULL)])
@pytest.mark.parametrize("name", ["layer", "group", "batch", "instance"])
def test_fake_norms_keep_cpu_dtypes(name: str, x: torch.dtype, w: torch.dtype) -> None:
    real = norms(x, w)
    with FakeKernels():
        fake = norms(x, w)
        answer = saved(fake[name])
    assert answer == saved(real[name])


def test_fake_cuda_norms_keep_float32_statistics() -> None:
    with FakeKernels(cuda=True):
        for name, shape in (("layer", (2, 4, 1)), ("batch", (8,))):
            kept = saved(norms(HALF, HALF)[name])
            assert kept.count((FULL, shape)) == 2, name


def test_grouped_matmul_is_estimated_in_float32() -> None:
    ends = nn.Buffer(torch.tensor([4, 8, 12], dtype=torch.int32))
    experts = Does(
        lambda net, x: F.grouped_mm(x, net.weight, offs=net.ends).tanh(),
        weight=nn.Parameter(torch.randn(3, 16, 24)), ends=ends,
    )  # fmt: skip
    model, x = nn.Sequential(nn.Linear(16, 16), experts), torch.randn(12, 16)
    chain = rotoff.estimate(model, x, device="CPU")
    measured = recorded_chain(model, x)
    assert chain.stages[1].output_bytes == 12 * 24 * 4
    assert [s.saved_bytes for s in chain.stages] == [s.saved_bytes for s in measured.stages]


def test_what_is_written_to_a_tensor_of_numbers_is_that_tensor() -> None:
    with FakeKernels():
        noise = torch.empty(4, 1)
        assert noise.bernoulli_(0.5) is noise and noise.div_(0.5) is noise

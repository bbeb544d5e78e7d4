"""Devices as their vendors' data sheets describe them: enough to estimate a model's times without the device.

All rates are peaks as printed, without sparsity. The efficiencies say which share of each peak a training step is
assumed to reach. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ...errors import OptionError

GB = 10**9
TERA = 10**12
_DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")


@dataclass(frozen=True)
class Device:
    """A device to plan for.

    Args:
        name: by which it is found; case and spaces do not matter.
        memory_bytes: of the device.
        memory_bandwidth: between memory and cores, in B/s.
        flops: floating-point operations per second by type ("float64", "float32", "tf32" for convolutions in float32,
            "float16", "bfloat16", "float8"); a missing type runs as fast as float32.
        d2h_bandwidth, h2d_bandwidth: of the link to the host, in B/s, each direction alone.
        duplex: whether both directions run at once.
        capability: CUDA's (major, minor), which determines the kernels of attention; None if it is not a CUDA device.
        launch_time: the least seconds of an operation.
        compute_efficiency, memory_efficiency, link_efficiency: the assumed share of each peak.
        source: of the numbers.

    Raises:
        OptionError: if a number is not above 0, or a type is unknown.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    d2h_bandwidth: float
    h2d_bandwidth: float
    duplex: bool = True
    capability: tuple[int, int] | None = (8, 0)
    launch_time: float = 5e-6
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        names = ("memory_bytes", "memory_bandwidth", "d2h_bandwidth", "h2d_bandwidth")
        numbers = {name: getattr(self, name) for name in names}
        numbers |= {f"flops[{name!r}]": value for name, value in self.flops.items()}
        for share in ("compute_efficiency", "memory_efficiency", "link_efficiency"):
            numbers[share] = getattr(self, share)
            if getattr(self, share) > 1:
                raise OptionError(f"{share} of device {self.name!r} is {getattr(self, share)!r}; give a share up to 1")
        for what, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
                raise OptionError(f"{what} of device {self.name!r} is {number!r}; give a number above 0")
        unknown = sorted(set(self.flops) - set(_DTYPES))
        if unknown:
            raise OptionError(
                f"flops of device {self.name!r} has the type {unknown[0]!r}; known ones are {', '.join(_DTYPES)}"
            )
        if "float32" not in self.flops:
            raise OptionError(f"flops of device {self.name!r} has no 'float32'; give its operations per second")
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def peak(self, dtype: str) -> float:
        """Return the floating-point operations per second in `dtype`."""
        return self.flops.get(dtype, self.flops["float32"])


_known: dict[str, Device] = {}


def register_device(device: Device) -> Device:
    """Make `device` available by its name, replacing any other of that name; returns it."""
    _known[_key(device.name)] = device
    return device


def find(device: Device | str) -> Device:
    """Return the device of that name; a `Device` is returned as it is.

    Raises:
        OptionError: if no device has that name; the message lists the known ones.
    """
    if isinstance(device, Device):
        return device
    known = _known.get(_key(device)) if isinstance(device, str) else None
    if known is None:
        names = ", ".join(d.name for d in _known.values())
        raise OptionError(
            f"device is {device!r}; known ones are {names}; give another as a rotoff.Device(...), or register"
            " it with rotoff.register_device"
        )
    return known


def devices() -> tuple[Device, ...]:
    """Return all devices known by name."""
    return tuple(_known.values())


def _key(name: str) -> str:
    return "".join(name.lower().replace("-", "").replace("_", "").split())


def _pcie(generation: int) -> float:
    """Return B/s of 16 lanes in one direction: 8, 16, 32 GT/s a lane, coded 128b/130b (PCI-SIG base specifications 3.0
    to 5.0)."""
    return {3: 8e9, 4: 16e9, 5: 32e9}[generation] * 16 / 8 * 128 / 130


def _add(
    name: str,
    gigabytes: float,
    bandwidth: float,
    flops: dict[str, float],
    pcie: int,
    capability: tuple[int, int],
    source: str,
) -> None:
    link, rates = _pcie(pcie), {kind: value * TERA for kind, value in flops.items()}
    sizes = int(gigabytes * 2**30), bandwidth * GB
    register_device(Device(name, *sizes, rates, link, link, capability=capability, source=source))


# Half-precision rates are those with sums in float32, as in training. If a sheet gives sparse rates, half of them.
_KEPLER = {"float64": 1.43, "float32": 4.29}
_add("K40", 12, 288, _KEPLER, 3, (3, 5), "NVIDIA Tesla K40 GPU accelerator, board specification")
_MAXWELL = {"float64": 0.192, "float32": 6.144}
_add("Titan X", 12, 336.5, _MAXWELL, 3, (5, 2), "NVIDIA GeForce GTX Titan X, specifications")
_PASCAL = {"float64": 5.3, "float32": 10.6, "float16": 21.2}
_add("P100", 16, 732, _PASCAL, 3, (6, 0), "NVIDIA Tesla P100 data sheet (SXM2 16 GB)")
_VOLTA = {"float64": 7.8, "float32": 15.7, "float16": 125}
_add("V100", 16, 900, _VOLTA, 3, (7, 0), "NVIDIA V100 data sheet (SXM2, 16 GB)")
_add("V100 32GB", 32, 900, _VOLTA, 3, (7, 0), "NVIDIA V100 data sheet (SXM2)")
_add("T4", 16, 300, {"float32": 8.1, "float16": 65}, 3, (7, 5), "NVIDIA T4 data sheet")
_A100 = {"float64": 9.7, "float32": 19.5, "tf32": 156, "float16": 312, "bfloat16": 312}
_add("A100", 80, 2039, _A100, 4, (8, 0), "NVIDIA A100 80GB data sheet (SXM)")
_add("A100 40GB", 40, 1555, _A100, 4, (8, 0), "NVIDIA A100 data sheet (SXM, 40 GB)")
_HOPPER = {"float64": 34, "float32": 67, "tf32": 494.5, "float16": 989.5, "bfloat16": 989.5, "float8": 1979}
_add("H100", 80, 3350, _HOPPER, 5, (9, 0), "NVIDIA H100 data sheet (SXM)")
_add("H200", 141e9 / 2**30, 4800, _HOPPER, 5, (9, 0), "NVIDIA H200 data sheet (SXM, 141 GB)")
_add(
    "RTX 3090", 24, 936, {"float32": 35.6, "tf32": 35.6, "float16": 71, "bfloat16": 71}, 4, (8, 6),
    "NVIDIA Ampere GA102 GPU architecture, appendix A",
)  # fmt: skip
_add(
    "RTX 4090", 24, 1008,
    {"float32": 82.6, "tf32": 82.6, "float16": 165.2, "bfloat16": 165.2, "float8": 330.3}, 4, (8, 9),
    "NVIDIA Ada GPU architecture, appendix A",
)  # fmt: skip
_add(
    "L4", 24, 300, {"float32": 30.3, "tf32": 60, "float16": 121, "bfloat16": 121, "float8": 242.5}, 4, (8, 9),
    "NVIDIA L4 data sheet",
)  # fmt: skip
# Stands for any CPU: two cores of a server and its disk. Bytes are exact, times are guesses.
register_device(
    Device(
        "CPU", 16 * 2**30, 10e9, {"float32": 100e9, "float64": 50e9}, 0.5e9, 1e9, duplex=False, capability=None,
        compute_efficiency=1, memory_efficiency=1, link_efficiency=1, source="a guess",
    )
)  # fmt: skip

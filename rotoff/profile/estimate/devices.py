"""Devices as their vendors' data sheets describe them: enough to estimate a model's times without the device.

All rates are peaks as printed, without sparsity. The efficiencies say which share of each peak a training step is
assumed to reach. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
        launch_time: seconds that each operation takes beside.
        compute_efficiency, memory_efficiency, link_efficiency: the assumed share of each peak.
        source: of the numbers.
        interconnect: B/s that a device sends to others of its host; None if that takes the link to the host.

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
    interconnect: float | None = None

    def __post_init__(self) -> None:
        rates = "memory_bytes", "memory_bandwidth", "d2h_bandwidth", "h2d_bandwidth"
        shares = "compute_efficiency", "memory_efficiency", "link_efficiency"
        numbers = {name: getattr(self, name) for name in (*rates, *shares)}
        numbers |= {f"flops[{name!r}]": value for name, value in self.flops.items()}
        numbers |= {} if self.interconnect is None else {"interconnect": self.interconnect}
        for what, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
                raise OptionError(f"{what} of device {self.name!r} is {number!r}; give a number above 0")
            if what in shares and number > 1:
                raise OptionError(f"{what} of device {self.name!r} is {number!r}; give a share up to 1")
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

    @property
    def between(self) -> float:
        """B/s that collectives are assumed to reach."""
        return (self.interconnect or min(self.d2h_bandwidth, self.h2d_bandwidth)) * self.link_efficiency


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


def _add(
    name: str,
    gigabytes: float,
    bandwidth: float,
    flops: dict[str, float],
    link: float,
    capability: tuple[int, int],
    source: str,
    between: float | None = None,
) -> None:
    rates = {kind: value * TERA for kind, value in flops.items()}
    sizes = int(gigabytes * 2**30), bandwidth * GB
    made = Device(name, *sizes, rates, link * GB, link * GB, capability=capability, source=source)
    register_device(replace(made, interconnect=None if between is None else between * GB))


def _rates(float32: float, half: float = 0.0, **others: float) -> dict[str, float]:
    """Return TFLOP/s by type; `half`: of both types of 16 bits."""
    return {"float32": float32} | ({"float16": half, "bfloat16": half} if half else {}) | others


# GiB, GB/s of the memory, TFLOP/s, GB/s of the link. Dense rates; those of 16 and 8 bits with sums in float32, as in
# training. If a sheet gives sparse rates, half of them; if it gives those of a board of several devices, a share. Then
# GB/s to other devices in one direction, half of what sheets print, where all devices of a board are connected.
# fmt: off
# 16 lanes in one direction: 8, 16, 32 GT/s each, coded 128b/130b (PCI-SIG base specifications 3.0 to 5.0)
_3, _4, _5 = (rate * 16 / 8 * 128 / 130 for rate in (8, 16, 32))
_C2C = 450.0  # NVLink-C2C to Grace: 900 GB/s in both directions
_VOLTA = _rates(15.7, float16=125, float64=7.8)
_A100 = _rates(19.5, 312, tf32=156, float64=9.7)
_HOPPER = _rates(67, 989.5, tf32=494.5, float8=1979, float64=34)
_CDNA3 = _rates(163.4, 1307.4, tf32=653.7, float8=2614.9, float64=163.4)
_add("K40", 12, 288, _rates(4.29, float64=1.43), _3, (3, 5), "NVIDIA Tesla K40 GPU accelerator, board specification")
_add("Titan X", 12, 336.5, _rates(6.144, float64=0.192), _3, (5, 2), "NVIDIA GeForce GTX Titan X, specifications")
_add("P100", 16, 732, _rates(10.6, float16=21.2, float64=5.3), _3, (6, 0), "NVIDIA Tesla P100 data sheet (SXM2)", 80)
_add("V100", 16, 900, _VOLTA, _3, (7, 0), "NVIDIA V100 data sheet (SXM2, 16 GB)", 150)
_add("V100 32GB", 32, 900, _VOLTA, _3, (7, 0), "NVIDIA V100 data sheet (SXM2)", 150)
_add("T4", 16, 300, _rates(8.1, float16=65), _3, (7, 5), "NVIDIA T4 data sheet")
_add("A100", 80, 2039, _A100, _4, (8, 0), "NVIDIA A100 80GB data sheet (SXM)", 300)
_add("A100 40GB", 40, 1555, _A100, _4, (8, 0), "NVIDIA A100 data sheet (SXM, 40 GB)", 300)
_add("A10", 24, 600, _rates(31.2, 125, tf32=62.5), _4, (8, 6), "NVIDIA A10 data sheet")
_add("L4", 24, 300, _rates(30.3, 121, tf32=60, float8=242.5), _4, (8, 9), "NVIDIA L4 data sheet")
_add("L40S", 48, 864, _rates(91.6, 362.05, tf32=183, float8=733), _4, (8, 9), "NVIDIA L40S data sheet")
_add("H100", 80, 3350, _HOPPER, _5, (9, 0), "NVIDIA H100 data sheet (SXM)", 450)
_add("H100 PCIe", 80, 2000, _rates(51, 756.5, tf32=378, float8=1513, float64=26), _5, (9, 0),
     "NVIDIA H100 data sheet of 2022 (PCIe)")
_add("H100 NVL", 94, 3900, _rates(60, 835.5, tf32=417.5, float8=1670.5, float64=30), _5, (9, 0),
     "NVIDIA H100 data sheet (NVL, one of its GPUs)")
_add("H200", 141e9 / 2**30, 4800, _HOPPER, _5, (9, 0), "NVIDIA H200 data sheet (SXM, 141 GB)", 450)
_add("GH200", 96, 4000, _HOPPER, _C2C, (9, 0), "NVIDIA GH200 Grace Hopper superchip data sheet (96 GB HBM3)")
_add("GH200 144GB", 144e9 / 2**30, 4900, _HOPPER, _C2C, (9, 0),
     "NVIDIA GH200 Grace Hopper superchip data sheet (144 GB HBM3e)")
_add("B200", 180e9 / 2**30, 7700, _rates(75, 2250, tf32=1125, float8=4500, float64=37), _5, (10, 0),
     "NVIDIA HGX B200 data sheet, an eighth of its board", 900)
_add("GB200", 186e9 / 2**30, 8000, _rates(80, 2500, tf32=1250, float8=5000, float64=40), _C2C / 2, (10, 0),
     "NVIDIA GB200 NVL72 data sheet, one of the two GPUs of its superchip, which share the link", 900)
_add("RTX 3090", 24, 936, _rates(35.6, 71, tf32=35.6), _4, (8, 6), "NVIDIA Ampere GA102 GPU architecture, appendix A")
_add("RTX A6000", 48, 768, _rates(38.7, 154.8, tf32=77.4), _4, (8, 6),
     "NVIDIA Ampere GA102 GPU architecture, appendix (RTX A6000)")
_add("RTX 4080", 16, 716.8, _rates(48.7, 97.5, tf32=48.7, float8=194.9), _4, (8, 9),
     "NVIDIA Ada GPU architecture, appendix B")
_add("RTX 4090", 24, 1008, _rates(82.6, 165.2, tf32=82.6, float8=330.3), _4, (8, 9),
     "NVIDIA Ada GPU architecture, appendix A")
_add("RTX 6000 Ada", 48, 960, _rates(91.1, 364.2, tf32=182.1, float8=728.5), _4, (8, 9),
     "NVIDIA RTX 6000 Ada Generation data sheet and Ada professional GPU architecture")
_add("RTX 5080", 16, 960, _rates(56.3, 112.6, tf32=56.3, float8=225.1), _5, (12, 0),
     "NVIDIA RTX Blackwell GPU architecture, appendix (GeForce RTX 5080)")
_add("RTX 5090", 32, 1792, _rates(104.8, 209.5, tf32=104.8, float8=419), _5, (12, 0),
     "NVIDIA RTX Blackwell GPU architecture, appendix (GeForce RTX 5090)")
# AMD's: attention runs in kernels that save what CUDA's do from 8.0 on. Matrices are multiplied at the matrix rates.
_add("MI250", 64, 1638.4, _rates(45.25, 181.05, float64=45.25), _4, (8, 0),
     "AMD Instinct MI250 data sheet, one of its two dies, each of which is a device")
_add("MI300X", 192, 5300, _CDNA3, _5, (8, 0), "AMD Instinct MI300X data sheet", 448)
_add("MI325X", 256, 6000, _CDNA3, _5, (8, 0), "AMD Instinct MI325X data sheet", 448)
_add("MI350X", 288, 8000, _rates(144.2, 2306.9, float8=4613.7, float64=72.1), _5, (8, 0),
     "AMD Instinct MI350X data sheet", 537.6)
# Stands for any CPU: two cores of a server and its disk. Bytes are exact, times are guesses.
register_device(
    Device("CPU", 16 * 2**30, 10e9, {"float32": 100e9, "float64": 50e9}, 0.5e9, 1e9, duplex=False, capability=None,
           compute_efficiency=1, memory_efficiency=1, link_efficiency=1, source="a guess")
)
# fmt: on

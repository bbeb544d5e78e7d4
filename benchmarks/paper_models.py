"""The papers' networks as chains of one block a stage, for those who import `benchmarks`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "papers"))
from network_chains import network

import rotoff
from rotoff.profile.estimate.devices import find


def chain(name: str, image: int = 224, batch: int = 32, device: str = "V100") -> rotoff.Chain:
    """The chain of the network `name` for a batch of square images, on the device of that name."""
    return network(name, batch, image, find(device))

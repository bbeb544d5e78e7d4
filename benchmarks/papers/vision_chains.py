"""Chains of torchvision's networks by `rotoff.estimate`: exact bytes from the modules, times from a device's data
sheet."""

from __future__ import annotations

from dataclasses import replace

import torch
from network_chains import _torchvision

import rotoff

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
DENSENETS = ("densenet121", "densenet161", "densenet169", "densenet201")
INCEPTION = "inception_v3"


def vision_chain(
    name: str, image: int, batch: int, device: str = "V100", bandwidth: float = 12.2e9, duplex: bool = True
) -> rotoff.Chain:
    """`name` of torchvision on a batch of square images; `bandwidth` in bytes per second, each way."""
    torchvision = _torchvision()
    options = {"aux_logits": False, "init_weights": False} if name == INCEPTION else {}
    with torch.device("meta"):
        model, sample = getattr(torchvision.models, name)(**options), torch.empty(batch, 3, image, image)
    chain = rotoff.estimate(model, sample, device=device)
    label = f"{name}, {image}, batch {batch}"
    return replace(chain, name=label, d2h_bandwidth=bandwidth, h2d_bandwidth=bandwidth, duplex=duplex)

"""Layers that save less for their backward than PyTorch's own."""

from .invertible import InvertibleBatchNormLeakyReLU as InvertibleBatchNormLeakyReLU

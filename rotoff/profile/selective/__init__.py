"""Smaller forms of a stage: which tensors to keep and which to compute again, found and measured."""

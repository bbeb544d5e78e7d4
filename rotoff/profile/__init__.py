"""A chain from a model."""

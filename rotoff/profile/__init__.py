"""Measures or estimates the chain of a model."""

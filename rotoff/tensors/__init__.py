"""Shared by capture and runtime: stages, storages, saved tensors, random number generators, recipes of forms."""

"""Shared by capture and runtime: stages, storage, saved tensors, generators, recipes of what is kept and what is
computed again."""

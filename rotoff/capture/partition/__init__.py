"""Divides a recorded forward into stages: the cuts, what crosses them, and lifetimes."""

"""Chains, sequences, the machine that simulates a sequence on a chain, and sizes in bytes."""

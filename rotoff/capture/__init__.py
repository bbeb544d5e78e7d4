"""Stages from a model: how it is cut into pieces that run one after another."""

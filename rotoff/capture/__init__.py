"""Stages from a model."""

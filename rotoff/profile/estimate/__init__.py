"""Profiles without the device: fake tensors for bytes, data sheets for times."""

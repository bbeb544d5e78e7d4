"""The ways to the host: streams of a device, a file, pinned memory, and their bandwidth."""

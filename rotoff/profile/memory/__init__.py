"""What the allocator sees: bytes of forwards, backwards, gradients and skip connections."""

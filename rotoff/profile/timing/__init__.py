"""What the clock sees: times of stages, until they converge; those that are known already."""

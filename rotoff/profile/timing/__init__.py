"""Times stages until the medians converge, and keeps known times."""

"""Public functions in addition to `Checkpointable`: attach, estimate, stages, plan."""

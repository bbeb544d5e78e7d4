"""What people call beside `Checkpointable`: attach, estimate, stages, the comparison of modes."""

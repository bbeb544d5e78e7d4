"""Running a sequence."""

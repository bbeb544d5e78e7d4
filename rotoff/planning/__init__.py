"""From a measured model and what the user asked for to the plan that runs, for each course and each process."""

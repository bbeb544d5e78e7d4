"""Every method on every workload at every limit, each cell in a fresh process: `python -m benchmarks.grid.run
--help`."""

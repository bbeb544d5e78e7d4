"""What `rotoff doctor` asks of a machine: does everything work here that training under a memory limit builds on, and
how well."""

"""The checks of `rotoff doctor`: whether all that training under a memory limit needs works on this machine, and how
well."""

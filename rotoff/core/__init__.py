"""What a plan is made of and judged by: chains, sequences, the machine that runs one on the other, and sizes in bytes."""

"""Files and terminals: atomic writes, JSON, progress."""

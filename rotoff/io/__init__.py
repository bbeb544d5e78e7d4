"""Files and terminals: atomic writes, JSON, the cache, progress."""

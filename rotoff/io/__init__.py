"""Files and terminals: whole writes, JSON, the cache, progress."""

"""Files and terminals: text and JSON, settings, progress."""

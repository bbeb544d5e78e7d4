"""What can be said of tensors without a plan: storages, nested inputs, settings, what a run has changed."""

"""The compiled searches and bounds of the solver."""

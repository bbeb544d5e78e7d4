"""Parameters, gradients and optimizer states that lie on the device or on the host, as a plan says."""

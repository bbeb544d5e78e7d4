"""From a recorded forward to stages: where it is cut, what crosses, what lives how long."""

"""Records what a forward did, operation by operation below autograd, and makes again what was dropped."""

"""Gradients, and the optimizers that use them."""

"""Comparisons of what stages compute with what one device computes, and of ranks with each other."""

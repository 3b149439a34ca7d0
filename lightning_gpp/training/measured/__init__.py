"""The machine, and the times of a job on it."""

"""The half of the project that needs GPUs, in one report; on CPUs, what can be checked there."""

"""The step as a whole, whose network calls are pipelined."""

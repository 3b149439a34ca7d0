"""The default partitioner; `search.py` is its whole course."""

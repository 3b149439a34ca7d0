"""The default partitioner; `search.py` describes its steps."""

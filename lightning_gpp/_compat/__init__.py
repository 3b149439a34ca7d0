"""All private names of torch and Lightning that this library uses, so that an upgrade has one place to look at.

The two are apart because the runtime knows torch alone. Every name has a test in `tests/compat`.
"""

"""All private names of torch, Lightning and OmegaConf that this library uses, so that an upgrade has one place to look.

Only the strategy imports Lightning, so the names of torch and those of modules, which may be Lightning's, are apart.
Every name has a test in `tests/compat`.
"""

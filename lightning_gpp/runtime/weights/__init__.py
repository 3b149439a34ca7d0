"""Weight policies, by name: the difference between synchronous and asynchronous training."""

from lightning_gpp.runtime.weights import corrected as _corrected  # noqa: F401  registers itself
from lightning_gpp.runtime.weights import double_buffer as _double_buffer  # noqa: F401  registers itself
from lightning_gpp.runtime.weights import latest as _latest  # noqa: F401  registers itself
from lightning_gpp.runtime.weights import predicted as _predicted  # noqa: F401  registers itself
from lightning_gpp.runtime.weights import stash as _stash  # noqa: F401  registers itself
from lightning_gpp.runtime.weights.interface import Use, WeightPolicy, Weights
from lightning_gpp.runtime.weights.registry import (
    check_options,
    copies_of,
    make_policy,
    options_of,
    register_weights,
    weight_policy_names,
)

__all__ = [
    "Use",
    "WeightPolicy",
    "Weights",
    "check_options",
    "copies_of",
    "make_policy",
    "options_of",
    "register_weights",
    "weight_policy_names",
]

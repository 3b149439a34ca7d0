"""Weight policies, by name: the difference between synchronous and asynchronous training."""

from lightning_gpp.runtime.weights import error_feedback as _error_feedback  # noqa: F401  registers its policy
from lightning_gpp.runtime.weights import latest as _latest  # noqa: F401  registers its policies
from lightning_gpp.runtime.weights import newest_graph as _newest_graph  # noqa: F401  registers its policy
from lightning_gpp.runtime.weights import predicted as _predicted  # noqa: F401  registers its policy
from lightning_gpp.runtime.weights import versions as _versions  # noqa: F401  registers its policies
from lightning_gpp.runtime.weights.policy import (
    Use,
    WeightPolicy,
    Weights,
    check_options,
    copies_of,
    make_policy,
    options_of,
    register_weights,
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
]

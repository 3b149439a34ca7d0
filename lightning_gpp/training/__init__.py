"""Training in stages without a framework: from a module and its optimizers to an engine for a loop of one's own."""

from lightning_gpp.training.engine import Engine
from lightning_gpp.training.loop import initialize
from lightning_gpp.training.options import Options

__all__ = ["Engine", "Options", "initialize"]

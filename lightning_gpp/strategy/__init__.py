"""Lightning's view of pipeline parallelism."""

from lightning_gpp.strategy.strategy import GPPStrategy

__all__ = ["GPPStrategy"]

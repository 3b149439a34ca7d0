"""Lightning Fabric's view of pipeline parallelism: a loop of the user's own that calls a module in stages."""

from lightning_gpp.fabric.strategy import GPPFabricStrategy

__all__ = ["GPPFabricStrategy"]

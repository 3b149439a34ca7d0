from lightning_gpp.runtime.bubbles import Work
from lightning_gpp.runtime.executor import Executor
from lightning_gpp.runtime.gradients import GradientSync
from lightning_gpp.runtime.mesh import Mesh
from lightning_gpp.runtime.random import RandomStreams
from lightning_gpp.runtime.stage import LOSS, DataSource, MicroBatch, Slot, StageModule
from lightning_gpp.runtime.transport import DistributedTransport, Transport, pairs_of

__all__ = [
    "LOSS",
    "DataSource",
    "DistributedTransport",
    "Executor",
    "GradientSync",
    "Mesh",
    "MicroBatch",
    "RandomStreams",
    "Slot",
    "StageModule",
    "Transport",
    "Work",
    "pairs_of",
]

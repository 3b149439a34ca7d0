"""From a captured model to a plan: by a partitioner, or by hand."""

from lightning_gpp.planning.balanced import balanced
from lightning_gpp.planning.devices import count_pipelines, devices_per_pipeline, number_devices
from lightning_gpp.planning.fit import check_model
from lightning_gpp.planning.manual import manual
from lightning_gpp.planning.registry import Request, partition, partitioner_names, register

__all__ = [
    "Request",
    "balanced",
    "check_model",
    "count_pipelines",
    "devices_per_pipeline",
    "manual",
    "number_devices",
    "partition",
    "partitioner_names",
    "register",
]

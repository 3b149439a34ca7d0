"""From a captured model to a plan: by a partitioner, or by hand."""

from lightning_gpp.planning import exhaustive as _exhaustive  # noqa: F401  registers itself
from lightning_gpp.planning import graphpipe as _graphpipe  # noqa: F401  registers itself
from lightning_gpp.planning import pipedream as _pipedream  # noqa: F401  registers itself
from lightning_gpp.planning import piper as _piper  # noqa: F401  registers itself
from lightning_gpp.planning.answer import Alternative, Answer, Control
from lightning_gpp.planning.auto import search as _auto  # noqa: F401  registers itself
from lightning_gpp.planning.devices import count_pipelines, devices_per_pipeline, number_devices
from lightning_gpp.planning.draft import Draft, DraftStage
from lightning_gpp.planning.estimate import estimate
from lightning_gpp.planning.evaluate import Evaluation, Evaluator
from lightning_gpp.planning.fit import check_model
from lightning_gpp.planning.found import Found, partition
from lightning_gpp.planning.manual import manual
from lightning_gpp.planning.problem import Problem
from lightning_gpp.planning.registry import partitioner_names, register
from lightning_gpp.planning.request import Request

__all__ = [
    "Alternative",
    "Answer",
    "Control",
    "Draft",
    "DraftStage",
    "Evaluation",
    "Evaluator",
    "Found",
    "Problem",
    "Request",
    "check_model",
    "count_pipelines",
    "devices_per_pipeline",
    "estimate",
    "manual",
    "number_devices",
    "partition",
    "partitioner_names",
    "register",
]

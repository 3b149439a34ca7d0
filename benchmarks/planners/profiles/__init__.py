"""Operator graphs and seconds from the published profiles of Piper and of dnn-partitioning."""

from __future__ import annotations

from pathlib import Path

from benchmarks.planners.profiles import dnn_partitioning, piper
from lightning_gpp.costs.measured import CostTable
from lightning_gpp.errors import PlanError
from lightning_gpp.files import read_json
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.validation import shown

__all__ = ["read_profile"]


def read_profile(path: str | Path, *, time_unit: float = 1e-3) -> tuple[OperatorGraph, CostTable]:
    """Read the operators of a JSON file, and their seconds.

    The keys show the kind of file: `maxMemoryPerDevice` or `mbsInBatch` an input of Piper, `maxSizePerFPGA` or
    `maxFPGAs` one of dnn-partitioning. The modules `piper` and `dnn_partitioning` describe how they are read.

    Args:
        path: the file.
        time_unit: the time unit of the file in seconds, which no format states. Most published inputs come from the
            profiles of PipeDream, in milliseconds; Piper's BERT is in seconds (1.0).

    Raises:
        PlanError: the file cannot be read, is of no known kind, lacks a key, or its edges form a cycle.
    """
    content, file = read_json(path, error=PlanError), str(path)
    if not isinstance(content, dict):
        raise PlanError(f"{file}: the content is {shown(content)}; it must be an object (curly brackets).")
    if piper.recognises(content):
        return piper.read(content, file, time_unit)
    if dnn_partitioning.recognises(content):
        return dnn_partitioning.read(content, file, time_unit)
    raise PlanError(
        f"{file}: no known kind of profile; its keys are: {', '.join(content) or 'none'}. Expected is "
        "'maxMemoryPerDevice' (Piper) or 'maxSizePerFPGA' (dnn-partitioning)."
    )

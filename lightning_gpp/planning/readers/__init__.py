"""Operator graphs from files: of this library, of Piper, and of dnn-partitioning."""

from __future__ import annotations

from pathlib import Path

from lightning_gpp.costs.table import CostTable
from lightning_gpp.errors import PlanError
from lightning_gpp.files import read_json
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning.readers import dnn_partitioning, native, piper
from lightning_gpp.validation import shown

__all__ = ["read_graph"]


def read_graph(path: str | Path, *, time_unit: float = 1e-3) -> tuple[OperatorGraph, CostTable | None]:
    """Read the operators of a JSON file, and their seconds if the file has times.

    The keys show the kind of file: `operators` is a graph that this library wrote (`OperatorGraph.to_json`),
    `maxMemoryPerDevice` or `mbsInBatch` an input of Piper, `maxSizePerFPGA` or `maxFPGAs` one of dnn-partitioning. The
    modules `native`, `piper` and `dnn_partitioning` describe the formats and how they are read.

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
    if native.recognises(content):
        return native.read(content, file), None
    if piper.recognises(content):
        return piper.read(content, file, time_unit)
    if dnn_partitioning.recognises(content):
        return dnn_partitioning.read(content, file, time_unit)
    raise PlanError(
        f"{file}: no known kind of operator graph; its keys are: {', '.join(content) or 'none'}. Expected is "
        "'operators' (this library), 'maxMemoryPerDevice' (Piper) or 'maxSizePerFPGA' (dnn-partitioning)."
    )

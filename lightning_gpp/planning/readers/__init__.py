"""Operator graphs from files: of this library, of Piper, and of dnn-partitioning."""

from __future__ import annotations

from pathlib import Path

from lightning_gpp.costs.table import CostTable
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning.readers import dnn_partitioning, native, piper
from lightning_gpp.planning.readers.located import load

__all__ = ["read_graph"]


def read_graph(path: str | Path, *, time_unit: float = 1e-3) -> tuple[OperatorGraph, CostTable | None]:
    """The operators of a JSON file, and their seconds where the file tells times.

    What kind of file it is, its keys tell: `operators` is a graph that this library wrote (`OperatorGraph.to_json`),
    `maxMemoryPerDevice` or `mbsInBatch` an input of Piper, `maxSizePerFPGA` or `maxFPGAs` one of dnn-partitioning. The
    modules `native`, `piper` and `dnn_partitioning` describe the formats and how they are read.

    Args:
        path: the file.
        time_unit: seconds per unit of the times in the file, which no format states. Most published inputs go back to
            the profiles of PipeDream, in milliseconds; Piper's BERT is in seconds (1.0).

    Raises:
        PlanError: the file cannot be read, is of no known kind, lacks a key, or its edges form a cycle.
    """
    content = load(path)
    if native.recognises(content):
        return native.read(content), None
    if piper.recognises(content):
        return piper.read(content, time_unit)
    if dnn_partitioning.recognises(content):
        return dnn_partitioning.read(content, time_unit)
    keys = ", ".join(content.value) if isinstance(content.value, dict) and content.value else "none"
    raise PlanError(
        f"{content.file}: no known kind of operator graph; its keys are: {keys}. Expected is 'operators' "
        "(this library), 'maxMemoryPerDevice' (Piper) or 'maxSizePerFPGA' (dnn-partitioning)."
    )

"""The simulator: step time and peak memory of the same program that the runtime executes."""

from lightning_gpp.cluster import Link
from lightning_gpp.simulation.period import (
    Period,
    WeightCopies,
    no_copies,
    simulate_period,
    simulate_streaming,
    steady_seconds,
)
from lightning_gpp.simulation.simulator import simulate
from lightning_gpp.simulation.stage_costs import StageCosts
from lightning_gpp.simulation.timeline import Collective, HostCopy, Span, Timeline, Transfer
from lightning_gpp.simulation.trace_events import TraceEvents, trace_of

__all__ = [
    "Collective",
    "HostCopy",
    "Link",
    "Period",
    "Span",
    "StageCosts",
    "Timeline",
    "TraceEvents",
    "Transfer",
    "WeightCopies",
    "no_copies",
    "simulate",
    "simulate_period",
    "simulate_streaming",
    "steady_seconds",
    "trace_of",
]

"""The simulator: step time and peak memory of the same program that the runtime executes."""

from lightning_gpp.cluster import Link
from lightning_gpp.simulation.simulator import simulate
from lightning_gpp.simulation.stage_costs import StageCost, StageCosts
from lightning_gpp.simulation.timeline import Collective, Span, Timeline, Transfer, trace_events

__all__ = ["Link", "Collective", "Span", "StageCost", "StageCosts", "Timeline", "Transfer", "simulate", "trace_events"]

"""Time and memory of a program before it runs: discrete events over the same program that the runtime executes."""

from lightning_gpp.cluster import Link
from lightning_gpp.simulation.simulator import simulate
from lightning_gpp.simulation.stage_costs import StageCost, StageCosts
from lightning_gpp.simulation.timeline import Reduction, Span, Timeline, Transfer, trace_events

__all__ = ["Link", "Reduction", "Span", "StageCost", "StageCosts", "Timeline", "Transfer", "simulate", "trace_events"]

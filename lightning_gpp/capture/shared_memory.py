"""Calls that change memory which other values share: a stage must have all of them, because messages copy.

stage a    linear ─► h
stage b              h ─► view ─► [::2] ─► add_      changes h, if the views are views of what this stage has
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from lightning_gpp.capture.recording import Recorded, Ref


def sharing_memory(calls: Sequence[Recorded]) -> dict[int, int]:
    """The group of each call that changes views in place, or makes them, by its number; others are left out.

    What was there before all of a group comes from outside: its stage copies that before it changes it.
    """
    groups: nx.Graph[int] = nx.Graph()
    for call in calls:
        makers = sorted({_first(ref, calls).call for ref in call.overwritten})
        groups.add_edges_from((call.index, maker) for maker in makers[1:])
    return {member: min(group) for group in nx.connected_components(groups) for member in group}


def _first(ref: Ref, calls: Sequence[Recorded]) -> Ref:
    """The value as it was before calls changed it in place."""
    while ref.call >= 0 and (place := ref.output - calls[ref.call].num_returned) >= 0:
        ref = calls[ref.call].mutated[place]
    return ref

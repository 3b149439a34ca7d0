"""The data that the page's script draws: actions, messages, collectives, host copies and memory of timelines."""

from __future__ import annotations

from typing import Any

from lightning_gpp.planning import Prediction
from lightning_gpp.reports.lanes import MEANINGS, computes, lanes
from lightning_gpp.reports.palette import HATCHED, action_color
from lightning_gpp.schedules import Action, Kind
from lightning_gpp.simulation import Timeline


def chart_data(prediction: Prediction, measured: Timeline | None = None) -> dict[str, Any]:
    """Both timelines, with times in seconds from their first action, and what their letters mean.

    A span is [stage, kind, micro-batch, start, stop], a message [sender, its span, receiver, its span, start, stop,
    bytes] with indices of devices and of spans on them, a collective or host copy [stage, kind, start, stop].
    """
    plan, timelines = prediction.plan, {"simulated": prediction.drawn, "measured": measured}
    return {
        "stages": [{"name": stage.name, "modules": list(stage.modules)} for stage in plan.stages],
        "kinds": {kind.value: MEANINGS[kind] for kind in Kind},
        "hatched": [kind.value for kind in HATCHED],
        "colors": [{kind.value: action_color(stage, kind) for kind in Kind} for stage in range(len(plan.stages))],
        "limits": list(prediction.memory_bytes),
        "peaks": list(prediction.peak_bytes),
        "timelines": {name: _timeline(timeline) for name, timeline in timelines.items() if timeline is not None},
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    origin = timeline.start
    drawn = [[span for span in spans if computes(span.action)] for spans in timeline.devices]
    places = {(device, span.action): at for device, spans in enumerate(drawn) for at, span in enumerate(spans)}
    return {
        "seconds": timeline.makespan,
        "idle": list(timeline.bubble_fractions),
        "devices": [
            [[*_named(span.action), span.start - origin, span.stop - origin] for span in spans] for spans in drawn
        ],
        "collectives": [
            [
                [entry.stage, entry.kind.value, entry.start - origin, entry.stop - origin]
                for lane in lanes(timeline, device)
                for entry in lane
            ]
            for device in range(len(drawn))
        ],
        "messages": [
            [
                *(entry.src, places[entry.src, entry.producer], entry.dst, places[entry.dst, entry.consumer]),
                *(entry.start - origin, entry.stop - origin, entry.num_bytes),
            ]
            for entry in timeline.transfers
            if (entry.src, entry.producer) in places and (entry.dst, entry.consumer) in places
        ],
        "memory": [[[time - origin, held] for time, held in device] for device in timeline.held_bytes],
    }


def _named(action: Action) -> tuple[int, str, int]:
    return action.stage, action.kind.value, action.micro_batch

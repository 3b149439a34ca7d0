"""Compares a plan with one device alone: a model may be too small for the devices that it is planned for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightning_gpp.errors import PlanError
from lightning_gpp.planning import Prediction
from lightning_gpp.reports.units import rate
from lightning_gpp.training.machine import Machine
from lightning_gpp.training.options import Options
from lightning_gpp.training.planner import Subject, planned

WORTH: Final = 0.25
"""Speed-up per device below which a model is too small for its devices."""

SECONDS: Final = 1.0
"""Time limit of the search for one device, which has little to choose."""


def too_small(prediction: Prediction, step: Subject, machine: Machine, options: Options) -> Iterator[str]:
    """A sentence if the devices together are hardly faster than one of them; none if one does not have the memory."""
    devices, one = machine.cluster.num_devices, _on_one_device(step, machine, options)
    if devices == 1 or one is None:
        return
    gain = prediction.samples_per_second / one.samples_per_second
    if gain < WORTH * devices:
        yield (
            f"The model is too small for {devices} devices: together they are {gain:.1f} times as fast as one of them "
            f"({rate(prediction.samples_per_second)} against {rate(one.samples_per_second)} samples/s). Take fewer "
            "devices, or give each more work: a larger mini-batch, or a larger model."
        )


def _on_one_device(step: Subject, machine: Machine, options: Options) -> Prediction | None:
    """The fastest step on the first device alone; None if its memory is too small."""
    recompute = options.recompute if isinstance(options.recompute, bool) else None
    options = Options(recompute=recompute, search_seconds=SECONDS, bound_seconds=0)
    try:
        return planned(step, options, lambda: machine, 1).prediction
    except PlanError:
        return None

"""The remark on how many devices a plan uses: whether others should be idle, and where data parallelism is all."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning.problem.prediction import Prediction
from lightning_gpp.planning.request import Request

WORTH_SAYING: Final = 1.05
"""The ratio of throughputs from which it is said that fewer devices are faster."""

REMARK: Final = "devices"
"""The key of the remark in a plan's notes."""


def device_remark(prediction: Prediction, compared: Prediction | None, request: Request) -> str:
    """A sentence on the devices that a plan uses; empty if it uses all in a pipeline, and nothing is known against it.

    Args:
        prediction: the plan.
        compared: the best plan known on all devices if this one leaves some idle, otherwise on fewer.
        request: the request that the plan is for.
    """
    number, everything = prediction.used_devices, request.cluster.num_devices
    if number < everything:
        return _on_fewer(prediction, compared, everything)
    if compared is not None and compared.used_devices < number:
        ratio = compared.samples_per_second / prediction.samples_per_second
        if ratio >= WORTH_SAYING and compared.excess_bytes <= prediction.excess_bytes:
            return _fewer_are_faster(compared.used_devices, number, ratio)
    return _data_parallel(prediction.plan, number)


def _on_fewer(prediction: Prediction, compared: Prediction | None, everything: int) -> str:
    idle = everything - prediction.used_devices
    text = f"{idle} of {everything} devices {_verb(idle)} idle"
    if compared is None:
        return f"{text}: no plan that uses all of them was found to be as fast."
    ratio = prediction.samples_per_second / compared.samples_per_second
    faster = f"is {ratio:.3g} times as fast as the best one found on all" if ratio > 1.005 else "is as fast as on all"
    return f"{text}: this plan {faster}, because messages and gradients would take longer than the work that is shared."


def _fewer_are_faster(fewer: int, number: int, ratio: float) -> str:
    return (
        f"{fewer} of the {number} devices would be {ratio:.3g} times as fast as this plan on all: the model is too "
        "small for them, or the links are too slow. strategy.idle_devices=true makes that plan."
    )


def _verb(number: int) -> str:
    return "is" if number == 1 else "are"


def _data_parallel(plan: Plan, number: int) -> str:
    stages = [stage for stage in plan.stages if stage.modules != (STEP,)]
    if number == 1 or len(stages) > 1:
        return ""
    return (
        "All devices share one stage: for this model data parallelism alone is estimated to be fastest. "
        "strategy.max_replicas=1 makes a pipeline with one stage per device."
    )


def with_remark(plan: Plan, remark: str) -> Plan:
    """The plan with the remark in its notes."""
    return replace(plan, notes={**plan.notes, REMARK: remark}) if remark else plan

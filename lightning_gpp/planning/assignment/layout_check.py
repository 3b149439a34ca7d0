"""Layout check: compares the layout of a plan with the one that its schedule is made for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_gpp.errors import GPPError
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.layout import laid_out
from lightning_gpp.schedules.registry import method_of


def layout_mismatch(plan: Plan, schedule: str) -> str:
    """Why the plan's layout does not suit the schedule; empty if it does."""
    method, stages = method_of(schedule), [stage for stage in plan.stages if stage.modules != (STEP,)]
    if method.bidirectional and not all(_both_ways(plan, stage) for stage in stages):
        return (
            "it runs in both directions, which needs a second replica of every stage on the mirrored device; the two "
            "take micro-batches in turn (round_robin)."
        )
    if method.bidirectional and (reason := _one_way(plan, stages)):
        return reason
    number = method.stages_per_device
    held = sum(1 if method.bidirectional else len(stage.devices) for stage in stages)
    if -(-held // plan.num_devices) < number:
        return f"it is made for {number} stages per device; the plan has {held} on {plan.num_devices} devices."
    if number > 1 and not method.bidirectional and not _has_layout(plan, method.layout):
        return (
            f"it is made for stages placed {_WORDS[method.layout]}, one device each; this plan places them differently."
        )
    return ""


_WORDS = {"looped": "in loops over the devices", "zigzag": "back and forth over the devices"}


def _one_way(plan: Plan, stages: Sequence[Stage]) -> str:
    """Why no two micro-batches run in opposite directions; empty if some do."""
    if plan.num_devices < 2:
        return "it runs in both directions, which takes 2 devices or more (trainer.devices); there is 1."
    numbers = [-(-plan.batch_size // stage.micro_batch_size) for stage in stages]
    if max(numbers, default=2) < 2:
        return (
            "it runs micro-batches in both directions in turn, which takes 2 micro-batches or more "
            "(strategy.num_micro_batches); there is 1."
        )
    return ""


def _both_ways(plan: Plan, stage: Stage) -> bool:
    last = plan.num_devices - 1
    if len(stage.devices) == 1:
        return 2 * stage.devices[0] == last
    return stage.round_robin and len(stage.devices) == 2 and sum(stage.devices) == last


def _has_layout(plan: Plan, layout: str) -> bool:
    """True if the plan has this layout under any numbering of devices; stages of equal depth may be exchanged."""
    try:
        wanted = laid_out(plan, plan.num_devices, layout)
    except GPPError:
        return False
    single = all(len(stage.devices) == 1 for stage in plan.stages)
    return single and _depths(plan) == _depths(wanted)


def _depths(plan: Plan) -> Counter[tuple[int, ...]]:
    """Number of devices with stages of each set of depths."""
    depths = plan.depths()
    held = ([i for i in plan.stages_on(device) if plan.stages[i].modules != (STEP,)] for device in _devices(plan))
    return Counter(tuple(sorted(depths[stage] for stage in stages)) for stages in held)


def _devices(plan: Plan) -> range:
    return range(plan.num_devices)

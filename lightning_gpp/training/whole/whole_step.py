"""The step as a whole: every rank runs it once, on the undivided mini-batch, and network calls are pipelined.

    rank 0 loads a mini-batch -> all ranks have it, and rank 0's random numbers
    all ranks run the step    -> network calls: network_calls.py; all else is computed by each rank, with equal results
    a backward                -> each rank has the gradients of its parameters; shared ones are summed at its end

So the step may call networks, backwards and optimizers in any order, and its loss may combine all samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_gpp.capture import Capture
from lightning_gpp.capture.batch import samples_in
from lightning_gpp.capture.calls import (
    StepCalls,
    call_batch,
    capture_calls,
    find_calls,
    joint_batch,
    joint_loss,
    tied,
)
from lightning_gpp.errors import CaptureError, ConfigError, GPPError
from lightning_gpp.option import refuse_beside
from lightning_gpp.plan import Plan
from lightning_gpp.stages import Pipeline
from lightning_gpp.training.control import Mirror
from lightning_gpp.training.host import TRAINING, Job
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.options import Context, Options
from lightning_gpp.training.tensors.replicas import Replicas, Site
from lightning_gpp.training.whole.network_calls import NetworkCalls, Otherwise
from lightning_gpp.wording import sentence


def why_whole(refused: GPPError, step: str = TRAINING, *, alone: bool = False) -> str:
    """The message for a step that runs as a whole, because of what refused micro-batches. `alone`: on one device."""
    trains, name = step == TRAINING, step.replace("_", " ")
    option = "strategy.step=whole, docs/howto/contrastive.md" if trains else "docs/howto/evaluate.md"
    cost = " All forwards of a call come before its backwards, so steps take longer." if trains and not alone else ""
    on = ", on all ranks, and each of its network calls is pipelined" if not alone else " on its mini-batch"
    reason = sentence(getattr(refused, "reason", "") or refused)
    return f"The {name} runs as a whole{on} ({option}), because it cannot run on micro-batches.{cost} {reason}"


class WholeStep:
    """Runs a step as a whole. All ranks call its methods together.

    Args:
        site: what the step finds in place.
    """

    def __init__(self, site: Site) -> None:
        self._job, self._layout, self._replicas = site.job, site.layout, site.replicas
        self._mirror = Mirror(site.job.control, site.job.device)
        self._calls = NetworkCalls(site, self._mirror)

    def share(self, batch: Any) -> Any:
        """The mini-batch of the rank that loads the data, on all ranks of its pipeline."""
        return self._mirror.tree(batch)

    @contextmanager
    def running(self, number: int, otherwise: Otherwise | None = None) -> Iterator[None]:
        """Inside, the user's step runs on mini-batch `number`, on all ranks with the same random numbers.

        `otherwise`: answers network calls that get objects.
        """
        self._mirror.streams()
        self._calls.at_end = self._at_end()
        with self._job.control.mesh.peers(), self._calls.answered(number, otherwise):
            yield

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Inside, a backward runs; at its end gradients are complete, and added to those of earlier backwards."""
        if self._replicas is None:
            raise GPPError("The engine was set up to evaluate, so it cannot train.")
        self._replicas.begin(last=True)
        with self._job.control.mesh.peers(), self._summed(self._replicas):
            yield

    @contextmanager
    def _summed(self, replicas: Replicas) -> Iterator[None]:
        """Inside, a backward runs; at its end its gradients are summed over ranks."""
        shared = self._shared()
        before = {name: parameter.grad for name, parameter in shared.items()}
        for parameter in shared.values():
            parameter.grad = None
        self._calls.reduces = True
        try:
            yield
        finally:
            self._calls.reduces = False
        self._weight(shared)
        replicas.finish()
        for name, parameter in shared.items():
            parameter.grad = _sum(before[name], parameter.grad)

    def _at_end(self) -> str:
        """The reason why a backward must not end by itself, as a clause; empty if it may."""
        shared = self._replicas is not None and self._shared()
        return "several ranks hold the same parameters, whose gradients are summed at its end" if shared else ""

    def _shared(self) -> dict[str, nn.Parameter]:
        """This rank's parameters that other ranks hold, too."""
        control, layout = self._job.control, self._layout
        held = layout.names_on(control.device)
        several = control.num_pipelines > 1
        return {
            name: parameter
            for name, parameter in self._job.module.named_parameters()
            if name in held and (several or len(layout.devices[name]) > 1)
        }

    def _weight(self, shared: dict[str, nn.Parameter]) -> None:
        """Make the sum over ranks the mean over pipelines; parameters of no stage have one gradient on all ranks."""
        control = self._job.control
        pipelines = 1 if self._job.options.loss_reduction == "sum" else control.num_pipelines
        for name, parameter in shared.items():
            copies = pipelines * (1 if self._layout.uses[name] else control.num_devices)
            if parameter.grad is not None and copies > 1:
                parameter.grad.div_(copies)


def _sum(before: Tensor | None, fresh: Tensor | None) -> Tensor | None:
    if before is None or fresh is None:
        return before if fresh is None else fresh
    return before.add_(fresh)


def capture_whole(
    job: Job, example: Any, known: StepCalls | None = None, step: str = TRAINING
) -> tuple[Capture, StepCalls]:
    """Capture the network calls of the step, together, for planning; and what was found in the step.

    Args:
        job: the job of the run.
        example: a mini-batch, perhaps without memory.
        known: the network calls, if they need not be found in the step.
        step: the name of the step.

    Raises:
        CaptureError: the step cannot be run on fake tensors, or a module cannot be captured.
    """
    found = known or calls_of(job, example, step)
    return capture_found(job.module, found, example, job.options, job.host.context(step), job.device), found


def calls_of(job: Job, example: Any, step: str) -> StepCalls:
    """The network calls of a step that runs as a whole.

    Raises:
        CaptureError: see `capture_whole`.
    """
    with job.control.mesh.peers():
        return find_calls(
            job.module,
            example,
            context=job.host.context(step),
            device=job.device,
            stand_ins=job.host.stand_ins,
            step=step,
            divided=job.control.num_devices > 1,
        )


def capture_found(
    module: nn.Module, found: StepCalls, example: Any, options: Options, context: Context, device: torch.device
) -> Capture:
    """Capture the network calls that were found in a step, together; see `capture_whole`."""
    capture = partial(capture_calls, module, context=context, device=device, function=joint_loss)
    try:
        captured = capture(joint_batch(found.arguments, samples_in(example)))
    except CaptureError:  # perhaps because rows of an argument are no samples
        captured = capture(call_batch(found.arguments, samples_in(example)), divided=False)
    if options.stages is not None:  # they are checked afterwards
        return captured
    return replace(captured, graph=tied(captured.graph, found.coupled))


def check_states(found: StepCalls, pipeline: Pipeline, plan: Plan) -> None:
    """Raise ConfigError if the step itself uses parameters or buffers that a rank lacks which needs them."""
    held = [{*names, *buffers} for names, buffers in zip(pipeline.parameters, pipeline.buffers, strict=True)]
    if plan.num_devices > 1 and (both := sorted(found.states & set().union(*held))):
        raise ConfigError(
            f"The step uses {', '.join(both[:5])} itself, and a module in a stage uses it, too. The step runs on all "
            "ranks, of which only those of that stage have it. Use it inside a module's forward, for example by a "
            "method of that module that returns what the step needs, called through a module of its own."
        )
    for group in found.coupled:
        users = [stage for stage, names in zip(plan.stages, held, strict=True) if names & group]
        if len({stage.devices for stage in users}) > 1:
            raise ConfigError(
                f"The step combines {', '.join(sorted(group)[:5])} with each other, but they are in the stages "
                f"{', '.join(repr(stage.name) for stage in users)} on different devices. Put their modules into one "
                "stage (strategy.stages)."
            )


def can_run_whole(job: Job) -> bool:
    """True if a training step that cannot run on micro-batches may run as a whole instead, as the user left it open."""
    return not job.whole and left_open(job.options)


def left_open(options: Options) -> bool:
    """True if the options leave it open that a step runs as a whole."""
    if options.step != "auto" or options.members > 1:
        return False
    try:
        check_whole(options)
    except ConfigError:
        return False
    return True


def may_evaluate_whole(options: Options, plan: Plan) -> bool:
    """True if an evaluation step that cannot run on micro-batches may run as a whole instead, in these stages."""
    if options.step == "micro_batches" or options.members > 1 or plan.num_devices == 1:
        return False
    return options.weights == SYNCHRONOUS and plan.sharding != "fsdp"


_STEP: Final = "step"
_WHOLE: Final = "whole"
"""Name and value of the note in plans for steps as a whole."""


def noted_whole(plan: Plan, whole: bool) -> Plan:
    """The plan, with a note if it is for a step as a whole."""
    return replace(plan, notes={**plan.notes, _STEP: _WHOLE}) if whole else plan


def made_for_whole(plan: Plan | None) -> bool:
    """True if a given plan is for a step as a whole."""
    return plan is not None and plan.notes.get(_STEP) == _WHOLE


def ordered_for(options: Options, whole: bool) -> Options:
    """The options by which stages are planned: of a step as a whole, all forwards of a call precede its backwards."""
    return replace(options, schedule="gpipe") if whole else options


def check_whole(options: Options, *, steps_itself: bool = False) -> None:
    """Refuse options that a step as a whole does not support.

    Args:
        options: the options.
        steps_itself: the user's code steps the optimizers.

    Raises:
        ConfigError: names the option, the reason and a remedy.
    """
    problems = {
        "schedule": (
            options.schedule not in (None, "gpipe"),
            "orders the forwards of a micro-batch and the backwards of another, but here all forwards of a call run "
            "before the step goes on. Leave it out",
        ),
        "weights": (options.weights != SYNCHRONOUS, "does not wait for the end of a step. Leave it out"),
        "slices": (options.slices not in (None, 1), "cuts sequences in the program of a step. Leave it out"),
        "sharding": (options.sharding not in (None, "none"), "reduces gradients inside the program. Leave it out"),
        "local_losses": (bool(options.local_losses), "starts backwards before the step has its loss. Leave it out"),
        "costs": (options.costs == "measured", "times the step on micro-batches. Use roofline"),
        "trace": (options.trace, "measures the program of a step. Leave it out"),
        "on_nonfinite": (
            steps_itself and options.on_nonfinite in ("stop", "skip"),
            "looks at gradients before the loop steps the optimizer, but here your code does. Leave it out, and check "
            "in your code",
        ),
    }
    refuse_beside("strategy.step=whole (which manual optimization needs)", options, problems)

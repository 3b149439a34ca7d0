"""From the user's steps to running stages: captures, plans, places parameters, runs mini-batches."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_gpp.capture import Capture
from lightning_gpp.capture.batch import batch_size_of
from lightning_gpp.capture.record import step_arguments
from lightning_gpp.costs.footprint import Footprint
from lightning_gpp.costs.model import CostModel
from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.reports.progress import search_progress
from lightning_gpp.runtime.random import RandomStreams
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.runtime.transport import DistributedTransport, pairs_of
from lightning_gpp.slices import is_sliced
from lightning_gpp.stages import build
from lightning_gpp.stages.declared import Declared
from lightning_gpp.strategy.logs import LogExchange, LogRecorder
from lightning_gpp.training.batches import outline, signature
from lightning_gpp.training.compiled import warn_of_cuts
from lightning_gpp.training.control import Control
from lightning_gpp.training.costs import measured_costs
from lightning_gpp.training.machine import Machine, resolved
from lightning_gpp.training.options import Context, Options
from lightning_gpp.training.parameters import Placement, drop, equalise, move, place, settle, tensors_of
from lightning_gpp.training.planner import TRAINING, captured_step, evaluation_plan, plan_for, refitted
from lightning_gpp.training.replicas import Replicas, Uses
from lightning_gpp.training.results import combined, loss_and_rest
from lightning_gpp.training.self_check import refuses_check, self_check
from lightning_gpp.training.session import Session
from lightning_gpp.training.shards import without_shards

SMALL = 50_000_000
"""Parameters up to which a model is checked without being asked."""


class Engine:
    """Runs the steps of one module in stages. All ranks construct it and call its methods together.

    Attributes:
        plan: the stages, once a step was captured.
        placement: where parameters live, once they were placed.
        step: mini-batches trained so far; numbers the random streams.
        batch_size, batch_signature: of the mini-batch that was announced last.
        footprint: what a device keeps per byte of parameters, for planning.
        uses: the stages that use each parameter, once they were placed.
        replicas: what ranks with the same parameters do together, in training.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        control: Control,
        options: Options,
        precision: Precision,
        device: torch.device,
        seed: int,
        on_plan: Callable[[Plan], None],
        known: Plan | None = None,
        num_nodes: int = 1,
    ) -> None:
        self._known = known
        self.num_nodes = num_nodes
        self.footprint = Footprint()
        self._costs: CostModel | None = None
        self._on_plan = on_plan
        self.module, self.control, self.options = module, control, options
        self.precision, self.device, self.seed = precision, device, seed
        self.streams = RandomStreams(seed, device)
        self.logs = LogExchange(control, device)
        self._recorder = LogRecorder(module)
        self._parameters = list(module.parameters())
        self.plan: Plan | None = None
        self.placement: Placement | None = None
        self.uses: Uses = {}
        self.replicas: Replicas | None = None
        self.was_whole = False
        self.step = 0
        self.batch_size, self.batch_signature = 0, 0
        self.inside_user_code = False
        self.current: Session | None = None
        self._sessions: dict[tuple[str, int], Session] = {}
        self._transport: DistributedTransport | None = None
        self._first: tuple[Capture | Declared, int] | None = None

    # -- once ---------------------------------------------------------------------------------------------------------

    def make_plan(self, step: str, batch: Any) -> Plan:
        """Capture a step on rank 0's batch and decide who computes what. `batch` counts only on rank 0.

        Raises:
            CaptureError, PlanError, ConfigError: see there.
            GPPError: the ranks do not agree on what they captured.
        """
        example = self.control.broadcast(outline(batch) if self.control.rank == 0 else None)
        captured = self._capture(step, example)
        self.plan = self._planned(captured, batch)
        _check_step_device(self.plan)
        self._agree(captured, self.plan)
        self._first = captured, self._form(example)
        if self._known is None:
            self._on_plan(self.plan)
        if step == TRAINING and self._wants_check(self.plan):
            with isolate_rng():
                self._check(captured, self.plan, batch)
        return self.plan

    def _planned(self, captured: Capture | Declared, batch: Any) -> Plan:
        """Rank 0's plan, or its refusal: a search stops elsewhere in another process, and finds another plan."""
        outcome: Plan | GPPError | None = None
        if self.control.rank == 0:
            try:
                outcome = self._searched(captured, batch)
            except GPPError as error:
                outcome = error
        outcome = self.control.broadcast(outcome)
        if not isinstance(outcome, Plan):
            raise outcome or GPPError("Rank 0 made no plan.")
        return outcome

    def _searched(self, captured: Capture | Declared, batch: Any) -> Plan:
        def machine() -> Machine:
            found = self.machine()
            if self.options.costs == "measured" and captured.step == TRAINING:
                context = self._context(TRAINING)
                self._costs = measured_costs(
                    captured, self.module, batch, self.options, found.cluster, device=self.device, context=context
                )
            return replace(found, costs=self._costs)

        with search_progress() as progress:
            return plan_for(captured, self.options, self.control.num_devices, self._known, machine, progress)

    def machine(self) -> Machine:
        """What plans are made for, by all ranks' devices; costs that were measured are known on rank 0."""
        cluster = resolved(self.options.cluster, self.control.world_size, self.num_nodes, self.device.type)
        return Machine(cluster=cluster, footprint=self.footprint, costs=self._costs)

    @property
    def graph(self) -> OperatorGraph | None:
        """What the step computes that the plan was made for."""
        return None if self._first is None else self._first[0].graph

    def _wants_check(self, plan: Plan) -> bool:
        wanted = self.options.self_check
        if wanted == "auto":
            wanted = sum(parameter.numel() for parameter in self.module.parameters()) < SMALL
        reasons = [reason for reason in self.control.gather(refuses_check(self.module, plan)) if reason]
        if wanted and reasons:
            rank_zero_info(f"The self-check (strategy.self_check) is left out: {reasons[0]}.")
        return bool(wanted) and not reasons

    def _check(self, captured: Capture | Declared, plan: Plan, batch: Any) -> None:
        """One micro-batch split and unsplit, on the first pipeline. `batch` counts only on rank 0."""
        equalise(self.module, self.control)
        self._connected(plan)
        if self.control.pipeline != 0:
            return
        everywhere = {name: tuple(range(self.control.num_devices)) for name in tensors_of(self.module)}
        arguments = step_arguments(getattr(self.module, TRAINING), 0)

        def call(module: nn.Module, samples: Any) -> Any:
            with self._context(TRAINING)(), self.user_code():
                return getattr(module, TRAINING)(samples, *arguments)

        self_check(
            self.module,
            captured,
            plan,
            batch,
            control=self.control,
            call=call,
            session=lambda module: self._make_session(captured, plan, module, Placement(everywhere), TRAINING),
            device=self.device,
            precision=self._precision(),
        )

    def _precision(self) -> torch.dtype:
        """The least precise type that modules compute in."""
        named = {"bf16": torch.bfloat16, "16": torch.float16}.get(str(self.precision.precision).split("-")[0])
        kinds = [parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point()]
        return named or min(kinds, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)

    def place_parameters(self) -> Placement:
        """Let every rank hold what its stages use, on its device, and nothing else."""
        if self.plan is None or self._first is None:
            raise GPPError("Parameters were to be placed before there was a plan; call make_plan() first.")
        pipeline = build(self._first[0], self.plan, self.module)
        warn_of_cuts(self.module, self._first[0], pipeline)
        used = [(*names, *buffers) for names, buffers in zip(pipeline.parameters, pipeline.buffers, strict=True)]
        self.placement = place(self.module, self.plan, used)
        self.uses = {
            name: tuple(stage for stage, names in enumerate(pipeline.parameters) if name in names)
            for name, _ in self.module.named_parameters()
        }
        self.was_whole = settle(self.module, self.placement, self.control)
        move(self.module, self.device)
        self.renew()
        return self.placement

    def renew(self) -> None:
        """After the module was given other parameters in the places of its own."""
        self._parameters = list(self.module.parameters())

    def drop_foreign(self) -> None:
        """After a whole state dict was loaded: keep only what lives here."""
        if self.placement is not None:
            drop(self.module, self.placement.names_on(self.control.device))
            self.renew()

    def _agree(self, captured: Capture | Declared, plan: Plan) -> None:
        text = f"{captured.fingerprint} {plan}"
        digests = self.control.gather(hashlib.sha256(text.encode()).hexdigest()[:12])
        if len(set(digests)) > 1:
            raise GPPError(
                f"The ranks captured different steps or made different plans; fingerprints by rank: {digests}. The "
                "model's structure must not depend on the rank or on unseeded random choices; or give all ranks one "
                "plan by strategy.plan."
            )

    def _capture(self, step: str, example: Any) -> Capture | Declared:
        context, known = self._context(step), self.plan or self._known
        return captured_step(self.module, example, step, self.options, context, self.device, known)

    def _context(self, step: str) -> Context:
        """The precision plugin's context for a step; the modules compute in it on all ranks."""
        context: Context = getattr(self.precision, _CONTEXTS[step])
        return context

    # -- every mini-batch ---------------------------------------------------------------------------------------------

    def announce(self, batch: Any) -> bool:
        """Tell the ranks of this pipeline what comes: samples and form. False: the loader gave None.

        `batch` counts only on the rank that runs the step.
        """
        numbers = torch.zeros(2, dtype=torch.int64)
        if self.control.runs_step:
            facts = (-1, 0) if batch is None else (batch_size_of(batch), self._form(batch))
            numbers = torch.tensor(facts)
        self.batch_size, self.batch_signature = self.control.share(numbers).tolist()
        return self.batch_size >= 0

    def train(self, arguments: Sequence[Any], accumulated: int) -> Any:
        """Run forwards and backwards of one mini-batch; the loss (on all ranks), with the rest of a dict where it is.

        `accumulated`: mini-batches per optimizer step.
        """
        weight = 1.0 / accumulated
        if self.options.loss_reduction == "mean":
            weight /= self.batch_size * self.control.num_pipelines
        outputs, recorder = self._run(TRAINING, arguments, weight)
        if self.current is not None:
            self.current.tell_not_split()
        self.step += 1
        loss, rest = loss_and_rest(outputs) if outputs else (torch.zeros(()), {})
        if outputs and self.options.loss_reduction == "sum":
            loss = loss * sum(part.num_samples for part, _ in outputs)
        (number,) = self._share_logs(recorder, [loss.item()])
        if not outputs:
            return torch.tensor(number, dtype=torch.float64, device=self.device)
        return {"loss": loss, **rest} if rest else loss

    def evaluate(self, step: str, arguments: Sequence[Any]) -> Any:
        """Run a validation, test or prediction step; what it returned, on the rank that runs it; None elsewhere."""
        outputs, recorder = self._run(step, arguments, 1.0)
        if step != "predict_step":
            self._share_logs(recorder, [])
        return combined(outputs) if outputs else None

    def _run(
        self, step: str, arguments: Sequence[Any], weight: float
    ) -> tuple[list[tuple[MicroBatch, Any]], LogRecorder | None]:
        recorder = self._recorder.reset() if self.control.runs_step else None
        self.current = session = self._session(step, arguments[0])
        invoke = self._invocation(step, arguments[1:], recorder)
        outputs = session.run(arguments[0], invoke, self.batch_size, loss_weight=weight, step=self.step)
        return (outputs if self.control.runs_step else []), recorder

    def _share_logs(self, recorder: LogRecorder | None, numbers: Sequence[float]) -> list[float]:
        """Replay the step's logs everywhere; `numbers` of the step's rank, and whether it wants to stop."""
        trainer = self.module.trainer
        calls, values = self.logs.exchange(recorder, [float(trainer.should_stop), *numbers])
        stop, *rest = values
        if stop:
            trainer.should_stop = True
        count = len(rest) - 2 * len(calls)
        self.logs.replay(self.module, calls, rest[count:])
        return rest[:count]

    def _invocation(self, step: str, rest: Sequence[Any], recorder: LogRecorder | None) -> Callable[[Any], Any]:
        function = getattr(self.module, step)
        context = self._context(step)
        is_sum = step == TRAINING and self.options.loss_reduction == "sum"

        def invoke(batch: Any) -> Any:
            samples = batch_size_of(batch)
            if recorder is None:
                raise GPPError("The user's step was called on a rank that has no data.")
            with recorder.run(samples), context(), self.user_code():
                output = function(batch, *rest)
            return _scaled(output, 1 / samples) if is_sum else output

        return invoke

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """While user code runs that other ranks do not run, barriers and broadcasts must not wait for them."""
        before, self.inside_user_code = self.inside_user_code, True
        try:
            yield
        finally:
            self.inside_user_code = before

    # -- sessions -----------------------------------------------------------------------------------------------------

    def _session(self, step: str, batch: Any) -> Session:
        key = (step, self.batch_signature)
        if key not in self._sessions:
            self._sessions[key] = self._new_session(step, batch)
        return self._sessions[key]

    def _new_session(self, step: str, batch: Any) -> Session:
        if self.placement is None:
            self.make_plan(step, batch)
            self.place_parameters()
        captured = self._captured(step, batch)
        if self.plan is None or self.placement is None:
            raise GPPError("A step was to run before parameters were placed.")
        plan = (refitted if step == TRAINING else evaluation_plan)(captured, self.plan)
        meets = self.replicas is not None and (step == TRAINING or self.replicas.sharding == "fsdp")
        replicas = self.replicas if meets else None
        return self._make_session(captured, plan, self.module, self.placement, step, replicas)

    def _make_session(
        self,
        captured: Capture | Declared,
        plan: Plan,
        module: nn.Module,
        placement: Placement,
        step: str,
        replicas: Replicas | None = None,
    ) -> Session:
        return Session(
            capture=captured,
            plan=plan,
            module=module,
            placement=placement,
            control=self.control,
            transport=self._connected(plan),
            device=self.device,
            streams=self.streams,
            context=self._context(step),
            training=step == TRAINING,
            trace=self.options.trace,
            replicas=replicas,
            check_slices=self._precision() if self._checks_slices(step, plan) else None,
        )

    def _checks_slices(self, step: str, plan: Plan) -> bool:
        return step == TRAINING and self.options.self_check is not False and is_sliced(plan)

    def _captured(self, step: str, batch: Any) -> Capture | Declared:
        """The capture of this form of the batch; the first one was made for the plan."""
        if self._first is not None:
            captured, known = self._first
            if captured.step == step and known == self.batch_signature:
                return captured
        facts = (outline(batch), self.trained()) if self.control.runs_step else None
        example, trained = self.control.share_object(facts)
        for parameter, flag in zip(self._parameters, trained, strict=True):
            if parameter.requires_grad != bool(flag):  # user code may have changed it where the step runs only
                parameter.requires_grad_(bool(flag))
        with without_shards(self.module):
            return self._capture(step, example)

    def _form(self, batch: Any) -> int:
        """Fingerprint of what a capture depends on: the batch's form, and which parameters are trained."""
        return signature(batch) ^ (zlib.crc32(self.trained()) << 16)

    def trained(self) -> bytes:
        """For every parameter of the module 1 if it requires a gradient, else 0."""
        return bytes([parameter.requires_grad for parameter in self._parameters])

    def _connected(self, plan: Plan) -> DistributedTransport:
        """One transport for all sessions; it connects device 0 to all, which evaluation may need more than training."""
        if self._transport is None:
            devices = range(1, self.control.num_devices)
            pairs = {*pairs_of(plan), *((0, d) for d in devices), *((d, 0) for d in devices)}
            self._transport = DistributedTransport(self.control.mesh, pairs, device=self.device)
        return self._transport

    def describe(self) -> str:
        """What this rank is doing, for messages."""
        if self.current is None or self.current.latest is None:
            return "set-up"
        return f"{self.current.latest.describe()} of {self.current.capture.step}, mini-batch {self.step}"


_CONTEXTS = {
    TRAINING: "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


def _scaled(output: Any, factor: float) -> Any:
    if isinstance(output, Tensor):
        return output * factor
    return {**output, "loss": output["loss"] * factor} if isinstance(output, Mapping) else output


def _check_step_device(plan: Plan) -> None:
    stage = plan.stages[plan.step_stage]
    if stage.devices != (0,):
        raise ConfigError(
            f"Stage {stage.name!r} runs the user's step ({STEP!r}) on devices {stage.devices}; it must run on device 0 "
            "alone, which loads the data. Number the devices accordingly; to replicate the stage's modules, give "
            f"{STEP!r} a stage of its own."
        )

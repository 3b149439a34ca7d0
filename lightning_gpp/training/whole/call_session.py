"""Runs one network call, of one form, on the stages of the plan that have its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gpp._compat.torch import pytree
from lightning_gpp.capture import Capture
from lightning_gpp.capture.calls import call_networks
from lightning_gpp.capture.recording import Ref
from lightning_gpp.errors import GPPError
from lightning_gpp.graph import OperatorGraph, TensorSpec
from lightning_gpp.plan import SOURCE, WHOLE, Plan, Stage
from lightning_gpp.planning.assignment.assign import assign, make_plan
from lightning_gpp.planning.assignment.complete import separated
from lightning_gpp.runtime.phases import KeptForwards, PhasedExecutor
from lightning_gpp.runtime.random import RandomStreams
from lightning_gpp.schedules import compile_program
from lightning_gpp.slices import unsliced
from lightning_gpp.stages import build
from lightning_gpp.stages.step import InContext, Invocation
from lightning_gpp.training.control import Mirror
from lightning_gpp.training.host import TRAINING
from lightning_gpp.training.session import check_placement
from lightning_gpp.training.tensors.replicas import Site


class _Seeds:
    """The gradients of a call's results; they come later."""

    gradients: Sequence[Tensor] = ()


class _Outlet(torch.autograd.Function):
    """The end of the network for autograd: a scalar whose backward starts from gradients that come later."""

    @staticmethod
    def forward(ctx: Any, seeds: _Seeds, *results: Tensor) -> Tensor:
        ctx.seeds = seeds
        return results[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.seeds.gradients


class CallSession:
    """Runs a captured network call for any number of samples.

    Args:
        site: what the step finds in place.
        captured: the call.
        streams: random streams of the stages.
        divided: whether the call was captured for any number of samples, so that it may be cut.

    Attributes:
        plan: the part of the plan that the call needs; the step has a stage of its own, on device 0.
        differentiable: whether a result needs a gradient.
        wanted: the inputs that need one, by their places among the leaves of the call's arguments.
    """

    def __init__(self, site: Site, captured: Capture, streams: RandomStreams, *, divided: bool = True) -> None:
        job = self.job = site.job
        self._transport, self._streams = site.transport, streams
        self.plan = call_plan(captured, site.layout.plan, divided)
        self.pipeline = build(captured, self.plan, job.module)
        check_placement(self.pipeline, self.plan, site.layout, captured.step)
        self.input_specs = {f"input{number}": spec for number, spec in enumerate(captured.inputs)}
        context = job.host.context(TRAINING)
        self._stages = [InContext(stage, context) for stage in self.pipeline.stages]
        self._executors: dict[tuple[int, bool], PhasedExecutor] = {}
        (call,) = captured.network.network_calls()
        self._tree, self._captured = call.result, captured
        self._refs = list(dict.fromkeys(ref for ref in _refs(call.result) if ref.call >= 0))
        self._specs = [captured.specs[ref.call][ref.output] for ref in self._refs]
        self.needs_grad = [spec.requires_grad for spec in self._specs]
        places = zip(self.input_specs.items(), captured.network.inputs, strict=True)
        self.wanted = {key[2]: name for (name, spec), key in places if spec.requires_grad}
        self.differentiable = any(self.needs_grad)

    def executor(self, batch_size: int, training: bool) -> PhasedExecutor:
        """The executor for mini-batches of this size, cached. `training`: with backwards."""
        key = batch_size, training
        if key not in self._executors:
            control = self.job.control
            self._executors[key] = PhasedExecutor(
                compile_program(self.plan, batch_size, training, reduce=False),
                control.device,
                stages=self._stages,
                slots=self.pipeline.slots,
                transport=self._transport,
                source=self.pipeline.source if control.runs_step else None,
                torch_device=self.job.device,
                streams=self._streams,
                pipeline=control.pipeline,
            )
        return self._executors[key]

    def samples_of(self, stage: int, micro_batch: int, batch_size: int) -> tuple[int, int]:
        """The samples that this rank computes of a stage's micro-batch."""
        return self.plan.share(stage, self.job.control.device, micro_batch, batch_size)

    def buffers(self, batch_size: int) -> list[Tensor]:
        """Empty tensors for the results, in the order of `made`."""
        made = ((spec.sizes(batch_size), getattr(torch, spec.dtype)) for spec in self._specs)
        return [torch.empty(sizes, dtype=dtype, device=self.job.device) for sizes, dtype in made]

    def made(self, tree: Any) -> list[Tensor]:
        """The tensors that the network made, of a result of the call."""
        places: dict[Any, int] = {}
        for place, leaf in enumerate(pytree.tree_leaves(self._tree)):
            if isinstance(leaf, Ref):
                places.setdefault(leaf, place)
        leaves = pytree.tree_leaves(tree)
        return [leaves[places[ref]] for ref in self._refs]

    def result(self, made: Sequence[Tensor], given: Sequence[Any]) -> Any:
        """The answer to the call, from the tensors that the network made and the leaves of the call's arguments."""
        known = dict(zip(self._refs, made, strict=True))
        keys = self._captured.network.inputs

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, Ref):
                return leaf
            return known[leaf] if leaf.call >= 0 else given[keys[-1 - leaf.call][2]]

        return pytree.tree_map(value, self._tree)


def _refs(tree: Any) -> list[Ref]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Ref)]


def call_plan(captured: Capture, plan: Plan, divided: bool = True) -> Plan:
    """The stages of a plan that have the modules of a call, with a stage for the step, which takes all samples at once.

    A network whose inputs, values or results cannot be cut into samples gets them undivided.
    """
    stages, graph = unsliced(plan).plan.stages, captured.graph
    used = {index for found in assign(graph, [stage.modules for stage in stages]).values() for index in found}
    kept = separated([replace(stages[index], round_robin=False) for index in sorted(used - {SOURCE})], WHOLE)
    made = partial(_made, graph, captured.batch_size, plan.num_devices)
    if divided and not graph.mixes_samples:
        cut = made(kept)
        if all(edge.sliceable for edge in cut.edges if edge.src == SOURCE or edge.dst == cut.step_stage):
            return cut
    return made([replace(stage, micro_batch_size=WHOLE, devices=stage.devices[:1]) for stage in kept])


def _made(graph: OperatorGraph, batch_size: int, num_devices: int, stages: Sequence[Stage]) -> Plan:
    unused = set(range(num_devices)) - {device for stage in stages for device in stage.devices}
    return make_plan(graph, stages, batch_size=batch_size, schedule="gpipe", unused=tuple(sorted(unused)))


@dataclass(kw_only=True)
class NetworkRun:
    """One call of a network: its forward, and its backward.

    Args:
        session: runs the call.
        batch: the arguments of the call.
        number: number of the call, for random streams; unique in the run, and the same on all ranks.
        mirror: gives results to all ranks.
        differentiable: whether a backward may follow.
    """

    session: CallSession
    batch: Mapping[str, Any]
    number: int
    mirror: Mirror
    differentiable: bool
    _kept: KeptForwards | None = None
    _seeds: _Seeds = field(default_factory=_Seeds)

    def __post_init__(self) -> None:
        self._size = len(self.batch["count"])
        arguments = [leaf for entry in self.batch["calls"].values() for leaf in pytree.tree_leaves(entry)]
        self._arguments = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in arguments]
        self._tensors = [place for place, leaf in enumerate(arguments) if isinstance(leaf, Tensor)]

    def forward(self) -> list[Tensor]:
        """Run the forwards; returns the results of the network on all ranks."""
        session, control = self.session, self.session.job.control
        executor, step = session.executor(self._size, self.differentiable), session.pipeline.step
        if control.runs_step:
            step.begin(self.batch, Invocation(function=self._invoke), seed=session.job.seed + self.number)
        try:
            kept = executor.forward(self.number)
            results = session.made(step.outputs[0][1]["result"]) if control.runs_step else None
        finally:
            step.end()
        if self.differentiable:
            self._kept = kept
        if results is None:
            return [self.mirror.tensor(buffer) for buffer in session.buffers(self._size)]
        return [self.mirror.tensor(result.detach().contiguous()) for result in results]

    def _invoke(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The step around the call: its loss starts the backward with the gradients of the results."""
        (result,) = call_networks(self.session.job.module, batch)
        pairs = zip(self.session.made(result), self.session.needs_grad, strict=True)
        leaves = [tensor for tensor, needs in pairs if needs and self.differentiable]
        loss = _Outlet.apply(self._seeds, *leaves) if leaves else torch.zeros(())  # type: ignore[no-untyped-call]
        return {"loss": loss, "result": result}

    def backward(
        self, gradients: Sequence[Tensor | None], *, with_parameters: bool, again: bool
    ) -> list[Tensor | None]:
        """Run the backwards; returns the gradients of the arguments that are tensors, on all ranks.

        Args:
            gradients: gradients of the results; None for zero.
            with_parameters: whether parameters get gradients, too.
            again: whether another backward of this call follows.
        """
        if self._kept is None:
            raise GPPError(
                "A backward came to a network call for the second time, after its memory was freed. Give the first "
                "one retain_graph=True."
            )
        buffers = self.session.buffers(self._size)
        needed = zip(gradients, buffers, self.session.needs_grad, strict=True)
        self._seeds.gradients = [torch.zeros_like(b) if g is None else g for g, b, needs in needed if needs]
        executor = self.session.executor(self._size, True)
        with nullcontext() if with_parameters else self._untouched_parameters():
            executor.backward(self._kept, self.number, again=again)
        found = self._input_gradients(self._kept)
        if not again:
            self._kept = None
        return found

    @contextmanager
    def _untouched_parameters(self) -> Iterator[None]:
        """Put the gradients of the parameters back afterwards, for torch.autograd.grad."""
        parameters = [each for each in self.session.job.module.parameters() if not each.is_meta]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        yield
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient

    def _input_gradients(self, kept: KeptForwards) -> list[Tensor | None]:
        """The gradients of all tensors among the arguments: sums over the stages and ranks that read them."""
        wanted = self.session.wanted
        total: dict[int, Tensor] = {place: torch.zeros_like(self._arguments[place]) for place in wanted}
        for (stage, number), (leaves, _, _) in kept.graphs.items():
            start, stop = self.session.samples_of(stage, number, self._size)
            for place, name in wanted.items():
                gradient = leaves[name].grad if name in leaves else None
                if gradient is not None:
                    _part(total[place], self.session.input_specs[name], start, stop).add_(gradient)
        self._sum(list(total.values()))
        return [total.get(place) for place in self._tensors]

    def _sum(self, gradients: Sequence[Tensor]) -> None:
        mesh = self.session.job.control.mesh
        if mesh.num_devices > 1:
            for gradient in gradients:
                dist.all_reduce(gradient, group=mesh.pipeline_group)


def _part(gradient: Tensor, spec: TensorSpec, start: int, stop: int) -> Tensor:
    """The part of the gradient of an input for some of the samples; all of it, if the input is the same for all."""
    return gradient.narrow(spec.batch_dim or 0, start, stop - start) if spec.varies else gradient

"""Network calls of a step that every rank runs: each is pipelined over micro-batches, forwards at once, backwards when
autograd comes to it.

    every rank                 the pipeline
    ----------                 ------------
    fake = self.generator(z)   D, F0 F1 F2 ... on all stages of the generator; all ranks get the result
    loss = ...                 (each rank computes it)
    loss.backward()            B0 B1 B2 ... on all stages; all ranks get the gradient of z, if it needs one

A call is one operation for autograd, so the step may do between calls what it likes, as long as all ranks do the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp._compat.torch import accumulator_of, graph_is_kept, pytree, will_run
from lightning_gpp.capture.attributes import is_plain
from lightning_gpp.capture.calls import call_batch, capture_calls, samples_of_call
from lightning_gpp.errors import CaptureError, GPPError
from lightning_gpp.runtime.named_tensors import tensors_of
from lightning_gpp.runtime.random import RandomStreams, undisturbed
from lightning_gpp.stages.step import Answers
from lightning_gpp.training.control import Mirror
from lightning_gpp.training.data.batches import SessionCache, outline, signature
from lightning_gpp.training.data.incoming import FrozenAttributes
from lightning_gpp.training.host import TRAINING
from lightning_gpp.training.tensors.replicas import Site
from lightning_gpp.training.whole.call_session import CallSession, NetworkRun
from lightning_gpp.wording import named

Otherwise = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Answers a call of the module at a path that gets an object, on all ranks together."""


class NetworkCalls:
    """Answers the calls of modules whose parameters are not on every rank.

    Args:
        site: what the step finds in place; what all devices hold is computed by each.
        mirror: gives results to all ranks.

    Attributes:
        at_end: what has to be done at the end of a backward, as a clause; empty if nothing.
        reduces: whether that will be done at the end of the current one.
    """

    def __init__(self, site: Site, mirror: Mirror) -> None:
        self.at_end, self.reduces = "", False
        job = self._job = site.job
        self._site, self._mirror = site, mirror
        self._streams = RandomStreams(job.seed, job.device)
        self._sessions = SessionCache[CallSession](job.control.warn)
        self._frozen = FrozenAttributes(job.module)
        self._undivided: set[Hashable] = set()
        self._rows: dict[str, list[bool]] = {}
        self._told: set[str] = set()
        with torch.inference_mode(False), torch.enable_grad():
            self._token = torch.zeros((), requires_grad=True)
            self._accumulator = accumulator_of(self._token)
        self._paths = dict(self._divided())
        parts = [job.module.get_submodule(path) for path in self._paths.values()]
        self._answers = Answers(parts)
        self._step = self._number = 0
        self._otherwise: Otherwise | None = None

    def _divided(self) -> Iterator[tuple[int, str]]:
        """Ids and paths of modules with tensors that some devices do not have."""
        count = self._job.control.num_devices
        apart = {name for name, devices in self._site.layout.devices.items() if len(devices) < count}
        ids = {id(tensor) for name, tensor in tensors_of(self._job.module).items() if name in apart}
        for path, part in self._job.module.named_modules():
            if any(id(tensor) in ids for tensor in (*part.parameters(), *part.buffers())):
                yield id(part), path

    @contextmanager
    def answered(self, step: int, otherwise: Otherwise | None = None) -> Iterator[None]:
        """Inside, network calls are pipelined. `step` numbers the mini-batch; `otherwise` is for those with objects."""
        self._step, self._number, self._otherwise = step, 0, otherwise
        with self._answers.given(self._answer):
            yield

    def _answer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = self._paths[id(module)]
        with self._answers.suspended():
            if self._otherwise is not None and any(map(_may_hold_tensors, pytree.tree_leaves((args, kwargs)))):
                return self._otherwise(path, module, args, kwargs)
            with undisturbed():
                return self._call(path, module, args, kwargs)

    def _call(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._number += 1
        given = pytree.tree_leaves((args, kwargs))
        inputs = [leaf for leaf in given if isinstance(leaf, Tensor)]
        wanted = [*inputs, *module.parameters()]
        differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in wanted)
        session = self._session(path, module, (args, kwargs), differentiable)
        run = NetworkRun(
            session=session,
            batch=call_batch({path: (args, kwargs)}, samples_of_call((args, kwargs))),
            number=self._step * _MOST_CALLS + self._number,
            mirror=self._mirror,
            differentiable=differentiable and session.differentiable,
        )
        pipelined: Any = _PipelinedCall.apply
        made = pipelined(self, run, self._token, *inputs) if run.differentiable else run.forward()
        return session.result(made, given)

    def backward(self, run: NetworkRun, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the backward of a call, inside one of autograd."""
        parameters = will_run(self._accumulator)
        if parameters and self.at_end and not self.reduces:
            raise GPPError(
                f"A backward was started by loss.backward(), but {self.at_end}. Use self.manual_backward(loss) (or "
                "engine.backward(loss))."
            )
        with self._answers.suspended(), undisturbed():
            return run.backward(gradients, with_parameters=parameters, again=graph_is_kept())

    def _session(self, path: str, module: nn.Module, arguments: Any, differentiable: bool) -> CallSession:
        flags = bytes(part.training for part in module.modules())
        trained = bytes(parameter.requires_grad for parameter in module.parameters())
        needs = tuple(
            differentiable and leaf.requires_grad for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)
        )
        batch = call_batch({path: arguments}, samples_of_call(arguments))
        form = path, signature(batch), zlib.crc32(flags), zlib.crc32(trained), needs, differentiable
        others = [leaf for leaf in pytree.tree_leaves(arguments) if not isinstance(leaf, Tensor)]
        given = tuple(repr(leaf) if is_plain(leaf) else type(leaf) for leaf in others)
        values, changing = (given, self._frozen.announce()), partial(_changing, path, self._frozen)
        make = partial(self._new, batch, needs)
        if self._job.cuts_calls and self._has_known_rows(path, arguments) and form not in self._undivided:
            try:
                return self._sessions.get((form, values)) or self._sessions.make((form, values), make, changing)
            except CaptureError:  # perhaps because tensors differ in the dimension that counts samples
                self._undivided.add(form)
        shapes = tuple(leaf.shape for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor))
        key, make = ((form, shapes), values), partial(make, divided=False)
        return self._sessions.get(key) or self._sessions.make(key, make, changing)

    def _has_known_rows(self, path: str, arguments: Any) -> bool:
        """True if the same arguments count samples as in the first call; a warning if not, so that no other is cut."""
        samples = samples_of_call(arguments)
        if samples == 1:
            return True
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dim()]
        counts = [len(tensor) == samples for tensor in tensors]
        first = self._rows.setdefault(path, counts)
        if len(first) != len(counts) or first == counts:
            return True
        if all(first) and path not in self._told:
            self._told.add(path)
            self._job.control.warn(
                f"An argument of {named(path)} had one row for each sample, and has not in this call. Calls like this "
                "one get undivided mini-batches. If rows belong to samples (images), set "
                "strategy.num_micro_batches=1, which leaves all calls undivided."
            )
        return False

    def _new(self, batch: Mapping[str, Any], needs: Sequence[bool], divided: bool = True) -> CallSession:
        job, example = self._job, _needing(outline(batch), needs)
        context = job.host.context(TRAINING)
        captured = capture_calls(job.module, example, context=context, device=job.device, divided=divided)
        session = CallSession(self._site, captured, self._streams, divided=divided)
        self._frozen.add(session.pipeline.frozen, {})
        return session


def _may_hold_tensors(leaf: Any) -> bool:
    """True for an object, such as a cache, whose tensors a forward may read and change; captures cannot know them."""
    return hasattr(leaf, "__dict__") and not (isinstance(leaf, Tensor) or is_plain(leaf) or callable(leaf))


def _changing(path: str, frozen: FrozenAttributes) -> str:
    return f"Arguments of {path or 'the module'!r} that are no tensors, or {frozen.names()},"


_MOST_CALLS = 1 << 20
"""More than the network calls of any step; numbers of calls are unique in a run."""


def _needing(batch: Any, needs: Sequence[bool]) -> Any:
    """The batch with tensors that need a gradient or not; the first tensor counts samples."""
    flags = iter((False, *needs))

    def flagged(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(next(flags)) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(flagged, batch)


class _PipelinedCall(torch.autograd.Function):
    """A network call as one operation; the token makes its results need a gradient, as its parameters do."""

    @staticmethod
    def forward(ctx: Any, calls: NetworkCalls, run: NetworkRun, token: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.calls, ctx.run = calls, run
        ctx.set_materialize_grads(False)
        results = run.forward()
        ctx.mark_non_differentiable(*(r for r, needs in zip(results, run.session.needs_grad, strict=True) if not needs))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise GPPError(
                "The gradient of a network call was asked for with create_graph=True, but it comes from other devices, "
                "without a graph. Compute what differentiates a gradient (a penalty) in the forward of a module that "
                "is in one stage: it is called as it is, with torch.autograd.grad inside."
            )
        return None, None, None, *ctx.calls.backward(ctx.run, gradients)

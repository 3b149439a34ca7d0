"""The engine: trains and evaluates a module whose parameters are spread over the ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_gpp.capture.captured import loss_of
from lightning_gpp.capture.record import step_arguments
from lightning_gpp.errors import GPPError, ShapeError
from lightning_gpp.failure.hangs import Wait
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.plan import Plan
from lightning_gpp.training.data.batches import Feed
from lightning_gpp.training.evaluation import EvaluationSteps
from lightning_gpp.training.host import TRAINING
from lightning_gpp.training.measured.machine import Machine
from lightning_gpp.training.runner import Outputs, Runner, loss_and_rest, losses_of
from lightning_gpp.training.session import Session
from lightning_gpp.training.sessions import Sessions
from lightning_gpp.training.states import DividedStates, make_whole
from lightning_gpp.training.tensors.foreign import KnownNorms
from lightning_gpp.training.tensors.gathered import Door, install, remove
from lightning_gpp.training.tensors.parameters import move
from lightning_gpp.training.tensors.replicas import Replicas
from lightning_gpp.training.updates.gradients import FiniteCheck, StageGradients
from lightning_gpp.training.updates.optimizers import OptimizerIndex
from lightning_gpp.training.whole.whole_step import WholeStep

CPU: Final = torch.device("cpu")


class Engine(DividedStates):
    """Trains and evaluates a module in stages. `set_up` builds it; all ranks call its methods together.

    A loop calls `train_step` and `evaluate`, and steps and zeroes its optimizers as usual. Programs that do more in a
    step call its parts: `announce`, `train` and `sum_gradients`.

    Args:
        sessions: makes the sessions, which run the user's steps.
        indices: indices of the optimizers, in the user's order.
        gradients: checks and clips gradients if there is no flush.
        finite: checks losses and gradients, of all ranks together; None does not.
        whole: runs steps as a whole, on all ranks.
        as_whole: names of the steps that run as a whole; others run on micro-batches, in evaluation if they can.
        machine: returns the machine that the plan was made for.
        num_steps: number of mini-batches that were trained earlier.

    Attributes:
        num_steps: number of mini-batches trained so far, which also numbers the random streams.
        trains_whole: whether the training step runs as a whole.
        whole: see above.
        evaluation: runs evaluation steps.
        skipped: whether the training step has returned None for micro-batches of the latest mini-batch; to be set on
            all ranks before `sum_gradients`.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        indices: Sequence[OptimizerIndex],
        machine: Callable[[], Machine],
        num_steps: int,
        whole: WholeStep,
        as_whole: Set[str] = frozenset(),
        gradients: StageGradients | None = None,
        finite: FiniteCheck | None = None,
    ) -> None:
        self._sessions, self._indices = sessions, indices
        self._replicas, self._asynchronous = sessions.site.replicas, sessions.site.asynchronous
        self._gradients, self._finite = gradients, finite
        self.whole, self.trains_whole = whole, TRAINING in as_whole
        self.job, self._layout, self._incoming = sessions.job, sessions.layout, sessions.incoming
        self.module, self.control, self.device = self.job.module, self.job.control, self.job.device
        self.machine, self.num_steps = machine, num_steps
        self._peers = self.control.mesh.peers()
        self._door = Door(self.job, self._layout)
        install(self._door)
        self.skipped = False
        self._runner = Runner(sessions, lambda: [index.optimizer for index in self._indices])
        self._feed = Feed(self.ahead)
        self.evaluation = EvaluationSteps(
            sessions,
            self._runner,
            whole,
            self._door,
            as_whole=as_whole - {TRAINING},
            training=self._feed,
            num_steps=lambda: self.num_steps,
        )
        self._released = False
        guards = [index.guard() for index in indices if self._owned or self.control.num_devices > 1]
        self._guards = [guard for guard in guards if guard is not None]
        for index in indices:
            index.move(self.device)

    @property
    def plan(self) -> Plan:
        """The stages, and who computes them."""
        return self._layout.plan

    @property
    def graph(self) -> OperatorGraph:
        """The operators of the step that the plan was made for, as far as one process of a device computes them."""
        return self.machine().part(self._sessions.captured.graph)

    @property
    def optimizer_parameters(self) -> list[list[str]]:
        """The names of each optimizer's parameters, in the user's order."""
        return [index.names for index in self._indices]

    @property
    def current(self) -> Session | None:
        """The session of the last mini-batch."""
        return self._runner.current

    @property
    def entries(self) -> float | None:
        """The entries by which this pipeline's latest mini-batch counted in its optimizer step; None: all alike."""
        return self._runner.entries.here

    @property
    def runs_step(self) -> bool:
        """True if this rank runs the user's step and needs data."""
        return self.control.runs_step

    # -- a loop -------------------------------------------------------------------------------------------------------

    def train_step(self, batch: Any, batch_idx: int = 0, *, accumulated: int = 1, last: bool = True) -> Tensor:
        """Run forwards and backwards of a mini-batch. Returns its loss on all ranks, in float64.

        It is on the CPU. If the pipeline is one process, it is on its device, and the process has not waited for it.

        Args:
            batch: the mini-batch; used only on ranks with `runs_step`.
            batch_idx: argument of the user's step, if it takes one.
            accumulated: mini-batches per optimizer step.
            last: whether an optimizer step follows. Then gradients are complete afterwards.
        """
        self._check_open()
        if self.trains_whole:
            return self._train_whole(batch, batch_idx, accumulated)
        batch = self._in_device(batch)
        self._expect(batch, anew=self._feed.interrupted)
        self._feed.interrupted = False
        arguments = [batch, *step_arguments(getattr(self.module, TRAINING), batch_idx)]
        outputs = self.train(arguments, accumulated=accumulated, last=last)
        if last:
            self.sum_gradients()
        if not outputs:
            return self.control.share(torch.zeros((), dtype=torch.float64))
        loss = self.loss_of(outputs)[0].detach().double()
        return loss if self.control.sole else self.control.share(loss.cpu())

    def _check_open(self) -> None:
        if self._released:
            raise GPPError(
                "The engine has ended, and the module is whole again on global rank 0: call train_step and evaluate "
                "inside of `with initialize(...) as engine`."
            )

    def _in_device(self, batch: Any) -> Any:
        """A mini-batch on all members of the device that runs the step; only that of the first one counts."""
        return self.job.in_device(batch) if self.runs_step else batch

    def _train_whole(self, batch: Any, batch_idx: int, accumulated: int) -> Tensor:
        batch, step = self.whole.share(batch), getattr(self.module, TRAINING)
        with self.whole_step(accumulated), self.job.host.context(TRAINING)():
            loss = loss_of(step(batch, *step_arguments(step, batch_idx)))
        with self.whole.reducing():
            (loss / accumulated).backward()
        self.check_finite(loss)
        return loss.detach().to(CPU, torch.float64)

    @contextmanager
    def whole_step(self, accumulated: int = 1) -> Iterator[None]:
        """Inside, the user's training step runs as a whole, on all ranks, and sees the optimizers of all, each of which
        steps after `accumulated` mini-batches.
        """
        self.evaluation.end()
        if self._runner.counted is not None and accumulated * self.control.num_pipelines > 1 and not self.num_steps:
            self.control.warn(
                f"strategy.loss_reduction={self._runner.counted} does not weigh the mini-batches of steps that run as "
                "a whole: those of an accumulation and of several pipelines count alike, as in DDP."
            )
        with self.whole.running(self.num_steps), self.undivided_optimizers():
            yield
        self.num_steps += 1

    def runs_whole(self, step: str) -> bool:
        """True for a step that runs as a whole: all ranks call it, with a mini-batch of all."""
        return self.trains_whole if step == TRAINING else self.evaluation.runs_whole(step)

    def check_finite(self, loss: Tensor, *, last: bool = True) -> None:
        """Look for numbers that are not finite (`on_nonfinite`), after the backward of a step as a whole.

        Args:
            loss: the loss of the mini-batch.
            last: whether an optimizer step follows.

        Raises:
            GPPError: on all ranks; a number is not finite, and steps are not left out.
        """
        if self._finite is not None and self._finite.always:
            self._finite.note([loss.detach()])
            if last:
                self._finite.before_update(self.num_steps - 1)

    def evaluate(self, batch: Any, batch_idx: int = 0, *, step: str = "validation_step") -> Any:
        """Run an evaluation step on a mini-batch. Returns its result on ranks with `runs_step`, elsewhere None.

        In a loop over `feed(loader, step)` the pipeline does not flush in between. A step that runs as a whole returns
        its result on all ranks.
        """
        self._check_open()
        if self.runs_whole(step):
            batch = self.whole.share(batch)
        else:
            batch = self._in_device(batch)
            self._expect(batch)
        return self.run(step, [batch, *step_arguments(getattr(self.module, step), batch_idx)])

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Scale the gradients of an optimizer's parameters so that the norm over all stages is at most `max_norm`.

        Returns:
            The norm of the full model's gradient before clipping; without a flush, that of the last optimizer step that
                all ranks have done.
        """
        if self._gradients is not None and self._asynchronous is not None:
            update, age = self._asynchronous.policy.updates, self._asynchronous.age
            return self._gradients.scale(self.stepped_here(optimizer), max_norm, update, age)
        norm = self.optimizer_norm(optimizer)
        self.scale_gradients(optimizer, max_norm, norm)
        return norm

    def optimizer_norm(self, optimizer: Optimizer, norm_type: float = 2.0) -> Tensor:
        """The norm that an optimizer's gradients are clipped by, over all stages. All ranks call this together."""
        return self._training.grad_norm(norm_type, self._index(optimizer).names if self.trains_whole else None)

    def scale_gradients(self, optimizer: Optimizer, max_norm: float, norm: Tensor) -> None:
        """Scale an optimizer's gradients, whose norm is known, so that it is at most `max_norm`."""
        clip_grads_with_norm_(self.stepped_here(optimizer), max_norm, norm)

    def stepped_here(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The parameters of an optimizer that this rank steps."""
        with self._index(optimizer).divided():
            return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of all stages, on every rank. All ranks call this together."""
        return self._training.grad_norm(norm_type)

    def known_norms(self) -> KnownNorms | None:
        """Norms of the gradients of all stages, for hooks; None where ranks cannot exchange them. All ranks call it."""
        alone = self.control.num_devices == 1  # then this rank has all gradients
        return None if alone or self._asynchronous is not None else self._training.known_norms()

    def _expect(self, batch: Any, *, anew: bool = False) -> None:
        if not self._incoming.announce(batch, anew=anew):
            raise ShapeError("The mini-batch is None on the rank that runs the step; leave it out of the loop.")

    # -- parts of a step ----------------------------------------------------------------------------------------------

    def announce(self, batch: Any) -> bool:
        """Tell the ranks of this pipeline the next mini-batch's samples and form. Returns False if the batch is None.

        `batch` is used only on the rank that runs the step.
        """
        return self._incoming.announce(batch)

    def train(
        self,
        arguments: Sequence[Any],
        *,
        accumulated: int = 1,
        last: bool = True,
        scale: float = 1.0,
        skips: bool = False,
    ) -> Outputs:
        """Run forwards and backwards of the announced mini-batch. Returns the results of the user's step where it ran.

        Args:
            arguments: arguments of the user's step, the mini-batch first.
            accumulated: mini-batches per optimizer step.
            last: whether an optimizer step follows.
            scale: factor of the gradients, for half precision.
            skips: whether the step may return None for micro-batches. Then `skipped` is to be set.
        """
        self._runner.skips = self._finite is not None and (skips or self._finite.skips)
        self._training.begin(last=last)
        if self.evaluation.number is not None:
            self.evaluation.end()
        weight = scale / accumulated
        if not self._runner.sums:
            weight /= self._incoming.batch_size * self.control.num_pipelines
        with self._peers:
            outputs = self._runner.train(arguments, weight, accumulated, self.num_steps)
        if self._finite is not None and self._finite.always:
            self._finite.note(losses_of(outputs))
        self.num_steps += 1
        return outputs

    def loss_of(self, outputs: Outputs) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a mini-batch, and the rest of the dict that a training step returned."""
        loss, rest = loss_and_rest(outputs)
        return (loss * self._incoming.batch_size if self._runner.sums else loss), rest

    def sum_gradients(self) -> None:
        """Complete the reductions of gradients over ranks with the same parameters, before an optimizer step."""
        self._training.finish()
        if self._runner.counted is not None:
            self._runner.entries.end()
        if self._gradients is not None and self.job.options.on_nonfinite != "ignore":
            self._gradients.check(self.num_steps - 1)
        if self._finite is not None and (self._finite.always or self.skipped):
            self._finite.before_update(self.num_steps - 1, self.skipped)
        if self._asynchronous is not None:
            self._asynchronous.before_update()

    def ahead(self, step: str = TRAINING) -> int:
        """Number of mini-batches of a step that have to be read before their turn."""
        if step == TRAINING:
            return 0 if self._asynchronous is None else self._asynchronous.ahead
        return 0 if self.runs_whole(step) else self._runner.lead(step)

    def feed(self, loader: Iterable[Any], step: str = TRAINING) -> Iterator[Any]:
        """Iterate over the mini-batches of a loader, reading those in advance that stages start before their turn."""
        feed = self._feed if step == TRAINING else Feed(lambda: self.ahead(step))
        with self._incoming.fed_by(feed):
            for batch in feed.over(loader):
                feed.turn()
                yield batch

    def run(self, step: str, arguments: Sequence[Any]) -> Any:
        """Run an evaluation step on the announced mini-batch. Returns its result where it ran."""
        with self._peers:
            return self.evaluation.run(step, arguments)

    @property
    def _training(self) -> Replicas:
        if self._replicas is None:
            raise GPPError("The engine was set up to evaluate, so it cannot train.")
        return self._replicas

    # -- the end ------------------------------------------------------------------------------------------------------

    def undivided_optimizers(self) -> AbstractContextManager[None]:
        """A context in which the groups of the optimizers have the parameters of all ranks."""
        if self.control.num_processes == 1:
            return nullcontext()
        tensors = dict(self.module.named_parameters())
        return _all(index.undivided(tensors) for index in self._indices)

    def divided_optimizers(self) -> AbstractContextManager[None]:
        """A context in which they have those of this rank, wherever it is entered."""
        return _all(index.divided() for index in self._indices if index.own is not None)

    def release(self) -> None:
        """Move everything to the CPU, unsharded, and the undivided module to global rank 0, after the last step."""
        remove(self._door)
        self._end_guards()
        if self._asynchronous is not None:
            self._runner.give_up(self.num_steps)
            self._asynchronous.release()
        if self._replicas is not None:
            self._replicas.end()
            self._incoming.follow()
        elif self.job.parallel is not None:
            self.job.parallel.undivide(self.module)
        self._released = True
        if self._layout.complete:
            make_whole(self.module, self._layout, self.control)
        move(self.module, CPU)
        for index in self._indices:
            index.move(CPU)

    def abandon(self) -> None:
        """Move this rank's part to the CPU, after a failure. Shards stay on their devices: other ranks may be gone."""
        remove(self._door)
        self._end_guards()
        move(self.module, CPU)
        if self._replicas is None or not self._replicas.sharded:
            for index in self._indices:
                index.move(CPU)

    def _end_guards(self) -> None:
        for guard in self._guards:
            guard.remove()

    def describe(self) -> str:
        """The activity of this rank, for messages."""
        session = self.current
        if session is None or session.latest is None:
            return "set-up"
        evaluated = self.evaluation.number
        number = self.num_steps if session.training or evaluated is None else evaluated
        place = f"{session.latest.place} of {session.capture.step}, mini-batch {number}"
        return f"between steps, after {place}" if session.latest.is_complete else place

    def wait(self) -> Wait | None:
        """The ranks that this one waits for; None if it waits for none."""
        running = None if self.current is None or self.current.latest is None else self.current.latest.wait()
        return running or self.control.wait


@contextmanager
def _all(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside of all these contexts."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield

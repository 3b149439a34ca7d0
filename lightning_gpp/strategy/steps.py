"""Lightning's steps on an engine: their arguments, results, logs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_gpp.capture.attributes import Attribute, dotted
from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.strategy.batch_readers import RESULT, BatchReaders, packed
from lightning_gpp.strategy.checks import facts_of_trainer
from lightning_gpp.strategy.data import Placeholder
from lightning_gpp.strategy.logs import LogRecorder, exchange, over_pipelines, replay
from lightning_gpp.strategy.metrics import MetricStates
from lightning_gpp.strategy.optimization import stand_ins
from lightning_gpp.training.control import Control
from lightning_gpp.training.data.incoming import Incoming
from lightning_gpp.training.engine import Engine
from lightning_gpp.training.host import TRAINING, Host
from lightning_gpp.training.measured.trace import TraceFile
from lightning_gpp.training.mirrored_state import MirroredState
from lightning_gpp.training.options import Context
from lightning_gpp.training.runner import Outputs
from lightning_gpp.training.updates.gradients import LossScale
from lightning_gpp.wording import some, spoken

CONTEXTS: Final = {
    TRAINING: "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
"""The context of each step, a method of the precision plugin."""

_SETTINGS: Final[Attribute] = "", "trainer.optimizers"
"""Stands for the hyperparameters of optimizers among the attributes that a step has changed."""

_RESULT: Final[Attribute] = "", "trainer.result"
"""Stands for the result of a step beside them."""

SKIPPED: Final = object()
"""Stands for the None that a step returns on all ranks; Lightning refuses it, because other ranks could go on."""

_LATE: Final = (
    "Only the ranks that run the step have this at once: hooks around mini-batches find on others what was there at "
    "the end of an epoch. Use strategy.step=whole (docs/explanation/contract.md)."
)

_TYPES: Final = {"bf16": torch.bfloat16, "16": torch.float16}


class LightningHost(Host):
    """The trainer as a host: steps compute in the contexts of its precision plugin, and their logs are recorded.

    Attributes:
        recorder: recorder of the logs of the user's step.
        scaler: the precision plugin's scaler of the loss, if it has one.
        placeholder: what stands for the mini-batch on ranks that have none.
    """

    def __init__(self, module: pl.LightningModule, plugin: Precision) -> None:
        super().__init__(precision=_TYPES.get(str(plugin.precision).split("-")[0]))
        self._module, self._plugin = module, plugin
        self.scaler = getattr(plugin, "scaler", None)
        self.recorder = LogRecorder(module)
        self.placeholder = Placeholder(torch.empty(0, 0))

    def context(self, step: str) -> Context:
        context: Context = getattr(self._plugin, CONTEXTS[step])
        return context

    def around(self, step: str, batch: int | None = None) -> Callable[[int, float], AbstractContextManager[Any]]:
        return partial(self.recorder.run, context=self.context(step), batch=batch)

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Inside, the trainer's loggers ignore everything; a wish to stop is taken back."""
        trainer = self._module.trainer
        loggers, stop = trainer.loggers, trainer.should_stop
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            trainer.loggers, trainer.should_stop = loggers, stop

    def forget(self, batches: range) -> None:
        self.recorder.forget(batches)

    def stand_ins(self, module: nn.Module) -> dict[str, Any]:
        return stand_ins(self._module, module)

    def facts(self) -> dict[str, str]:
        return facts_of_trainer(self._module.trainer)

    def combine(self, reductions: Mapping[str, str]) -> None:
        self.recorder.combined.update(reductions)

    def received(self, batch: Any) -> None:
        """Lightning has a placeholder of the mini-batch, and takes the number of its samples for logs."""
        with suppress(MisconfigurationException):  # a mini-batch of unknown size, of which Lightning says so
            self.placeholder.samples = torch.empty(extract_batch_size(batch), 0)

    def inform(self, text: str) -> None:
        rank_zero_info(spoken(text))


class SharedResult(ClosureResult):
    """The result of a step that all ranks run alike, and skip together."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        """The result that Lightning makes of it."""
        known = None if training_step_output is SKIPPED else training_step_output
        return super().from_training_step_output(known, normalize)


def once(closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure, which raises ConfigError when it is called again."""
    calls = 0

    def called() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ConfigError(
                "The optimizer called its closure more than once in one step. Optimizers that evaluate the model "
                "repeatedly (L-BFGS, sharpness-aware minimisation) use norms over all parameters, of which every rank "
                "has only its own. Use one that needs a single evaluation."
            )
        return closure()

    return called


class StepGradients:
    """Puts the gradients that a pipelined step computes aside until the backward that Lightning calls.

    Between the two Lightning zeroes the gradients from before, and calls the hooks on them.

    Args:
        trainer: of the run.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._seen: bool | None = None
        self._aside: list[tuple[Tensor, Tensor | None]] = []

    @contextmanager
    def computed(self) -> Iterator[None]:
        """Inside, a step computes gradients; those of several mini-batches of an optimizer step are summed."""
        trainer = self._trainer
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
            yield
            return
        parameters = [each for group in trainer.optimizers[0].param_groups for each in group["params"]]
        self._seen = self._are_seen() if self._seen is None else self._seen
        before = [parameter.grad if self._seen else None for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        yield
        self._aside = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient

    def _are_seen(self) -> bool:
        """True if a hook finds the gradients that are zeroed; otherwise those from before need no memory."""
        module: Any = self._trainer.lightning_module
        callbacks: Any = self._trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        by_callbacks = any(is_overridden("on_before_zero_grad", each, parent=pl.Callback) for each in callbacks)
        hooks = "on_before_zero_grad", "optimizer_zero_grad"
        return by_callbacks or any(is_overridden(name, module) for name in hooks)

    def give_back(self) -> None:
        """Let the parameters have the gradients of the step.

        Raises:
            ConfigError: a hook of the module has not zeroed the others.
        """
        for parameter, _ in self._aside:
            if parameter.grad is not None and not parameter.is_meta and bool(parameter.grad.any()):
                raise ConfigError(
                    f"{type(self._trainer.lightning_module).__name__}.optimizer_zero_grad has left gradients, to which "
                    "those of the next mini-batch would be added. Zero all of them, and sum over mini-batches by "
                    "trainer.accumulate_grad_batches."
                )
        self.put_back()

    def put_back(self) -> None:
        """Let the parameters have the gradients of the step at once, in the place of others."""
        for parameter, gradient in self._aside:
            if gradient is not None:
                parameter.grad = gradient
        self._aside = []


class Steps:
    """Runs the steps of a trainer's loops.

    Args:
        module: the trainer's module.
        control: the side channel of this rank.
        host: the host, which records the logs.
        incoming: announces the next mini-batch.
        device: the device of this rank.
        set_up: sets up the engine at the first mini-batch, from the name of the step and the mini-batch.
        readers: what hooks around mini-batches read.
        metrics: the metrics that the steps update.

    Attributes:
        mirrored: what the steps change in attributes of the module.
        gradients: those of the step, which Lightning would zero.
        engine: the engine that runs the steps; None before it is set up.
        scale: the scale of the loss; None for 1.
        trace: trace of the training steps, if the user wants one.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        control: Control,
        host: LightningHost,
        incoming: Incoming,
        device: torch.device,
        set_up: Callable[[str, Any], Engine],
        readers: BatchReaders,
        metrics: MetricStates,
    ) -> None:
        self.module, self.control, self.host, self.incoming, self.device = module, control, host, incoming, device
        self.gradients = StepGradients(module.trainer)
        self.scale = LossScale.of(host.scaler, control, device)
        self.engine: Engine | None = None
        self.trace: TraceFile | None = None
        self.mirrored = MirroredState(module, control, device)
        self._set_up, self._readers, self._metrics = set_up, readers, metrics
        self._before: list[dict[str, Any]] = []
        self._told, self._told_repeated, self._told_late = set[str](), set[Attribute](), set[Attribute]()
        self._trained = self._observed = self._told_skipped = False

    @property
    def whole(self) -> bool:
        """True while steps run as a whole."""
        return self.engine is not None and self.engine.runs_whole(step_of(self.module.trainer))

    def train(self, arguments: Sequence[Any], last: bool) -> Any:
        """Run forwards and backwards of a mini-batch; returns the loss, or None for a mini-batch that the step skips.

        With the rest of a dict where the step ran, and everywhere if hooks of callbacks read it.
        """
        engine, scale = self.engine, 1.0 if self.scale is None else self.scale.factor
        if engine is None:
            raise GPPError("The training step runs before the trainer's set-up; use trainer.fit(model).")
        accumulated = self.module.trainer.accumulate_grad_batches
        self._begin(first=not self._trained)  # one process looks at its first step only
        with self.gradients.computed():
            outputs = engine.train(arguments, accumulated=accumulated, last=last, scale=scale, skips=self._skips)
        changed = self._changed()
        self._tell_changes(changed, len(outputs))
        self._trained = True
        self.host.recorder.turn(engine.num_steps - 1, engine.entries)
        if self.trace is not None:
            self.trace.add(engine)
        loss, rest = engine.loss_of(outputs) if outputs else (torch.zeros(()), {})
        numbers = [loss, torch.full_like(loss, self._skipped(outputs))]
        (number, skipped), rest = self._share(
            TRAINING, rest or None, numbers, changed if self.control.num_devices > 1 else {}
        )
        engine.skipped = self._skips and skipped > 0
        if self._skips and skipped == 1:
            self.gradients.put_back()  # Lightning zeroes them after a step without a loss
            engine.sum_gradients()
            return None
        if not self.control.loads:
            loss = torch.full((), number, dtype=torch.float64, device=self.device)
        return {"loss": loss, **rest} if rest else loss

    @property
    def _skips(self) -> bool:
        """True if the training step may skip micro-batches, and ranks know of it before they use their gradients."""
        return self.scale is None and self.module.trainer.accumulate_grad_batches == self.control.num_pipelines == 1

    def _skipped(self, outputs: Outputs) -> float:
        """The part of the micro-batches for which the step returned None; warns once unless it is none or all."""
        skipped = sum(value is None for _, value in outputs)
        if 0 < skipped < len(outputs) and not self._told_skipped:
            self._told_skipped = True
            self.control.warn(
                f"training_step returned None for {skipped} of {len(outputs)} micro-batches: they add no gradient. One "
                "process decides for the whole mini-batch, as strategy.step=whole does. To leave out mini-batches "
                "whose numbers are not finite, set strategy.on_nonfinite=skip."
            )
        return skipped / max(1, len(outputs))

    def _begin(self, *, first: bool = False) -> None:
        self._observed = first or self.control.num_devices > 1
        if self._observed:
            self.mirrored.begin()
            self._before = self._settings()

    def _changed(self) -> dict[Attribute, Any]:
        """The plain values that the step has changed since `_begin`."""
        if not self._observed:
            return {}
        changed, settings = self.mirrored.end(), self._settings()
        return changed if settings == self._before else {**changed, _SETTINGS: settings}

    def _tell_changes(self, changed: Mapping[Attribute, Any], runs: int) -> None:
        """Warn once of attributes that differ from one process: the step runs several times, or other ranks wait.

        `runs`: how often the step ran for the mini-batch on this rank.
        """
        if runs == 0 or not self._observed:
            return
        latest = {*self.mirrored.latest, *changed}
        if runs > 1 and (new := (latest | self.mirrored.changed_buffers()) - self._told_repeated):
            self._told_repeated |= new
            self.control.warn(f"The training step changes {some(sorted(map(dotted, new)))}. {_repeated(runs)}")
        late = latest - changed.keys() if self._readers.around and self.control.num_devices > 1 else set()
        if new := late - self._told_late:
            self._told_late |= new
            self.control.warn(f"The training step changes {some(sorted(map(dotted, new)))}. {_LATE}")

    def _settings(self) -> list[dict[str, Any]]:
        """The hyperparameters of the optimizers' groups that are numbers."""
        groups = [group for each in self.module.trainer.optimizers for group in each.param_groups]
        return [{name: value for name, value in group.items() if isinstance(value, int | float)} for group in groups]

    def _set(self, settings: Sequence[Mapping[str, Any]]) -> None:
        groups = [group for each in self.module.trainer.optimizers for group in each.param_groups]
        for group, values in zip(groups, settings, strict=False):
            group.update(values)

    def evaluate(self, step: str, arguments: Sequence[Any]) -> Any:
        """Run a validation, test or prediction step. Returns its result on the rank that runs it, elsewhere None.

        All ranks run a step as a whole, and have its result, except predictions. So they do of other steps if hooks of
        callbacks read it.
        """
        if self.engine is None:
            self.engine = self._set_up(step, arguments[0])
            if self.engine.runs_whole(step):  # from the first mini-batch on, which other ranks do not have yet
                arguments = self.engine.evaluation.hand_out(arguments)
        self.host.recorder.reset()
        whole = self.engine.runs_whole(step)
        if not whole:  # else all ranks run it
            self._begin()
        result = self.engine.run(step, arguments)
        if not whole:
            self._changed()
        if step == "predict_step":
            return result if self.control.loads else None
        return result if whole else self._share(step, result if self.control.loads else None)[1]

    def _warn_of_means(self, names: Sequence[str]) -> None:
        if new := [name for name in names if name not in self._told]:
            self._told.update(new)
            self.control.warn(
                f"The step logged {', '.join(map(repr, new))} for some micro-batches of a mini-batch only: what is "
                "logged is the mean over those, weighted by their samples, which one process does not compute. Say how "
                "many items each value is the mean of (self.log(..., batch_size=count)), or log a sum "
                "(reduce_fx='sum') and a count."
            )

    def _share(
        self,
        step: str,
        result: Any,
        numbers: Sequence[Tensor] = (),
        kept: Mapping[Attribute, Any] = MappingProxyType({}),
    ) -> tuple[list[float], Any]:
        """Replay the step's logs everywhere, its wish to stop, and the attributes that it has `kept`.

        Returns the `numbers` of the step's rank, and its `result`, which other ranks have if hooks take it.
        """
        self._metrics.behind = not self.control.runs_step
        sent = dict(kept)
        if result is not None and RESULT in self._readers.taken.get(step, ()):
            sent[_RESULT] = packed(result)
        trainer = self.module.trainer
        recorder = self.host.recorder if self.control.runs_step else None
        if recorder is not None:
            self._warn_of_means(recorder.record.means_of_some())
        facts = trainer.should_stop, sent
        calls, shared, (stop, received) = exchange(self.control, recorder, facts, numbers)
        if received and not self.control.runs_step:
            result = self._readers.unpacked(received.pop(_RESULT, None))
            self._set(received.pop(_SETTINGS, ()))
            self.mirrored.take(received)
        trainer.should_stop = trainer.should_stop or stop
        if self.control.num_pipelines > 1 and self.host.recorder.record.entries is not None:
            calls = over_pipelines(self.control, calls)
        replay(self.module, calls, self.device)
        return shared, result


def _repeated(runs: int) -> str:
    return (
        f"It runs once per micro-batch, {runs} times per mini-batch: counters and lists grow {runs} times as fast as "
        "on one device, and other values are those of the last micro-batch. strategy.step=whole runs it once "
        "(docs/explanation/contract.md)."
    )


def step_of(trainer: pl.Trainer) -> str:
    """The step of the loop in which the trainer is."""
    if trainer.training:
        return TRAINING
    return "test_step" if trainer.testing else "predict_step" if trainer.predicting else "validation_step"

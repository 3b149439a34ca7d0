"""Real models on one device by the Trainer: Lightning's own strategy beside this library, in turn. Prints a table.

    python -m benchmarks.gpu.models [gpt2 clip towers] [--steps 28]

On a GPU with transformers. Without one, the same with small models, to try the script.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_gpp import GPPStrategy

WARM = 8
"""Steps before those that are measured."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to train. `accumulated`: mini-batches of Lightning that stand for one; `options`: of the library."""

    name: str
    accumulated: int = 1
    options: Mapping[str, Any] | None = None


GRAPHS: Mapping[str, Any] = {"cuda_graphs": "auto"}
VARIANTS = (
    Variant("plain"),
    *(Variant(f"plain, {count} accumulated", count) for count in (4, 16)),
    *(Variant(f"stages, M={count}", options={"num_micro_batches": count}) for count in (1, 4, 16)),
    *(Variant(f"CUDA graphs, M={count}", options={"num_micro_batches": count, **GRAPHS}) for count in (1, 4, 16)),
    Variant("CUDA graphs, 8 concurrent", options={"num_micro_batches": 1, "concurrent_stages": 8, **GRAPHS}),
)


class Model(pl.LightningModule, ABC):
    """A model with its data. `samples`: of a mini-batch."""

    samples = 16

    def __init__(self, small: bool) -> None:
        super().__init__()
        self.small = small

    @abstractmethod
    def item(self, generator: torch.Generator) -> Any:
        """A sample."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The mean loss of a mini-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class GPT2(Model):
    """GPT-2 with 124 million parameters and 1,024 tokens."""

    def __init__(self, small: bool) -> None:
        super().__init__(small)
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64} if small else {}
        self.net = GPT2LMHeadModel(GPT2Config(use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes))

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def item(self, generator: torch.Generator) -> Tensor:
        return torch.randint(0, self.net.config.vocab_size, (16 if self.small else 1024,), generator=generator)


class CLIP(Model):
    """ViT-B/32 and its text tower; the loss is a mean over pairs, unlike a contrastive one."""

    samples = 256

    def __init__(self, small: bool) -> None:
        super().__init__(small)
        from transformers import CLIPConfig, CLIPModel

        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        towers = {"text_config": sizes, "vision_config": sizes} if small else {}
        self.net = CLIPModel(CLIPConfig(**towers))

    def loss(self, batch: Any) -> Tensor:
        words, pixels = batch
        image = self.net.visual_projection(self.net.vision_model(pixels).pooler_output)
        text = self.net.text_projection(self.net.text_model(words).pooler_output)
        return (nn.functional.normalize(image, dim=-1) - nn.functional.normalize(text, dim=-1)).square().sum(-1).mean()

    def item(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 49400, (77,), generator=generator), torch.randn(3, 224, 224, generator=generator)


class Towers(Model):
    """Eight towers of seven linear layers."""

    samples = 1024

    def __init__(self, small: bool) -> None:
        super().__init__(small)
        width, inputs = (16, 8) if small else (512, 256)
        layer = lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))  # noqa: E731
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), *(layer() for _ in range(6))) for _ in range(8)
        )
        self.head = nn.Sequential(nn.Linear(8 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def loss(self, batch: Any) -> Tensor:
        inputs, wanted = batch
        joined = torch.cat([tower(inputs[:, number]) for number, tower in enumerate(self.towers)], -1)
        return nn.functional.mse_loss(self.head(joined).squeeze(-1), wanted)

    def item(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(8, 8 if self.small else 256, generator=generator), torch.randn((), generator=generator)


class Samples(Dataset[Any]):
    """So many samples, of which every 64th is the same."""

    def __init__(self, item: Callable[[torch.Generator], Any], number: int) -> None:
        self._items = [item(torch.Generator().manual_seed(seed)) for seed in range(64)]
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Any:
        return self._items[index % len(self._items)]


class Clock(pl.Callback):
    """Seconds until the first step has been done, and of each after `warm`."""

    def __init__(self, warm: int) -> None:
        self._warm, self._begun = warm, time.perf_counter()
        self.first = self.step = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._warm:
            self._start = _now()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.first = _now() - self._begun
        if batch_idx + 1 == trainer.num_training_batches:
            self.step = (_now() - self._start) / (batch_idx + 1 - self._warm)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


MODELS = {"gpt2": GPT2, "clip": CLIP, "towers": Towers}


def measured(kind: type[Model], variant: Variant, steps: int) -> tuple[float, float, float, float]:
    """Milliseconds of a step, seconds until the first one, the most GiB of tensors, and the last loss."""
    gpu, count = torch.cuda.is_available(), variant.accumulated
    pl.seed_everything(0, verbose=False)
    model, samples = kind(small=not gpu), kind.samples if gpu else 16
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(WARM * count)
    trainer = pl.Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=1,
        strategy="auto" if variant.options is None else GPPStrategy(**variant.options),
        precision="bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=count,
        callbacks=[clock],
    )
    loader = DataLoader(Samples(model.item, steps * samples), samples // count, pin_memory=gpu)
    trainer.fit(model, loader)
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    return clock.step * count * 1e3, clock.first, peak, float(trainer.callback_metrics["loss"])


def rows(names: list[str], steps: int) -> Iterator[str]:
    """The lines of the table."""
    yield "| model | variant | step, ms | of plain | first step, s | peak, GiB | last loss |"
    yield "|---|---|---|---|---|---|---|"
    for name in names:
        plain = 0.0
        for variant in VARIANTS:
            try:
                step, first, peak, loss = measured(MODELS[name], variant, steps)
            except Exception as error:  # the others are still worth their time
                yield f"| {name} | {variant.name} | {type(error).__name__}: {str(error).splitlines()[0]} | | | | |"
                continue
            plain = plain or step
            figures = f"{step:.1f} | {step / plain:.2f} | {first:.1f} | {peak:.2f} | {loss:.4f}"
            yield f"| {name} | {variant.name} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="models of the table")
    parser.add_argument("--steps", type=int, default=28, help="steps of each run")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    for line in rows(arguments.models, arguments.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()

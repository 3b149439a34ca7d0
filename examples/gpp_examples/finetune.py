"""Fine-tunes a causal language model of Hugging Face on a text file, all of it or with LoRA.

python -m gpp_examples.finetune notes.txt --model gpt2 --devices 4
python -m gpp_examples.finetune notes.txt --model gpt2 --devices 4 --lora 8
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gpp import GPPStrategy

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError as error:
    raise SystemExit(f'{error}. This example needs Hugging Face: pip install ".[hf]" in a clone.') from error


class Finetune(L.LightningModule):
    """A causal language model.

    Args:
        name: its name at Hugging Face, or its folder.
        lora: rank of LoRA's matrices; 0 trains all weights.
        learning_rate: step size of AdamW.
    """

    def __init__(self, name: str, lora: int = 0, learning_rate: float = 1e-4) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(name)
        self.learning_rate = learning_rate
        if lora:
            from peft import LoraConfig, get_peft_model

            self.model = get_peft_model(self.model, LoraConfig(task_type="CAUSAL_LM", r=lora))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, labels=batch["input_ids"]).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


def windows(path: Path, name: str, length: int) -> list[dict[str, Tensor]]:
    """The file's tokens in windows of `length` tokens; a shorter rest is left out."""
    tokens = AutoTokenizer.from_pretrained(name)(path.read_text(), return_tensors="pt")["input_ids"][0]
    return [{"input_ids": part} for part in tokens.split(length) if len(part) == length]


def main(arguments: Any) -> None:
    L.seed_everything(0)
    loader = DataLoader(
        windows(arguments.text, arguments.model, arguments.length), arguments.batch_size, drop_last=True
    )
    trainer = L.Trainer(
        strategy=GPPStrategy(num_micro_batches=4) if arguments.devices > 1 else "auto",
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Finetune(arguments.model, arguments.lora), loader)
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['loss']):.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="file to learn")
    parser.add_argument("--model", default="gpt2", help="name at Hugging Face, or folder")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu or auto")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains all weights")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a mini-batch")
    parser.add_argument("--epochs", type=int, default=1)
    main(parser.parse_args())

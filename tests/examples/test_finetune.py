"""The example with a model of Hugging Face: two processes end with the loss of one, also with LoRA."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tests.cli.commands import ROOT

TEXT = ROOT / "docs/reference/terms.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small network and its tokenizer, as `save_pretrained` writes them."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train([str(TEXT)], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = GPT2Config(
        vocab_size=300, n_positions=32, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def loss(model: Path, devices: int, lora: int) -> float:
    options = ["--model", str(model), "--devices", str(devices), "--lora", str(lora), "--accelerator", "cpu"]
    result = subprocess.run(
        [sys.executable, "-m", "gpp_examples.finetune", str(TEXT), *options, "--length", "32"],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", **os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return float(re.findall(r"^loss (.*)$", result.stdout, re.MULTILINE)[0])


@pytest.mark.acceptance
@pytest.mark.parametrize("lora", [0, 4])
def test_a_pipeline_ends_with_the_loss_of_one_process(model: Path, lora: int) -> None:
    if lora:
        pytest.importorskip("peft")
    assert loss(model, 2, lora) == pytest.approx(loss(model, 1, lora), rel=1e-5)

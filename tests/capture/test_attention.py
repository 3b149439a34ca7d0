"""Attention in stages is called as in one process: whatever is decided by values is decided by those of training.

Forwards that take another way if they see fake tensors, such as those that make masks in `transformers`, would lose
kernels like flash attention.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpp import Options, initialize
from lightning_gpp.capture import Capture, capture_step
from lightning_gpp.stages import build
from tests.acceptance.models.base import B, ids, images, labels, numbers, pretrained
from tests.distributed import run_distributed
from tests.models import Steps, in_stages
from tests.stages.inprocess import chain_of, split_gradients, whole_gradients

pytest.importorskip("transformers")

_TEXT = {"input_ids": ids(), "labels": ids()}
_SHORT = {"input_ids": ids(), "labels": labels()}
_GROUPED = {"num_key_value_heads": 1}
_SEQUENCES = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
_SOUND = {**_SEQUENCES, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
ARCHITECTURES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt2": pretrained("GPT2", {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32}, _TEXT, head="LMHeadModel"),
    "llama": pretrained("Llama", _GROUPED, _TEXT, head="ForCausalLM"),
    "mistral": pretrained("Mistral", {**_GROUPED, "sliding_window": 32}, _TEXT, head="ForCausalLM"),
    "window": pretrained("Mistral", {**_GROUPED, "sliding_window": 4}, _TEXT, head="ForCausalLM"),
    "qwen2": pretrained("Qwen2", _GROUPED, _TEXT, head="ForCausalLM"),
    "gpt_neox": pretrained("GPTNeoX", {}, _TEXT, head="ForCausalLM"),
    "opt": pretrained("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 16}, _TEXT, head="ForCausalLM"),
    "phi": pretrained("Phi", {}, _TEXT, head="ForCausalLM"),
    "bert": pretrained("Bert", {}, _SHORT, head="ForSequenceClassification"),
    "roberta": pretrained("Roberta", {}, _SHORT, head="ForSequenceClassification"),
    "t5": pretrained(
        "T5",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
        _TEXT,
        head="ForConditionalGeneration",
    ),
    "bart": pretrained("Bart", _SEQUENCES, _TEXT, head="ForConditionalGeneration"),
    "vit": pretrained(
        "ViT",
        {"image_size": 16, "patch_size": 8},
        {"pixel_values": images(), "labels": labels()},
        head="ForImageClassification",
    ),
    "whisper": pretrained(
        "Whisper", _SOUND, {"input_features": numbers(8, 16), "labels": ids()}, head="ForConditionalGeneration"
    ),
}
SAMPLE = [("gpt2", "none", 2), ("llama", "ones", 2), ("bert", "padded", 2), ("gpt2", "ones", 1)]
ALL = [(name, mask, count) for name in ARCHITECTURES for mask in ("none", "ones", "padded") for count in (1, 2)]


_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Attention(TorchFunctionMode):
    """Counts the calls of attention by their arguments: shapes of mask and query, and flags."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[Any]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
            mask, flags = given.get("attn_mask"), (given.get("is_causal", False), given.get("enable_gqa", False))
            self.calls[None if mask is None else tuple(mask.shape), flags, tuple(given["query"].shape)] += 1
        return func(*args, **kwargs)


class Kernels(TorchDispatchMode):
    """Counts kernels, which on a GPU would be launched, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.detach.default:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def padded(batch: dict[str, Tensor], mask: str) -> dict[str, Tensor]:
    """The batch with a mask: none, only ones, or zeros at the end of every second row."""
    if mask == "none" or "input_ids" not in batch:
        return batch
    ones = torch.ones_like(batch["input_ids"])
    if mask == "padded":
        ones[::2, 5:] = 0
    return {**batch, "attention_mask": ones}


def stages_of(captured: Capture, count: int) -> list[list[str]]:
    """All blocks in one stage, or cut in two behind the first block."""
    paths = [operator.module for operator in captured.graph if operator.parameters and operator.target != "step"]
    blocks = list(dict.fromkeys(re.sub(r"(\.\d+)\..*", r"\1", path) for path in paths))
    cut = next(place for place, block in enumerate(blocks) if block.endswith(".1"))
    return [blocks] if count == 1 else [blocks[:cut], blocks[cut:]]


def check(name: str, mask: str, count: int) -> None:
    torch.manual_seed(0)
    module, batch = ARCHITECTURES[name]()
    module, batch = Steps(module).double(), padded(batch, mask)
    captured = capture_step(module, batch)
    plan = chain_of(captured, stages_of(captured, count), B)
    with Attention() as expected:
        loss, reference = whole_gradients(module, plan, batch)
    with Attention() as found:
        split = split_gradients(module, captured, plan, batch)
    assert found.calls == expected.calls
    assert split == pytest.approx(loss, rel=1e-12)
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("name", "mask", "count"), SAMPLE)
def test_attention_is_called_as_in_one_process(name: str, mask: str, count: int) -> None:
    check(name, mask, count)


@pytest.mark.acceptance
@pytest.mark.parametrize(("name", "mask", "count"), ALL)
def test_all_architectures(name: str, mask: str, count: int) -> None:
    check(name, mask, count)


def kernels(layers: int) -> tuple[Counter[str], Counter[str]]:
    """The kernels of a step in one process, and in two stages."""
    config = {"n_embd": 16, "n_layer": layers, "n_head": 2, "n_positions": 32}
    model, batch = pretrained("GPT2", config, _TEXT, head="LMHeadModel")()
    module = Steps(model).double()
    reference, captured = copy.deepcopy(module), capture_step(module, batch)
    plan = chain_of(captured, stages_of(captured, 2), B)
    with Kernels() as alone:
        reference.training_step(batch, 0).backward()
    pipeline = build(captured, plan, module)
    with Kernels() as piped:
        split_gradients(module, pipeline, plan, batch)
    return alone.calls, piped.calls


def test_a_block_runs_the_kernels_of_one_process() -> None:
    (alone, piped), (longer_alone, longer_piped) = kernels(2), kernels(4)
    assert longer_piped - piped == longer_alone - alone
    assert piped.total() <= alone.total() + 8  # the embeddings' inputs, gradients of edges


MASKS = ("ones", "padded", "ones", "padded")


def batches() -> list[dict[str, Tensor]]:
    tokens = [ids(12, samples=8, seed=seed) for seed in range(len(MASKS))]
    return [padded({"input_ids": each, "labels": each}, mask) for each, mask in zip(tokens, MASKS, strict=True)]


def train_in_stages(rank: int) -> tuple[list[float], list[set[Any]]]:
    """Losses of mini-batches with and without padding, and the masks of attention in each."""
    torch.manual_seed(0)
    module, _, stages = in_stages("gpt2")
    plan = {path: min(number, 1) for number, paths in enumerate(stages) for path in paths}
    optimizer, losses, masks = torch.optim.SGD(module.parameters(), lr=0.1), [], []
    options = Options(stages=plan, num_micro_batches=2)
    with initialize(module, optimizer, batches()[0], options=options) as engine:
        for number, batch in enumerate(batches()):
            with Attention() as seen:
                losses.append(float(engine.train_step(batch, number)))
            masks.append({mask for mask, *_ in seen.calls})
            optimizer.step()
            optimizer.zero_grad()
    return losses, masks


@pytest.mark.acceptance
def test_mini_batches_with_padding_and_without() -> None:
    torch.manual_seed(0)
    module = in_stages("gpt2")[0]
    optimizer, expected = torch.optim.SGD(module.parameters(), lr=0.1), []
    for batch in batches():
        halves = [{name: part[rows] for name, part in batch.items()} for rows in (slice(4), slice(4, 8))]
        loss = torch.stack([module.training_step(half, 0) for half in halves]).mean()
        loss.backward()
        expected.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for losses, masks in run_distributed(2, train_in_stages):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert [mask == {None} for mask in masks] == [True, False, True, False]

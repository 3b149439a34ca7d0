"""Mini-batches of fine-tuning: padded, packed, with rows that belong to samples; on architectures of transformers.

Every task trains a network with random weights on a few mini-batches, each of another form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lightning_gpp import summon_full_params

Batch = dict[str, Tensor]
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
VISION = {"image_size": 8, "patch_size": 4, "projection_dim": 8, **SIZES}
IMAGE = 3
"""The token in the place of a part of an image."""
LENGTHS = ([5, 9, 7, 12, 3, 8, 6, 4], [11, 4, 6, 2, 9, 7, 5, 10], [3, 6, 4, 7, 7, 2, 5, 6], [14, 5, 9, 3, 8, 4, 13, 6])
"""Tokens of the samples of each mini-batch."""
IMAGES = ([1, 0, 3, 2, 1, 2, 0, 1], [0, 2, 1, 1, 3, 0, 1, 2], [2, 2, 1, 3, 0, 1, 1, 2], [1, 0, 0, 1, 2, 0, 3, 0])
"""Images of the samples of each mini-batch."""


class Trained(pl.LightningModule):
    """A network that computes its own loss, or leaves it to the function `loss` of network and mini-batch."""

    def __init__(self, network: nn.Module, loss: Callable[[nn.Module, Any], Tensor] | None = None) -> None:
        super().__init__()
        self.network, self.loss = network, loss
        self.losses: list[float] = []
        self.trained = torch.empty(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.network, batch) if self.loss else self.network(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_train_end(self) -> None:
        with summon_full_params(self):
            self.trained = torch.cat([parameter.detach().flatten() for parameter in self.parameters()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A module, its mini-batches, and the options of the strategy that they need."""

    module: Callable[[], Trained]
    batches: Callable[[], Sequence[Any]]
    options: dict[str, Any] = field(default_factory=dict)


def tokens(count: int, seed: int) -> Tensor:
    return torch.randint(4, 32, (count,), generator=torch.Generator().manual_seed(seed))


def padded(texts: Sequence[Tensor], ignored: Sequence[int] = (0,)) -> Batch:
    """Texts of different lengths; labels hide padding and what else is ignored."""
    ids = pad_sequence(list(texts), batch_first=True)
    hidden = torch.isin(ids, torch.tensor(ignored))
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(hidden, -100)}


def texts() -> list[Batch]:
    return [padded([tokens(n, 10 * k + n) for n in lengths]) for k, lengths in enumerate(LENGTHS)]


def _with_images(counts: Sequence[int], parts: int, seed: int) -> Batch:
    """Texts that begin with the places of their images, each behind a token 2."""
    places = [torch.tensor([2, *[IMAGE] * parts] * count, dtype=torch.int64) for count in counts]
    rest = [tokens(4 + (seed + 3 * sample) % 5, seed + sample) for sample in range(len(counts))]
    return padded([torch.cat(pair) for pair in zip(places, rest, strict=True)], [0, IMAGE])


def albums() -> list[Batch]:
    """LLaVA: one row of `pixel_values` for each image."""
    found = []
    for seed, counts in enumerate(IMAGES):
        pixels = torch.randn(sum(counts), 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        found.append({**_with_images(counts, 4, seed), "pixel_values": pixels.double()})
    return found


def grids() -> list[Batch]:
    """Qwen2-VL: a row of `image_grid_thw` for each image, a row of `pixel_values` for each patch; 4 patches a token."""
    found = []
    for seed, counts in enumerate(IMAGES):
        grid = torch.tensor([[1, 2, 4]]).expand(sum(counts), 3).contiguous()
        pixels = torch.randn(8 * sum(counts), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))
        batch = _with_images(counts, 2, seed)
        kinds = {"mm_token_type_ids": (batch["input_ids"] == IMAGE).int()}
        found.append({**batch, **kinds, "pixel_values": pixels.double(), "image_grid_thw": grid})
    return found


def answers(inputs: Callable[[Sequence[int], int], Batch]) -> list[Batch]:
    """Inputs of an encoder, and labels of other lengths."""
    found = []
    for seed, lengths in enumerate(LENGTHS):
        labels = padded([tokens(1 + n // 2, seed + n) for n in lengths])["labels"]
        found.append({**inputs(lengths, seed), "labels": labels})
    return found


def _sentences(lengths: Sequence[int], seed: int) -> Batch:
    batch = padded([tokens(n, seed + n) for n in lengths])
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def _sounds(lengths: Sequence[int], seed: int) -> Batch:
    features = torch.randn(len(lengths), 8, 32, generator=torch.Generator().manual_seed(seed))
    return {"input_features": features.double()}


def graphs() -> list[Batch]:
    """Graphs of different sizes in one: features of nodes, edges between nodes, the graph of each node, and targets."""
    found = []
    for seed, sizes in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(seed)
        starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist()
        edges = [
            start + torch.randint(size, (2, 2 * size), generator=generator)
            for start, size in zip(starts, sizes, strict=True)
        ]
        found.append(
            {
                "x": torch.randn(sum(sizes), 6, generator=generator).double(),
                "edges": torch.cat(edges, 1),
                "graph": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
                "y": torch.randn(len(sizes), generator=generator).double(),
            }
        )
    return found


def some_graphs(batch: Batch, number: int) -> list[Batch]:
    """Micro-batches of whole graphs."""
    found = []
    for graphs in torch.arange(len(batch["y"])).chunk(number):
        nodes, edges = torch.isin(batch["graph"], graphs), torch.isin(batch["graph"][batch["edges"][0]], graphs)
        renamed = nodes.cumsum(0) - 1
        found.append(
            {
                "x": batch["x"][nodes],
                "edges": renamed[batch["edges"][:, edges]],
                "graph": batch["graph"][nodes] - graphs[0],
                "y": batch["y"][graphs],
            }
        )
    return found


class Layer(nn.Module):
    """A node becomes a function of itself and of the sum over its neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        heard = torch.zeros_like(x).index_add(0, edges[1], self.others(x)[edges[0]]) / 2
        return torch.tanh(self.own(x) + heard)


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(6) for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, batch: Batch) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x, batch["edges"])
        sums = x.new_zeros(len(batch["y"]), x.shape[1]).index_add(0, batch["graph"], x)
        return self.head(sums / 10)[:, 0]


def _squares(network: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(network(batch), batch["y"])


def pairs() -> list[Batch]:
    """Chosen texts and rejected ones, `[pairs, 2, tokens]`, and what a reference thinks of both."""
    found = []
    for seed, lengths in enumerate(LENGTHS):
        both = padded([tokens(n, 100 * seed + sample) for sample, n in enumerate(lengths)])
        reference = torch.randn(len(lengths) // 2, 2, generator=torch.Generator().manual_seed(seed)).double()
        found.append({name: value.unflatten(0, (-1, 2)) for name, value in both.items()} | {"reference": reference})
    return found


def preference(network: nn.Module, batch: Batch) -> Tensor:
    """The loss of direct preference optimization (DPO)."""
    ids, mask = batch["input_ids"].flatten(0, 1), batch["attention_mask"].flatten(0, 1)
    logits = network(input_ids=ids, attention_mask=mask).logits[:, :-1]
    each = -F.cross_entropy(logits.transpose(1, 2), batch["labels"].flatten(0, 1)[:, 1:], reduction="none")
    margins = each.sum(1).unflatten(0, (-1, 2)) - batch["reference"]
    return -F.logsigmoid(0.1 * (margins[:, 0] - margins[:, 1])).mean()


def packed_pairs() -> list[Batch]:
    """The same without padding: one row of tokens, their places in their texts, and the text of each token."""
    found = []
    for batch in pairs():
        kept = batch["attention_mask"].flatten(0, 1).bool()
        places = torch.arange(kept.shape[1]).expand_as(kept)
        text = torch.arange(len(kept))[:, None].expand_as(kept)
        found.append(
            {
                "input_ids": batch["input_ids"].flatten(0, 1)[kept][None],
                "position_ids": places[kept][None],
                "text": text[kept][None],
                "reference": batch["reference"],
            }
        )
    return found


def some_pairs(batch: Batch, number: int) -> list[Batch]:
    """Micro-batches of whole pairs."""
    found = []
    for chosen in torch.arange(len(batch["reference"])).chunk(number):
        kept = torch.isin(batch["text"][0] // 2, chosen)
        found.append(
            {
                "input_ids": batch["input_ids"][:, kept],
                "position_ids": batch["position_ids"][:, kept],
                "text": batch["text"][:, kept] - 2 * chosen[0],
                "reference": batch["reference"][chosen],
            }
        )
    return found


def packed_preference(network: nn.Module, batch: Batch) -> Tensor:
    text = batch["text"][0]
    logits = network(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0, :-1]
    each = -F.cross_entropy(logits, batch["input_ids"][0, 1:], reduction="none") * (text[1:] == text[:-1])
    sums = each.new_zeros(batch["reference"].numel()).index_add(0, text[1:], each)
    margins = sums.unflatten(0, (-1, 2)) - batch["reference"]
    return -F.logsigmoid(0.1 * (margins[:, 0] - margins[:, 1])).mean()


def next_tokens(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The loss of language models in the precision of the logits; that of transformers is in float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def model(name: str, loss: Any = None, head: str = "ForCausalLM", **config: Any) -> Callable[[], Trained]:
    """A module around a network of transformers with random weights."""

    def build() -> Trained:
        torch.manual_seed(0)
        network = getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**config))
        if name not in ("T5", "Whisper"):
            network.loss_function = next_tokens
        return Trained(network, loss).double()

    return build


def _llava() -> Trained:
    vision = transformers.CLIPVisionConfig(**VISION)
    text = transformers.LlamaConfig(**SIZES)
    return model(
        "Llava",
        head="ForConditionalGeneration",
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )()


def _qwen2_vl() -> Trained:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
    special = {"image_token_id": IMAGE, "video_token_id": 1, "vision_start_token_id": 2}
    return model("Qwen2VL", head="ForConditionalGeneration", vision_config=vision, text_config=text, **special)()


def _graph_network() -> Trained:
    torch.manual_seed(0)
    return Trained(GraphNetwork(), _squares).double()


_GPT2 = {"vocab_size": 32, "n_positions": 64, "n_embd": 16, "n_layer": 4, "n_head": 2}
_STILL = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
_WHISPER = {
    **{f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 2))},
    **{"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, "vocab_size": 32, "num_mel_bins": 8},
    **{"max_source_positions": 16, "max_target_positions": 32, "dropout": 0.0},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
_EXPERTS = {"experts_implementation": "eager", "output_router_logits": True, "router_aux_loss_coef": 0.1}
_COUNTED = {"loss_reduction": "labels:shifted"}

TASKS: dict[str, Task] = {
    "llama": Task(module=model("Llama", **SIZES), batches=texts, options=_COUNTED),
    "gpt2": Task(module=model("GPT2", head="LMHeadModel", **_GPT2, **_STILL), batches=texts, options=_COUNTED),
    "llava": Task(module=_llava, batches=albums, options=_COUNTED),
    "qwen2_vl": Task(module=_qwen2_vl, batches=grids, options=_COUNTED),
    "mixtral": Task(
        module=model("Mixtral", num_local_experts=4, **SIZES, **_EXPERTS), batches=texts, options={"step": "whole"}
    ),
    "qwen2_moe": Task(
        module=model(
            "Qwen2Moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            **SIZES,
            **_EXPERTS,
        ),
        batches=texts,
        options={"step": "whole"},
    ),
    "t5": Task(
        module=model("T5", head="ForConditionalGeneration", **_T5, decoder_start_token_id=0),
        batches=partial(answers, _sentences),
        options={"loss_reduction": "labels"},
    ),
    "whisper": Task(
        module=model("Whisper", head="ForConditionalGeneration", **_WHISPER),
        batches=partial(answers, _sounds),
        options={"loss_reduction": "labels"},
    ),
    "graph_network": Task(
        module=_graph_network, batches=graphs, options={"micro_batch_by": some_graphs, "batch_dims": {"y": 0}}
    ),
    "dpo": Task(module=model("Llama", preference, **SIZES), batches=pairs),
    "dpo_packed": Task(
        module=model("Llama", packed_preference, **SIZES),
        batches=packed_pairs,
        options={"micro_batch_by": some_pairs},
    ),
}

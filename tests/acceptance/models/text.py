"""Text: encoders, decoders, encoder-decoders, mixtures of experts, state spaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.acceptance.models.base import Entry, ids, labels, pretrained

TEXT = {"input_ids": ids(), "labels": labels()}
MASKED = {"input_ids": ids(), "attention_mask": (ids(seed=1) > 8).long(), "labels": labels()}
TOKENS = {"input_ids": ids(), "labels": ids() % 3}
LM = {"input_ids": ids(), "labels": ids()}
SEQ2SEQ = {"input_ids": ids(), "labels": ids(6, seed=2)}
SPAN = {"input_ids": ids(), "start_positions": labels(), "end_positions": labels() + 2}
NEXT = "ForCausalLM"
CLASS = "ForSequenceClassification"
SEQ = "ForConditionalGeneration"

_KV = {"num_key_value_heads": 1, "head_dim": 8}
_SEQ2SEQ = {
    **{
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": 2, "ffn_dim": 32}.items()
    },
    "d_model": 16,
}
_EAGER = {"experts_implementation": "eager"}  # others are for float32
_GPT = {"n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}


def switch() -> tuple[nn.Module, Any]:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "num_decoder_layers": 2}
    sparse = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    module, batch = pretrained(
        "SwitchTransformers", {**sizes, **sparse, "router_jitter_noise": 0.0}, SEQ2SEQ, head=SEQ
    )()
    for part in module.modules():
        if isinstance(getattr(part, "dtype", None), torch.dtype) and hasattr(part, "jitter_noise"):
            part.dtype = torch.float64  # routers compute in a type of their own, which may only be a short one
    return module, batch


MODELS: dict[str, Entry] = {
    "bert": pretrained("Bert", batch=MASKED, head=CLASS),
    "roberta": pretrained("Roberta", batch=TOKENS, head="ForTokenClassification"),
    "xlm_roberta_span": pretrained("XLMRoberta", {"num_labels": 2}, batch=SPAN, head="ForQuestionAnswering"),
    "distilbert": pretrained(
        "DistilBert", {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32}, MASKED, head=CLASS
    ),
    "albert": pretrained("Albert", {"embedding_size": 8}, LM, head="ForMaskedLM"),
    "deberta": pretrained(
        "DebertaV2",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
        MASKED,
        head=CLASS,
    ),
    "mpnet": pretrained("MPNet", batch=LM, head="ForMaskedLM"),
    "mobilebert": pretrained("MobileBert", {"embedding_size": 16, "intra_bottleneck_size": 16}, TEXT, head=CLASS),
    "convbert": pretrained("ConvBert", {"embedding_size": 16, "head_ratio": 1}, TEXT, head=CLASS),
    "fnet": pretrained("FNet", batch=TEXT, head=CLASS),
    "nystromformer": pretrained("Nystromformer", {"num_landmarks": 4, "segment_means_seq_len": 8}, TEXT, head=CLASS),
    "longformer": pretrained("Longformer", {"attention_window": 4}, TEXT, head=CLASS),
    "big_bird": pretrained("BigBird", {"attention_type": "original_full"}, TEXT, head=CLASS),
    "xlnet": pretrained("XLNet", {"d_model": 16, "n_layer": 3, "n_head": 2, "d_inner": 32}, TEXT, head=CLASS),
    "modernbert": pretrained("ModernBert", batch=TEXT, head=CLASS),
    "gpt2": pretrained("GPT2", _GPT, LM, head="LMHeadModel"),
    "gpt_neo": pretrained(
        "GPTNeo", {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}, LM, head=NEXT
    ),
    "gpt_neox": pretrained("GPTNeoX", batch=LM, head=NEXT),
    "gptj": pretrained("GPTJ", {**_GPT, "rotary_dim": 4}, LM, head=NEXT),
    "opt": pretrained("OPT", {"ffn_dim": 32, "word_embed_proj_dim": 16}, LM, head=NEXT),
    "bloom": pretrained("Bloom", {"n_layer": 3, "n_head": 2}, LM, head=NEXT),
    "falcon": pretrained("Falcon", batch=LM, head=NEXT),
    "llama": pretrained("Llama", _KV, LM, head=NEXT),
    "mistral": pretrained("Mistral", {**_KV, "sliding_window": 4}, LM, head=NEXT),
    "qwen2": pretrained("Qwen2", _KV, LM, head=NEXT),
    "qwen3": pretrained("Qwen3", _KV, LM, head=NEXT),
    "gemma2": pretrained("Gemma2", _KV, LM, head=NEXT),
    "phi": pretrained("Phi", batch=LM, head=NEXT),
    "olmo2": pretrained("Olmo2", batch=LM, head=NEXT),
    "cohere": pretrained("Cohere", _KV, LM, head=NEXT),
    "mamba": pretrained("Mamba", {"state_size": 4, "num_hidden_layers": 2}, LM, head=NEXT),
    "mamba2": pretrained(
        "Mamba2",
        {"state_size": 4, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
        LM,
        head=NEXT,
    ),
    "rwkv": pretrained("Rwkv", {"attention_hidden_size": 16, "num_hidden_layers": 2}, LM, head=NEXT),
    "mixtral": pretrained("Mixtral", {**_KV, "num_local_experts": 4, "num_hidden_layers": 2, **_EAGER}, LM, head=NEXT),
    "qwen2_moe": pretrained(
        "Qwen2Moe",
        {
            **_KV,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            **_EAGER,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_hidden_layers": 2,
        },
        LM,
        head=NEXT,
    ),
    "switch": switch,
    "t5": pretrained("T5", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}, SEQ2SEQ, head=SEQ),
    "bart": pretrained("Bart", _SEQ2SEQ, SEQ2SEQ, head=SEQ),
    "bart_classifier": pretrained(
        "Bart", _SEQ2SEQ, {"input_ids": ids().index_fill(1, ids()[0, :1] * 0 + 7, 2), "labels": labels()}, head=CLASS
    ),
    "pegasus": pretrained("Pegasus", _SEQ2SEQ, SEQ2SEQ, head=SEQ),
    "marian": pretrained("Marian", {**_SEQ2SEQ, "decoder_vocab_size": 32}, SEQ2SEQ, head="MTModel"),
    "funnel": pretrained(
        "Funnel",
        {"block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "num_decoder_layers": 1},
        TEXT,
        head=CLASS,
    ),
}

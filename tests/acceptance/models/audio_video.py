"""Sound, video and time series."""

from __future__ import annotations

import torch

from tests.acceptance.models.base import B, Entry, ids, labels, numbers, pretrained

SPEECH = {"input_values": numbers(400), "labels": labels()}
_CONVOLUTIONS = {
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "classifier_proj_size": 8,
}
CTC = {**_CONVOLUTIONS, "ctc_zero_infinity": True}
_VIDEO = {"pixel_values": numbers(4, 3, 16, 16), "labels": labels()}
_TUBES = {"image_size": 16, "patch_size": 8, "num_frames": 4}
_SERIES = {"past_values": numbers(16, 2), "future_values": numbers(4, 2, seed=1)}

MODELS: dict[str, Entry] = {
    "wav2vec2": pretrained("Wav2Vec2", _CONVOLUTIONS, SPEECH, head="ForSequenceClassification"),
    "wav2vec2_ctc": pretrained("Wav2Vec2", CTC, {"input_values": numbers(400), "labels": ids(4)}, head="ForCTC"),
    "wav2vec2_masked": pretrained(
        "Wav2Vec2",
        {**CTC, "apply_spec_augment": True, "mask_time_prob": 0.4, "mask_time_length": 2},
        {"input_values": numbers(400), "labels": ids(4)},
        head="ForCTC",
    ),
    "hubert": pretrained("Hubert", CTC, {"input_values": numbers(400), "labels": ids(4)}, head="ForCTC"),
    "wavlm": pretrained("WavLM", _CONVOLUTIONS, SPEECH, head="ForSequenceClassification"),
    "sew": pretrained("SEW", {**_CONVOLUTIONS, "squeeze_factor": 2}, SPEECH, head="ForSequenceClassification"),
    "whisper": pretrained(
        "Whisper",
        {
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "num_mel_bins": 8,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_source_positions": 8,
            "max_target_positions": 16,
        },
        {"input_features": numbers(8, 16), "labels": ids(6)},
        head="ForConditionalGeneration",
    ),
    "audio_spectrogram": pretrained(
        "AST",
        {"patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8},
        {"input_values": numbers(16, 8), "labels": labels()},
        head="ForAudioClassification",
    ),
    "videomae": pretrained("VideoMAE", {**_TUBES, "tubelet_size": 2}, _VIDEO, head="ForVideoClassification"),
    "timesformer": pretrained("Timesformer", _TUBES, _VIDEO, head="ForVideoClassification"),
    "vivit": pretrained("Vivit", {**_TUBES, "tubelet_size": [2, 8, 8]}, _VIDEO, head="ForVideoClassification"),
    "patchtst": pretrained(
        "PatchTST",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
            "d_model": 16,
            "ffn_dim": 32,
        },
        _SERIES,
        head="ForPrediction",
    ),
    "time_series": pretrained(
        "TimeSeriesTransformer",
        {
            "prediction_length": 4,
            "context_length": 10,
            "lags_sequence": [1, 2, 3],
            "num_time_features": 1,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
        },
        {
            "past_values": numbers(13),
            "past_time_features": numbers(13, 1),
            "past_observed_mask": torch.ones(B, 13),
            "future_values": numbers(4, seed=1),
            "future_time_features": numbers(4, 1),
        },
        head="ForPrediction",
    ),
}

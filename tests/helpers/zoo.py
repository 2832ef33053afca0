"""Tiny models of many architectures, built from configurations alone (nothing is downloaded)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

T, D, H, L, V = 12, 32, 4, 3, 97
"""Tokens, width, heads, layers, vocabulary."""
N = 6
"""Samples."""

_G = torch.Generator().manual_seed(7)


def tokens(length: int = T, *, low: int = 3) -> torch.Tensor:
    return torch.randint(low, V, (N, length), generator=_G)


def mask(length: int = T) -> torch.Tensor:
    lengths = torch.randint(length // 2, length + 1, (N, 1), generator=_G)
    return (torch.arange(length)[None] < lengths).long()


def text(**extra: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "attention_mask": mask(), **extra}


def labels(num: int = 3) -> torch.Tensor:
    return torch.randint(num, (N,), generator=_G)


def image(size: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(N, channels, size, size, generator=_G)


TEXT = {
    "vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H,
    "intermediate_size": 37, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
DECODER = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H, "intermediate_size": 37,
    "image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 3,
}  # fmt: skip


def _of(
    config: str, model: str, settings: dict[str, Any], data: Callable[[], dict[str, Any]]
) -> Callable[[], tuple[Any, dict[str, Any]]]:
    def build() -> tuple[Any, dict[str, Any]]:
        import transformers

        made = getattr(transformers, config)(**settings)
        return getattr(transformers, model)(made), data()

    return build


def classify(prefix: str, model: str | None = None, **settings: Any) -> Any:
    name = model or f"{prefix}ForSequenceClassification"
    return _of(f"{prefix}Config", name, {**TEXT, **settings}, lambda: text(labels=labels()))


def causal(prefix: str, **settings: Any) -> Any:
    def data() -> dict[str, Any]:
        batch = text()
        return {**batch, "labels": batch["input_ids"]}

    return _of(f"{prefix}Config", f"{prefix}ForCausalLM", {**DECODER, **settings}, data)


def seq2seq(prefix: str, model: str | None = None, **settings: Any) -> Any:
    base = {
        "vocab_size": V, "d_model": D, "encoder_layers": L, "decoder_layers": L,
        "encoder_attention_heads": H, "decoder_attention_heads": H, "encoder_ffn_dim": 37,
        "decoder_ffn_dim": 37, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    }  # fmt: skip
    name = model or f"{prefix}ForConditionalGeneration"
    return _of(f"{prefix}Config", name, {**base, **settings}, lambda: text(labels=tokens(9)))


def pictures(prefix: str, model: str | None = None, *, size: int = 32, **settings: Any) -> Any:
    name = model or f"{prefix}ForImageClassification"
    return _of(
        f"{prefix}Config", name, {**VISION, **settings},
        lambda: {"pixel_values": image(size), "labels": labels()},
    )  # fmt: skip


def conv(prefix: str, model: str | None = None, *, size: int = 32, **settings: Any) -> Any:
    name = model or f"{prefix}ForImageClassification"
    return _of(
        f"{prefix}Config", name, {"num_labels": 3, **settings},
        lambda: {"pixel_values": image(size), "labels": labels()},
    )  # fmt: skip


def segment(prefix: str, *, size: int = 32, **settings: Any) -> Any:
    return _of(
        f"{prefix}Config", f"{prefix}ForSemanticSegmentation", {"num_labels": 3, **settings},
        lambda: {
            "pixel_values": image(size),
            "labels": torch.randint(3, (N, size, size), generator=_G),
        },
    )  # fmt: skip


def waves(prefix: str, **settings: Any) -> Any:
    base = {
        "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H,
        "intermediate_size": 37, "conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (4, 4),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16, "num_labels": 3,
        "mask_time_prob": 0.0,
    }  # fmt: skip
    return _of(
        f"{prefix}Config", f"{prefix}ForSequenceClassification", {**base, **settings},
        lambda: {"input_values": torch.randn(N, 640, generator=_G), "labels": labels()},
    )  # fmt: skip


def whisper() -> Any:
    settings = {
        "vocab_size": V, "d_model": D, "encoder_layers": L, "decoder_layers": L,
        "encoder_attention_heads": H, "decoder_attention_heads": H, "encoder_ffn_dim": 37,
        "decoder_ffn_dim": 37, "num_mel_bins": 8, "max_source_positions": 10,
        "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }  # fmt: skip
    return _of(
        "WhisperConfig", "WhisperForConditionalGeneration", settings,
        lambda: {"input_features": torch.randn(N, 8, 20, generator=_G), "labels": tokens(9)},
    )  # fmt: skip


def clip(prefix: str = "CLIP") -> Any:
    text_config = {**TEXT, "max_position_embeddings": T}
    settings = {"text_config": text_config, "vision_config": VISION, "projection_dim": 16}
    settings["text_config"] |= {"eos_token_id": 2, "bos_token_id": 1, "projection_size": D}

    def data() -> dict[str, Any]:
        ids = tokens()
        ids[:, -1] = 2
        return {"input_ids": ids, "attention_mask": mask() | 1, "pixel_values": image()}

    return _of(f"{prefix}Config", f"{prefix}Model", settings, data)


BUILDERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    # text encoders
    "bert": classify("Bert"),
    "roberta": classify("Roberta"),
    "albert": classify("Albert", embedding_size=16),
    "distilbert": classify(
        "DistilBert", dim=D, n_layers=L, n_heads=H, hidden_dim=37, hidden_size=D
    ),
    "electra": classify("Electra", embedding_size=16),
    "deberta_v2": classify(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
    "mpnet": classify("MPNet"),
    "modernbert": classify("ModernBert", global_attn_every_n_layers=2, local_attention=8),
    "xlnet": _of(
        "XLNetConfig", "XLNetForSequenceClassification",
        {"vocab_size": V, "d_model": D, "n_layer": L, "n_head": H, "d_inner": 37, "num_labels": 3,
         "pad_token_id": 0},
        lambda: text(labels=labels()),
    ),
    "funnel": _of(
        "FunnelConfig", "FunnelForSequenceClassification",
        {"vocab_size": V, "block_sizes": [2, 1, 1], "d_model": D, "n_head": H, "d_head": 8,
         "d_inner": 37, "num_labels": 3},
        lambda: text(labels=labels()),
    ),
    "fnet": _of(
        "FNetConfig", "FNetForSequenceClassification", {**TEXT},
        lambda: {"input_ids": tokens(), "labels": labels()},
    ),
    "convbert": classify("ConvBert", embedding_size=16),
    "big_bird": classify("BigBird", attention_type="original_full"),
    "longformer": classify("Longformer", attention_window=4),
    "nystromformer": classify("Nystromformer", num_landmarks=T, segment_means_seq_len=T),
    "xmod": classify("Xmod", languages=["en_XX"], default_language="en_XX"),
    # decoders
    "gpt2": _of(
        "GPT2Config", "GPT2LMHeadModel",
        {"vocab_size": V, "n_embd": D, "n_layer": L, "n_head": H, "n_positions": 64},
        lambda: (lambda batch: {**batch, "labels": batch["input_ids"]})(text()),
    ),
    "gpt_neo": _of(
        "GPTNeoConfig", "GPTNeoForCausalLM",
        {"vocab_size": V, "hidden_size": D, "num_layers": 4, "num_heads": H,
         "attention_types": [[["global", "local"], 2]], "max_position_embeddings": 64,
         "intermediate_size": 37},
        lambda: (lambda batch: {**batch, "labels": batch["input_ids"]})(text()),
    ),
    "gpt_neox": causal("GPTNeoX"),
    "opt": causal("OPT", ffn_dim=37, word_embed_proj_dim=D),
    "bloom": causal("Bloom", n_layer=L, n_head=H),
    "llama": causal("Llama"),
    "mistral": causal("Mistral", sliding_window=8),
    "qwen2": causal("Qwen2"),
    "gemma2": causal("Gemma2", head_dim=8, sliding_window=8),
    "phi": causal("Phi"),
    "falcon": causal("Falcon", alibi=False),
    "mixtral": causal("Mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=32),
    "mamba": _of(
        "MambaConfig", "MambaForCausalLM",
        {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "state_size": 4},
        lambda: (lambda ids: {"input_ids": ids, "labels": ids})(tokens()),
    ),
    # encoder-decoder
    "t5": _of(
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 37, "num_layers": L, "num_heads": H,
         "decoder_start_token_id": 0},
        lambda: text(labels=tokens(9)),
    ),
    "bart": seq2seq("Bart"),
    "pegasus": seq2seq("Pegasus"),
    "led": seq2seq(
        "LED", attention_window=4, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "whisper": whisper(),
    # vision transformers
    "vit": pictures("ViT"),
    "deit": pictures("DeiT"),
    "beit": pictures("Beit", use_relative_position_bias=True),
    "swin": conv("Swin", embed_dim=8, depths=[1, 2], num_heads=[2, 4], window_size=2,
                 patch_size=2, image_size=32),
    "swinv2": conv("Swinv2", embed_dim=8, depths=[1, 2], num_heads=[2, 4], window_size=2,
                   patch_size=2, image_size=32),
    "dinov2": pictures("Dinov2"),
    "pvt": pictures("Pvt", hidden_sizes=[8, 16], depths=[1, 1], num_attention_heads=[1, 2],
                    num_encoder_blocks=2, sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2],
                    strides=[4, 2], mlp_ratios=[2, 2], patch_size=4),
    "poolformer": pictures("PoolFormer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1]),
    "levit": pictures("Levit", size=64, image_size=64, hidden_sizes=[16, 32, 48],
                      num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[4, 4, 4],
                      patch_size=16),
    # CNNs
    "resnet": conv("ResNet", embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1],
                   layer_type="basic"),
    "regnet": conv("RegNet", embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1],
                   groups_width=8),
    "convnext": conv("ConvNext", hidden_sizes=[8, 16, 24, 32], depths=[1, 2, 1, 1]),
    "mobilenet_v2": conv("MobileNetV2", depth_multiplier=0.25),
    "efficientnet": conv("EfficientNet", image_size=32, width_coefficient=0.25,
                         depth_coefficient=0.25, hidden_dim=320),
    # segmentation, detection
    "segformer": segment("Segformer", size=64, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1],
                         num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16),
    "mobilevit": segment("MobileViT", size=64, image_size=64, hidden_sizes=[16, 24, 32],
                         neck_hidden_sizes=[8, 8, 16, 16, 16, 16, 32], num_attention_heads=4),
    "dpt": segment(
        "DPT", size=32, **{**VISION, "num_hidden_layers": 4}, is_hybrid=False,
        backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=16,
        neck_hidden_sizes=[8, 8, 16, 16],
    ),
    # audio
    "wav2vec2": waves("Wav2Vec2"),
    "hubert": waves("Hubert"),
    "data2vec_audio": waves("Data2VecAudio", conv_pos_kernel_size=3),
    "ast": _of(
        "ASTConfig", "ASTForAudioClassification",
        {**VISION, "num_mel_bins": 16, "max_length": 24, "frequency_stride": 8, "time_stride": 8},
        lambda: {"input_values": torch.randn(N, 24, 16, generator=_G), "labels": labels()},
    ),
    # two towers
    "clip": clip(),
    "siglip": clip("Siglip"),
    # not looked at while the engine was made; layers dropped at random where the model can
    "roformer": classify("RoFormer", embedding_size=D),
    "deberta": classify("Deberta", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "canine": classify(
        "Canine", num_hash_functions=2, num_hash_buckets=16, downsampling_rate=2,
        upsampling_kernel_size=2, local_transformer_stride=4,
    ),
    "perceiver": _of(
        "PerceiverConfig", "PerceiverForSequenceClassification",
        {"vocab_size": V, "num_latents": 8, "d_latents": D, "d_model": D, "num_blocks": 1,
         "num_self_attends_per_block": 2, "num_self_attention_heads": H,
         "num_cross_attention_heads": H, "max_position_embeddings": T, "num_labels": 3},
        lambda: {"inputs": tokens(), "attention_mask": mask(), "labels": labels()},
    ),
    "flaubert": _of(
        "FlaubertConfig", "FlaubertForSequenceClassification",
        {"vocab_size": V, "emb_dim": D, "n_layers": L, "n_heads": H, "num_labels": 3,
         "max_position_embeddings": 64, "layerdrop": 0.2},
        lambda: text(labels=labels()),
    ),
    "biogpt": causal("BioGpt"),
    "gemma3": _of(
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        {**DECODER, "head_dim": 8, "sliding_window": 8},
        lambda: (lambda batch: {**batch, "labels": batch["input_ids"]})(text()),
    ),
    "qwen3": causal("Qwen3", head_dim=8),
    "olmoe": causal("Olmoe", num_experts=4, num_experts_per_tok=2, intermediate_size=32),
    "hrm_text": causal("HrmText"),
    "mamba2": _of(
        "Mamba2Config", "Mamba2ForCausalLM",
        {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "state_size": 4,
         "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
        lambda: (lambda ids: {"input_ids": ids, "labels": ids})(tokens()),
    ),
    "mbart": seq2seq("MBart", encoder_layerdrop=0.2, decoder_layerdrop=0.2),
    "marian": seq2seq("Marian", "MarianMTModel", decoder_vocab_size=V),
    "blenderbot": seq2seq("Blenderbot"),
    "longt5": _of(
        "LongT5Config", "LongT5ForConditionalGeneration",
        {"vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 37, "num_layers": L, "num_heads": H,
         "decoder_start_token_id": 0, "local_radius": 3},
        lambda: text(labels=tokens(9)),
    ),
    "convnextv2": conv("ConvNextV2", hidden_sizes=[8, 16, 24, 32], depths=[1, 2, 1, 1],
                       drop_path_rate=0.2),
    "bit": conv("Bit", embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1], num_groups=4),
    "wavlm": waves("WavLM", layerdrop=0.2),
    "blip": _of(
        "BlipConfig", "BlipForImageTextRetrieval",
        {"text_config": {**TEXT, "max_position_embeddings": T, "encoder_hidden_size": D,
                         "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2,
                         "sep_token_id": 2},
         "vision_config": VISION, "projection_dim": 16, "image_text_hidden_size": 16},
        lambda: {"input_ids": tokens(), "attention_mask": mask(), "pixel_values": image()},
    ),
    "lxmert": _of(
        "LxmertConfig", "LxmertForQuestionAnswering",
        {**TEXT, "num_qa_labels": 3, "l_layers": 2, "x_layers": 2, "r_layers": 2,
         "visual_feat_dim": 8},
        lambda: {**text(), "visual_feats": torch.randn(N, 4, 8, generator=_G),
                 "visual_pos": torch.rand(N, 4, 4, generator=_G), "labels": labels()},
    ),
}  # fmt: skip


BOUNDARIES: dict[str, tuple[str, ...]] = {
    "albert": ("albert.encoder.albert_layer_groups.0.albert_layers.0",),
    "ast": ("audio_spectrogram_transformer.layers.1",),
    "bart": ("model.encoder.layers.1", "model.decoder.layers.1"),
    "beit": ("beit.layers.1",),
    "bert": ("bert.encoder.layer.1", "bert.embeddings"),
    "big_bird": ("bert.encoder.layer.1",),
    "bloom": ("transformer.h.1",),
    "clip": ("text_model.encoder.layers.1", "vision_model.encoder.layers.1"),
    "convbert": ("convbert.encoder.layer.1",),
    "convnext": ("convnext.encoder.stages.1",),
    "data2vec_audio": ("data2vec_audio.encoder.layers.1",),
    "deberta_v2": ("deberta.encoder.layer.1",),
    "deit": ("deit.layers.1",),
    "dinov2": ("dinov2.encoder.layer.1",),
    "distilbert": ("distilbert.transformer.layer.1",),
    "dpt": ("dpt.encoder.layer.1", "neck.reassemble_stage.layers.1"),
    "efficientnet": ("efficientnet.encoder.blocks.1",),
    "electra": ("electra.encoder.layer.1",),
    "falcon": ("transformer.h.1",),
    "fnet": ("fnet.encoder.layer.1",),
    "funnel": ("funnel.encoder.blocks.0.1",),
    "gemma2": ("model.layers.1",),
    "gpt2": ("transformer.h.1",),
    "gpt_neo": ("transformer.h.1",),
    "gpt_neox": ("gpt_neox.layers.1",),
    "hubert": ("hubert.encoder.layers.1",),
    "led": ("led.encoder.layers.1", "led.decoder.layers.1"),
    "levit": ("levit.encoder.stages.1",),
    "llama": ("model.layers.1", "model.layers.0.self_attn"),
    "longformer": ("longformer.encoder.layer.1",),
    "mamba": ("backbone.layers.1",),
    "mistral": ("model.layers.1",),
    "mixtral": ("model.layers.1",),
    "mobilenet_v2": ("mobilenet_v2.layer.7",),
    "mobilevit": ("mobilevit.encoder.layer.2", "segmentation_head.aspp.convs.2"),
    "modernbert": ("model.layers.1",),
    "mpnet": ("mpnet.encoder.layer.1",),
    "nystromformer": ("nystromformer.encoder.layer.1",),
    "opt": ("model.decoder.layers.1",),
    "pegasus": ("model.encoder.layers.1", "model.decoder.layers.1"),
    "phi": ("model.layers.1",),
    "poolformer": ("poolformer.encoder.patch_embeddings.1",),
    "pvt": ("pvt.encoder.patch_embeddings.0",),
    "qwen2": ("model.layers.1",),
    "regnet": ("regnet.encoder.stages.1",),
    "resnet": ("resnet.encoder.stages.1", "resnet.embedder"),
    "roberta": ("roberta.encoder.layer.1",),
    "segformer": ("segformer.stages.1", "decode_head.linear_projections.1"),
    "siglip": ("text_model.encoder.layers.1",),
    "swin": ("swin.encoder.layers.0",),
    "swinv2": ("swinv2.encoder.layers.0",),
    "t5": ("encoder.block.1", "decoder.block.1"),
    "vit": ("vit.layers.1", "vit.embeddings"),
    "wav2vec2": ("wav2vec2.encoder.layers.1", "wav2vec2"),
    "whisper": ("model.encoder.layers.1", "model.decoder.layers.1"),
    "xlnet": ("transformer.layer.1",),
    "xmod": ("roberta.encoder.layer.1",),
} | {
    "biogpt": ("biogpt.layers.1",),
    "bit": ("bit.encoder.stages.1",),
    "blenderbot": ("model.encoder.layers.1", "model.decoder.layers.1"),
    "blip": ("vision_model.encoder.layers.1",),
    "canine": ("canine.chars_to_molecules",),
    "convnextv2": ("convnextv2.encoder.stages.1",),
    "deberta": ("deberta.encoder.layer.0.attention",),
    "flaubert": ("transformer.ffns.0", "transformer.layer_norm2.1"),
    "gemma3": ("model.layers.1",),
    "hrm_text": ("model.L_module.layers.1",),
    "longt5": ("decoder.block.1",),
    "lxmert": ("lxmert.encoder.x_layers.0",),
    "mamba2": ("backbone.layers.1",),
    "marian": ("model.decoder.layers.1",),
    "mbart": ("model.encoder.layers.1", "model.decoder.layers.1"),
    "olmoe": ("model.layers.1",),
    "perceiver": ("perceiver.encoder.self_attends.0",),
    "qwen3": ("model.layers.0.self_attn",),
    "roformer": ("roformer.embeddings",),
    "wavlm": ("wavlm.encoder.layers.1",),
}


FAMILIES = (
    "bert", "bloom", "clip", "convnext", "llama", "mamba", "mbart", "mixtral", "perceiver",
    "resnet", "segformer", "swin", "t5", "vit", "wav2vec2", "whisper",
)  # fmt: skip
"""One of each: the others are further ones of their kinds."""


def build(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the model (training mode, seeded) and its data: dropout 0.1 as configured."""
    torch.manual_seed(0)
    _G.manual_seed(7)
    model, data = BUILDERS[name]()
    return model.train(), data

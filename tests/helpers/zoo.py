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


def own_labels() -> dict[str, Any]:
    batch = text()
    return {**batch, "labels": batch["input_ids"]}


def causal(prefix: str, **settings: Any) -> Any:
    return _of(f"{prefix}Config", f"{prefix}ForCausalLM", {**DECODER, **settings}, own_labels)


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


ZOO: dict[str, tuple[Any, ...]] = {
    # text encoders
    "bert": ("bert.encoder.layer.1", "bert.embeddings", classify("Bert")),
    "deberta_v2": ("deberta.encoder.layer.1", classify(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    )),
    "funnel": ("funnel.encoder.blocks.0.1", _of(
        "FunnelConfig", "FunnelForSequenceClassification",
        {"vocab_size": V, "block_sizes": [2, 1, 1], "d_model": D, "n_head": H, "d_head": 8,
         "d_inner": 37, "num_labels": 3},
        lambda: text(labels=labels()),
    )),
    "longformer": ("longformer.encoder.layer.1", classify("Longformer", attention_window=4)),
    # decoders
    "gpt2": ("transformer.h.1", _of(
        "GPT2Config", "GPT2LMHeadModel",
        {"vocab_size": V, "n_embd": D, "n_layer": L, "n_head": H, "n_positions": 64},
        own_labels,
    )),
    "bloom": ("transformer.h.1", causal("Bloom", n_layer=L, n_head=H)),
    "llama": ("model.layers.1", "model.layers.0.self_attn", causal("Llama")),
    "mixtral": ("model.layers.1",
        causal("Mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=32)),
    "mamba": ("backbone.layers.1", _of(
        "MambaConfig", "MambaForCausalLM",
        {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "state_size": 4},
        lambda: (lambda ids: {"input_ids": ids, "labels": ids})(tokens()),
    )),
    # encoder-decoder
    "t5": ("encoder.block.1", "decoder.block.1", _of(
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": V, "d_model": D, "d_kv": 8, "d_ff": 37, "num_layers": L, "num_heads": H,
         "decoder_start_token_id": 0},
        lambda: text(labels=tokens(9)),
    )),
    "led": ("led.encoder.layers.1", "led.decoder.layers.1", seq2seq(
        "LED", attention_window=4, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    )),
    "whisper": ("model.encoder.layers.1", "model.decoder.layers.1", whisper()),
    # vision transformers
    "vit": ("vit.layers.1", "vit.embeddings", pictures("ViT")),
    "swin": ("swin.encoder.layers.0",
        conv("Swin", embed_dim=8, depths=[1, 2], num_heads=[2, 4], window_size=2,
                 patch_size=2, image_size=32)),
    # CNNs
    "resnet": ("resnet.encoder.stages.1", "resnet.embedder",
        conv("ResNet", embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1],
                   layer_type="basic")),
    "convnext": ("convnext.encoder.stages.1",
        conv("ConvNext", hidden_sizes=[8, 16, 24, 32], depths=[1, 2, 1, 1])),
    "efficientnet": ("efficientnet.encoder.blocks.1",
        conv("EfficientNet", image_size=32, width_coefficient=0.25,
                         depth_coefficient=0.25, hidden_dim=320)),
    # segmentation, detection
    "segformer": ("segformer.stages.1", "decode_head.linear_projections.1",
        segment("Segformer", size=64, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1],
                         num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16)),
    # audio
    "wav2vec2": ("wav2vec2.encoder.layers.1", "wav2vec2", waves("Wav2Vec2")),
    # two towers
    "clip": ("text_model.encoder.layers.1", "vision_model.encoder.layers.1", clip()),
    # not looked at while the engine was made; layers dropped at random where the model can
    "canine": ("canine.chars_to_molecules", classify(
        "Canine", num_hash_functions=2, num_hash_buckets=16, downsampling_rate=2,
        upsampling_kernel_size=2, local_transformer_stride=4,
    )),
    "perceiver": ("perceiver.encoder.self_attends.0", _of(
        "PerceiverConfig", "PerceiverForSequenceClassification",
        {"vocab_size": V, "num_latents": 8, "d_latents": D, "d_model": D, "num_blocks": 1,
         "num_self_attends_per_block": 2, "num_self_attention_heads": H,
         "num_cross_attention_heads": H, "max_position_embeddings": T, "num_labels": 3},
        lambda: {"inputs": tokens(), "attention_mask": mask(), "labels": labels()},
    )),
    "mbart": ("model.encoder.layers.1", "model.decoder.layers.1",
        seq2seq("MBart", encoder_layerdrop=0.2, decoder_layerdrop=0.2)),
    "lxmert": ("lxmert.encoder.x_layers.0", _of(
        "LxmertConfig", "LxmertForQuestionAnswering",
        {**TEXT, "num_qa_labels": 3, "l_layers": 2, "x_layers": 2, "r_layers": 2,
         "visual_feat_dim": 8},
        lambda: {**text(), "visual_feats": torch.randn(N, 4, 8, generator=_G),
                 "visual_pos": torch.rand(N, 4, 4, generator=_G), "labels": labels()},
    )),
}  # fmt: skip
"""By name: boundaries, and what makes the model and its data."""
BOUNDARIES: dict[str, tuple[str, ...]] = {name: row[:-1] for name, row in ZOO.items()}
BUILDERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    name: row[-1] for name, row in ZOO.items()
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

"""Small configurations of real architectures, with random weights; nothing is downloaded.

The sizes of batch, time and features differ, so that no axis passes for another one.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

B, T, VOCABULARY, CLASSES = 3, 10, 50, 5
SIDE = 64

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """One model of a library.

    Args:
        library: the package that it comes from.
        name: the model's name there.
        build: makes the model.
        inputs: keyword arguments, the sample first; a sole ``x`` is passed by position.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]


def tokens(**more: Callable[[], Tensor]) -> Callable[[], Inputs]:
    """Token ids, and what else the model takes."""

    def make() -> Inputs:
        ids = torch.randint(4, VOCABULARY, (B, T))
        return {"input_ids": ids, **{name: value() for name, value in more.items()}}

    return make


def images(side: int = SIDE, name: str = "x") -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(B, 3, side, side)}


def floats(name: str, *shape: int) -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(B, *shape)}


# What configurations call their sizes. A model ignores the names that are not its own.
WIDTH = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {**WIDTH, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {
    **ROPE,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
}
GPT = {**WIDTH, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64}
PAIR = {
    **WIDTH,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5 = {**WIDTH, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 = {**T5, "decoder_start_token_id": 0}
VISION = {**WIDTH, "image_size": SIDE, "patch_size": 16, "num_labels": CLASSES}
WINDOWS = {"image_size": SIDE, "num_labels": CLASSES}
STAGES = {
    "image_size": SIDE,
    "num_labels": CLASSES,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 24, 32],
}
SPEECH = {
    **WIDTH,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}

LABELS = {"num_labels": CLASSES}


def targets() -> Tensor:
    return torch.randint(4, VOCABULARY, (B, T - 3))


def boxes() -> Tensor:
    low = torch.randint(0, 20, (B, T, 2))
    return torch.cat([low, low + torch.randint(1, 20, (B, T, 2))], dim=2)


TEXT = tokens()
BOTH = tokens(decoder_input_ids=targets)
PIXELS = images(name="pixel_values")
WAVE = floats("input_values", 800)

TRANSFORMERS: list[tuple[str, str, dict[str, Any], Callable[[], Inputs]]] = [
    ("Bert", "SequenceClassification", WIDTH | LABELS, TEXT),
    ("Bert", "MaskedLM", WIDTH, TEXT),
    ("Roberta", "SequenceClassification", WIDTH | LABELS, TEXT),
    (
        "DistilBert",
        "SequenceClassification",
        WIDTH | {"dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2},
        TEXT,
    ),
    ("Albert", "SequenceClassification", WIDTH | {"embedding_size": 16}, TEXT),
    ("Electra", "SequenceClassification", WIDTH | {"embedding_size": 16}, TEXT),
    (
        "DebertaV2",
        "SequenceClassification",
        WIDTH
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        TEXT,
    ),
    (
        "DebertaV2",
        "MaskedLM",
        WIDTH
        | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": -1},
        TEXT,
    ),
    (
        "Deberta",
        "SequenceClassification",
        WIDTH | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        TEXT,
    ),
    ("MPNet", "SequenceClassification", WIDTH, TEXT),
    (
        "ModernBert",
        "SequenceClassification",
        WIDTH | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
        TEXT,
    ),
    (
        "Nystromformer",
        "SequenceClassification",
        WIDTH | {"num_landmarks": 5, "segment_means_seq_len": T},
        TEXT,
    ),
    ("FNet", "SequenceClassification", WIDTH, TEXT),
    ("RoFormer", "SequenceClassification", WIDTH | {"embedding_size": 16}, TEXT),
    ("BigBird", "SequenceClassification", WIDTH | {"attention_type": "original_full"}, TEXT),
    ("Longformer", "SequenceClassification", WIDTH | {"attention_window": 4}, TEXT),
    (
        "MobileBert",
        "SequenceClassification",
        WIDTH | {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
        TEXT,
    ),
    ("SqueezeBert", "SequenceClassification", WIDTH | {"embedding_size": 32}, TEXT),
    ("IBert", "SequenceClassification", WIDTH, TEXT),
    (
        "LayoutLM",
        "SequenceClassification",
        WIDTH | {"max_2d_position_embeddings": 64},
        tokens(bbox=boxes),
    ),
    ("GPT2", "CausalLM", GPT, TEXT),
    (
        "GPTNeo",
        "CausalLM",
        WIDTH
        | {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        TEXT,
    ),
    ("GPTJ", "CausalLM", GPT | {"rotary_dim": 4}, TEXT),
    ("GPTNeoX", "CausalLM", WIDTH, TEXT),
    ("OPT", "CausalLM", PAIR | {"ffn_dim": 48, "word_embed_proj_dim": 32}, TEXT),
    ("Bloom", "CausalLM", GPT, TEXT),
    (
        "Mpt",
        "CausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": VOCABULARY},
        TEXT,
    ),
    ("Falcon", "CausalLM", WIDTH, TEXT),
    ("CodeGen", "CausalLM", GPT | {"rotary_dim": 4}, TEXT),
    ("Llama", "CausalLM", ROPE, TEXT),
    ("Mistral", "CausalLM", ROPE, TEXT),
    ("Qwen2", "CausalLM", ROPE, TEXT),
    ("Qwen3", "CausalLM", ROPE, TEXT),
    ("Gemma", "CausalLM", ROPE, TEXT),
    ("Gemma2", "CausalLM", ROPE, TEXT),
    ("Phi", "CausalLM", WIDTH, TEXT),
    ("Phi3", "CausalLM", ROPE, TEXT),
    ("StableLm", "CausalLM", ROPE, TEXT),
    ("Olmo2", "CausalLM", ROPE, TEXT),
    ("Cohere", "CausalLM", ROPE, TEXT),
    ("Granite", "CausalLM", ROPE, TEXT),
    ("SmolLM3", "CausalLM", ROPE, TEXT),
    ("Mixtral", "CausalLM", EXPERTS, TEXT),
    ("Qwen2Moe", "CausalLM", EXPERTS | {"decoder_sparse_step": 1}, TEXT),
    ("Qwen3Moe", "CausalLM", EXPERTS | {"decoder_sparse_step": 1}, TEXT),
    ("Olmoe", "CausalLM", EXPERTS, TEXT),
    (
        "DeepseekV3",
        "CausalLM",
        EXPERTS
        | {
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "head_dim": 4,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        TEXT,
    ),
    ("GptOss", "CausalLM", EXPERTS | {"sliding_window": 4}, TEXT),
    ("Mamba", "CausalLM", WIDTH | {"state_size": 4, "expand": 2, "time_step_rank": 4}, TEXT),
    (
        "Mamba2",
        "CausalLM",
        WIDTH
        | {
            "state_size": 4,
            "expand": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
        TEXT,
    ),
    ("Rwkv", "CausalLM", WIDTH | {"attention_hidden_size": 32}, TEXT),
    ("T5", "ConditionalGeneration", T5, BOTH),
    ("MT5", "ConditionalGeneration", T5, BOTH),
    (
        "LongT5",
        "ConditionalGeneration",
        T5 | {"local_radius": 3, "encoder_attention_type": "local"},
        BOTH,
    ),
    (
        "SwitchTransformers",
        "ConditionalGeneration",
        T5
        | {
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "expert_capacity": 64,
            "router_jitter_noise": 0.0,
        },
        BOTH,
    ),
    ("Bart", "ConditionalGeneration", PAIR, BOTH),
    ("MBart", "ConditionalGeneration", PAIR, BOTH),
    ("Pegasus", "ConditionalGeneration", PAIR, BOTH),
    ("Marian", "MTModel", PAIR, BOTH),
    ("Blenderbot", "ConditionalGeneration", PAIR, BOTH),
    ("ViT", "ImageClassification", VISION, PIXELS),
    ("DeiT", "ImageClassification", VISION, PIXELS),
    ("Beit", "ImageClassification", VISION | {"use_relative_position_bias": True}, PIXELS),
    (
        "Data2VecVision",
        "ImageClassification",
        VISION | {"use_relative_position_bias": True},
        PIXELS,
    ),
    ("Dinov2", "ImageClassification", VISION | {"mlp_ratio": 2}, PIXELS),
    (
        "Swin",
        "ImageClassification",
        WINDOWS
        | {
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "patch_size": 4,
        },
        PIXELS,
    ),
    (
        "Swinv2",
        "ImageClassification",
        WINDOWS
        | {
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "patch_size": 4,
        },
        PIXELS,
    ),
    ("ConvNext", "ImageClassification", STAGES, PIXELS),
    ("ConvNextV2", "ImageClassification", STAGES, PIXELS),
    (
        "Segformer",
        "ImageClassification",
        STAGES | {"num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16},
        PIXELS,
    ),
    ("Pvt", "ImageClassification", STAGES | {"num_attention_heads": [1, 2, 2, 4]}, PIXELS),
    ("PoolFormer", "ImageClassification", STAGES, PIXELS),
    ("ResNet", "ImageClassification", STAGES | {"embedding_size": 8}, PIXELS),
    (
        "MobileViT",
        "ImageClassification",
        {
            "image_size": SIDE,
            "num_labels": CLASSES,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32],
            "num_attention_heads": 4,
        },
        PIXELS,
    ),
    ("Wav2Vec2", "SequenceClassification", SPEECH, WAVE),
    ("Hubert", "SequenceClassification", SPEECH, WAVE),
    (
        "WavLM",
        "SequenceClassification",
        SPEECH | {"num_buckets": 8, "max_bucket_distance": 16},
        WAVE,
    ),
    (
        "ASTModel",
        "",
        WIDTH
        | {
            "num_mel_bins": 16,
            "max_length": 24,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
        },
        floats("input_values", 24, 16),
    ),
    (
        "Whisper",
        "ConditionalGeneration",
        PAIR | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16},
        lambda: {"input_features": torch.randn(B, 8, 24), "decoder_input_ids": targets()},
    ),
    ("CLIPTextModel", "", WIDTH, TEXT),
    ("CLIPVisionModel", "", VISION, PIXELS),
]

VISION_TIMM = """
vit_tiny_patch16_224 deit_tiny_patch16_224 swin_tiny_patch4_window7_224 mixer_s32_224
resmlp_12_224 gmlp_ti16_224 cait_xxs24_224 xcit_nano_12_p16_224 pvt_v2_b0 poolformer_s12
convit_tiny coat_lite_tiny convnext_atto convnextv2_atto edgenext_xx_small fastvit_t8
resnet10t resnet18 resnet26d seresnet18 skresnet18 regnetx_002 regnety_002 nf_resnet26
mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small efficientnet_b0
tf_efficientnet_lite0 mnasnet_050 ghostnet_050 lcnet_050 tinynet_e repvgg_a0 rexnet_100
inception_next_atto levit_128s mobilevit_xxs lambda_resnet26t maxvit_rmlp_pico_rw_256
visformer_tiny tiny_vit_5m_224 repvit_m0_9 focalnet_tiny_srf eva02_tiny_patch14_224
""".split()

VISION_TORCH = ["alexnet", "googlenet", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0"]
VISION_TORCH += ["shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5", "regnet_y_400mf", "swin_t"]
VISION_TORCH += ["vit_b_32", "convnext_tiny", "swin_v2_t", "densenet121"]

ADAPTERS = [
    ("LoraConfig", {"r": 4}),
    ("LoraConfig", {"r": 4, "use_dora": True}),
    ("LoHaConfig", {"r": 4}),
    ("LoKrConfig", {"r": 4}),
    ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10}),
    ("IA3Config", {"feedforward_modules": []}),
    ("OFTConfig", {"oft_block_size": 4}),
    ("BOFTConfig", {"boft_block_size": 4}),
    ("VeraConfig", {"r": 4}),
    ("FourierFTConfig", {"n_frequency": 10}),
    ("HRAConfig", {"r": 4}),
    ("VBLoRAConfig", {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2}),
    ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
]


def _latents(**more: Callable[[], Tensor]) -> Callable[[], Inputs]:
    """Noisy pictures, and what else a denoiser takes."""
    return lambda: {"x": torch.randn(B, 4, 8, 8), **{name: make() for name, make in more.items()}}


def _steps() -> Tensor:
    return torch.randint(0, 1000, (B,))


BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
SIZED = {"in_channels": 4, "out_channels": 4, "sample_size": 8}
DIFFUSERS: list[tuple[str, dict[str, Any], Callable[[], Inputs]]] = [
    (
        "UNet2DModel",
        SIZED
        | BLOCKS
        | {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 4,
        },
        _latents(timestep=_steps),
    ),
    (
        "UNet2DConditionModel",
        SIZED
        | BLOCKS
        | {
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 12,
            "attention_head_dim": 4,
        },
        _latents(timestep=_steps, encoder_hidden_states=lambda: torch.randn(B, 5, 12)),
    ),
    (
        "DiTTransformer2DModel",
        SIZED
        | {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "norm_num_groups": 4,
            "num_embeds_ada_norm": 10,
            "patch_size": 2,
        },
        _latents(timestep=_steps, class_labels=lambda: torch.randint(10, (B,))),
    ),
    (
        "PixArtTransformer2DModel",
        SIZED
        | {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "cross_attention_dim": 16,
            "caption_channels": 12,
            "patch_size": 2,
            "use_additional_conditions": False,
        },
        _latents(timestep=_steps, encoder_hidden_states=lambda: torch.randn(B, 5, 12)),
    ),
    (
        "SD3Transformer2DModel",
        SIZED
        | {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "patch_size": 2,
            "joint_attention_dim": 12,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 6,
            "pos_embed_max_size": 8,
        },
        _latents(
            timestep=_steps,
            encoder_hidden_states=lambda: torch.randn(B, 5, 12),
            pooled_projections=lambda: torch.randn(B, 6),
        ),
    ),
    (
        "AutoencoderKL",
        {"in_channels": 4, "out_channels": 4, "latent_channels": 4}
        | BLOCKS
        | {
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        _latents(),
    ),
]


def _of_diffusers(kind: str, options: dict[str, Any]) -> nn.Module:
    import diffusers

    made: nn.Module = getattr(diffusers, kind)(**options)
    return made


def available(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def import_torchvision() -> None:
    """Import torchvision's Python modules also where its compiled operations do not load."""
    if available("torchvision"):
        name = "torchvision._meta_registrations"
        sys.modules.setdefault(name, types.ModuleType(name))
        import torchvision  # noqa: F401


def _of_transformers(kind: str, head: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    family = kind.removesuffix("Model")
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(**options)
    for part in (config, *vars(config).values()):
        for name, value in list(getattr(part, "__dict__", {}).items()):
            number = isinstance(value, float) and not isinstance(value, bool)
            if number and ("drop" in name or name.endswith("pdrop")):
                setattr(part, name, 0.0)
    config.use_cache = False
    name = kind if not head else kind + (head if head == "MTModel" else f"For{head}")
    if head == "CausalLM" and not hasattr(transformers, name):
        name = f"{kind}LMHeadModel"
    made: nn.Module = getattr(transformers, name)(config)
    if kind in ("Hubert", "WavLM"):
        made.freeze_feature_encoder()  # as in fine-tuning; Wav2Vec2 is tried without
    return made


def _of_timm(name: str) -> nn.Module:
    import timm

    try:
        made: nn.Module = timm.create_model(name, num_classes=CLASSES, img_size=SIDE)
    except (TypeError, AssertionError):
        made = timm.create_model(name, num_classes=CLASSES)
    return made


def _of_torchvision(name: str) -> nn.Module:
    import torchvision.models

    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    if name in ("vit_b_32",):
        options = {"image_size": SIDE}
    made: nn.Module = torchvision.models.get_model(name, num_classes=CLASSES, **options)
    return made


def _of_peft(kind: str, options: dict[str, Any]) -> nn.Module:
    import peft

    base = _of_transformers("Llama", "CausalLM", ROPE)
    prompt = kind.startswith("P")
    more = {} if prompt or "target_modules" in options else {"target_modules": ["q_proj", "v_proj"]}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options, **more)
    made: nn.Module = peft.get_peft_model(base, config)
    return made


def architectures() -> Iterator[Architecture]:
    """Yield the architectures of the libraries that are installed."""
    import_torchvision()
    if available("transformers"):
        for kind, head, options, inputs in TRANSFORMERS:
            name = f"{kind}{'For' if head else ''}{head}"
            yield Architecture(
                "transformers",
                name,
                lambda k=kind, h=head, o=options: _of_transformers(k, h, o),
                inputs,
            )
    if available("timm"):
        for name in VISION_TIMM:
            yield Architecture("timm", name, lambda n=name: _of_timm(n), images())
    if available("torchvision"):
        for name in VISION_TORCH:
            yield Architecture("torchvision", name, lambda n=name: _of_torchvision(n), images())
    if available("diffusers"):
        for kind, options, inputs in DIFFUSERS:
            first = "sample" if kind.startswith(("UNet", "Auto")) else "hidden_states"
            yield Architecture(
                "diffusers",
                kind,
                lambda k=kind, o=options: _of_diffusers(k, o),
                lambda i=inputs, f=first: {f if n == "x" else n: t for n, t in i().items()},
            )
    if available("peft"):
        for kind, options in ADAPTERS:
            name = kind.removesuffix("Config") + ("+DoRA" if "use_dora" in options else "")
            yield Architecture("peft", name, lambda k=kind, o=options: _of_peft(k, o), TEXT)

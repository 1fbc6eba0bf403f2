"""Tiny random models of the families that people train, each with a loss of a batch of token ids.

What is not text (pixels, sounds) is computed from the ids of its row, so that one tensor is a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.ranks.nets import VOCABULARY
from tests.ranks.training import Task

SIZES: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 37}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER: dict[str, Any] = {**TEXT, "num_key_value_heads": 1, "head_dim": 12, "max_position_embeddings": 32}
# Sizes of experts are multiples of 4: the grouped product of torch wants rows of 16 bytes.
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 36}
STILL: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE: dict[str, Any] = {**SIZES, "image_size": 16, "patch_size": 8, "num_channels": 3}
SPOKEN: dict[str, Any] = {"hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
PICTURE = 99  # the id that stands for a patch of an image


def pixels(ids: torch.Tensor) -> torch.Tensor:
    """Return an image for each row of ids, shape (rows, 3, 16, 16)."""
    return torch.sin(ids[:, :1] * torch.arange(1, 769) * 0.01).view(-1, 3, 16, 16)


def samples(ids: torch.Tensor) -> torch.Tensor:
    """Return a sound for each row of ids, shape (rows, 400)."""
    return torch.sin(ids[:, :1] * torch.arange(400) * 0.01)


def spectrum(ids: torch.Tensor) -> torch.Tensor:
    """Return mel features for each row of ids, shape (rows, 8, 20)."""
    return samples(ids)[:, :160].view(-1, 8, 20)


def labelled(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def classified(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids[:, 0] % 2).loss


def translated(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids.flip(1)).loss


def transcribed(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_features=spectrum(ids), labels=ids).loss


def recognized(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(pixel_values=pixels(ids), labels=ids[:, 0] % 2).loss


def heard(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_values=samples(ids), labels=ids[:, 0] % 2).loss


def matched(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Bring both towers of a row together: the usual contrast depends on the other rows of a rank."""
    out = model(input_ids=ids, pixel_values=pixels(ids))
    return -(out.text_embeds * out.image_embeds).sum(1).mean()


def pictured(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Show images to the parts of a batch that begin with an even id; the others skip the tower."""
    if ids[0, 0] % 2:
        return labelled(model, ids)
    ids = torch.cat([torch.full((len(ids), 4), PICTURE), ids], 1)
    return model(input_ids=ids, pixel_values=pixels(ids[:, 4:]), labels=ids).loss


def words(batch: int, rows: int) -> torch.Tensor:
    """Return ids, shape (rows, 12); with two ranks of two rows, both, one and none show images."""
    generator = torch.Generator().manual_seed(105 + batch)
    return torch.randint(3, 98, (rows, 12), generator=generator)


def build(model: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, config)(**settings)
    return getattr(transformers, model)(made)


def pair_of_towers(model: str, config: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> nn.Module:
    import transformers

    if model == "LlavaForConditionalGeneration":
        configs = transformers.CLIPVisionConfig(**vision), transformers.LlamaConfig(**text)
        return build(model, config, vision_config=configs[0], text_config=configs[1], **more)
    return build(model, config, text_config=text, vision_config=vision, **more)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def task(name: str) -> Task:
    make, model, config, settings, loss = FAMILIES[name]
    return Task(make=partial(make, model, config, **settings), loss=loss, batch=words, optimizer=plain, steps=3)


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]

FAMILIES: dict[str, tuple[Callable[..., nn.Module], str, str, dict[str, Any], Loss]] = {
    "llama": (build, "LlamaForCausalLM", "LlamaConfig", DECODER, labelled),
    "qwen2": (build, "Qwen2ForCausalLM", "Qwen2Config", DECODER, labelled),
    "qwen3": (build, "Qwen3ForCausalLM", "Qwen3Config", DECODER, labelled),
    "mistral": (build, "MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 4}, labelled),
    "gemma2": (build, "Gemma2ForCausalLM", "Gemma2Config", DECODER, labelled),
    "mixtral": (build, "MixtralForCausalLM", "MixtralConfig", {**DECODER, **EXPERTS}, labelled),
    "qwen2 moe": (
        build,
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**DECODER, **EXPERTS, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 19},
        labelled,
    ),
    "mamba": (build, "MambaForCausalLM", "MambaConfig", {**TEXT, "state_size": 4}, labelled),
    "gpt2": (
        build,
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **{"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        },
        labelled,
    ),
    "bert, pooler unused": (build, "BertForMaskedLM", "BertConfig", {**TEXT, **STILL}, labelled),
    "bert": (build, "BertForSequenceClassification", "BertConfig", {**TEXT, **STILL}, classified),
    "deberta": (
        build,
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        {
            **{**TEXT, **STILL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 24},
            **{"max_position_embeddings": 32, "pooler_dropout": 0.0, "norm_rel_ebd": "layer_norm"},
        },
        classified,
    ),
    "t5": (
        build,
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 12, "d_ff": 37, "num_layers": 2, "num_heads": 2},
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
        },
        translated,
    ),
    "vit": (build, "ViTForImageClassification", "ViTConfig", {**IMAGE, **STILL}, recognized),
    "clip": (pair_of_towers, "CLIPModel", "CLIPConfig", {"text": TEXT, "vision": IMAGE, "projection_dim": 7}, matched),
    "whisper": (
        build,
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{"vocab_size": VOCABULARY, "num_mel_bins": 8, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2},
            **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 37},
            **{"decoder_ffn_dim": 37, "max_source_positions": 10, "max_target_positions": 16, "pad_token_id": 0},
            **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0},
        },
        transcribed,
    ),
    "wav2vec2": (
        build,
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {
            **{**TEXT, **SPOKEN, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2)},
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0},
            **{"feat_proj_dropout": 0.0, "final_dropout": 0.0, "classifier_proj_size": 9},
        },
        heard,
    ),
    "llava": (
        pair_of_towers,
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text": DECODER, "vision": IMAGE, "image_token_id": PICTURE},
        pictured,
    ),
}

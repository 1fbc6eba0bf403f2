"""More families than `test_families.py` has, each for what is odd in it, in the way that fits it. D01, D03, F12.

They stand for 394 architectures of transformers 5.24 that were compared so once, at stages 1 and 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.ranks.families import (
    DECODER,
    IMAGE,
    STILL,
    TEXT,
    VOCABULARY,
    Loss,
    build,
    classified,
    labelled,
    plain,
    recognized,
    translated,
    words,
)
from tests.ranks.training import Configs, Task, assert_same, reference, train_all

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CONFIGS: Configs = {
    "stage 1": {"stage": 1, "persist_below": 30},
    "stage 3": {"stage": 3, "persist_below": 0},
    "whole until backward": {"stage": 3, "persist_below": 30, "reshard_after_forward": False},
    "recomputed": {"stage": 3, "persist_below": 0, "activation_checkpointing": True},
    "merged, on the host": {
        **{"stage": 3, "persist_below": 0, "wrap": {"policy": "min_params", "min_params": 3000}},
        "offload": {"optimizer": "cpu"},
    },
}

MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
GPT_NEOX: dict[str, Any] = {key: value for key, value in TEXT.items() if key != "pad_token_id"}
MAMBA: dict[str, Any] = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_chunk_size": 4}
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    "first_k_dense_replace": 1,
}
TRANSLATING: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37},
    **{"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}

# what is odd, model, config, settings, loss
FAMILIES: dict[str, tuple[str, str, str, dict[str, Any], Loss]] = {
    "bloom": (
        "one weight for queries, keys and values",
        *("BloomForCausalLM", "BloomConfig"),
        {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 2},
        labelled,
    ),
    "gpt neox": ("attention and MLP side by side", "GPTNeoXForCausalLM", "GPTNeoXConfig", GPT_NEOX, labelled),
    "albert": (
        "one layer for all, called again and again",
        *("AlbertForSequenceClassification", "AlbertConfig"),
        {**TEXT, **STILL, "embedding_size": 12, "classifier_dropout_prob": 0.0, "num_hidden_layers": 3},
        classified,
    ),
    "bart": (
        "three names for one embedding",
        *("BartForConditionalGeneration", "BartConfig"),
        {**TRANSLATING, "decoder_start_token_id": 2},
        translated,
    ),
    "deepseek v3": (
        "experts in groups, latent keys, a dense layer first",
        *("DeepseekV3ForCausalLM", "DeepseekV3Config"),
        {**DECODER, **MOE, **LATENT, "head_dim": 8},
        labelled,
    ),
    "gpt oss": (
        "experts with biases, sinks",
        *("GptOssForCausalLM", "GptOssConfig"),
        {**DECODER, "intermediate_size": 36, "num_local_experts": 4, "num_experts_per_tok": 2},
        labelled,
    ),
    "bamba": (
        "attention among state spaces",
        *("BambaForCausalLM", "BambaConfig"),
        {**DECODER, **MAMBA, "mamba_n_groups": 1, "attn_layer_indices": [1]},
        labelled,
    ),
    "gemma 3n": (
        "layers that use the keys of others, inputs of each layer",
        *("Gemma3nForCausalLM", "Gemma3nTextConfig"),
        {
            **{**DECODER, "num_hidden_layers": 4, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4},
            **{"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "altup_num_inputs": 2, "sliding_window": 4},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
        labelled,
    ),
    "swin": (
        "windows, layers that grow",
        *("SwinForImageClassification", "SwinConfig"),
        {
            **{"image_size": 16, "embed_dim": 12, "num_heads": [2, 2], "depths": [2, 2], "window_size": 2},
            **{"patch_size": 2, "drop_path_rate": 0.0},
        },
        recognized,
    ),
    "convnext": (
        "no attention",
        *("ConvNextForImageClassification", "ConvNextConfig"),
        {"image_size": 16, "num_stages": 2, "hidden_sizes": [12, 24], "depths": [2, 2]},
        recognized,
    ),
    "vit with masks": (
        "tokens outside of all modules",
        *("Dinov2ForImageClassification", "Dinov2Config"),
        {**IMAGE, "mlp_ratio": 2, "drop_path_rate": 0.0},
        recognized,
    ),
}

REFUSED = {("albert", "recomputed")}  # its one layer is no unit of its own


def task(name: str) -> Task:
    _, model, config, settings, loss = FAMILIES[name]
    make = partial(build, model, config, **settings)
    return Task(make=make, loss=loss, batch=words, optimizer=plain, steps=3, clip=1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_in_one_process_at_each_config(ranks, name):
    wanted = reference(task(name), 2, one_by_one=True)
    assert wanted.losses[0] != wanted.losses[-1]
    configs = {key: config for key, config in CONFIGS.items() if (name, key) not in REFUSED}
    found = ranks(2)(train_all, task(name), configs)
    for config in configs:
        assert_same([result[config] for result in found], wanted, 1e-5, f"{name}, {config}")

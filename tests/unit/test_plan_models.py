"""Plans of models that are no plain decoder: tied with dropout, experts, encoder and decoder, images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ourshard.config import ShardConfig
from ourshard.planning.hardware import hardware_of
from ourshard.planning.model import load_model, make_batch, parse_input
from ourshard.planning.plan import Planner, Row, Workload, candidates, offloaded

pytest.importorskip("transformers")

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "tied, with dropout": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2,
        "vocab_size": 99,
    },
    "experts": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **SMALL, "num_key_value_heads": 1,
        "num_local_experts": 4, "vocab_size": 99,
    },
    "encoder and decoder": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_kv": 32, "d_ff": 128,
        "num_layers": 2, "num_heads": 2, "vocab_size": 99,
    },
    "images": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], **SMALL, "image_size": 32, "patch_size": 8,
    },
}  # fmt: skip


def plan(folder: Path, values: dict[str, Any], gpus: int, nodes: int, **config: Any) -> Row:
    (folder / "config.json").write_text(json.dumps(values))
    model = load_model(str(folder))
    planner = Planner(model, Workload(make_batch(model, 2, 64)), hardware_of("h100", gpus, nodes))
    return planner.row(ShardConfig.from_dict({"stage": 3, "persist_below": 0, "wrap": {"merge": 0}, **config}))


@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_model_is_planned_and_recomputation_keeps_less(name: str, tmp_path: Path) -> None:
    row = plan(tmp_path, MODELS[name], 2, 1)
    recomputed = plan(tmp_path, MODELS[name], 2, 1, activation_checkpointing=True)
    assert 0 < recomputed.memory.activations < row.memory.activations
    assert recomputed.timing.compute > row.timing.compute > 0
    assert row.wire_inside > 0


def test_a_model_is_planned_on_16384_gpus(tmp_path: Path) -> None:
    values = MODELS["tied, with dropout"]
    few, many = plan(tmp_path, values, 8, 1), plan(tmp_path, values, 16384, 2048)
    assert many.memory.at_rest < few.memory.at_rest
    assert many.wire_between > 0 == few.wire_between
    assert many.timing.total > few.timing.total


def test_a_model_that_can_not_be_run_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["images"]))
    model = load_model(str(tmp_path))
    batch = make_batch(model, 2, 64, dict([parse_input("pixel_values=2x1x32x32:float32")]))
    with pytest.raises(ValueError, match=r"ViTForImageClassification could not .* pixel_values of 2x1x32x32.* channel"):
        Planner(model, Workload(batch), hardware_of("h100", 1)).row(ShardConfig())


def test_only_what_goes_with_the_keys_that_are_kept_is_compared() -> None:
    configs = list(candidates(ShardConfig(cuda_graph=True), hardware_of("h100", 16, 2)))
    assert {config.stage for config in configs} == {0, 1, 2, 3}
    assert not any(config.activation_checkpointing or config.shard_optimizer_over == "all" for config in configs)
    assert list(offloaded(ShardConfig(cuda_graph=True), hardware_of("h100", 16, 2))) == []


def test_keys_that_are_given_stay_as_they_are_in_all_that_is_compared() -> None:
    hardware = hardware_of("h100", 8)
    kept = ("stage", "shard_size", "activation_checkpointing")
    base = ShardConfig(stage=3, shard_size=4)
    configs = list(candidates(base, hardware, kept))
    assert {(config.stage, config.shard_size, config.activation_checkpointing) for config in configs} == {(3, 4, False)}
    assert {config.reshard_after_forward for config in configs} == {True, False}
    assert list(offloaded(base, hardware, ("offload.optimizer",))) == []


def test_a_step_that_is_replayed_does_not_wait_for_the_host(tmp_path: Path) -> None:
    row = plan(tmp_path, MODELS["images"], 2, 1)
    replayed = plan(tmp_path, MODELS["images"], 2, 1, cuda_graph=True)
    assert row.timing.starved > 0 == pytest.approx(replayed.timing.starved)
    assert replayed.timing.total < row.timing.total
    assert replayed.name == "stage 3, replayed"
    assert replayed.memory.at_rest == replayed.memory.peak == row.memory.peak > row.memory.at_rest

"""What the plan makes of `communication: auto`: the rule of a run, on the links of the hardware it is given."""

from __future__ import annotations

from typing import Any

import pytest
from ourshard.config import Codec, ShardConfig
from ourshard.planning.hardware import GB, hardware_of
from ourshard.planning.links import decide
from ourshard.planning.plan import describe, mesh_of
from typer.testing import CliRunner

AUTO = {"weights": "auto", "gradients": "auto", "error_feedback": True}
BF16 = {"param_dtype": "bfloat16"}


def decided(gpus: int, nodes: int, config: dict[str, Any], **rates: float) -> tuple[ShardConfig, str]:
    hardware = hardware_of("h100", gpus, nodes).replace(**rates)
    auto = ShardConfig.from_dict({"communication": AUTO, "precision": BF16, **config})
    return decide(auto, mesh_of(auto, hardware), hardware)


def codecs(config: ShardConfig) -> tuple[Codec, Codec]:
    return config.communication.weights, config.communication.gradients


def test_nvlink_gets_no_codec_and_a_slow_network_int8_with_the_times_that_say_so() -> None:
    fast, told = decided(8, 1, {})
    assert codecs(fast) == (Codec.NONE, Codec.NONE)
    assert not fast.communication.error_feedback
    assert told.count("so none") == 2
    slow, told = decided(16, 2, {}, network_rate=1 * GB)
    assert codecs(slow) == (Codec.INT8, Codec.INT8)
    assert slow.communication.error_feedback
    assert told.count("so int8") == 2


@pytest.mark.parametrize("config", [{}, {"shard_size": 16}, {"shard_size": 16, "shard_optimizer_over": "all"}])
def test_the_slower_the_network_the_sooner_a_codec_pays(config: dict[str, Any]) -> None:
    """From fast to slow the choice changes once at most; what is told is what was decided."""
    chosen = []
    for rate in (400, 100, 25, 5, 1, 0.2):
        found, told = decided(32, 4, config, network_rate=rate * GB)
        chosen.append(codecs(found))
        assert [part.rpartition(" ")[2] for part in told.split("; ")] == [codec.value for codec in chosen[-1]]
    for which in range(2):
        taken = [pair[which] is Codec.INT8 for pair in chosen]
        assert taken == sorted(taken)
    assert chosen[-1] == (Codec.INT8, Codec.INT8)


def test_two_hops_and_replicas_are_counted_as_training_takes_them() -> None:
    """With a copy in each node weights stay on NVLink, while gradients go over the network too."""
    hybrid, _ = decided(16, 2, {"shard_size": "node"}, network_rate=0.2 * GB)
    assert codecs(hybrid) == (Codec.NONE, Codec.INT8)
    alone, told = decided(4, 4, {"shard_size": 1}, network_rate=0.2 * GB)
    assert codecs(alone) == (Codec.NONE, Codec.NONE)
    assert told == ""


@pytest.mark.parametrize(("stage", "wanted"), [(0, (Codec.NONE, Codec.NONE)), (2, (Codec.NONE, Codec.INT8))])
def test_stages_that_a_codec_is_not_for_get_none(stage: int, wanted: tuple[Codec, Codec]) -> None:
    config, _ = decided(16, 2, {"stage": stage}, network_rate=0.2 * GB)
    assert codecs(config) == wanted


def test_codecs_that_are_named_stay() -> None:
    config = ShardConfig.from_dict({"communication": {"weights": "fp8"}})
    hardware = hardware_of("h100", 8, 1)
    assert decide(config, mesh_of(config, hardware), hardware) == (config, "")
    assert describe(config) == "stage 3, fp8 weights"


def test_the_command_says_what_auto_came_to(tmp_path: Any) -> None:
    from ourshard.planning.cli import app
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(vocab_size=97, **sizes).save_pretrained(tmp_path)
    words = [str(tmp_path), "--length", "16", "--gpus", "16", "--nodes", "2", "--network", "0.1", "--set"]
    result = CliRunner().invoke(app, [*words, "communication.gradients=auto"])
    assert result.exit_code == 0, result.output
    assert "int8 gradients" in result.output

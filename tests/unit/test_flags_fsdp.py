"""FSDP's flags, versions 1 and 2, to a config and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ourshard.config import ShardConfig
from ourshard.flags.files import load
from ourshard.flags.fsdp import STRATEGIES, from_fsdp, to_fsdp, to_parallelism
from ourshard.flags.sources import read_document
from ourshard.values import flatten

FILES = Path(__file__).parent / "flag_files"


def said(raw: dict[str, Any]) -> dict[str, Any]:
    return dict(from_fsdp(raw).said)


@pytest.mark.parametrize("number", range(1, 6))
def test_a_strategy_is_read_by_name_by_torchs_number_and_as_torchs_object(number: int) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    strategy = ShardingStrategy(number)
    name = strategy.name.lstrip("_")
    wanted = dict(STRATEGIES[name])
    for spelling in (name, name.lower(), strategy.name, number, str(number), strategy, str(strategy)):
        assert said({"fsdp_sharding_strategy": spelling}) == wanted


def test_shard_grad_op_keeps_parameters_sharded_at_rest() -> None:
    config = from_fsdp({"sharding_strategy": "SHARD_GRAD_OP"}).config
    assert (config.stage, config.reshard_after_forward) == (3, False)


@pytest.mark.parametrize("value", [True, "true", "True", False, "false"])
def test_version_2_reshard_after_forward_is_a_bool_in_any_spelling(value: bool | str) -> None:
    config = from_fsdp({"fsdp_version": "2", "fsdp_reshard_after_forward": value}).config
    assert (config.stage, config.reshard_after_forward) == (3, str(value).lower() == "true")


def test_a_number_for_reshard_after_forward_is_a_second_shard_in_version_2_and_a_strategy_in_version_1() -> None:
    assert from_fsdp({"version": 2, "reshard_after_forward": 8}).config.secondary_shard_size == 8
    assert from_fsdp({"version": 1, "reshard_after_forward": 3}).config.stage == 0


def test_a_strategy_and_reshard_after_forward_that_disagree_are_named_both() -> None:
    with pytest.raises(ValueError, match=r"fsdp_sharding_strategy=FULL_SHARD.*fsdp_reshard_after_forward=false"):
        from_fsdp({"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "false"})


def test_the_prefix_may_be_left_out_and_both_spellings_must_agree() -> None:
    assert said({"fsdp_offload_params": "true"}) == said({"offload_params": True}) == said({"cpu_offload": "1"})
    with pytest.raises(ValueError, match=r"fsdp_offload_params gives True.*cpu_offload gives False"):
        from_fsdp({"fsdp_offload_params": True, "cpu_offload": False})


def test_offload_moves_parameters_and_optimizer_and_is_refused_without_sharding() -> None:
    config = from_fsdp({"fsdp_offload_params": True}).config
    assert (config.offload.params.value, config.offload.optimizer.value) == ("cpu", "cpu")
    with pytest.raises(ValueError, match=r"offload.params needs stage 3"):
        from_fsdp({"fsdp_offload_params": True, "fsdp_sharding_strategy": "NO_SHARD"})


@pytest.mark.parametrize(
    ("raw", "policy", "classes", "least"),
    [
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, "auto", (), 0),
        ({"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_to_wrap": "A, B"}, "classes", ("A", "B"), 0),
        ({"transformer_layer_cls_to_wrap": ["A"], "min_num_params": 0}, "classes", ("A",), 0),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "1e6"}, "min_params", (), 1_000_000),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "min_params", (), 100_000_000),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 0}, "none", (), 0),
        ({"min_num_params": 500}, "min_params", (), 500),
        ({"auto_wrap_policy": "NO_WRAP", "transformer_layer_cls_to_wrap": "A"}, "none", (), 0),
        ({}, "auto", (), 0),
    ],
)  # fmt: skip
def test_wrap_policies(raw: dict[str, Any], policy: str, classes: tuple[str, ...], least: int) -> None:
    wrap = from_fsdp(raw).config.wrap
    assert (wrap.policy.value, wrap.classes, wrap.min_params) == (policy, classes, least)


def test_a_wrap_key_that_the_policy_does_not_use_is_noted_as_inactive() -> None:
    result = from_fsdp({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_min_num_params": 2000})
    assert result.config.wrap.min_params == 0
    assert any("fsdp_min_num_params: inactive" in note for note in result.notes)


@pytest.mark.parametrize(
    ("version", "value", "backward"),
    [(1, "BACKWARD_PRE", 1), (1, "BACKWARD_POST", 0), (1, "NO_PREFETCH", 0), (1, "2", 0), (2, "NO_PREFETCH", 1)],
)
def test_backward_prefetch_counts_units_and_version_2_ignores_it(version: int, value: str, backward: int) -> None:
    result = from_fsdp({"fsdp_version": version, "fsdp_backward_prefetch": value})
    assert result.config.prefetch.backward == backward
    assert any("FSDP2 ignores it" in note for note in result.notes) == (version == 2)


def test_state_dict_types_become_checkpoint_formats_and_local_is_refused() -> None:
    assert said({"state_dict_type": "FULL_STATE_DICT"}) == {"checkpoint.format": "full"}
    assert said({"state_dict_type": "StateDictType.SHARDED_STATE_DICT"}) == {"checkpoint.format": "sharded"}
    with pytest.raises(ValueError, match=r"LOCAL_STATE_DICT is refused.*SHARDED_STATE_DICT"):
        from_fsdp({"state_dict_type": "LOCAL_STATE_DICT"})


def test_mixed_precision_is_read_from_a_name_a_mapping_and_torchs_objects() -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    both = {"precision.param_dtype": "bfloat16", "precision.reduce_dtype": "float32"}
    assert said({"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": torch.float32}}) == both
    old = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    new = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert said({"mixed_precision_policy": old}) == said({"mixed_precision_policy": new}) == both
    assert said({"mixed_precision_policy": "fp8"})["precision.param_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match=r"param_type.*Did you mean 'param_dtype'"):
        from_fsdp({"mixed_precision_policy": {"param_type": "bf16"}})


def test_inputs_that_are_not_to_be_cast_have_the_name_of_each_version() -> None:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    old, new = "cast_root_forward_inputs", "cast_forward_inputs"
    for version, policy, name in [
        (1, MixedPrecision(cast_root_forward_inputs=False), old),
        (2, MixedPrecisionPolicy(cast_forward_inputs=False), new),
        (1, {old: False}, old),
        (2, {new: False}, new),
    ]:
        read = said({"fsdp_version": version, "mixed_precision_policy": policy})
        assert read["precision.cast_inputs"] is False, name
    of_inner_modules = said({"fsdp_version": 1, "mixed_precision_policy": {new: False, "param_dtype": "bf16"}})
    assert "precision.cast_inputs" not in of_inner_modules


def test_ignored_modules_are_names_and_patterns_are_refused() -> None:
    assert from_fsdp({"fsdp_ignored_modules": "vision.tower, head"}).config.wrap.ignore == ("vision.tower", "head")
    with pytest.raises(ValueError, match="pattern, which is refused"):
        from_fsdp({"fsdp_ignored_modules": r"vision\..*"})
    with pytest.raises(ValueError, match="module objects"):
        from_fsdp({"ignored_modules": [object()]})


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"xla": "true"}, "PyTorch/XLA"),
        ({"xla_fsdp_settings": {"compute_dtype": "bfloat16"}}, "PyTorch/XLA"),
        ({"param_init_fn": print}, "function"),
    ],
)
def test_what_is_not_done_here_is_refused_with_the_reason(raw: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=f"is refused: .*{reason}"):
        from_fsdp(raw)


def test_refused_keys_pass_when_they_ask_for_nothing() -> None:
    raw = {"xla": False, "xla_fsdp_settings": {}, "param_init_fn": None}
    assert said(raw) == {}


def test_inputs_of_recomputed_units_go_to_the_host_with_recomputation_alone() -> None:
    both = {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True}
    config = from_fsdp(both).config
    assert config.offload.activations.value == "cpu"
    raw, notes = to_fsdp(config)
    assert (from_fsdp(raw).config, notes) == (config, ())
    with pytest.raises(ValueError, match=r"offload.activations: cpu moves .*activation_checkpointing: true"):
        from_fsdp({"fsdp_activation_checkpointing_offload": True})
    _, notes = to_fsdp(from_fsdp({**both, "fsdp_sharding_strategy": "HYBRID_SHARD"}).config)  # said in version 1
    assert [note.partition(":")[0] for note in notes] == ["offload.activations"]


def test_unknown_keys_name_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"Unknown FSDP key 'fsdp_sharding_stratgy'.*'sharding_strategy'"):
        from_fsdp({"fsdp_sharding_stratgy": "FULL_SHARD"})
    with pytest.raises(
        ValueError, match=r"^a.yaml: fsdp_config: Unknown FSDP key 'fsdp_reshard'.*'reshard_after_forward'"
    ):
        from_fsdp({"fsdp_reshard": True}, "a.yaml: fsdp_config")
    with pytest.raises(ValueError, match=r"'FULL_SHART' is not a sharding strategy.*'FULL_SHARD'"):
        from_fsdp({"fsdp_sharding_strategy": "FULL_SHART"})
    with pytest.raises(ValueError, match=r"fsdp: 'full_shard' and 'shard_grad_op' are two sharding strategies"):
        from_fsdp({"fsdp": "full_shard shard_grad_op"})
    with pytest.raises(ValueError, match=r"fsdp_min_num_params: expected int, got 'many'"):
        from_fsdp({"fsdp_min_num_params": "many"})


@pytest.mark.parametrize("words", ["full_shard auto_wrap offload", ["full_shard", "auto_wrap", "offload"]])
def test_the_words_of_transformers_4_are_read(words: Any) -> None:
    config = from_fsdp({"fsdp": words}).config
    assert (config.stage, config.offload.params.value, config.wrap.policy.value) == (3, "cpu", "auto")


def test_parallelism_config_says_hybrid_shard() -> None:
    hybrid = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    assert from_fsdp({"fsdp_version": 2}, parallelism=hybrid).config.shard_size == 4
    assert from_fsdp({}, parallelism={"dp_shard_size": 8}).config.shard_size is None
    assert from_fsdp({}, parallelism={"dp_replicate_size": 8}).config.stage == 0
    with pytest.raises(ValueError, match=r"tp_size: 2 is refused"):
        from_fsdp({}, parallelism={"dp_shard_size": 4, "tp_size": 2})


def test_origins_name_the_file_the_key_and_the_value() -> None:
    result = read_document(load(FILES / "fsdp1_hybrid.yaml"), "fsdp1_hybrid.yaml")
    assert result.origins["shard_size"] == "fsdp1_hybrid.yaml: fsdp_config: fsdp_sharding_strategy=4"
    assert result.origin("timeout") == "default"


def test_public_fsdp_files_are_read() -> None:
    first = read_document(load(FILES / "fsdp1.yaml"), "fsdp1.yaml").config
    assert (first.stage, first.reshard_after_forward, first.offload.params.value) == (3, True, "cpu")
    hybrid = read_document(load(FILES / "fsdp1_hybrid.yaml"), "x").config
    assert (hybrid.shard_size, hybrid.prefetch.backward, hybrid.checkpoint.format.value) == ("node", 0, "full")
    assert hybrid.wrap.classes == ("LlamaDecoderLayer", "MistralDecoderLayer")
    second = read_document(load(FILES / "fsdp2.yaml"), "x").config
    assert (second.reshard_after_forward, second.shard_size, second.activation_checkpointing) == (False, 4, True)
    trainer = read_document(load(FILES / "trainer_fsdp_config.json"), "x").config
    assert (trainer.wrap.classes, trainer.low_memory_loading) == (("Qwen2DecoderLayer",), True)


sayable = st.fixed_dictionaries(
    {},
    optional={
        "reshard_after_forward": st.booleans(),
        "shard_size": st.sampled_from([None, "node"]),
        "wrap": st.sampled_from(
            [{}, {"policy": "none"}, {"classes": ["A", "B"]}, {"min_params": 7}, {"ignore": ["a.b"]}]
        ),
        "offload": st.sampled_from([{}, {"params": "cpu", "optimizer": "cpu"}]),
        "activation_checkpointing": st.booleans(),
        "low_memory_loading": st.booleans(),
        "prefetch": st.sampled_from([{}, {"backward": 0}]),
        "checkpoint": st.sampled_from([{}, {"format": "full"}]),
    },
)  # fmt: skip


@settings(deadline=None)
@given(sayable)
def test_what_fsdp_can_say_comes_back_equal(values: dict[str, Any]) -> None:
    config = ShardConfig.from_dict(values)
    raw, notes = to_fsdp(config)
    assert notes == ()
    assert from_fsdp(yaml.safe_load(yaml.safe_dump(raw))).config == config


def test_copies_over_a_known_number_of_ranks_are_said_beside_it() -> None:
    config = ShardConfig(shard_size=4)
    raw, notes = to_fsdp(config, ranks=8)
    beside = to_parallelism(config, ranks=8)
    assert (raw["fsdp_version"], notes, from_fsdp(raw, parallelism=beside).config) == (2, (), config)
    for ranks in (None, 4, 6):
        assert to_parallelism(config, ranks) == {}
        assert any(note.startswith("shard_size: 4 can't be said") for note in to_fsdp(config, ranks)[1])


@settings(deadline=None)
@given(stage=st.sampled_from([1, 2]), timeout=st.sampled_from([None, 60.0]), shards=st.sampled_from([None, 4]))
def test_what_fsdp_cannot_say_is_noted_key_by_key(stage: int, timeout: float | None, shards: int | None) -> None:
    config = ShardConfig(stage=stage, timeout=timeout, shard_size=shards)
    raw, notes = to_fsdp(config)
    wanted, back = flatten(config.to_dict()), flatten(from_fsdp(raw).config.to_dict())
    assert (
        {note.partition(":")[0] for note in notes} == {key for key in wanted if wanted[key] != back[key]} >= {"stage"}
    )
    assert any(note.startswith("timeout: 60.0 can't be said in FSDP") for note in notes) == (timeout is not None)


def test_accelerates_plugin_takes_what_is_written_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    for config in (ShardConfig(stage=0), ShardConfig(shard_size="node"), ShardConfig(reshard_after_forward=False)):
        raw, _ = to_fsdp(config)
        for key in ("SHARDING_STRATEGY", "RESHARD_AFTER_FORWARD", "VERSION"):
            monkeypatch.delenv(f"FSDP_{key}", raising=False)
            if f"fsdp_{key.lower()}" in raw:
                monkeypatch.setenv(f"FSDP_{key}", str(raw[f"fsdp_{key.lower()}"]))
        plugin = FullyShardedDataParallelPlugin()
        if raw["fsdp_version"] == 1:
            assert plugin.sharding_strategy.name == raw["fsdp_sharding_strategy"]
        else:
            assert plugin.reshard_after_forward is False


def test_a_config_of_an_early_accelerate_is_read() -> None:
    early = {"fsdp_backward_prefetch_policy": "BACKWARD_PRE", "fsdp_sharding_strategy": 1, "fsdp_offload_params": False}
    assert from_fsdp(early).config.prefetch.backward == 1
    assert from_fsdp({"fsdp_version": 2}).notes == ()

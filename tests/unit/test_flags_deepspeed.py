"""DeepSpeed's configuration, in both of its shapes, to a config and back."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ourshard.config import ShardConfig
from ourshard.flags.deepspeed import DEEPSPEED, from_deepspeed, to_deepspeed
from ourshard.flags.files import load
from ourshard.flags.language import Kind, Verdict
from ourshard.flags.sources import read_document

FILES = Path(__file__).parent / "flag_files"
TRAINER = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "train_batch_size": 64,
    "world_size": 4,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "bf16.enabled": True,
    "fp16.enabled": False,
}


def zero(**values: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **values}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "0", "1", "2", "3"])
def test_stages_are_the_same_as_numbers_and_as_text(stage: int | str) -> None:
    assert from_deepspeed({"zero_optimization": {"stage": stage}}).config.stage == int(stage)
    assert from_deepspeed({"zero_stage": stage}).config.stage == int(stage)


def test_the_stage_that_nobody_wrote_is_the_default_of_whoever_would_have_read_it() -> None:
    assert from_deepspeed({"gradient_clipping": 1.0}).config.stage == 0
    section = from_deepspeed({"offload_optimizer_device": "cpu"})
    assert section.config.stage == 2
    assert "Accelerate's default" in section.origins["stage"]


def test_auto_takes_the_trainers_values_and_is_dropped_where_there_are_none() -> None:
    result = from_deepspeed(FILES / "ds_zero2.json", TRAINER)
    assert result.run.mixed_precision == "bf16"
    assert (result.run.gradient_accumulation_steps, result.run.train_batch_size) == (8, 64)
    assert result.run.optimizer == {
        "type": "AdamW",
        "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    }
    assert result.run.scheduler["params"] == {"warmup_max_lr": 5e-5}
    bare = from_deepspeed(FILES / "ds_zero2.json")
    assert bare.run.optimizer == {"type": "AdamW"}
    assert (bare.run.mixed_precision, bare.run.gradient_accumulation_steps) == (None, None)


@pytest.mark.parametrize("flag", DEEPSPEED.flags, ids=lambda flag: flag.key)
def test_auto_never_reaches_the_result_whatever_key_it_stands_on(flag: Any) -> None:
    key = f"{flag.key}.anything" if flag.tree else flag.key
    result = from_deepspeed({**{"zero_optimization.stage": 1}, key: "auto"}, {"zero_optimization.stage": 1})
    assert "auto" not in json.dumps([result.said, dict(result.run.said)])
    assert result.config == ShardConfig(stage=1)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (zero(stage="auto"), r'ds_config: zero_optimization.stage: "auto" has nobody to follow'),
        ({"zero_optimization": 3}, r"ds_config: zero_optimization: expected keys and values, got 3. Its keys: stage,"),
        ({"bf16": True}, r"ds_config: bf16: expected keys and values, got True. Its keys: enabled,"),
        ({"qwertz": 1, "zero_optimization": {}}, r"Unknown DeepSpeed key 'qwertz'. None of the 1\d\d known names"),
        (zero(offload_param={"devise": "cpu"}), r"ds_config: Unknown.*offload_param.devise'.*offload_param.device'"),
        ({"gradient_clipping": -1}, r"ds_config: gradient_clipping: -1.0 is too small"),
        ({"gradient_accumulation_steps": 0}, r"ds_config: gradient_accumulation_steps: 0 is too small"),
        ({"fp16": {"loss_scale": -1}}, r"ds_config: fp16.loss_scale: -1.0 is no scale"),
        ({"fp16": {"initial_scale_power": 4000}}, r"ds_config: fp16.initial_scale_power: 4000 is not between 0 and"),
        ({"fp16": {"loss_scale_window": 0}}, r"ds_config: fp16.loss_scale_window: 0 is too small"),
        (zero(stage=3, offload_param={"device": "nvme"}), r"offload.params: nvme needs .*ds_config: zero.*device=nvme"),
    ],
)
def test_values_that_can_not_be_are_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_deepspeed(raw)


def test_the_persistence_threshold_auto_stays_ours() -> None:
    raw = zero(stage3_param_persistence_threshold="auto")
    assert from_deepspeed(raw).config.persist_below == ShardConfig().persist_below
    said = zero(stage3_param_persistence_threshold="1e4")
    assert from_deepspeed(said).config.persist_below == 10_000


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"gradient_accumulation_steps": 2}, r"steps: ds_config gives 2.* of TrainingArguments gives 8"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping: ds_config gives 0.5, but max_grad_norm gives 1.0"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, r"params.lr: ds_config gives 0.001, but learning_rate .*5e-05"),
        ({"train_batch_size": 5}, r"gives 5, but ranks x per_device_train_batch_size x gradient_acc.*write \"auto\""),
        ({"fp16": {"enabled": True}}, r"fp16.enabled: ds_config gives True.*gives False"),
    ],
)
def test_a_value_that_disagrees_with_the_trainer_names_both(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_deepspeed(raw, TRAINER)


def test_numbers_that_are_written_as_text_agree_with_numbers() -> None:
    raw = {
        "gradient_accumulation_steps": "8",
        "gradient_clipping": "1.0",
        "optimizer": {"params": {"lr": "5e-5", "betas": ["0.9", 0.999]}},
    }
    assert from_deepspeed(raw, TRAINER).run.gradient_accumulation_steps == 8


def test_batch_sizes_are_not_needed_and_are_checked_when_all_are_known() -> None:
    assert from_deepspeed({"zero_optimization": {"stage": 2}}).run.train_batch_size is None
    raw = {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    with pytest.raises(ValueError, match=r"100 is not train_micro_batch_size_per_gpu 2 .* 8 x 4 ranks = 64"):
        from_deepspeed(raw, {"world_size": 4})


def test_offload_goes_to_tiers_and_one_path() -> None:
    result = from_deepspeed(FILES / "ds_zero3_offload.json")
    offload = result.config.offload
    assert (offload.optimizer.value, offload.params.value, offload.nvme_path) == ("nvme", "cpu", "/local/nvme")
    two = zero(
        offload_optimizer={"device": "nvme", "nvme_path": "/a"}, offload_param={"device": "nvme", "nvme_path": "/b"}
    )
    with pytest.raises(ValueError, match=r"offload.nvme_path: .*'/a', but .*'/b'"):
        from_deepspeed(two)


def test_a_path_beside_a_device_that_is_no_disk_is_noted_as_inactive() -> None:
    result = from_deepspeed(zero(offload_param={"device": "cpu", "nvme_path": "/a"}))
    assert result.config.offload.nvme_path is None
    assert any("offload_param.nvme_path: inactive" in note for note in result.notes)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {"offload_param": {"device": "cpu"}},
        {"offload_param": {"device": "nvme", "nvme_path": "/a", "pin_memory": False}},
        {"cpu_offload_params": True},
        {"stage3_param_persistence_threshold": 10_000},
        {"zero_hpz_partition_size": 8},
        {"zero_quantized_weights": True},
        {"zero_quantized_gradients": True},
        {"mics_shard_size": 4},
        {"mics_hierarchical_params_gather": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_deepspeed_reads_at_stage_3_alone_is_inactive_below_it(stage: int, settings: dict[str, Any]) -> None:
    result = from_deepspeed(zero(stage=stage, **settings))
    assert result.config == ShardConfig(stage=stage)
    assert any(f"at stage 3 alone, and the stage is {stage}" in note for note in result.notes), result.notes


def test_a_key_of_stage_3_that_asks_for_nothing_is_not_noted_below_it() -> None:
    result = from_deepspeed({"zero_stage": 2, "offload_param_device": "none", "offload_optimizer_device": "cpu"})
    assert (result.config.offload.optimizer.value, result.notes) == ("cpu", ())
    assert from_deepspeed(zero(stage=1, zero_hpz_partition_size=1, zero_quantized_weights=False)).notes == ()


def test_offloaded_parameters_need_stage_3_where_nobody_says_the_stage() -> None:
    with pytest.raises(ValueError, match=r"offload.params needs stage 3; stage 2.*Accelerate's default is 2"):
        from_deepspeed({"offload_param_device": "cpu"})


def test_zeropp_becomes_codecs_and_a_second_shard() -> None:
    result = from_deepspeed(FILES / "ds_zeropp.json")
    config = result.config
    assert (config.secondary_shard_size, config.persist_below, config.ledger) == (8, 10_000, True)
    assert (config.communication.weights.value, config.communication.gradients.value) == ("int8", "int4")
    assert config.precision.reduce_dtype == "float32"
    assert result.run.mixed_precision == "fp16"
    assert result.run.grad_scaler == {"init_scale": 4096.0, "growth_interval": 500}


def test_masters_in_half_precision_are_kept() -> None:
    raw = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert from_deepspeed(raw).config.precision.master_dtype == "bfloat16"


def test_bf16_and_fp16_at_once_disagree() -> None:
    with pytest.raises(ValueError, match=r"mixed_precision: .*bf16.enabled=True gives 'bf16'.*fp16.enabled=True"):
        from_deepspeed({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


def test_a_static_loss_scale_is_where_the_scale_stays() -> None:
    result = from_deepspeed({"fp16": {"enabled": True, "loss_scale": 128, "initial_scale_power": 16}})
    assert result.run.grad_scaler == {"init_scale": 128.0, "growth_interval": 2**31 - 1}
    assert any("does not grow" in note for note in result.notes)


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        (zero(zero_quantized_nontrainable_weights=True), "zero_quantized_nontrainable_weights"),
        (zero(offload_optimizer={"device": "cpu", "super_offload": True}), "super_offload"),
        ({"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}}, "curriculum_learning.enabled"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention.mode"),
        ({"amp": {"enabled": "true"}}, "amp.enabled"),
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size"),
        ({"enable_msamp": True}, "enable_msamp"),
    ],
)
def test_what_is_not_done_here_is_refused_with_the_key(raw: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}: .* is refused: "):
        from_deepspeed(raw)


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        ({"fp8": {"enabled": True, "hysteresis": 2}}, r"Accelerate's mixed_precision: fp8"),
        ({"max_grad_norm": 1.0}, r"its name is gradient_clipping"),
        ({"gradient_checkpointing": True}, r"gradient_checkpointing of TrainingArguments, or activation_checkpointing"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, r"leave it out, or set bf16.bf16_master_weights_and_grads"),
    ],
)
def test_what_belongs_elsewhere_is_refused_with_its_place(raw: dict[str, Any], hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        from_deepspeed({**zero(), **raw})


def test_keys_that_are_comments_say_nothing() -> None:
    written = {"_read_the_docs": "https://example.org", "//": "three", "# stage": 3}
    result = from_deepspeed({**written, **zero(stage=2)})
    assert (result.said, result.notes) == ({"stage": 2}, ())
    with pytest.raises(ValueError, match=r"Unknown DeepSpeed key 'zero_optimization._stage'"):
        from_deepspeed(zero(_stage=3))


def test_one_rank_of_tensor_parallelism_is_none() -> None:
    assert from_deepspeed({**zero(), "tensor_parallel": {"autotp_size": 1}, "fp8": {"enabled": False}}).notes == ()


def test_blocks_that_are_switched_off_pass() -> None:
    raw = {
        "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"},
        "amp": {"enabled": "false"},
        "compile": {"deepcompile": False},
        "autotuning": {},
        "sequence_parallel_size": 1,
        "flops_profiler": {"enabled": False, "profile_step": 1},
    }
    result = from_deepspeed(raw)
    assert (result.config, result.notes) == (ShardConfig(stage=0), ())


def test_idle_keys_are_said_once_for_each_reason() -> None:
    notes = from_deepspeed(FILES / "ds_zero3_offload.json").notes
    assert len(notes) == len({note.partition(": ")[2] for note in notes})
    assert sum("zero_optimization.overlap_comm" in note for note in notes) == 1
    assert any(note.startswith("tensorboard.enabled") and "report_to" in note for note in notes)


def test_unknown_keys_name_the_nearest_one_at_any_depth() -> None:
    with pytest.raises(ValueError, match=r"'zero_optimization.offload_optimiser.device'.*offload_optimizer.device"):
        from_deepspeed(zero(offload_optimiser={"device": "cpu"}))
    with pytest.raises(ValueError, match=r"'gradient_cliping'.*'gradient_clipping'"):
        from_deepspeed({"gradient_cliping": 1.0})


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        (zero(aio={"block_size": 1}), "aio.block_size"),  # as the page of transformers on NVMe has it
        (zero(gradient_clipping=1.0), "gradient_clipping"),
        (zero(bf16={"enabled": True}), "bf16.enabled"),
        ({"overlap_comm": True}, "zero_optimization.overlap_comm"),
        ({"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer.device"),
        ({"stage3_max_live_parameters": 1}, "zero_optimization.max_live_parameters"),
    ],
)
def test_a_key_in_the_wrong_block_is_shown_its_place(raw: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{place}'"):
        from_deepspeed(raw)


ODD = (True, -1, 4000, float("nan"), float("inf"), "", "x", b"x", [1], {"x": 1})


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_whatever_stands_on_a_key_is_read_or_refused(value: Any) -> None:
    for key in DEEPSPEED.by_spelling:
        with suppress(ValueError):
            from_deepspeed({key: value, "fp16.enabled": True}).config  # noqa: B018 (it checks)


def test_a_section_and_its_file_are_joined_and_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}))
    section = {"deepspeed_config_file": str(path), "zero3_init_flag": True, "gradient_clipping": "1.0"}
    result = from_deepspeed(section)
    assert (result.config.stage, result.run.gradient_clipping) == (3, 1.0)
    with pytest.raises(ValueError, match=r"stage: deepspeed_config: zero_stage=2 gives 2, but .*ds.json.* gives 3"):
        from_deepspeed({**section, "zero_stage": 2})


def test_public_accelerate_files_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    result = read_document(load(FILES / "accelerate_zero3.yaml"), "x")
    assert (result.config.stage, result.config.offload.optimizer.value) == (3, "cpu")
    assert (result.run.gradient_accumulation_steps, result.run.gradient_clipping) == (4, 1.0)
    monkeypatch.chdir(FILES)
    result = read_document(load("accelerate_ds_file.yaml"), "x")
    assert (result.config.stage, result.run.mixed_precision, result.run.micro_batch_size) == (3, "bf16", 2)


def test_a_section_that_is_null_says_nothing() -> None:
    assert from_deepspeed({"zero_optimization": {"stage": 2, "offload_param": None}, "fp16": None}).said == {"stage": 2}


def test_the_first_format_of_zero_is_read() -> None:
    config = from_deepspeed({"zero_optimization": {"stage": 2, "cpu_offload": True}}).config
    assert (config.stage, config.offload.optimizer.value) == (2, "cpu")
    assert from_deepspeed({"zero_optimization": True}).config.stage == 1


sayable = st.fixed_dictionaries(
    {"stage": st.sampled_from([0, 1, 2, 3])},
    optional={
        "offload": st.sampled_from(
            [{"optimizer": "cpu"}, {"optimizer": "nvme", "nvme_path": "/n", "pin_memory": False}]
        ),
        "precision": st.sampled_from(
            [{"param_dtype": "bf16", "reduce_dtype": "fp32"}, {"master_dtype": "bf16"}, {"master_dtype": "fp16"}]
        ),
        "prefetch": st.just({"forward": 0, "backward": 0}),
        "ledger": st.booleans(),
        "checkpoint": st.fixed_dictionaries({"save_on_each_node": st.booleans()}),
    },
)  # fmt: skip


@settings(deadline=None)
@given(sayable)
def test_what_deepspeed_can_say_comes_back_equal(values: dict[str, Any]) -> None:
    config = ShardConfig.from_dict(values)
    raw, notes = to_deepspeed(config)
    assert notes == ()
    assert from_deepspeed(json.loads(json.dumps(raw))).config == config


def test_stage_3_alone_is_said_with_its_own_keys() -> None:
    config = ShardConfig(secondary_shard_size=8, persist_below=7).replace(offload={"params": "cpu"})
    raw, notes = to_deepspeed(config)
    assert notes == ()
    assert raw["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert from_deepspeed(raw).config == config
    copies = ShardConfig(shard_size=8).replace(
        communication={"two_hop_gathers": True, "weights": "int8", "gradients": "int4"}
    )
    raw, notes = to_deepspeed(copies)
    assert (from_deepspeed(raw).config, notes) == (copies, ())


def test_inputs_of_recomputed_units_go_to_the_host_and_back_to_deepspeed() -> None:
    recompute = {"partition_activations": True, "cpu_checkpointing": True}
    config = from_deepspeed({**zero(stage=2), "activation_checkpointing": recompute}).config
    assert (config.activation_checkpointing, config.offload.activations.value) == (True, "cpu")
    raw, notes = to_deepspeed(config)
    assert (from_deepspeed(raw).config, notes) == (config, ())


def test_sums_of_gradients_are_taken_and_said_where_deepspeed_takes_them() -> None:
    config = from_deepspeed({**zero(stage=2), "gradient_allreduce_op": "sum"}).config
    assert config.communication.reduce_op.value == "sum"
    raw, notes = to_deepspeed(config)
    assert (from_deepspeed(raw).config, notes) == (config, ())
    raw, notes = to_deepspeed(config.replace(stage=3))
    assert "gradient_allreduce_op" not in raw
    assert notes == ("communication.reduce_op: 'sum' can't be said in DeepSpeed, which reads as 'mean' here.",)


def test_units_that_deepspeed_keeps_for_their_backward_are_kept() -> None:
    """The distance runs over what comes before the backward of a unit: the elements behind it, twice."""
    for key in ("stage3_max_reuse_distance", "max_reuse_distance"):
        config = from_deepspeed(zero(stage=3, **{key: 1e9})).config
        assert config.keep_last == 500_000_000
    raw, notes = to_deepspeed(config)
    assert (raw["zero_optimization"]["stage3_max_reuse_distance"], notes) == (1_000_000_000, ())
    assert from_deepspeed(raw).config == config
    assert from_deepspeed(zero(stage=2, stage3_max_reuse_distance=1e9)).config.keep_last == 0


def test_what_deepspeed_cannot_say_is_noted() -> None:
    config = ShardConfig(shard_size="node", reshard_after_forward=False).replace(communication={"weights": "fp8"})
    _, notes = to_deepspeed(config)
    assert {note.partition(":")[0] for note in notes} == {
        "shard_size",
        "reshard_after_forward",
        "communication.weights",
    }


def test_what_deepspeed_would_not_read_below_stage_3_is_not_written_there() -> None:
    raw, notes = to_deepspeed(ShardConfig(stage=2).replace(communication={"gradients": "int4"}))
    assert "zero_quantized_gradients" not in raw["zero_optimization"]
    assert [note.partition(":")[0] for note in notes] == ["communication.gradients"]


def test_each_key_has_one_verdict_and_a_reason() -> None:
    for flag in DEEPSPEED.flags:
        assert flag.reason
        if flag.verdict is Verdict.REFUSED and flag.kind is not Kind.ANY:
            assert flag.asks_nothing, flag.key


def test_numbers_of_a_json_file_are_numbers_however_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "optimizer": {"params": {"lr": 1e-5}}}')
    assert read_document(load(tmp_path / "ds.json"), "ds.json").run.optimizer == {"params": {"lr": 1e-5}}


def test_keys_of_fp16_in_a_bf16_block_are_named_and_not_refused() -> None:
    """Configs that were made for earlier versions of DeepSpeed have them (axolotl's for bf16 did)."""
    block = {"enabled": True, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}
    result = from_deepspeed({**zero(), "bf16": block})
    assert result.run.mixed_precision == "bf16"
    assert result.run.grad_scaler == {}
    assert any(note.startswith("bf16.initial_scale_power, bf16.hysteresis") for note in result.notes), result.notes

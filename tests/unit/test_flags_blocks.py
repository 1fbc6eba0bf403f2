"""DeepSpeed's optimizer and scheduler blocks as torch's objects, and the objects of Accelerate and transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from ourshard.flags.blocks import build_optimizer, build_scheduler
from ourshard.flags.objects import (
    auto_from_training_arguments,
    from_deepspeed_plugin,
    from_fsdp_plugin,
    from_training_arguments,
)
from transformers import TrainingArguments


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


def rates(block: dict[str, Any], steps: int, lr: float = 1e-3) -> list[float]:
    optimizer = torch.optim.SGD(parameters(), lr=lr)
    scheduler = build_scheduler(block, optimizer)
    result = []
    for _ in range(steps):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return result


def test_adam_decouples_weight_decay_as_deepspeeds_does() -> None:
    settings = {"lr": "1e-3", "betas": [0.9, 0.95], "weight_decay": 0.1, "bias_correction": True, "torch_adam": True}
    optimizer = build_optimizer({"type": "Adam", "params": settings}, parameters())
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.9, 0.95)
    assert optimizer.defaults["lr"] == 1e-3
    plain = build_optimizer({"type": "Adam", "params": {"adam_w_mode": False}}, parameters())
    assert type(plain) is torch.optim.Adam
    assert type(build_optimizer({"type": "SGD", "params": {"lr": 1}}, parameters())) is torch.optim.SGD


@pytest.mark.parametrize(
    ("name", "settings", "decay"),
    [
        ("AdamW", {}, 0.0),
        ("Adam", {}, 0.0),
        ("AdamW", {"weight_decay": 0.1}, 0.1),
        ("AdamW", {"torch_adam": True}, 0.01),
        ("Adam", {"adam_w_mode": False}, 0),
    ],
)
def test_a_weight_decay_that_the_block_leaves_out_is_deepspeeds(
    name: str, settings: dict[str, Any], decay: float
) -> None:
    assert build_optimizer({"type": name, "params": settings}, parameters()).defaults["weight_decay"] == decay


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "OneBitAdam"}, r"torch has no optimizer 'OneBitAdam'; .*write AdamW, and communication.gradients"),
        ({"type": "DeepSpeedCPUAdam"}, r"'DeepSpeedCPUAdam'; write AdamW; offload.optimizer: cpu"),
        ({"type": "Lamb"}, r"torch has no optimizer 'Lamb'; build it in the script"),
        ({"type": "AdamW", "params": {"epsilon": 1e-8}}, "unknown argument 'epsilon'"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, "gradient_clipping beside the block"),
    ],
)
def test_optimizers_that_torch_does_not_have_are_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(block, parameters())


def test_warmup_lr_rises_and_stays() -> None:
    block = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
    found = rates(block, 8)
    # DeepSpeed rests at the minimum until its first step, which is its number 0: log(1) = 0 once more
    wanted = [1e-4] + [1e-4 + 9.9e-3 * math.log(n + 1) / math.log(4) for n in range(4)] + [1e-2] * 3
    assert found == pytest.approx(wanted)


def test_warmup_decay_lr_rises_and_falls_to_zero() -> None:
    settings = {"warmup_max_lr": 1e-3, "warmup_num_steps": 4, "total_num_steps": 8, "warmup_type": "linear"}
    found = rates({"type": "WarmupDecayLR", "params": settings}, 11)
    assert found == pytest.approx([0, 0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4, 0, 0], abs=1e-12)


def test_warmup_cosine_lr_rises_and_follows_the_cosine() -> None:
    settings = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear", "cos_min_ratio": 0.1}
    found = rates({"type": "WarmupCosineLR", "params": settings}, 9, lr=1.0)
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert found == pytest.approx([0.0, 0.0, 0.5, *cosine, 0.1, 0.1], abs=1e-12)


def test_a_range_test_grows_from_its_least_rate_smoothly_or_in_stairs() -> None:
    settings = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 5}
    assert rates({"type": "LRRangeTest", "params": settings}, 4) == pytest.approx([0.01, 0.035, 0.06, 0.085])
    stairs = {**settings, "lr_range_test_staircase": True}
    assert rates({"type": "LRRangeTest", "params": stairs}, 4) == pytest.approx([0.01, 0.01, 0.06, 0.06])


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 2}


def test_one_cycle_rises_falls_and_decays_and_the_momentum_goes_against_it() -> None:
    settings = {**CYCLE, "decay_step_size": 1, "decay_lr_rate": 1.0, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9}
    optimizer = torch.optim.AdamW(parameters(), lr=1.0)
    scheduler = build_scheduler({"type": "OneCycle", "params": settings}, optimizer)
    found, momenta = [], []
    for _ in range(9):
        group = optimizer.param_groups[0]
        found.append(group["lr"])
        momenta.append(group["betas"])
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.05, 0.1 / 3])
    # DeepSpeed begins at the least momentum, and takes the largest after the cycle
    first = [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9, 0.9]
    assert [beta for beta, _ in momenta] == pytest.approx(first)
    assert {beta for _, beta in momenta} == {0.99}
    assert scheduler.state_dict()["settings"]["cycle_max_lr"] == 0.5


def test_one_cycle_moves_in_stairs_and_leaves_other_optimizers_momentum_alone() -> None:
    stairs = {**CYCLE, "cycle_first_stair_count": 2}
    assert rates({"type": "OneCycle", "params": stairs}, 7) == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.5, 0.3, 0.1])
    optimizer = torch.optim.AdamW(parameters(), lr=1.0)
    build_scheduler({"type": "OneCycle", "params": {**CYCLE, "cycle_momentum": False}}, optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_schedulers_that_are_not_built_here_and_missing_totals_are_refused() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"'CosineAnnealingLR' is not built here; .*Known: WarmupLR, .*, OneCycle"):
        build_scheduler({"type": "CosineAnnealingLR"}, optimizer)
    with pytest.raises(ValueError, match="OneCycle needs cycle_max_lr, a learning rate"):
        build_scheduler({"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}, optimizer)
    with pytest.raises(ValueError, match="lr_range_test_step_size is 0; give a number of steps above 0"):
        build_scheduler({"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}, optimizer)
    with pytest.raises(ValueError, match="WarmupDecayLR needs total_num_steps"):
        build_scheduler({"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}}, optimizer)
    with pytest.raises(ValueError, match=r"warmup_type 'cosine' is not known.*one of log, linear"):
        build_scheduler({"type": "WarmupLR", "params": {"warmup_type": "cosine"}}, optimizer)
    with pytest.raises(ValueError, match=r"unknown argument 'warmup_steps'.*'warmup_num_steps'"):
        build_scheduler({"type": "WarmupLR", "params": {"warmup_steps": 2}}, optimizer)


@pytest.fixture(autouse=True)
def _no_flags_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)


def test_a_default_fsdp_plugin_says_nothing() -> None:
    assert from_fsdp_plugin(FullyShardedDataParallelPlugin()).said == {}
    assert from_fsdp_plugin(FullyShardedDataParallelPlugin(fsdp_version=2)).said == {}


def test_an_fsdp_plugin_says_what_was_set() -> None:
    first = FullyShardedDataParallelPlugin(
        sharding_strategy="HYBRID_SHARD",
        auto_wrap_policy="size_based_wrap",
        min_num_params=100,
        backward_prefetch="BACKWARD_POST",
        state_dict_type="SHARDED_STATE_DICT",
        cpu_offload=True,
    )
    config = from_fsdp_plugin(first).config
    assert (config.stage, config.shard_size, config.wrap.min_params) == (3, "node", 100)
    assert (config.prefetch.backward, config.checkpoint.format.value, config.offload.params.value) == (
        0,
        "sharded",
        "cpu",
    )
    second = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        cpu_offload=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["A"],
    )
    config = from_fsdp_plugin(second).config
    assert (config.reshard_after_forward, config.offload.params.value, config.wrap.classes) == (False, "cpu", ("A",))


def test_a_wrap_policy_of_the_users_own_is_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse)
    with pytest.raises(ValueError, match=r"can't be kept in a config; name the classes in wrap.classes"):
        from_fsdp_plugin(plugin)


def test_a_deepspeed_plugin_says_its_joined_config() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", gradient_clipping=0.5)
    result = from_deepspeed_plugin(plugin)
    assert (result.config.stage, result.config.offload.optimizer.value) == (3, "cpu")
    assert result.run.gradient_clipping == 0.5


def test_training_arguments_are_read_for_fsdp(tmp_path: Any) -> None:
    fsdp_config = {"transformer_layer_cls_to_wrap": ["A"], "cpu_offload": True}
    args = TrainingArguments(str(tmp_path), fsdp=True, fsdp_config=fsdp_config, use_cpu=True, report_to=[])
    result = from_training_arguments(args)
    assert result is not None
    assert (result.config.wrap.classes, result.config.offload.params.value) == (("A",), "cpu")
    assert from_training_arguments(TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])) is None


def test_fields_of_training_arguments_may_be_json(tmp_path: Any) -> None:
    """As they come from a command line: ourshard reads them before transformers does."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    args.deepspeed = '{"zero_optimization": {"stage": 2}}'
    assert from_training_arguments(args).config.stage == 2
    args.deepspeed = "{zero}"
    with pytest.raises(ValueError, match=r"TrainingArguments.deepspeed: not JSON: .*zero"):
        from_training_arguments(args)
    args.deepspeed, args.fsdp, args.fsdp_config = None, True, '{"reshard_after_forward": false}'
    assert from_training_arguments(args).config.reshard_after_forward is False


def test_training_arguments_fill_deepspeeds_auto(tmp_path: Any) -> None:
    args = TrainingArguments(
        str(tmp_path), learning_rate=3e-4, gradient_accumulation_steps=4, warmup_steps=5, use_cpu=True, report_to=[]
    )
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
    args.deepspeed = {
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": scheduler,
    }
    result = from_training_arguments(args, total_steps=100)
    assert result is not None
    assert (result.config.stage, result.run.gradient_accumulation_steps) == (2, 4)
    assert result.run.optimizer["params"]["lr"] == 3e-4
    assert result.run.scheduler["params"] == {"warmup_num_steps": 5, "warmup_max_lr": 3e-4}
    args.deepspeed = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match=r"TrainingArguments.deepspeed gives 2.*gives 4"):
        from_training_arguments(args)
    assert "scheduler.params.total_num_steps" not in auto_from_training_arguments(args)


def test_a_schedule_without_warmup_agrees_with_arguments_without_warmup(tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    params = {"warmup_num_steps": 0, "warmup_max_lr": args.learning_rate, "total_num_steps": 10}
    args.deepspeed = {"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    result = from_training_arguments(args, total_steps=10)
    assert result is not None
    assert result.run.scheduler["params"] == params

"""Checkpoints of other engines load into sharded models as they are: weights and moments, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.source import PARAM, detect
from ourshard.integrations.foreign_resume import refuse_scheduler, say_random_states
from torch import nn

from tests.checkpoint.foreign import SHARED, Case, assert_equals_truth, load_truth, same, shared_cases

pytestmark = pytest.mark.ranks

WHOLE = [
    "accel_ds_z2_llama_w2_bf16",
    "ds_z1_llama_w2_bf16_BF16Optimizer",
    "ds_z3_llama_w2_fp32",
    "ds_z3_gpt2_w4_bf16_subgroups",
    "ds_universal_z3_llama_w2_fp32",
    "fsdp1_full_gpt2_w4_fp32_flatparam",
    "fsdp1_sharded_llama_w2_fp32",
    "fsdp2_full_llama_w2_fp32",
    "fsdp2_sharded_llama_w2_fp32",
    "trainer_ds_z2_llama_w2_bf16",
    "trainer_fsdp2_sharded_gpt2_w2_fp32",
    "trainer_plain_llama_w1_fp32",
    "fsdp1_sharded_lora_w2_fp32",
    "trainer_fsdp2_sharded_lora_w2_bf16mix",
]
CASES = [case for case in shared_cases() if case.id in WHOLE or case.id == "shared"]


def built(kind: str) -> nn.Module:
    """Return the model that wrote the fixtures of this kind, with other weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        base = AutoModelForCausalLM.from_pretrained(SHARED / "models" / "lora_base", dtype=torch.float32)
        return get_peft_model(base, LoraConfig.from_pretrained(SHARED / "models" / "lora"))
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHARED / "models" / kind))


def optimizer_like(model: nn.Module, groups: list[list[str]], lr: float = 7.0) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    return torch.optim.AdamW([{"params": [named[name] for name in names]} for names in groups], lr=lr)


def load_and_save(kind: str, folder: str, out: str, groups: list[list[str]], stages: list[int]) -> list[float]:
    """Load the folder at each stage, save what was loaded; return the learning rates that it brought."""
    import ourshard

    rates = []
    for stage in stages:
        model = ourshard.shard_model(built(kind), {"stage": stage, "persist_below": 64})
        optimizer = optimizer_like(model, groups)
        ourshard.load(model, optimizer, folder)
        ourshard.save(model, optimizer, f"{out}/stage{stage}")
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def groups_of(case: Case, kind: str) -> list[list[str]]:
    order = [name for name, _ in built(kind).named_parameters()]
    with detect(case.inner(), parameter_order=order) as source:
        return [list(group["params"]) for group in source.description.param_groups]


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_another_engine_loads_bit_for_bit(ranks: Any, case: Case, tmp_path: Path) -> None:
    kind = next(kind for kind in ("gpt2", "lora", "llama") if kind in case.name)
    stages = [0, 1, 2, 3] if case.name == "accel_ds_z2_llama_w2_bf16" else [3]
    groups = groups_of(case, kind)
    rates = ranks(2)(load_and_save, kind, str(case.inner()), str(tmp_path), groups, stages)[0]
    assert all(rate != 7.0 for rate in rates)
    for stage in stages:
        with detect(tmp_path / f"stage{stage}") as source:
            assert any(key.kind == "exp_avg_sq" for key in source.tensors)
            assert_equals_truth(source, load_truth(case.truth))


def through_accelerate(folder: str, out: str, groups: list[list[str]]) -> dict[str, Any]:
    import ourshard
    from accelerate import Accelerator
    from ourshard import ShardConfig, ShardPlugin

    accelerator = Accelerator(cpu=True, ourshard_plugin=ShardPlugin(ShardConfig(stage=3)))
    model = built("llama")
    optimizer = optimizer_like(model, groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(folder)
    ourshard.save(model, optimizer, out)
    return {"steps": scheduler.scheduler.last_epoch, "lr": optimizer.param_groups[0]["lr"]}


@pytest.mark.parametrize("case", [case for case in CASES if case.id in ("shared", "accel_ds_z2_llama_w2_bf16")])
def test_accelerate_loads_the_state_of_another_engine(ranks: Any, case: Case, tmp_path: Path) -> None:
    groups = groups_of(case, "llama")
    told = ranks(2)(through_accelerate, str(case.inner()), str(tmp_path / "out"), groups)[0]
    assert told["steps"] > 0
    with detect(tmp_path / "out") as source:
        assert_equals_truth(source, load_truth(case.truth))


def through_trainer(kind: str, folder: str, out: str, **wanted: Any) -> tuple[int, int]:
    """Resume, save what was loaded, train on; return the scheduler's steps at the begin, the Trainer's at the end."""
    import ourshard
    from ourshard import ShardConfig, ShardPlugin
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class SaveAtTheBegin(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert state.global_step == 3
            began.append(trainer.lr_scheduler.last_epoch)
            ourshard.save(trainer.model, trainer.optimizer, out)

    ourshard.enable(ShardPlugin(ShardConfig(stage=3, persist_below=64)))
    ids = torch.arange(8).repeat(16, 1)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    wanted |= {"max_steps": 5, "per_device_train_batch_size": 1, "save_strategy": "no", "report_to": "none"}
    began: list[int] = []
    arguments = TrainingArguments(f"{out}-trainer", use_cpu=True, disable_tqdm=True, **wanted)
    trainer = Trainer(built(kind), arguments, train_dataset=rows, callbacks=[SaveAtTheBegin()])
    trainer.train(resume_from_checkpoint=folder)
    return began[0], trainer.state.global_step


BY_TRAINER = ("shared", "trainer_ds_z2_llama_w2_bf16", "trainer_fsdp2_sharded_gpt2_w2_fp32")


@pytest.mark.parametrize("case", [case for case in CASES if case.id in BY_TRAINER])
def test_a_trainer_resumes_from_the_checkpoint_of_another_engine(ranks: Any, case: Case, tmp_path: Path) -> None:
    kind = "gpt2" if "gpt2" in case.name else "llama"
    out = str(tmp_path / "out")
    assert ranks(2)(through_trainer, kind, str(case.inner()), out) == [(3, 5), (3, 5)]
    with detect(out) as source:
        assert_equals_truth(source, load_truth(case.truth))


def refused_by_trainer(kind: str, folder: str, out: str) -> str:
    with pytest.raises(ValueError, match="nothing was loaded") as raised:
        through_trainer(kind, folder, out)
    return str(raised.value)


def only(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if case.id in ("shared", name)])


@only(BY_TRAINER[2])
def test_a_checkpoint_without_a_scheduler_is_refused_before_it_is_loaded(
    ranks: Any, case: Case, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(case.inner(), folder, ignore=shutil.ignore_patterns("scheduler.pt"))
    for told in ranks(2)(refused_by_trainer, "gpt2", str(folder), str(tmp_path / "out")):
        assert "checkpoint-3 has no state of a scheduler, neither in a file of its own nor in its engine's" in told


def with_deepspeeds_scheduler(case: Case, folder: Path) -> None:
    """Copy a checkpoint as it is with a scheduler of DeepSpeed's config: a number in the engine's own file."""
    shutil.copytree(case.inner(), folder, ignore=shutil.ignore_patterns("scheduler.*"))
    path = next(folder.rglob("mp_rank_00_model_states.pt"))
    content = torch.load(path, weights_only=False)
    content["lr_scheduler"] = {"last_batch_iteration": 2}
    torch.save(content, path)


@only(BY_TRAINER[1])
def test_a_trainer_goes_on_where_deepspeeds_own_scheduler_was(ranks: Any, case: Case, tmp_path: Path) -> None:
    with_deepspeeds_scheduler(case, tmp_path / "checkpoint-3")
    out = str(tmp_path / "out")
    ended = ranks(2)(through_trainer, "llama", str(tmp_path / "checkpoint-3"), out)
    assert ended == [(3, 5), (3, 5)]
    with detect(out) as source:
        assert_equals_truth(source, load_truth(case.truth))


@only("accel_ds_z2_llama_w2_bf16")
@pytest.mark.parametrize("converted", [False, True])
def test_accelerate_goes_on_where_deepspeeds_own_scheduler_was(
    ranks: Any, case: Case, tmp_path: Path, converted: bool
) -> None:
    with_deepspeeds_scheduler(case, tmp_path / "state")
    folder = tmp_path / "state"
    if converted:
        folder = convert(folder, tmp_path / "converted", to="ourshard").path
    groups = groups_of(case, "llama")
    told = ranks(2)(through_accelerate, str(folder), str(tmp_path / "out"), groups)[0]
    assert told["steps"] == 3
    assert told["lr"] == pytest.approx(0.01 / 1.3)
    with detect(tmp_path / "out") as source:
        assert_equals_truth(source, load_truth(case.truth))


@only(BY_TRAINER[2])
def test_weights_alone_are_resumed_from_only_where_the_user_says_so(ranks: Any, case: Case, tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint-3", str(tmp_path / "out")
    shutil.copytree(case.inner(), folder, ignore=shutil.ignore_patterns("optimizer_0", "scheduler.pt"))
    for told in ranks(2)(refused_by_trainer, "gpt2", str(folder), out):
        assert "checkpoint-3 holds no state of an optimizer" in told
        assert "set save_only_model=True" in told
    ended = ranks(2)(through_trainer, "gpt2", str(folder), out, save_only_model=True)
    assert ended == [(0, 5), (0, 5)]
    with detect(out) as source:
        truth = load_truth(case.truth)
        for key, tensors in truth.tensors.items():
            assert not key.is_state or key not in source.tensors
            assert key.kind != PARAM or key.name in truth.metadata["tied"] or same(source.read(key), tensors[0])


@only(BY_TRAINER[2])
def test_a_trainer_resumes_from_what_was_converted(ranks: Any, case: Case, tmp_path: Path) -> None:
    convert(case.inner(), tmp_path / "checkpoint-3", to="ourshard")
    out = str(tmp_path / "out")
    ended = ranks(2)(through_trainer, "gpt2", str(tmp_path / "checkpoint-3"), out)
    assert ended == [(3, 5), (3, 5)]
    with detect(out) as source:
        assert_equals_truth(source, load_truth(case.truth))


def through_a_conversion(root: str) -> bool:
    """Save; say the optimizer's part as DeepSpeed's FusedAdam does; convert that, load it, and step both."""
    import ourshard

    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = ourshard.shard_model(torch.nn.Linear(3, 3), {"stage": 0})
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    for _ in range(3):
        step(model, optimizer)
    ourshard.save(model, optimizer, f"{root}/saved")
    convert(f"{root}/saved", f"{root}/torch", to="torch")
    path = Path(root, "torch", "optimizer.bin")
    content = torch.load(path)
    state, (group,) = content["state"], content["param_groups"]
    for values in state.values():
        values["step"] = int(values["step"])
    for key in group.keys() - {"params", "lr", "betas", "eps", "weight_decay"}:
        del group[key]
    group["bias_correction"] = True
    torch.save(content, path)
    convert(f"{root}/torch", f"{root}/converted", to="ourshard")
    other, other_optimizer = made()
    ourshard.load(other, other_optimizer, f"{root}/converted")
    step(model, optimizer)
    step(other, other_optimizer)
    one, two = ourshard.full_state_dict(model), ourshard.full_state_dict(other)
    return all(same(one[name], two[name]) for name in one) and "bias_correction" not in other_optimizer.param_groups[0]


def test_converted_state_of_another_engines_adam_is_stepped_by_torchs(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1)(through_a_conversion, str(tmp_path)) == [True]


@pytest.mark.parametrize(("files", "world", "said"), [(2, 2, False), (2, 3, True), (4, 2, True), (0, 1, True)])
def test_random_states_of_another_number_of_ranks_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: int, world: int, said: bool
) -> None:
    for rank in range(files):
        (tmp_path / f"random_states_{rank}.pkl").touch()
    with caplog.at_level("WARNING", "ourshard"):
        for rank in range(world):
            say_random_states(tmp_path, world, rank == 0)
    assert len(caplog.messages) == said
    assert not said or f"has the random states of {files} ranks, this run has {world}" in caplog.text


def test_a_scheduler_of_several_cannot_be_set_to_a_number(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    parts = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) for _ in range(2)]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1])
    with pytest.raises(ValueError, match="a scheduler made of several cannot be set to it"):
        refuse_scheduler(scheduler, {"last_batch_iteration": 2}, tmp_path)
    refuse_scheduler(scheduler, scheduler.state_dict(), tmp_path)

"""Folders of accelerate's `save_state` with two models: each is read where it is asked for, none where it is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.source import PARAM, TensorKey, detect
from ourshard.cli import main
from safetensors.torch import load_file, save_file

from tests.checkpoint.foreign import assert_equals_truth, load_truth, made_case, shared_cases
from tests.checkpoint.making import assert_holds, make_state, save
from tests.checkpoint.test_foreign_resume import built, groups_of, optimizer_like


def beside(folder: Path, first: str, second: str, renamed: Callable[[str], str]) -> list[Path]:
    """Put two made checkpoints into one folder, the second under names of a second model; return their truths."""
    shutil.copytree(made_case(first).folder, folder)
    for path in made_case(second).folder.iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / renamed(path.name))
    return [made_case(name).truth for name in (first, second)]


def sharded(folder: Path) -> list[Path]:
    return beside(folder, "fsdp2_sharded", "fsdp1_sharded", lambda name: numbered(name.replace("_0", "_1")))


def full(folder: Path) -> list[Path]:
    return beside(folder, "fsdp2_full", "fsdp1_full", numbered)


def of_ranks(folder: Path) -> list[Path]:
    return beside(folder, "fsdp2_rank", "fsdp1_rank", lambda name: numbered(name.replace("_0_", "_1_")))


def deepspeed(folder: Path) -> list[Path]:
    folder.mkdir()
    for name, tag in (("ds_z2", "pytorch_model"), ("ds_z2_alignment", "pytorch_model_1")):
        shutil.copytree(made_case(name).folder / "global_step3", folder / tag)
    (folder / "latest").write_text("pytorch_model_1")  # accelerate's second save_checkpoint moves it
    return [made_case(name).truth for name in ("ds_z2", "ds_z2_alignment")]


def numbered(name: str) -> str:
    return name if "_1" in name else name.replace(".bin", "_1.bin")


@pytest.mark.parametrize("make", [sharded, full, of_ranks, deepspeed])
def test_each_of_two_models_is_read_with_its_optimizer(tmp_path: Path, make: Callable[[Path], list[Path]]) -> None:
    truths = make(tmp_path / "state")
    with pytest.raises(ValueError, match=r"state holds models by number \(0: .*; 1: .*\): choose one \(--model"):
        detect(tmp_path / "state")
    with pytest.raises(ValueError, match="holds models 0, 1: there is no model 2"):
        detect(tmp_path / "state", model=2)
    for number, truth in enumerate(truths):
        with detect(tmp_path / "state", model=number) as source:
            assert any(key.kind == "exp_avg" for key in source.tensors)
            assert not isinstance(source.description.scheduler, list)
            assert_equals_truth(source, load_truth(truth))


def test_the_path_of_an_inner_folder_names_its_model(tmp_path: Path) -> None:
    truths = sharded(tmp_path / "state")
    for name, truth in zip(("pytorch_model_fsdp_0", "optimizer_1"), truths, strict=True):
        with detect(tmp_path / "state" / name) as source:
            assert_equals_truth(source, load_truth(truth))


@pytest.mark.parametrize("optimizer", [True, False])
def test_each_of_two_whole_models_is_read(tmp_path: Path, optimizer: bool) -> None:
    folder = tmp_path / "state"
    shutil.copytree(made_case("ddp").folder, folder)
    shutil.copy(folder / "optimizer.bin", folder / "optimizer_1.bin")
    second = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(second, folder / "model_1.safetensors")
    if not optimizer:
        for path in folder.glob("optimizer*.bin"):
            path.unlink()
    with pytest.raises(ValueError, match=r"0: model\.safetensors; 1: model_1\.safetensors"):
        detect(folder)
    with detect(folder, model=0) as one, detect(folder, model=1) as other:
        assert any(key.kind == "exp_avg" for key in other.tensors) == optimizer
        for name, tensor in second.items():
            key = TensorKey(PARAM, name) if TensorKey(PARAM, name) in other.tensors else TensorKey("buffer", name)
            assert torch.equal(other.read(key), tensor)
            assert torch.equal(one.read(key) + 1, tensor)


def test_each_of_two_models_of_our_own_is_read(tmp_path: Path) -> None:
    states = [make_state(seed) for seed in (1, 2)]
    for number, state in enumerate(states):
        save(tmp_path / "state" / ("ourshard_1" if number else "ourshard"), state, 2)
    with pytest.raises(ValueError, match="choose one"):
        detect(tmp_path / "state")
    for number, state in enumerate(states):
        with detect(tmp_path / "state", model=number) as source:
            assert_holds(source, state)


def test_a_number_is_refused_where_there_is_one_model(tmp_path: Path) -> None:
    save(tmp_path / "ours", make_state(), 1)
    detect(tmp_path / "ours", model=0).close()
    with pytest.raises(ValueError, match="holds one model: there is no model 1"):
        detect(tmp_path / "ours", model=1)


def test_the_command_line_takes_the_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truths = full(tmp_path / "state")
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(tmp_path / "state"), str(tmp_path / "out"), "--to", "ourshard"])
    assert stopped.value.code == 2
    assert "choose one (--model" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(tmp_path / "state"), str(tmp_path / "out"), "--to", "ourshard", "--model", "1"])
    assert stopped.value.code == 0
    with detect(tmp_path / "out") as source:
        assert_equals_truth(source, load_truth(truths[1]))
    checks = ["verify", str(tmp_path / "out"), "--against", str(tmp_path / "state"), "-q"]
    for number, code in ((1, 0), (0, 1)):
        with pytest.raises(SystemExit) as stopped:
            main([*checks, "--against-model", str(number)])
        assert stopped.value.code == code


def test_an_optimizer_of_no_model_is_named(tmp_path: Path) -> None:
    shutil.copytree(made_case("fsdp2_sharded").folder, tmp_path / "state")
    shutil.copytree(tmp_path / "state" / "optimizer_0", tmp_path / "state" / "optimizer_1")
    with detect(tmp_path / "state") as source:
        assert "optimizer_1: an optimizer, there is no model of its number" in source.description.losses


def load_two(folder: str, out: str, groups: list[list[list[str]]]) -> None:
    import ourshard
    from accelerate import Accelerator
    from ourshard import ShardConfig, ShardPlugin

    accelerator = Accelerator(cpu=True, ourshard_plugin=ShardPlugin(ShardConfig(stage=3)))
    models = [built(kind) for kind in ("llama", "gpt2")]
    optimizers = [optimizer_like(model, own) for model, own in zip(models, groups, strict=True)]
    prepared = accelerator.prepare(*models, *optimizers)
    accelerator.load_state(folder)
    for number in range(2):
        ourshard.save(prepared[number], prepared[2 + number], f"{out}/{number}")


@pytest.mark.ranks
def test_accelerate_loads_two_models_of_another_engine(ranks: Any, tmp_path: Path) -> None:
    names = ("fsdp2_sharded_llama_w2_fp32", "trainer_fsdp2_sharded_gpt2_w2_fp32")
    cases = [case.values[0] for name in names for case in shared_cases() if case.id == name]
    if not cases:
        pytest.skip("shared/fixtures is not there")
    for number, case in enumerate(cases):
        for stem in ("pytorch_model_fsdp", "optimizer"):
            shutil.copytree(case.inner() / f"{stem}_0", tmp_path / "state" / f"{stem}_{number}")
    groups = [groups_of(case, kind) for case, kind in zip(cases, ("llama", "gpt2"), strict=True)]
    ranks(2)(load_two, str(tmp_path / "state"), str(tmp_path / "out"), groups)
    for number, case in enumerate(cases):
        with detect(tmp_path / "out" / str(number)) as source:
            assert_equals_truth(source, load_truth(case.truth))


def test_a_conversion_is_not_taken_up_for_another_model(tmp_path: Path) -> None:
    truths = deepspeed(tmp_path / "state")
    for number, truth in enumerate(truths):
        convert(tmp_path / "state", tmp_path / f"out{number}", to="ourshard", model=number)
        with detect(tmp_path / f"out{number}") as source:
            assert_equals_truth(source, load_truth(truth))

"""`ourshard config`: what it writes is read back equal, and each line says what it means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ourshard.config import ShardConfig
from ourshard.flags.cli import app
from ourshard.flags.files import load
from ourshard.flags.sources import read_document
from typer.testing import CliRunner

FILES = Path(__file__).parent / "flag_files"


def run(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(autouse=True)
def _a_clean_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(FILES)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.iterdir()))
@pytest.mark.parametrize("form", ["native", "fsdp", "deepspeed"])
def test_each_translation_is_read_back_as_the_same_config(name: str, form: str, tmp_path: Path) -> None:
    output = tmp_path / "new.yaml"
    printed = run("translate", FILES / name, "-o", output, "--to", form)
    old = read_document(load(FILES / name), name).config.to_dict()
    new = read_document(load(output), output.name).config.to_dict()
    differing = {key for key in old if old[key] != new[key]}
    unsaid = {line.removeprefix("note: ").partition(":")[0].partition(".")[0] for line in printed.splitlines()}
    assert differing <= unsaid, printed
    assert form != "native" or not differing
    for line in output.read_text().splitlines():
        assert "# " in line


def test_a_translation_keeps_accelerates_keys_and_names_the_old_key(tmp_path: Path) -> None:
    run("translate", FILES / "fsdp1.yaml", "-o", tmp_path / "new.yaml")
    text = (tmp_path / "new.yaml").read_text()
    old, new = load(FILES / "fsdp1.yaml"), yaml.safe_load(text)
    assert new.pop("distributed_type") == "OURSHARD"
    assert new.pop("ourshard_config")["offload"] == {"optimizer": "cpu", "params": "cpu"}
    assert new == {key: value for key, value in old.items() if key not in ("distributed_type", "fsdp_config")}
    assert "[fsdp_offload_params=True]" in text


def test_a_translation_says_what_belongs_to_the_trainer_and_what_has_no_meaning(tmp_path: Path) -> None:
    printed = run("translate", FILES / "accelerate_zero3.yaml", "-o", tmp_path / "new.yaml")
    assert "note: gradient_clipping = 1.0 is not part of the config: max_grad_norm" in printed
    assert "note: zero3_init_flag: no meaning here" in printed
    assert load(tmp_path / "new.yaml")["mixed_precision"] == "bf16"


RUN = {
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 4,
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 10}},
}


@pytest.mark.parametrize(
    "scale",
    [{"initial_scale_power": 12, "loss_scale_window": 500}, {"loss_scale": 128}, {"initial_scale_power": 8}, {}],
)
def test_a_translation_to_deepspeed_keeps_what_its_file_says_of_the_run(tmp_path: Path, scale: dict[str, Any]) -> None:
    old = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto", **scale}, **RUN}
    (tmp_path / "old.json").write_text(json.dumps(old))
    printed = run("translate", tmp_path / "old.json", "-o", tmp_path / "new.json", "--to", "deepspeed")
    new = json.loads((tmp_path / "new.json").read_text())
    assert {key: new[key] for key in RUN} == RUN
    assert new["fp16"] == old["fp16"]
    assert "is not part of the config" not in printed


def test_a_translation_to_fsdp_names_what_it_can_not_take_along(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, **RUN}))
    printed = run("translate", tmp_path / "old.json", "-o", tmp_path / "new.yaml", "--to", "fsdp")
    for name in ("gradient_clipping = 0.5", "gradient_accumulation_steps = 4", "optimizer = {'type'", "scheduler = {"):
        assert f"note: {name}" in printed, printed


def test_a_precision_that_deepspeed_has_no_word_for_is_noted(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("distributed_type: OURSHARD\nmixed_precision: fp8\nourshard_config: {stage: 2}\n")
    printed = run("translate", old, "-o", tmp_path / "ds.yaml", "--to", "deepspeed")
    assert "note: mixed_precision: 'fp8' can't be said in DeepSpeed" in printed


def test_a_ds_config_can_be_written_alone(tmp_path: Path) -> None:
    run("translate", FILES / "accelerate_zero3.yaml", "-o", tmp_path / "ds.json", "--to", "deepspeed")
    values = json.loads((tmp_path / "ds.json").read_text())
    assert values["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert values["bf16"]["enabled"] is True


def test_sharded_copies_go_to_fsdp_and_back(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("distributed_type: OURSHARD\nnum_processes: '8'\nourshard_config: {shard_size: 4}\n")
    assert "note:" not in run("translate", old, "-o", tmp_path / "fsdp.yaml", "--to", "fsdp")
    assert "fsdp_offload_params: false " in (text := (tmp_path / "fsdp.yaml").read_text())
    assert "# offload.params: none" in text  # what each key is here
    run("translate", tmp_path / "fsdp.yaml", "-o", tmp_path / "new.yaml")
    assert read_document(load(tmp_path / "new.yaml"), "x").config == ShardConfig(shard_size=4)


def test_nothing_is_overwritten_unless_that_is_asked(tmp_path: Path) -> None:
    output = tmp_path / "new.yaml"
    output.write_text("kept")
    assert "already there" in run("translate", FILES / "fsdp1.yaml", "-o", output, code=2)
    assert output.read_text() == "kept"
    assert "Is a directory" in run("translate", FILES / "fsdp1.yaml", "-o", tmp_path, "--overwrite", code=2)
    run("translate", FILES / "fsdp1.yaml", "-o", output, "--overwrite")
    assert output.read_text() != "kept"


def test_yaml_is_not_written_under_the_name_of_json(tmp_path: Path) -> None:
    """What was written could not be read again."""
    output = tmp_path / "new.json"
    for command in (["write", output], ["translate", FILES / "fsdp1.yaml", "-o", output]):
        assert "new.json: what is written is YAML" in " ".join(run(*command, code=2).split())
    run("translate", FILES / "fsdp1.yaml", "-o", output, "--to", "deepspeed")
    assert load(output)["zero_optimization"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: MULTI_GPU\n", "nothing to translate"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_forward: true}\n", "Did you mean"),
        ("- a list\n", "expected keys and values, got list"),
        ("", "expected keys and values, got nothing"),
        ("distributed_type: OURSHARD\nourshard_confg: {stage: 2}\n", "Did you mean 'ourshard_config'?"),
        ("distributed_type: OURSHARD\nourshard_config: {stage: 2, stage: 3}\n", "'stage' is there twice"),
    ],
)
def test_what_cannot_be_translated_ends_with_one_line(tmp_path: Path, text: str, message: str) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(text)
    printed = run("translate", old, code=2)
    assert printed.startswith("Error: ")
    assert message in printed
    assert len(printed.splitlines()) == 1


def test_show_prints_values_with_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURSHARD_PREFETCH_FORWARD", "2")
    values = json.loads(run("show", FILES / "fsdp1.yaml", "--set", "ledger=true", "--json"))
    assert values["config"]["prefetch.forward"] == {"value": 2, "from": "OURSHARD_PREFETCH_FORWARD"}
    assert values["config"]["ledger"] == {"value": True, "from": "--set"}
    assert values["config"]["stage"]["from"] == "fsdp1.yaml: fsdp_config: fsdp_sharding_strategy=FULL_SHARD"
    assert values["config"]["timeout"] == {"value": None, "from": "default"}
    table = run("show", FILES / "fsdp1.yaml")
    assert "prefetch.forward" in table
    assert "timeout" not in table
    assert "timeout" in run("show", FILES / "fsdp1.yaml", "--all")
    assert "distributed_type is FSDP: set it to OURSHARD" in " ".join(table.split())


def test_show_without_a_file_reads_accelerates_default_one(tmp_path: Path) -> None:
    assert json.loads(run("show", "--json"))["config"]["stage"]["from"] == "default"
    folder = tmp_path / "home" / "accelerate"
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text("distributed_type: OURSHARD\nourshard_config: {stage: 1}\n")
    assert json.loads(run("show", "--json"))["config"]["stage"] == {
        "value": 1,
        "from": "default_config.yaml: ourshard_config",
    }


def test_show_names_both_sources_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURSHARD_STAGE", "2")
    printed = run("show", FILES / "fsdp1.yaml", code=2)
    assert "OURSHARD_STAGE" in printed
    assert "fsdp_sharding_strategy=FULL_SHARD" in printed


def test_write_makes_a_config_that_is_read_back(tmp_path: Path) -> None:
    output = tmp_path / "new.yaml"
    run("write", output, "--set", "stage=2,offload.optimizer=cpu", "--num-processes", "4", "--mixed-precision", "no")
    values = load(output)
    assert (values["num_processes"], values["mixed_precision"], values["use_cpu"]) == (4, "no", False)
    assert read_document(values, "x").config == ShardConfig(stage=2).replace(offload={"optimizer": "cpu"})
    two = ["write", tmp_path / "b.yaml", "--num-machines", "2"]
    assert "--main-process-ip" in run(*two, "--num-processes", "2", code=2)
    assert "2 machines can't be filled evenly by 3 ranks" in run(*two, "--num-processes", "3", code=2)

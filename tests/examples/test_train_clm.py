"""The main job, run as a user runs it, for two steps."""

from __future__ import annotations

import ast
from pathlib import Path

import matplotlib.image
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.commands import ROOT, CliResult, launch

pytestmark = pytest.mark.examples

SCRIPT = ROOT / "examples" / "train_clm.py"


def _train(folder: Path, processes: int, batch_size: int) -> CliResult:
    options = {"--max_steps": 2, "--max_files": 10, "--output_dir": folder, "--batch_size": batch_size}
    args = [str(part) for option in options.items() for part in option]
    cache = {"HF_DATASETS_CACHE": str(folder.parent / "cache")}
    return launch(SCRIPT, *args, processes=processes, env=cache, timeout=240)


def _open(folder: Path) -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM)
    return model


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of one process, whose batch is the joined batch of the others."""
    folder = tmp_path_factory.mktemp("single") / "model"
    _train(folder, processes=1, batch_size=8)
    return folder


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_more_processes_save_the_weights_of_one(single, processes, tmp_path):
    result = _train(tmp_path / "model", processes, batch_size=8 // processes)
    alone, together = _open(single).state_dict(), _open(tmp_path / "model").state_dict()
    assert alone.keys() == together.keys()
    for name, weight in alone.items():
        assert (together[name] - weight).abs().max() < 1e-5, name  # stock DDP differs by 2.2e-6 on 4 processes
    assert result.stdout.count("The saved model writes:\ndef ") == 1


def test_two_steps_move_every_weight_by_about_the_learning_rate(single):
    torch.manual_seed(7)  # the script's default seed
    start = LlamaForCausalLM(_open(single).config)
    for name, weight in _open(single).named_parameters():
        moved = (weight - start.get_parameter(name)).abs().max().item()
        assert 1e-4 < moved < 2 * 3.1e-3, name


def test_the_folder_opens_with_tied_weights_and_generates(single):
    model = _open(single)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    output = model.generate(torch.tensor([list(b"def ")]), max_new_tokens=5, min_new_tokens=5)
    assert output.shape == (1, 9)


def test_the_loss_curve_is_a_picture(single):
    picture = matplotlib.image.imread(single / "loss.png")
    height, width = picture.shape[:2]
    assert width > height > 200
    assert picture[..., :3].std() > 0.01


def test_the_script_is_short_and_names_no_backend():
    source = SCRIPT.read_text()
    assert source.count("\n") < 150
    tree = ast.parse(source)
    code = ast.unparse(ast.Module(tree.body[1:], []))  # the docstring has the command
    assert "shard" not in code.lower()

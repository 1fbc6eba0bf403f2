"""A version of accelerate whose seams moved is left alone, and its first use says which versions were tried (H05)."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import peft.peft_model
import pytest
import transformers.modeling_utils
import transformers.trainer
import transformers.training_args
from accelerate.commands.config import config_args
from ourshard.integrations import notes, register, register_transformers, seams, transformers_seams

from tests.commands import run_cli

OURS = "distributed_type: OURSHARD\nuse_cpu: true\nnum_processes: 2\n"
THEIRS = "distributed_type: MULTI_GPU\nuse_cpu: true\nnum_processes: 2\n"


def module(**names: Any) -> ModuleType:
    made = ModuleType("moved")
    vars(made).update(names)
    return made


@pytest.fixture(autouse=True)
def _launcher_half_as_it_was():
    before = list(register._launcher_missing)
    yield
    register._launcher_missing[:] = before


def test_every_seam_of_the_installed_version_is_where_it_should_be():
    assert seams.of_accelerator(accelerate.accelerator) == []
    assert seams.of_state(accelerate.state) == []
    assert seams.of_config(config_args) == []
    assert seams.of_launch(sys.modules["accelerate.utils.launch"]) == []
    assert seams.of_command(import_module("accelerate.commands.launch")) == []
    assert transformers_seams.of_trainer(transformers.trainer) == []
    assert transformers_seams.of_arguments(transformers.training_args) == []
    assert transformers_seams.of_model(transformers.modeling_utils) == []
    assert transformers_seams.of_peft(peft.peft_model) == []


def test_what_stands_around_a_method_of_the_trainer_is_where_the_table_says():
    for name, around in transformers_seams.TRAINER.items():
        assert callable(getattr(import_module(f"ourshard.integrations.{around.module}"), name)), name


class Moved:
    """An Accelerator of another version: it has lost `prepare_model`, and an argument."""

    def __init__(self, cpu: bool = False) -> None:
        self.cpu = cpu


def test_an_accelerator_without_our_seams_works_and_refuses_only_when_ourshard_is_asked_for(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_OURSHARD", raising=False)
    moved = type("Accelerator", (Moved,), {})
    register.accelerator_class(module(Accelerator=moved))
    assert type(moved(cpu=True)) is moved
    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    with pytest.raises(RuntimeError, match=rf"Accelerator\.prepare_model.*Tried: accelerate {re.escape(seams.TRIED)}"):
        moved()


def test_a_trainer_without_our_seams_works_and_refuses_only_when_ourshard_is_asked_for(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_OURSHARD", raising=False)
    moved = type("Trainer", (), {})
    register_transformers.trainer_class(module(Trainer=moved))
    moved()
    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    with pytest.raises(RuntimeError, match=r"under transformers 5.*Trainer\.save_model.*Tried: transformers 5"):
        moved()


def test_a_config_in_the_environment_that_nothing_turns_on_is_said_once(monkeypatch, capsys):
    monkeypatch.delenv("ACCELERATE_USE_OURSHARD", raising=False)
    monkeypatch.setattr(notes, "_said", set())
    stock = type("Accelerator", (Moved,), {})
    register.accelerator_class(module(Accelerator=stock))
    stock()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("OURSHARD_STAGE", "2")
    stock(), stock()
    assert capsys.readouterr().err.count("OURSHARD_STAGE: no effect, because ACCELERATE_USE_OURSHARD is not true") == 1


@pytest.mark.parametrize("launch_moved", [True, False])
def test_a_launcher_without_our_seams_refuses_our_config_with_one_line(tmp_path: Path, launch_moved: bool):
    """Whichever of the two modules moved, neither is patched."""
    path = tmp_path / "config.yaml"
    path.write_text(OURS)
    launch = module(**{name: lambda args: None for name in seams.LAUNCH if not launch_moved})
    before = dict(vars(launch))
    register.launch_environment(launch)
    cluster = config_args.ClusterConfig.__mro__[1]
    config = module(load_config_from_file=config_args.load_config_from_file, ClusterConfig=cluster)
    if not launch_moved:
        del config.ClusterConfig
    register.config_classes(config)
    assert getattr(config, "ClusterConfig", cluster) is cluster
    assert not launch_moved or vars(launch) == before
    with pytest.raises(ValueError, match=f"Tried: accelerate {re.escape(seams.TRIED)}"):
        config.load_config_from_file(str(path))
    path.write_text(THEIRS)
    assert config.load_config_from_file(str(path)).distributed_type.value == "MULTI_GPU"


def test_the_refusal_of_the_launcher_is_one_line(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(OURS)
    lines = [
        "from ourshard.integrations import seams",
        "seams.CONFIG['load_config_from_file'] = ('gone',)",
        "import sys",
        f"sys.argv = ['accelerate', 'launch', '--config_file', {str(path)!r}, 'script.py']",
        "from accelerate.commands.accelerate_cli import main",
        "main()",
    ]
    result = run_cli([sys.executable, "-c", "\n".join(lines)], check=False)
    assert result.returncode == 1
    assert result.stderr.strip().count("\n") == 0, result.stderr
    assert "load_config_from_file(gone=)" in result.stderr

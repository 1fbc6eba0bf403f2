"""accelerate's own installed test scripts, unmodified, under our config on two CPU processes."""

from __future__ import annotations

import sys
from pathlib import Path

import accelerate.test_utils.scripts
import pytest

from tests.commands import ROOT, launch, run_cli

SCRIPTS = Path(accelerate.test_utils.scripts.__file__).parent
CONFIG = ROOT / "accelerate_configs" / "ourshard.yaml"
STAGES = [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)), 3]

pytestmark = pytest.mark.ranks


@pytest.fixture
def config(tmp_path: Path, stage: int) -> Path:
    """Our YAML with another stage."""
    text = CONFIG.read_text()
    assert "stage: 3" in text
    path = tmp_path / "ourshard.yaml"
    path.write_text(text.replace("stage: 3", f"stage: {stage}"))
    return path


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("script", ["test_ops.py", "test_sync.py", "test_cli.py", "test_distributed_data_loop.py"])
def test_an_installed_script_passes(config, script):
    launch(SCRIPTS / script, config=config, timeout=180)


@pytest.mark.parametrize("stage", STAGES)
def test_accelerate_test_is_a_success(config):
    command = [Path(sys.executable).with_name("accelerate"), "test", "--config_file", config]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # it starts `accelerate-launch` by name
    assert "Test is a success" in run_cli(command, env={"PATH": path}, timeout=240).stdout

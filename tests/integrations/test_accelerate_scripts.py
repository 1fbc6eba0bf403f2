"""accelerate's own installed test scripts, unmodified, under our config on two CPU processes.

At stage 3 most run as the main program of ranks of the pool, which get what our launcher puts into the environment; the
slow tests start each of them with `accelerate launch`, at every stage.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import accelerate.test_utils.scripts
import pytest

from tests.commands import ROOT, launch, run_cli

SCRIPTS = Path(accelerate.test_utils.scripts.__file__).parent
NAMES = ["test_ops.py", "test_sync.py", "test_cli.py", "test_distributed_data_loop.py"]
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


def run_as_main(script: str) -> tuple[str, int]:
    """Run an installed script as the main program of this rank; return what an `Accelerator()` is there afterwards."""
    os.environ |= {"ACCELERATE_USE_OURSHARD": "true", "OURSHARD_CONFIG": '{"stage": 3}'}
    os.environ |= {"ACCELERATE_MIXED_PRECISION": "no"}
    argv, sys.argv = sys.argv, [script]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv = argv
    accelerator = accelerate.Accelerator()
    return type(accelerator).__name__, accelerator.num_processes


@pytest.mark.parametrize("script", NAMES)
def test_an_installed_script_passes_at_stage_3(ranks, script):
    assert ranks(2)(run_as_main, str(SCRIPTS / script), timeout=180) == [("ShardAccelerator", 2)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("script", NAMES)
def test_an_installed_script_passes_as_it_is_launched(config, script):
    launch(SCRIPTS / script, config=config, timeout=180)


@pytest.mark.parametrize("stage", STAGES)
def test_accelerate_test_is_a_success(config):
    command = [Path(sys.executable).with_name("accelerate"), "test", "--config_file", config]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # it starts `accelerate-launch` by name
    assert "Test is a success" in run_cli(command, env={"PATH": path}, timeout=240).stdout

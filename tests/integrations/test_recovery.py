"""A rank is killed under torchrun, or told to end: training comes back, or ends with a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import ROOT, CliResult, run_cli

pytestmark = pytest.mark.ranks

ENV = {
    "ACCELERATE_USE_OURSHARD": "1",
    "OURSHARD_CONFIG": '{"stage": 3, "persist_below": 50}',
    "ACCELERATE_USE_CPU": "true",
    "PYTHONPATH": str(ROOT),
}


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"],
}
RESTARTS = {"torchrun": ["--max-restarts", "1"], "accelerate": ["--max_restarts", "1"]}


def trained(kind: str, folder: Path, strike: str, launcher: str = "torchrun") -> tuple[CliResult, dict[str, Any]]:
    """Run the script on two ranks; return what it printed, and its last step and weights."""
    folder.mkdir()
    script = ["-m", "tests.integrations.recovery_script", kind, str(folder), strike]
    result = run_cli([*LAUNCHERS[launcher], *RESTARTS[launcher], *script], env=ENV, timeout=90)
    return result, torch.load(folder / "end.pt", weights_only=True)


@pytest.mark.slow  # three starts of two ranks
@pytest.mark.parametrize(
    ("kind", "said", "launcher"),
    [("trainer", "training resumes from", "torchrun"), ("plain", "loading", "accelerate")],
)
def test_a_killed_rank_brings_the_job_back_from_its_newest_checkpoint(tmp_path, kind, said, launcher):
    """The weights at the end are those of a run that was not killed, bit for bit."""
    _, wanted = trained(kind, tmp_path / "whole", "none")
    result, found = trained(kind, tmp_path / "killed", "SIGKILL", launcher)
    assert result.stderr.count(f"Restart 1 by the launcher: {said}") == 1, result.stderr
    assert found["step"] == wanted["step"] == 8
    assert all(torch.equal(found["state"][name], value) for name, value in wanted["state"].items())


def test_sigterm_on_one_rank_saves_and_ends_all_ranks_in_order(tmp_path):
    """The signal comes at step 3, and no checkpoint is due before step 4 or after it before step 6."""
    result, found = trained("trainer", tmp_path / "told", "SIGTERM")
    assert result.stdout.count("ended in order") == 2
    assert "SIGTERM: saving a checkpoint at step" in result.stderr
    assert 3 <= found["step"] <= 5
    assert (tmp_path / "told" / f"checkpoint-{found['step']}" / "trainer_state.json").is_file()

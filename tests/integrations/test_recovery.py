"""A rank is killed under torchrun, or told to end: training comes back, or ends with a checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint import commit

from tests.commands import ROOT, CliResult, clean_environment, free_port, run_cli

pytestmark = pytest.mark.ranks

ENV = {
    "ACCELERATE_USE_OURSHARD": "1",
    "OURSHARD_CONFIG": '{"stage": 3, "persist_below": 50}',
    "ACCELERATE_USE_CPU": "true",
    "PYTHONPATH": str(ROOT),
}


CONFIG = "{distributed_type: OURSHARD, use_cpu: true, num_processes: 2, mixed_precision: 'no'}"
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "CONFIG"],
}
QUICK = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"  # seconds, seconds, tries
RESTARTS = {"torchrun": ["--max-restarts", "1"], "accelerate": ["--max_restarts", "1"]}


def trained(kind: str, folder: Path, strike: str, launcher: str = "torchrun") -> tuple[CliResult, dict[str, Any]]:
    """Run the script on two ranks; return what it printed, and its last step and weights."""
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    launch = [str(config) if word == "CONFIG" else word for word in LAUNCHERS[launcher]]
    script = ["-m", "tests.integrations.recovery_script", kind, str(folder), strike]
    result = run_cli([*launch, *RESTARTS[launcher], *script], env=ENV, timeout=200)
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


def asked_at(step: int) -> list[bool]:
    """Send rank 1 SIGTERM before it asks for the time of this number; return what was told each time."""
    import os

    import ourshard
    import torch.distributed as dist
    from ourshard.integrations import stopping

    told = []
    for number in range(5):
        if number == step and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        told.append(ourshard.asked_to_end())
    stopping.finish()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return told


def test_all_ranks_hear_of_sigterm_at_the_same_call(ranks):
    assert ranks(2)(asked_at, 2) == [[False, False, False, True, True]] * 2


@pytest.mark.slow
def test_sigterm_on_one_rank_lets_a_plain_loop_save_and_end_in_order(tmp_path):
    """A checkpoint is due at steps 2 and 4; the one of the end comes beside them."""
    result, found = trained("plain", tmp_path / "told", "SIGTERM")
    assert result.stdout.count("ended in order") == 2
    assert 3 <= found["step"] <= 5
    saved = sorted((tmp_path / "told" / "checkpoints").iterdir())
    assert torch.load(saved[-1] / "custom_checkpoint_0.pkl", weights_only=True) == {"step": found["step"]}
    assert commit.problem_of(saved[-1] / "ourshard") is None


@pytest.mark.slow  # two starts of torchrun, and its wait for a lost machine
def test_a_lost_machine_leaves_the_job_going_on_with_fewer_ranks(tmp_path):
    """Two torchruns of one rank each; one is killed with its rank at step 3, and the other comes back alone."""
    _, wanted = trained("plain", tmp_path / "whole", "none")
    folder = tmp_path / "lost"
    folder.mkdir()
    common = ["--nnodes", "1:2", "--nproc_per_node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "lost"]
    common += ["--rdzv-endpoint", f"localhost:{free_port()}", "--max-restarts", "2", "--rdzv-conf", QUICK]
    command = [sys.executable, "-m", "torch.distributed.run", *common, "-m", "tests.integrations.recovery_script"]
    environment = {**clean_environment(), **ENV}
    machines = []
    for word in ("none", "MACHINE"):
        log = (folder / word).open("w")
        arguments = [*command, "plain", str(folder), word]
        machines.append(subprocess.Popen(arguments, cwd=ROOT, env=environment, stderr=log, stdout=log))
        time.sleep(2)  # the first has the store
    assert machines[0].wait(120) == 0
    assert machines[1].wait(10) == -signal.SIGKILL
    assert "Restart 1 by the launcher: loading" in (folder / "none").read_text()
    assert torch.load(folder / "end.pt", weights_only=True)["step"] == wanted["step"] == 8


def test_sigterm_on_one_rank_saves_and_ends_all_ranks_in_order(tmp_path):
    """The signal comes at step 3, and no checkpoint is due before step 4 or after it before step 6."""
    result, found = trained("trainer", tmp_path / "told", "SIGTERM")
    assert result.stdout.count("ended in order") == 2
    assert "SIGTERM: saving a checkpoint at step" in result.stderr
    assert 3 <= found["step"] <= 5
    assert (tmp_path / "told" / f"checkpoint-{found['step']}" / "trainer_state.json").is_file()

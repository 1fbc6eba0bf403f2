"""Two machines, as accelerate starts them: namespaces of this one, 2 ranks in each, a slow link between."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import two_hosts as hosts

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def may_make_namespaces() -> bool:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    made = subprocess.run(["ip", "netns", "add", "ourshard-try"], check=False, capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", "ourshard-try"], check=False, capture_output=True)
    return made


@pytest.mark.skipif(not may_make_namespaces(), reason="needs root, ip and tc, and leave to make network namespaces")
def test_training_on_two_hosts_saves_and_resumes_and_a_secondary_shard_spares_the_link(tmp_path: Path):
    words = ["--steps", "4", "--hidden", "96", "--layers", "2"]
    moved = []
    with hosts.two_hosts(mbit=1000):
        for shard in ({}, {"secondary_shard_size": 2}):
            before = hosts.link_bytes()
            whole = hosts.train(shard, words)["losses"]
            moved.append(hosts.link_bytes() - before)
        hosts.train({}, [*words, "--save", str(tmp_path / "state")])
        resumed = hosts.train({}, [*words, "--resume", str(tmp_path / "state")])["losses"]
    assert resumed == whole[2:]
    assert moved[1] < 0.9 * moved[0]  # the layers' backward gathers are spared: a quarter of the model's own bytes

"""`ourshard doctor`: what it measures, what it calls a problem, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ourshard.doctor import speed, training
from ourshard.doctor.cli import app
from ourshard.doctor.examination import Report, _alike, _merged
from ourshard.doctor.finding import Finding, Verdict, run
from ourshard.doctor.machine import look_at_limits, memory_limit
from ourshard.doctor.ranks import measure_clocks, measure_collectives
from ourshard.doctor.versions import look_at_versions
from ourshard.planning import starts
from ourshard.runtime.mesh import default_device
from typer.testing import CliRunner

from tests.commands import launch, run_cli

DOCTOR = [sys.executable, "-m", "ourshard", "doctor"]
ALONE = {
    "versions",
    "GPUs",
    "host memory",
    "pinned memory",
    "shared memory",
    "open files",
    "free space",
    "disk",
    "AdamW on the host",
    "collectives",
    "training",
}


def test_one_process_finds_this_machine_healthy_and_measures_it(tmp_path: Path) -> None:
    result = run_cli([*DOCTOR, "--json", "--folder", tmp_path], env={"ACCELERATE_USE_CPU": "true"})
    report = json.loads(result.stdout)
    values = {finding["name"]: finding["values"] for finding in report["findings"]}
    assert report["healthy"], report
    assert set(values) == ALONE
    assert values["disk"]["write_bytes_per_s"] > 0
    assert values["disk"]["read_bytes_per_s"] > 0
    assert values["AdamW on the host"]["elements_per_s"] > 0
    assert report["seconds"] < 60
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_ranks_with_a_bad_combination_of_packages_end_with_1_and_the_fix(tmp_path: Path) -> None:
    package = tmp_path / "trl-1.0.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.0.0\nRequires-Dist: torch<2.0\n")
    env = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(tmp_path)}
    result = run_cli([*DOCTOR, "--processes", "2"], env=env, check=False)
    assert result.returncode == 1, result.stderr
    text = " ".join(result.stdout.replace("│", " ").split())
    assert "trl 1.0.0 needs torch<2.0" in text
    assert "fix: pip install 'torch<2.0'" in text
    assert "1 problem," in text
    assert "all-gather" in text


@pytest.mark.slow
def test_under_accelerate_launch_every_rank_measures_and_rank_0_prints() -> None:
    result = launch("-m", "ourshard.doctor", "--json")
    report = json.loads(result.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert report["world"] == 2
    assert set(found) == ALONE | {"clocks"}
    assert found["GPUs"]["ranks"] == [0, 1]
    assert found["collectives"]["values"]["all-gather_bytes_per_s"] > 0
    assert found["collectives"]["values"]["reduce-scatter_bytes_per_s"] > 0
    assert max(found["training"]["values"]["relative_errors"].values()) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (["--folder", "/no/such/folder"], {}),
        (["--processes", "0"], {}),
        (["--processes", "2"], {"WORLD_SIZE": "2", "RANK": "0"}),
        (["--processes", "99999"], {}),  # it started them all
    ],
)
def test_a_command_that_can_not_be_understood_ends_with_2(arguments: list[str], env: dict[str, str]) -> None:
    assert CliRunner().invoke(app, arguments, env=env).exit_code == 2


def test_ranks_that_can_not_join_are_a_problem_and_not_a_hang() -> None:
    env = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "nope0"}
    result = run_cli([*DOCTOR, "--processes", "2", "--json"], env=env, check=False)
    assert result.returncode == 1, result.stderr
    (finding,) = json.loads(result.stdout)["findings"]
    assert "nope0" in finding["text"]


def test_help_shows_examples_and_exit_codes() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert "accelerate launch" in text
    assert "Exit codes" in text


def test_a_probe_that_fails_is_a_problem_and_not_the_end() -> None:
    def broken() -> list[Finding]:
        raise OSError("no such disk")

    (finding,) = run("disk", broken)
    assert finding.verdict is Verdict.PROBLEM
    assert "no such disk" in finding.text
    assert not Report((finding,), 1, 0.0).healthy


def test_the_disk_is_measured_through_the_cache_where_the_file_system_refuses_o_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    (finding,) = speed.measure_disk(tmp_path)
    assert finding.values["direct"] is False
    assert "refuses O_DIRECT" in finding.text
    assert finding.values["write_bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("needs", "fix"),
    [
        ("transformers<5", "pip install -U trl: ourshard works with transformers>="),
        ("transformers>=99", "pip install 'transformers>=99', or another trl"),
    ],
)
def test_the_fix_of_a_bad_combination_is_not_one_that_ourshard_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, needs: str, fix: str
) -> None:
    (tmp_path / "trl-1.0.0.dist-info").mkdir()
    head = f"Metadata-Version: 2.1\nName: trl\nVersion: 1.0.0\nRequires-Dist: {needs}\n"
    (tmp_path / "trl-1.0.0.dist-info" / "METADATA").write_text(head)
    monkeypatch.syspath_prepend(tmp_path)
    found = next(each for each in look_at_versions() if each.text.startswith("trl 1.0.0 needs"))
    assert found.fix.startswith(fix)


@pytest.mark.parametrize(
    ("hard", "fix"),
    [(128, "Raise the hard limit, 128 "), (4096, "ulimit -n 4096;"), (resource.RLIM_INFINITY, "ulimit -n 65536;")],
)
def test_too_few_open_files_have_a_fix_that_the_hard_limit_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hard: int, fix: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (128, hard))
    files = next(each for each in look_at_limits(tmp_path, 1) if each.name == "open files")
    assert (files.verdict, files.text) == (Verdict.NOTE, "ulimit -n is 128")
    assert files.fix.startswith(fix)


def test_the_tightest_limit_of_nested_containers_counts(tmp_path: Path) -> None:
    inner = tmp_path / "pod" / "container"
    inner.mkdir(parents=True)
    for folder, limit, used in ((tmp_path / "pod", 3000, 2500), (inner, 2000, 100)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    assert memory_limit(tmp_path, "pod/container") == (3000, 2500)
    (tmp_path / "pod" / "memory.stat").write_text("anon 700\nactive_file 200\ninactive_file 300\n")
    assert memory_limit(tmp_path, "pod/container") == (3000, 2000)  # the kernel lets go of files first
    (tmp_path / "pod" / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path, "pod/container") == (2000, 100)
    (inner / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path, "pod/container") is None


def test_findings_that_say_the_same_become_one_and_differing_versions_are_a_problem() -> None:
    seen = [Finding("versions", f"torch {v}", values={"torch": v}, ranks=(r,)) for r, v in enumerate("112")]
    assert [finding.ranks for finding in _merged(seen)] == [(0, 1), (2,)]
    (problem,) = _alike(seen, (0, 1, 2))
    assert problem.verdict is Verdict.PROBLEM
    assert _alike(seen[:2], (0, 1)) == []


def train_with_a_rank_that_computes_wrongly() -> list[Finding]:
    right = training._batches
    if dist.get_rank() == 1:
        training._batches = lambda *args: (batch * 1.1 for batch in right(*args))  # type: ignore[assignment]
    try:
        return training.check_training(default_device())
    finally:
        training._batches = right


@pytest.mark.ranks
def test_a_rank_that_computes_wrongly_is_found(ranks: Any) -> None:
    (finding,) = ranks(2)(train_with_a_rank_that_computes_wrongly)[0]
    assert finding.verdict is Verdict.PROBLEM
    assert "stage 0, stage 1, stage 2, stage 3 learnt something else" in finding.text


def compare_clocks(ahead: float) -> list[Finding]:
    real = time.time
    if dist.get_rank() == 1:
        time.time = lambda: real() + ahead
    try:
        return measure_clocks(dist.group.WORLD)
    finally:
        time.time = real


@pytest.mark.ranks
def test_a_clock_that_is_ahead_is_seen_with_its_rank_and_size(ranks: Any) -> None:
    (late,) = ranks(2)(compare_clocks, 5.0)[0]
    (alike,) = ranks(2)(compare_clocks, 0.0)[0]
    assert late.values["skew_s"] == pytest.approx(5.0, abs=0.5)
    assert late.verdict is Verdict.NOTE
    assert "rank 1" in late.fix
    assert alike.verdict is Verdict.FINE


def collective_rates() -> list[Finding]:
    return measure_collectives(default_device())


@pytest.mark.ranks
def test_all_ranks_agree_on_the_rates_of_collectives(ranks: Any) -> None:
    first, second = ranks(2)(collective_rates)
    assert first[0].values == second[0].values


def test_kernel_starts_are_counted_as_the_planner_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "_REPEATS", 1)
    monkeypatch.setattr(starts.time, "perf_counter", iter(range(100)).__next__)
    before = torch.random.get_rng_state()
    assert starts.start_seconds(torch.device("cpu")) == pytest.approx(1 / starts._kernels())
    assert 100 < starts._kernels() < 400, "of a transformer of 4 layers"
    assert torch.equal(before, torch.random.get_rng_state())

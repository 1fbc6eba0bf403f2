"""What the planner predicts, against runs that were measured on GPUs (benchmarks/measured)."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.commands import ROOT

pytest.importorskip("transformers")

# The host decides here, and hosts differ: without a runtime small-48 took 148 to 184 ms on five machines of one kind.
HOST_BOUND = ("llama-1b-host", "small-48")


@pytest.fixture(scope="module")
def accuracy() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import plan_accuracy

    yield plan_accuracy
    sys.path.remove(str(ROOT / "benchmarks"))


# Files of benchmarks/measured that are passed over, each for what it measured another way than is planned.
PASSED_OVER = {
    "2026-11-28-h100x2-run1.jsonl": "NCCL alone, before peer copies and pools of their own",
    "2026-11-28-h200x2-run8.jsonl": "the optimizer on the host before it overlapped",
    "2026-11-28-h200x2-run11-host.jsonl": "groups for both devices, which had no peer copies then; the host decides",
    "2026-11-28-h200x1-run9-offload.jsonl": "the same as run 8, on one card",
    "2026-11-28-h200x2-run12-offload.jsonl": "clipping in a pass of its own over host memory",
    "2026-11-29-h200x1-run21-offload.jsonl": "a host whose memory is 1.2 to 1.4 times as fast as planned",
    "2026-11-29-h200x2-run18-slow.jsonl": "NCCL over sockets, whose rate no data sheet has",
    "2026-11-29-h200x2-run22-slow.jsonl": "the same",
    "2026-11-29-h200x2-run22-offload.jsonl": "a host whose memory is 0.8 times as fast as planned",
}
COMPILED = "llama-1b-compiled"  # kernels are planned as they are without a compiler


def measured(accuracy: Any) -> list[dict[str, Any]]:
    """Return every measured run that the planner speaks of."""
    paths = sorted((ROOT / "benchmarks" / "measured").glob("*h200*.jsonl"))
    runs = accuracy.results([path for path in paths if path.name not in PASSED_OVER])
    return [run for run in runs if run["work"] != COMPILED]


def test_memory_is_within_5_percent_and_time_within_15_where_the_gpu_decides(accuracy: Any) -> None:
    runs = measured(accuracy)
    assert len(runs) >= 30
    for result in runs:
        seen = accuracy.Comparison(result, accuracy.predict(result))
        name = f"{result['work']}, {result['engine']}"
        assert abs(seen.memory_error) < 0.05, f"{name}: peak memory is {seen.memory_error:+.1%} off"
        if result["work"] not in HOST_BOUND:
            assert abs(seen.time_error) < 0.15, f"{name}: the step is {seen.time_error:+.1%} off"


def test_where_the_host_decides_the_step_is_within_its_error_bar(accuracy: Any) -> None:
    runs = [run for run in measured(accuracy) if run["work"] in HOST_BOUND]
    assert len(runs) >= 14
    for result in runs:
        best, worst = accuracy.predict(result).seconds
        name = f"{result['work']}, {result['engine']}"
        assert best * 0.98 <= result["step_ms"] / 1e3 <= worst * 1.02, f"{name}: {result['step_ms']} ms"


def test_where_the_host_decides_and_its_pace_is_told_the_step_is_within_15_percent(accuracy: Any) -> None:
    """Of the mean of a machine's runs of one engine: the pace is the machine's, and that of its processes differs."""
    errors: dict[tuple[str, str, float], list[float]] = {}
    for result in measured(accuracy):
        if result["work"] in HOST_BOUND and "start_us" in result:
            error = accuracy.Comparison(result, accuracy.predict(result)).time_error
            errors.setdefault((result["work"], result["engine"], result["start_us"]), []).append(error)
    assert len(errors) >= 8
    for (work, engine, _), seen in errors.items():
        assert abs(statistics.mean(seen)) < 0.15, f"{work}, {engine}: {seen} off"


def test_every_engine_that_is_predicted_is_one_that_is_measured(accuracy: Any) -> None:
    from engines import ENGINES

    assert set(accuracy.CONFIGS) <= set(ENGINES)

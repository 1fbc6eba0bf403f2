"""Compare what `ourshard plan` predicts with what `run_one.py` measured. Needs no GPU.

python benchmarks/plan_accuracy.py RESULTS.jsonl ...

Each line of the files is a result of `run_one.py`; those of ourshard's engines are compared, the others passed over.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ourshard.config import ShardConfig
from ourshard.planning.hardware import GIB, hardware_of
from ourshard.planning.model import make_batch
from ourshard.planning.plan import Planner, Row, Workload
from works import WORKS

CONFIGS: dict[str, dict[str, Any]] = {
    "ourshard1": {"stage": 1},
    "ourshard2": {"stage": 2},
    "ourshard3": {"stage": 3},
    "ourshard1-bf16": {"stage": 1, "reduce": "bfloat16"},
    "ourshard2-bf16": {"stage": 2, "reduce": "bfloat16"},
    "ourshard3-bf16": {"stage": 3, "reduce": "bfloat16"},
    "ourshard1-nccl": {"stage": 1, "communication": {"transport": "nccl"}},
    "ourshard3-nccl": {"stage": 3, "communication": {"transport": "nccl"}},
    "ourshard3-keep": {"stage": 3, "reshard_after_forward": False},
    "ourshard-hybrid": {"stage": 3, "shard_size": 2},
    "ourshard3_offload_optimizer": {"stage": 3, "offload": {"optimizer": "cpu"}},
    "ourshard3_offload_overlap": {"stage": 3, "offload": {"optimizer": "cpu", "overlap_step": True}},
    "ourshard3_offload_half": {"stage": 3, "offload": {"optimizer": "cpu", "optimizer_ratio": 0.5}},
    "ourshard3_offload_all": {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
}
CARDS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measured run beside its prediction."""

    measured: dict[str, Any]
    predicted: Row

    @property
    def time_error(self) -> float:
        return self.predicted.timing.total * 1e3 / self.measured["step_ms"] - 1

    @property
    def memory_error(self) -> float:
        return self.predicted.memory.peak / GIB / self.measured["peak_gib"] - 1


def results(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield the measured runs that can be predicted, each once."""
    seen: set[tuple[str, str, float]] = set()
    for result in (result for path in paths for result in _of_one_machine(path)):
        known = result.get("engine") in CONFIGS and result.get("work") in WORKS and result.get("card") in CARDS
        if known and "peak_gib" in result:  # else of `turns.py`
            run = result["engine"], result["work"], round(result["step_ms"], 1)  # some files have more digits
            if run not in seen:
                yield result
            seen.add(run)


def _of_one_machine(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file, each with the machine's start of a kernel: processes measure up to a fifth apart."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    starts = [result["start_us"] for result in found if "start_us" in result]
    return [result | ({"start_us": statistics.mean(starts)} if starts else {}) for result in found]


@functools.cache
def planner(work_name: str) -> Planner:
    """Return the planner of one work: `shard_model` without Accelerate, AdamW, clipping; on any hardware."""
    work = WORKS[work_name]
    with torch.device("meta"):
        model = work.build()
    workload = Workload(make_batch(model, work.batch, work.seq), accelerate=False)
    return Planner(model, workload, hardware_of("h200", 1))


def predict(result: dict[str, Any]) -> Row:
    """Predict one run."""
    more = {name: result.get(name) for name in ("world", "absent", "start_us")}
    return _predict(result["engine"], result["work"], result["card"], **more)


@functools.cache
def _predict(engine: str, work: str, card: str, *, world: int, absent: int | None, start_us: float | None) -> Row:
    values = dict(CONFIGS[engine])
    precision = {"param_dtype": "bfloat16", "reduce_dtype": values.pop("reduce", "float32")}
    config = ShardConfig.from_dict(
        {**values, "precision": precision, "activation_checkpointing": WORKS[work].checkpoint}
    )
    hardware = hardware_of(CARDS[card], world)
    if start_us is not None:
        hardware = hardware.starting(start_us / 1e6)
    if absent:
        hardware = hardware.without_others()
    return dataclasses.replace(planner(work), hardware=hardware).row(config)


def print_runs(seen: list[Comparison]) -> None:
    """Print a line for each run."""
    print("| card | work | engine | step ms | predicted | error | peak GiB | predicted | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for each in seen:
        measured = each.measured
        print(
            f"| {_head(each)} | {measured['step_ms']:.1f} | {_predicted_ms(each)} | {each.time_error:+.1%} "
            f"| {measured['peak_gib']:.2f} | {each.predicted.memory.peak / GIB:.2f} | {each.memory_error:+.1%} |"
        )


def print_works(seen: list[Comparison]) -> None:
    """Print a line for each work and engine, with the least and the most of its runs."""
    print("| card | work | engine | runs | step ms | predicted | error | peak GiB | predicted | error |")
    print("|---|---|---|---:|---|---|---|---|---|---|")
    for head in dict.fromkeys(_head(each) for each in seen):
        runs = [each for each in seen if _head(each) == head]
        predicted = runs[0].predicted.memory.peak / GIB
        print(
            f"| {head} | {len(runs)} | {_span([each.measured['step_ms'] for each in runs], '.1f')} "
            f"| {_predicted_ms(runs[0])} | {_span([each.time_error for each in runs], '+.1%')} "
            f"| {_span([each.measured['peak_gib'] for each in runs], '.2f')} | {predicted:.2f} "
            f"| {_span([each.memory_error for each in runs], '+.1%')} |"
        )


def _head(seen: Comparison) -> str:
    measured = seen.measured
    return f"{CARDS[measured['card']]} x {measured['world']} | {measured['work']} | {measured['engine']}"


def _predicted_ms(seen: Comparison) -> str:
    best, worst = (1e3 * seconds for seconds in seen.predicted.seconds)
    return f"{seen.predicted.timing.total * 1e3:.1f} ({best:.1f} to {worst:.1f})"


def _span(values: list[float], how: str) -> str:
    least, most = format(min(values), how), format(max(values), how)
    return least if least == most else f"{least} to {most}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--by-work", action="store_true", help="a line for each work and engine, not for each run")
    options = parser.parse_args()
    seen = [Comparison(result, predict(result)) for result in results(options.results)]
    (print_works if options.by_work else print_runs)(seen)


if __name__ == "__main__":
    main()

"""Does training with coded collectives reach the same loss? The model and data of examples/train_clm.py, on CPUs.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/convergence.py --seeds 7 8 9

For each seed, every variant trains from the same weights on the same batches, in fp32 so that nothing but the codec
differs. `nudged` is uncompressed too, from weights that are off by one part in 10,000: how far two exact runs are
apart. Lines of JSON go to benchmarks/measured/convergence.jsonl, one a run: the loss of each step (mean over ranks,
nats a byte; with coded weights, at these), its mean over the last 50 steps, and the loss of the exact weights on rows
that were held out. Runs that are there already, with the same options, are not made again. The curves go to
docs/images/convergence.png, and the table to docs/numbers.md, between its marks.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from ourshard import clip_grad_norm_, shard_model
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_cosine_schedule_with_warmup, set_seed

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from train_clm import build_model, read_source_code  # noqa: E402

MEASURED = ROOT / "benchmarks" / "measured" / "convergence.jsonl"
BEGIN, END = "<!-- convergence.py: begin -->", "<!-- convergence.py: end -->"
LAST = 50  # steps whose mean loss is compared
UNCOMPRESSED = "uncompressed"
Run = dict[str, Any]
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    UNCOMPRESSED: {},
    "nudged": {},
    "int8 weights, int8 gradients": {"weights": "int8", "gradients": "int8"},
    "fp8 weights, int8 gradients": {"weights": "fp8", "gradients": "int8"},
    "int4 gradients, error feedback": {"gradients": "int4", "error_feedback": True},
    "int4 gradients": {"gradients": "int4"},
    "int4 gradients in blocks of 256, error feedback": {"gradients": "int4", "error_feedback": True, "block": 256},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=4, help="sequences of one rank")
    parser.add_argument("--sequence_length", type=int, default=192, help="bytes")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--held_out", type=int, default=512, help="rows that are not trained on")
    parser.add_argument("--max_files", type=int, default=200, help="files of the standard library that are read")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8, 9])
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    return parser.parse_args()


def batches(rows: Dataset, seed: int, args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's batches, the same in every run."""
    sampler: DistributedSampler[Any] = DistributedSampler(rows, seed=seed, drop_last=True)
    for epoch in range(args.steps):
        sampler.set_epoch(epoch)
        yield from DataLoader(rows, batch_size=args.batch_size, sampler=sampler, drop_last=True)


def train(rows: Dataset, variant: str, seed: int, args: argparse.Namespace) -> tuple[list[float], float]:
    """Return the mean loss over ranks of each step, and the final loss on the last rows, which are held out."""
    set_seed(seed)
    model = build_model()
    if variant == "nudged":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-4)
    model = shard_model(model, {"stage": 3, "communication": dict(VARIANTS[variant])})
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    losses = []
    last = len(rows) - args.held_out
    for _, batch in zip(range(args.steps), batches(rows.select(range(last)), seed, args), strict=False):
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss.detach()))
    model.eval()
    with torch.no_grad():
        own = rows.select(range(last + dist.get_rank(), len(rows), dist.get_world_size()))
        parts = [model(**b, labels=b["input_ids"]).loss for b in DataLoader(own, batch_size=16, drop_last=True)]
    return losses, mean_over_ranks(torch.stack(parts).mean())


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def percent_off(found: Sequence[Run], variant: str, what: str) -> list[float]:
    """Return, for each seed, how many percent `what` of a variant is above the uncompressed run's."""
    exact = {run["seed"]: run[what] for run in found if run["variant"] == UNCOMPRESSED}
    return [100 * (run[what] / exact[run["seed"]] - 1) for run in found if run["variant"] == variant]


def _mean(values: Sequence[float]) -> str:
    """Return a mean in percent, with its standard error where there are several values."""
    mean = f"{statistics.mean(values):+.2f}%"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"


def complete(found: Sequence[Run]) -> list[Run]:
    """Return the runs of the seeds with which every variant has been run."""
    names = {run["variant"] for run in found}
    done = {seed for seed in (run["seed"] for run in found) if names == _variants_of(found, seed)}
    return [run for run in found if run["seed"] in done]


def _variants_of(found: Sequence[Run], seed: int) -> set[str]:
    return {run["variant"] for run in found if run["seed"] == seed}


def table(found: Sequence[Run]) -> str:
    """Return the comparison in Markdown."""
    names = list(dict.fromkeys(run["variant"] for run in found))
    seeds = list(dict.fromkeys(run["seed"] for run in found))
    lines = [
        f"| variant, seeds {', '.join(map(str, seeds))} | loss, mean of the last {LAST} steps | off by, "
        "each seed | mean, its standard error | on held-out rows |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in names:
        last = statistics.mean(run["last"] for run in found if run["variant"] == name)
        if name == UNCOMPRESSED:
            lines.append(f"| {name} | {last:.4f} | | | |")
            continue
        off, held = percent_off(found, name, "last"), percent_off(found, name, "held_out_loss")
        each = ", ".join(f"{value:+.2f}%" for value in off)
        lines.append(f"| {name} | {last:.4f} | {each} | {_mean(off)} | {_mean(held)} |")
    return "\n".join(lines)


def draw(found: Sequence[Run], path: Path) -> None:
    """Draw losses, means over seeds smoothed over 10 steps, and how far each is from the uncompressed one."""
    plt.switch_backend("Agg")
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1))
    smooth = {name: _mean_curve(found, name) for name in dict.fromkeys(run["variant"] for run in found)}
    exact = smooth[UNCOMPRESSED]
    steps = np.arange(10, 10 + len(exact))
    for name, values in smooth.items():
        above.plot(steps, values, linewidth=1, label=name)
        below.plot(steps, 100 * (values / exact - 1), linewidth=1)
    above.set(ylabel="nats a byte", title="Loss, mean of 10 steps and of all seeds")
    above.legend()
    below.set(xlabel="step", ylabel="% from uncompressed")
    below.axhspan(-0.25, 0.25, color="gray", alpha=0.2)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _mean_curve(found: Sequence[Run], variant: str) -> np.ndarray:
    curves = np.mean([run["losses"] for run in found if run["variant"] == variant], axis=0)
    return np.convolve(curves, np.ones(10) / 10, "valid")


def read() -> list[Run]:
    return [json.loads(line) for line in MEASURED.read_text().splitlines()] if MEASURED.exists() else []


def write(found: Sequence[Run], others: Sequence[Run]) -> None:
    """Write what has been measured so far, its picture, and its table; runs with other options stay in the file."""
    lines = [json.dumps({**run, "losses": [round(loss, 5) for loss in run["losses"]]}) for run in (*others, *found)]
    MEASURED.write_text("\n".join(lines) + "\n")
    found = complete(found)
    draw(found, ROOT / "docs" / "images" / "convergence.png")
    page = ROOT / "docs" / "numbers.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        read_source_code(args.sequence_length, args.max_files)  # the others read what the first one cached
    dist.barrier()
    rows = read_source_code(args.sequence_length, args.max_files)
    options = {
        "ranks": dist.get_world_size(),
        **{k: v for k, v in vars(args).items() if k not in ("variants", "seeds")},
    }
    measured = read()
    found = [run for run in measured if options.items() <= run.items()]
    others = [run for run in measured if run not in found]
    dist.barrier()  # all have read what the first one is to write
    for seed in args.seeds:
        for name in args.variants:
            if any((run["variant"], run["seed"]) == (name, seed) for run in found):
                continue
            began = time.perf_counter()
            losses, held_out = train(rows, name, seed, args)
            last = statistics.mean(losses[-LAST:])
            run = {"variant": name, "seed": seed, "last": last, "held_out_loss": held_out, **options, "losses": losses}
            found.append(run)
            if dist.get_rank() == 0:
                print(f"{seed} {name:32} {last:.4f} ({time.perf_counter() - began:.0f} s)", flush=True)
                write(found, others)
    if dist.get_rank() == 0:
        print(table(complete(found)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Does training with coded collectives reach the same loss? The model and data of examples/train_clm.py, on CPUs.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/convergence.py

Each variant trains from the same seed on the same batches, in fp32 so that nothing but the codec differs. `nudged` is
uncompressed too, from weights that are off by one part in 10,000: how far two exact runs are apart. Lines of JSON go to
benchmarks/measured/convergence.jsonl: the loss of each step (mean over ranks, nats a byte; with coded weights, at
these), its mean over the last 50 steps and how far that is from the uncompressed run's, and the loss of the exact
weights on rows that were held out. The curves go to docs/images/convergence.png.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping
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

LAST = 50  # steps whose mean loss is compared
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "uncompressed": {},
    "nudged": {},
    "int8 weights, int8 gradients": {"weights": "int8", "gradients": "int8"},
    "fp8 weights, int8 gradients": {"weights": "fp8", "gradients": "int8"},
    "int4 gradients, error feedback": {"gradients": "int4", "error_feedback": True},
    "int4 gradients": {"gradients": "int4"},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=4, help="sequences of one rank")
    parser.add_argument("--sequence_length", type=int, default=192, help="bytes")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--held_out", type=int, default=512, help="rows that are not trained on")
    parser.add_argument("--max_files", type=int, default=200, help="files of the standard library that are read")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    return parser.parse_args()


def batches(rows: Dataset, args: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's batches, the same in every run."""
    sampler = DistributedSampler(rows, seed=args.seed, drop_last=True)
    for epoch in range(args.steps):
        sampler.set_epoch(epoch)
        yield from DataLoader(rows, batch_size=args.batch_size, sampler=sampler, drop_last=True)


def train(rows: Dataset, variant: str, args: argparse.Namespace) -> tuple[list[float], float]:
    """Return the mean loss over ranks of each step, and the final loss on the last rows, which are held out."""
    set_seed(args.seed)
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
    for _, batch in zip(range(args.steps), batches(rows.select(range(last)), args), strict=False):
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


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses, smoothed over 10 steps, and how far each is from the first."""
    plt.switch_backend("Agg")
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1))
    smooth = {each["variant"]: np.convolve(each["losses"], np.ones(10) / 10, "valid") for each in found}
    exact = next(iter(smooth.values()))
    steps = np.arange(10, 10 + len(exact))
    for name, values in smooth.items():
        above.plot(steps, values, linewidth=1, label=name)
        below.plot(steps, 100 * (values / exact - 1), linewidth=1)
    above.set(ylabel="nats a byte", title="Loss, mean of 10 steps")
    above.legend()
    below.set(xlabel="step", ylabel="% from uncompressed")
    below.axhspan(-0.25, 0.25, color="gray", alpha=0.2)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def write(found: list[dict[str, Any]]) -> None:
    """Write what has been measured so far, and its picture."""
    lines = [json.dumps({**each, "losses": [round(loss, 5) for loss in each["losses"]]}) for each in found]
    (ROOT / "benchmarks" / "measured" / "convergence.jsonl").write_text("\n".join(lines) + "\n")
    draw(found, ROOT / "docs" / "images" / "convergence.png")


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if dist.get_rank() == 0:
        read_source_code(args.sequence_length, args.max_files)  # the others read what the first one cached
    dist.barrier()
    rows = read_source_code(args.sequence_length, args.max_files)
    found: list[dict[str, Any]] = []
    for name in args.variants:
        losses, held_out = train(rows, name, args)
        last = float(np.mean(losses[-LAST:]))
        off = 100 * (last / found[0]["last"] - 1) if found else 0.0
        options = {"ranks": dist.get_world_size(), **{k: v for k, v in vars(args).items() if k != "variants"}}
        found.append(
            {"variant": name, "last": last, "percent_off": off, "held_out_loss": held_out, **options, "losses": losses}
        )
        if dist.get_rank() == 0:
            print(f"{name:32} {last:.4f} {off:+.3f}%", flush=True)
            write(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

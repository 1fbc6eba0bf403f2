"""Step whole matrices by their owners over NCCL, lane by lane, and compare with one process.

    torchrun --nproc_per_node 2 tests/gpu/owners.py

torch's and transformers' Adafactor within 2e-5; Muon beside AdamW within 3e-3, since it orthogonalizes in bf16, which
makes much of one rounding in its input. Prints one line a case with the milliseconds of a step; exits with 1 if any is
off.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ourshard.runtime.api import engine_of, full_state_dict, shard_model
from parity import batch, build, on_all_ranks, poison, tell
from transformers.optimization import Adafactor

STEPS = 4
Make = Callable[[Any], list[torch.optim.Optimizer]]


def muon(model: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if len(p.shape) == 2]
    rest = [p for p in model.parameters() if len(p.shape) != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, eps=1e-6)]


OPTIMIZERS: dict[str, tuple[Make, float]] = {
    "torch Adafactor": (lambda model: [torch.optim.Adafactor(model.parameters(), lr=1e-3)], 2e-5),
    "transformers Adafactor": (
        lambda model: [Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=True)],
        2e-5,
    ),
    "Muon": (muon, 3e-3),
}


def train(model: Any, make: Make, part: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> float:
    """Train; return the milliseconds of the last optimizer step."""
    optimizers = make(model)
    took = 0.0
    for step in range(STEPS):
        ids = part(batch(step, device))
        model(input_ids=ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        torch.cuda.synchronize()
        took = 1000 * (time.perf_counter() - began)
        for optimizer in optimizers:
            optimizer.zero_grad()
    return took


def apart(make: Make, config: dict[str, Any], device: torch.device) -> tuple[float, float, float]:
    """Return how far the weights are from one process, and the milliseconds of a step, there and here."""
    plain, sharded = build(device), build(device)
    alone = train(plain, make, lambda ids: ids, device)
    shard_model(sharded, {"persist_below": 100, "wrap": {"merge": 0}, **config})
    poison(engine_of(sharded))
    together = train(sharded, make, lambda ids: ids.chunk(dist.get_world_size())[dist.get_rank()], device)
    state = full_state_dict(sharded)
    worst = max((state[name] - value.cpu()).abs().max().item() for name, value in plain.state_dict().items())
    return worst, alone, together


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    torch.backends.cuda.matmul.allow_tf32 = False
    bad = 0
    configs: list[dict[str, Any]] = [{"stage": stage} for stage in (1, 2, 3)]
    configs += [
        {"stage": 3, "shard_size": 1 if dist.get_world_size() == 2 else 2, "shard_optimizer_over": "all"},
        {"stage": 3, "offload": {"optimizer": "cpu"}},
    ]
    for name, (make, tolerance) in OPTIMIZERS.items():
        for config in configs:
            worst, alone, together = apart(make, config, device)
            good = on_all_ranks(worst < tolerance, device)
            bad += not good
            tell(good, f"{name} {config}", f"{worst:.1e}, {together:.1f} ms a step, {alone:.1f} in one process")
    dist.destroy_process_group()
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()

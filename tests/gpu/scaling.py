"""Train in float16 with masters on the host, and on the device, and compare; overflow on one rank in two steps.

    torchrun --nproc_per_node 2 tests/gpu/scaling.py

Prints one line a configuration; exits with 1 if any is off. C05, G07.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from ourshard.runtime.api import clip_grad_norm_, full_state_dict, shard_model
from ourshard.runtime.scaler import ShardGradScaler
from torch import nn

WIDTH, STEPS = 256, 6


def model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)


def train(offload: dict[str, Any], fused: bool, clip: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the weights and, step by step, the scale; rank 1 overflows in steps 1 and 2."""
    device = torch.device("cuda", dist.get_rank())
    precision = {"param_dtype": "float16", "reduce_dtype": "float32"}
    sharded = shard_model(model(device), {"stage": 3, "persist_below": 0, "precision": precision, "offload": offload})
    make = torch.optim.AdamW if fused else torch.optim.SGD
    optimizer = make(sharded.parameters(), lr=1e-3, **({"eps": 1e-4} if fused else {}))  # far above rounding
    scaler, scales = ShardGradScaler("cuda", init_scale=2.0**10, growth_interval=2), []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        rows = torch.randn(8, WIDTH, generator=generator).to(device)
        loss = (sharded(rows.half()).float() - rows).square().mean()
        scaler.scale(loss).backward()
        if step in (1, 2) and dist.get_rank() == 1:
            gradient = next(p for p in sharded.parameters() if p.grad.local.numel()).grad
            gradient.local.view(-1)[0] = math.inf
        if clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(sharded, 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return full_state_dict(sharded), scales


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    bad = 0
    for fused in (True, False):
        for clip in (True, False):
            wanted, scales = train({}, fused, clip)
            for offload in ({"optimizer": "cpu"}, {"optimizer": "cpu", "overlap_step": True, "params": "cpu"}):
                found, others = train(offload, fused, clip)
                worst = max((found[name] - value).abs().max().item() for name, value in wanted.items())
                ok = worst < 1e-4 and others == scales and scales[:3] == [1024.0, 512.0, 256.0]
                bad += not ok
                if rank == 0:
                    case = f"fused={fused} clip={clip} {offload}"
                    print(f"{'ok ' if ok else 'BAD'} {case}: {worst:.2e} {others} {scales}", flush=True)
    dist.destroy_process_group()
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()

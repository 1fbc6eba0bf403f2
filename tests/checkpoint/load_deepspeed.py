"""Load a universal checkpoint into DeepSpeed at a stage, take its next step, and save what was loaded.

torchrun --nproc-per-node 2 tests/checkpoint/load_deepspeed.py FOLDER STAGE RESULT
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.fixtures.deepspeed_recipes import engine_of, gather, train


def main() -> None:
    """Load, gather, go on for a few steps, save."""
    folder, stage, result = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    engine = engine_of(stage, checkpoint={"load_universal": True})
    engine.load_checkpoint(folder)
    live = gather(engine)
    inner = engine.optimizer.optimizer
    tensors = {f"param/{name}": value for name, value in live["params"].items()}
    tensors |= {f"{kind}/{name}": value for name, values in live["state"].items() for kind, value in values.items()}
    steps = [float(inner.state[group["params"][0]]["step"]) for group in inner.param_groups if group["params"]]
    tensors["steps"] = torch.tensor(steps or [float(engine.global_steps)] * 2)
    tensors["weight_decay"] = torch.tensor([float(group["weight_decay"]) for group in inner.param_groups])
    tensors = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    tensors["losses"] = torch.tensor(train(engine))
    if dist.get_rank() == 0:
        save_file(tensors, result)
    dist.barrier()


if __name__ == "__main__":
    main()

"""A model of equal layers on the meta device, and its rehearsed steps, for tests of the planner."""

from __future__ import annotations

from typing import Any

import torch
from ourshard.config import ShardConfig
from ourshard.planning.hardware import Hardware, hardware_of
from ourshard.planning.layouts import plan_model
from ourshard.planning.model import make_batch
from ourshard.planning.moves import MeshSizes, Move
from ourshard.planning.plan import Planner, Workload
from ourshard.planning.rehearsal import Rehearsal
from ourshard.planning.trace import Trace, UnitParts, trace
from torch import nn

WIDTH, BLOCKS = 64, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Equal blocks and nothing else, so that laws can be written down."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer() for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


PARAMETERS = BLOCKS * 8 * WIDTH * WIDTH
UNIT = 8 * WIDTH * WIDTH
HALF = {"param_dtype": "bfloat16"}


def stack(blocks: int = BLOCKS) -> Stack:
    with torch.device("meta"):
        return Stack(blocks)


def fake_run(samples: int = 4, **options: Any) -> Trace:
    model = stack()
    x = torch.zeros(samples, WIDTH, device="meta", requires_grad=True)
    return trace(model, [*(UnitParts([block]) for block in model.blocks), UnitParts([])], {"x": x}, **options)


def rehearse(config: ShardConfig, mesh: MeshSizes, micro_batches: int = 1) -> tuple[Rehearsal, list[Move]]:
    planned = plan_model(stack(), config, mesh)
    rehearsal = Rehearsal(planned, config, mesh, fake_run().visits, micro_batches)
    return rehearsal, rehearsal.settled()


def exact(**changes: Any) -> Hardware:
    """Hardware that reaches all of its rates, and a host that takes no time."""
    rates = ("matmul", "attention", "memory", "nccl", "peer", "host_link")
    one = dict.fromkeys((f"{rate}_reach" for rate in rates), (1.0, 1.0))
    return hardware_of("h100", 8).replaying().replace(**one, nccl_drag=0.0, **changes)


def planner(gpus: int = 16, nodes: int = 2, **changes: Any) -> Planner:
    model = stack()
    x = torch.zeros(4, WIDTH, device="meta", requires_grad=True)
    hardware = hardware_of("h100", gpus, nodes).replace(**changes)
    return Planner(model, Workload(make_batch(model, 4, 1, {"x": x})), hardware)

"""How fast this host starts kernels, measured: where that decides, a plan is as good as this number."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from ourshard.planning.trace import UnitParts, trace

_LAYERS, _WIDTH = 4, 64
_SHAPE = (2, 16, _WIDTH)  # so small that a GPU is done with each kernel before the next one comes
_REPEATS = 30


def start_seconds(device: torch.device) -> float:
    """Return the seconds in which this process's host starts one kernel: of a model's forward and backward, a median.

    Ranks that measure at the same time share the host as they do in training.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        model = _model()
        batch = torch.randn(_SHAPE, device=device)
    spent = []
    for _ in range(_REPEATS + 3):
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        model(batch).sum().backward()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[3:]) / _kernels()


def _model() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, dropout=0.0, batch_first=True) for _ in range(_LAYERS)]
    return nn.Sequential(*layers)


def _kernels() -> int:
    """Count the kernels of one forward and backward."""
    with torch.device("meta"):
        model, batch = _model(), torch.empty(_SHAPE, device="meta")
    traced = trace(model, [UnitParts([model])], {"input": batch})
    return sum(visit.calls for visit in traced.visits)

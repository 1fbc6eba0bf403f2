"""A script's own default device, `torch.set_default_device` or `with torch.device(...)`, changes nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.integrations.tiny import rows, tiny
from tests.integrations.trainer_runs import enable

pytestmark = pytest.mark.ranks


def train(config: dict[str, Any], folder: str, device: str) -> dict[str, torch.Tensor]:
    """Train, save, train on, load, and train on, with a default device while nothing of the script's is made."""
    from accelerate import Accelerator

    enable(config)
    accelerator = Accelerator()
    model, (inputs, labels) = tiny(), rows()[:2]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    share = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.device(device):
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(3):
            accelerator.backward(F.cross_entropy(model(inputs[share]), labels[share]))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                accelerator.save_state(folder)
            if step == 1:
                accelerator.load_state(folder)
        return accelerator.get_state_dict(model)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_run_under_a_default_device_is_that_without(ranks, stage: int, tmp_path: Path):
    """The device is one that no host can read: a message that were made there would end the run."""
    config = {"stage": stage, "persist_below": 50}
    plain = ranks(2)(train, config, str(tmp_path / "plain"), "cpu")
    under = ranks(2)(train, config, str(tmp_path / "under"), "meta")
    for wanted, found in zip(plain, under, strict=True):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())

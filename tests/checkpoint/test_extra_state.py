"""What modules give as `get_extra_state` is part of a state dict: it is saved, loaded and converted, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint import convert
from ourshard.checkpoint.source import detect
from safetensors.torch import load_file
from torch import nn


class Counting(nn.Module):
    """Counts its forwards, and keeps the count where torch has a place for such things."""

    def __init__(self, as_tensor: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.count = 0
        self.as_tensor = as_tensor

    def get_extra_state(self) -> Any:
        return torch.arange(self.count) if self.as_tensor else {"count": self.count, "scale": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.count = len(state) if self.as_tensor else state["count"]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(rows)


def counted(root: str) -> dict[str, Any]:
    """Save by rows, load at another stage; take a state dict, load it; return the counts."""
    import ourshard

    def made(stage: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(Counting(False), Counting(True))
        ourshard.shard_model(model, {"stage": stage, "persist_below": 0})
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = made(3)
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    ourshard.save(model, optimizer, f"{root}/saved")
    told = {}
    for name, stage in (("saved", 1), ("state dict", 3)):
        other, its = made(stage)
        if name == "saved":
            ourshard.load(other, its, f"{root}/saved")
        else:
            ourshard.load_full_state_dict(other, ourshard.full_state_dict(model))
        told[name] = [module.count for module in other]
    plain = ourshard.shard_model(nn.Sequential(nn.Linear(5, 5)), {"stage": 3, "persist_below": 0})
    with pytest.raises(ValueError, match=r"unexpected: .*0\._extra_state"):
        ourshard.load(plain, None, f"{root}/saved")
    return told


@pytest.mark.ranks
def test_it_comes_back_at_any_stage_and_in_state_dicts(ranks: Any, tmp_path: Path) -> None:
    """Once it was dropped without a word, and a state dict that had it was refused."""
    for told in ranks(2)(counted, str(tmp_path)):
        assert told == {"saved": [2, 2], "state dict": [2, 2]}
    convert(tmp_path / "saved", tmp_path / "again", to="ourshard", world_size=3, rename=("^0=first",))
    with detect(tmp_path / "again") as source:
        assert source.description.extra_state["first._extra_state"]["count"] == 2
    report = convert(tmp_path / "saved", tmp_path / "weights", to="safetensors")
    assert "the extra state of modules" in report.losses


def written(root: str) -> list[str]:
    """Save whole models: a tensor is in the file, other things are refused on every rank."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3, "persist_below": 0}))
    tensor, other = accelerator.prepare(nn.Sequential(Counting(True)), nn.Sequential(Counting(False)))
    tensor(torch.ones(2, 5)).sum().backward()
    accelerator.save_model(tensor, f"{root}/tensor")
    with pytest.raises(ValueError, match=r"0\._extra_state is no tensor"):
        accelerator.save_model(other, f"{root}/other")
    accelerator.wait_for_everyone()
    return sorted(load_file(f"{root}/tensor/model.safetensors"))


@pytest.mark.ranks
def test_it_is_in_the_file_of_a_whole_model_or_refused(ranks: Any, tmp_path: Path) -> None:
    for names in ranks(2)(written, str(tmp_path)):
        assert names == ["0._extra_state", "0.inner.bias", "0.inner.weight"]

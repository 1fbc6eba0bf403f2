"""The example configs: each is read, each line says what it means, and each shows what its name says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ourshard.flags.files import load
from ourshard.flags.sources import read_document
from ourshard.values import flatten

from tests.commands import ROOT
from tests.ranks.nets import llama, token_loss, tokens

FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
SHOWS: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3, "reshard_after_forward": True},
    "hybrid": {"stage": 3, "shard_size": "node"},
    "zeropp": {"secondary_shard_size": 8, "communication.weights": "int8", "communication.gradients": "int4"},
    "offload_host": {"offload.optimizer": "cpu", "offload.params": "none"},
    "offload_nvme": {"offload.optimizer": "nvme", "offload.params": "cpu"},
    "lora": {"stage": 3, "persist_below": 100_000},
    "cpu": {"stage": 2},
    "ourshard": {"stage": 3},
    "multi_node": {"stage": 3, "checkpoint.keep": 3},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_config_is_read_and_each_line_is_explained(path: Path) -> None:
    values = load(path)
    result = read_document(values, path.name)
    assert values["distributed_type"] == "OURSHARD"
    assert result.said
    assert result.notes == ()
    assert all("#" in line for line in path.read_text().splitlines() if line.strip())
    assert values["num_processes"] % values["num_machines"] == 0


def test_each_config_is_among_those_that_are_looked_at() -> None:
    assert {path.stem for path in FILES} == set(SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_each_config_shows_what_its_name_says(name: str) -> None:
    config = flatten(read_document(load(ROOT / "accelerate_configs" / f"{name}.yaml"), name).config.to_dict())
    assert {key: config[key] for key in SHOWS[name]} == SHOWS[name]


def two_steps(values: dict[str, Any]) -> list[float]:
    """Return the losses of three batches, the last after two steps."""
    import torch
    from ourshard import shard_model

    model = shard_model(llama(), values)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = token_loss(model, tokens(0, 4))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_config_trains_two_steps(path: Path, ranks: Any, tmp_path: Path) -> None:
    values = load(path)["ourshard_config"]
    if "secondary_shard_size" in values:
        values["secondary_shard_size"] = 2  # of the 4 ranks that stand for 32 here
    if "nvme_path" in values.get("offload", {}):
        values["offload"]["nvme_path"] = str(tmp_path)
    losses = ranks(4 if load(path)["num_machines"] > 1 else 2)(two_steps, values)
    assert all(last < first for first, _, last in losses), losses


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_other_key_is_accelerates(path: Path) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    unknown = set(load(path)) - set(ClusterConfig.__dataclass_fields__) - {"ourshard_config"}
    assert not unknown

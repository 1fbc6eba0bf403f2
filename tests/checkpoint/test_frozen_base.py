"""Checkpoints by rows without the frozen base of adapters (CASES B06, I04)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.source import PARAM, CheckpointError, detect
from torch import nn

from tests.ranks.nets import llama, token_loss, tokens

pytestmark = pytest.mark.ranks


def adapted(seed: int = 0) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    base = llama(seed=seed)
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def made(config: dict[str, Any], seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    import ourshard

    model = ourshard.shard_model(adapted(seed), config)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        loss = token_loss(model, tokens(number, 2))  # all ranks the same, whatever their number
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_and_go_on(folder: str, config: dict[str, Any]) -> list[float]:
    import ourshard

    model, optimizer = made(config)
    steps(model, optimizer, range(2))
    ourshard.save(model, optimizer, folder)
    ourshard.wait_for_save()
    return steps(model, optimizer, range(2, 4))


def load_and_go_on(folder: str, config: dict[str, Any]) -> list[float]:
    import ourshard

    model, optimizer = made(config)
    steps(model, optimizer, range(5, 6))  # other adapters than were saved
    ourshard.load(model, optimizer, folder)
    return steps(model, optimizer, range(2, 4))


def names_in(folder: Path) -> set[str]:
    with detect(folder) as source:
        return {key.name for key in source.tensors if key.kind == PARAM}


CONFIGS: dict[str, dict[str, Any]] = {
    "stage 3": {"stage": 3, "persist_below": 0},
    "stage 3, small ones whole": {"stage": 3},
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "in the background": {"stage": 3, "checkpoint": {"asynchronous": True}},
    "offloaded": {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}},
}


@pytest.mark.parametrize("what", CONFIGS)
def test_adapters_alone_are_saved_and_go_on_over_the_same_base(ranks: Any, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "step"
    first, *_ = ranks(2)(save_and_go_on, str(folder), CONFIGS[what])
    names = names_in(folder)
    assert names
    assert all("lora_" in name for name in names), names
    for world, config in ((2, CONFIGS[what]), (3, {"stage": 3, "persist_below": 0})):
        for losses in ranks(world)(load_and_go_on, str(folder), config):
            torch.testing.assert_close(losses, first, atol=0 if config is CONFIGS[what] else 1e-5, rtol=0)


@pytest.mark.parametrize(("frozen", "peft", "base"), [("include", True, True), ("exclude", False, False)])
def test_the_config_says_what_is_saved_whatever_the_model_has(
    ranks: Any, tmp_path: Path, frozen: str, peft: bool, base: bool
) -> None:
    folder = tmp_path / "step"
    ranks(2)(save_frozen, str(folder), {"stage": 3, "checkpoint": {"frozen": frozen}}, peft)
    assert any("embed_tokens" in name for name in names_in(folder)) is base


def save_frozen(folder: str, config: dict[str, Any], peft: bool) -> None:
    import ourshard

    model = adapted() if peft else llama()
    model.get_input_embeddings().requires_grad_(False)
    ourshard.save(ourshard.shard_model(model, config), None, folder)


def change_and_save(folder: str) -> None:
    """Save a base of which one weight was written to, and one was trained and frozen again."""
    import ourshard

    model, _ = made({"stage": 3, "persist_below": 0})
    first, second = model.get_base_model().model.layers
    with torch.no_grad(), ourshard.gathered(first, writeback=True):
        first.mlp.up_proj.weight.mul_(2)
    thawed = second.mlp.up_proj.weight.requires_grad_(True)
    optimizer = torch.optim.SGD([thawed], lr=0.1)
    steps(model, optimizer, range(1))
    thawed.requires_grad_(False)
    steps(model, optimizer, range(1, 2))
    ourshard.save(model, None, folder)


def test_what_was_changed_since_the_model_was_sharded_is_saved(ranks: Any, tmp_path: Path) -> None:
    ranks(2)(change_and_save, str(tmp_path / "step"))
    names = {name for name in names_in(tmp_path / "step") if "lora_" not in name}
    assert {name for name in names if name.endswith("mlp.up_proj.weight")} == {
        f"base_model.model.model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)
    }
    assert not any("embed_tokens" in name for name in names)


def write_to_data(folder: str, stage: int) -> None:
    """Write to a whole parameter in the ways that torch does not count."""
    import ourshard

    model, optimizer = made({"stage": stage})
    steps(model, optimizer, range(1))
    model.get_base_model().model.norm.weight.data.mul_(3)
    ourshard.save(model, optimizer, folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_written_to_by_data_is_saved_too(ranks: Any, tmp_path: Path, stage: int) -> None:
    ranks(2)(write_to_data, str(tmp_path / "step"), stage)
    assert {name for name in names_in(tmp_path / "step") if "lora_" not in name} == {
        "base_model.model.model.norm.weight"
    }


def load_over_another(folder: str) -> tuple[str, bool]:
    import ourshard

    model, optimizer = made({"stage": 3}, seed=7)
    before = ourshard.full_state_dict(model)
    with pytest.raises(CheckpointError) as error:
        ourshard.load(model, optimizer, folder)
    after = ourshard.full_state_dict(model)
    return str(error.value), all(torch.equal(before[name], after[name]) for name in before)


def test_another_base_is_refused_and_nothing_is_loaded(ranks: Any, tmp_path: Path) -> None:
    ranks(2)(save_and_go_on, str(tmp_path / "step"), {"stage": 3})
    for error, same in ranks(3)(load_over_another, str(tmp_path / "step")):
        assert "here they are not those that it was trained on: base_model.model" in error
        assert "Start from the same base model" in error
        assert same


def test_what_is_left_out_is_named_by_inspect_and_by_conversions(ranks: Any, tmp_path: Path) -> None:
    from ourshard.checkpoint import convert, inspect

    ranks(2)(save_and_go_on, str(tmp_path / "step"), {"stage": 3})
    said = "frozen parameters, which the save left out (checkpoint.frozen)"
    with detect(tmp_path / "step") as source:
        assert any(said in loss for loss in inspect(source).losses)
    report = convert(tmp_path / "step", tmp_path / "other", to="safetensors")
    assert any(said in loss for loss in report.losses)

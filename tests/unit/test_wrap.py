"""Wrap units by class: a name that matches nothing, one of several, and none given (H01); what the root gives away."""

from __future__ import annotations

import logging

import ourshard
import pytest
from ourshard.config import WrapConfig
from ourshard.runtime import inventory
from ourshard.runtime.inventory import take_stock
from torch import nn

from tests.ranks.nets import WIDTH, Block, Toy, llama


def units(model: nn.Module, **wrap: object) -> list[str]:
    engine = ourshard.engine_of(ourshard.shard_model(model, {"stage": 3, "wrap": wrap}))
    assert engine is not None
    return [unit.label for unit in engine.units]


def test_a_misspelt_class_is_an_error_with_close_names_and_their_counts() -> None:
    with pytest.raises(
        ValueError, match=r"no module of the model is of class 'LLaMADecoderLayer'.*LlamaDecoderLayer \(2\)"
    ):
        units(llama(), classes=["LLaMADecoderLayer"])


def test_one_of_two_classes_is_enough_and_the_other_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ourshard"):
        found = units(llama(), classes=["LlamaDecoderLayer", "LlamaVisionLayer"])
    assert [label for label in found if "layers" in label] == ["model.layers.0", "model.layers.1"]
    assert any("LlamaVisionLayer" in message for message in caplog.messages)


def test_repeated_blocks_of_a_users_own_model_are_found() -> None:
    model = nn.Sequential(nn.Linear(13, 13), nn.Sequential(*(Block() for _ in range(3))))
    assert {"1.0", "1.1", "1.2"} <= set(units(model))


def test_lists_and_dicts_which_nobody_calls_are_no_units_by_size() -> None:
    parts = nn.ModuleDict({"a": nn.ModuleList(nn.Linear(5, 5) for _ in range(4)), "b": nn.Linear(20, 20)})
    model = nn.Sequential(nn.Linear(13, 13), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), parts)
    assert units(model, min_params=60) == ["0", "1", "2.b", "the root unit"]


def test_a_model_that_is_itself_the_list_of_blocks_is_cut_at_them() -> None:
    assert {"0", "1", "2"} <= set(units(nn.Sequential(*(Block() for _ in range(3)), nn.Linear(13, 13))))


def test_a_large_embedding_and_head_are_units_of_their_own_and_the_summary_says_the_largest() -> None:
    """E07: no unit holds both, so that no buffer of backward has the size of both."""
    model = nn.Sequential(nn.Embedding(40_000, 32), *(Block() for _ in range(2)), nn.Linear(32, 50_000, bias=False))
    engine = ourshard.engine_of(ourshard.shard_model(model, {"stage": 3}))
    assert engine is not None
    numel = {unit.label: sum(lane.layout.numel for lane in unit.lanes) for unit in engine.units}
    assert (numel["0.weight"], numel["3.weight"]) == (40_000 * 32, 50_000 * 32)
    assert {"1", "2"} <= set(numel)
    assert "the largest unit 3.weight with 1,600,000" in engine.summary()


def owners(model: nn.Module, small_numel: int) -> dict[str, set[str]]:
    """Return the short names of the parameters of each unit."""
    stock = take_stock(model, WrapConfig(), small_numel=small_numel)
    return {entry.name or "root": {p.name.removeprefix(f"{entry.name}.") for p in entry.parameters} for entry in stock}


def test_small_parameters_of_units_go_with_the_roots_but_not_where_a_unit_has_no_others_or_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norms = {f"blocks.{index}.norm.{name}" for index in range(2) for name in ("weight", "bias")}
    model = Toy(blocks=2)
    large = {"up.weight", "up.bias", "down.weight"}
    roots = {f"{layer}.{name}" for layer in ("first", "last") for name in ("weight", "bias")}
    assert owners(model, 20) == {"blocks.0": large, "blocks.1": large, "root": roots | norms}
    each = large | {"norm.weight", "norm.bias"}
    apart = {"blocks.0": each, "blocks.1": each, "root": roots}
    assert owners(model, 1000) == apart
    monkeypatch.setattr(inventory, "RIDERS_NUMEL", 4 * WIDTH - 1)
    assert owners(model, 20) == apart

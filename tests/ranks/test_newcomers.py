"""Parameters that come into a model after it was sharded: ranks would train them apart, so that they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.ranks.nets import WIDTH, Toy, square_loss, toy
from tests.ranks.pairs import joined, pair, part
from tests.ranks.training import TOY, sgd

pytestmark = pytest.mark.ranks

ENDS = {name: TOY[name] for name in ("stage 0", "stage 1", "stage 3")}


def another_layer(model: Toy) -> None:
    model.blocks.append(nn.Linear(WIDTH, WIDTH))


def another_weight(model: Toy) -> None:
    model.last.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def a_weight_norm(model: Toy) -> None:
    parametrizations.weight_norm(model.blocks[0].up)  # type: ignore[union-attr]


CHANGES: dict[str, Callable[[Toy], None]] = {
    "blocks.3.weight": another_layer,
    "last.weight": another_weight,
    "blocks.0.up": a_weight_norm,
}


def train_changed_models(config: dict[str, Any]) -> dict[str, str]:
    """Return what is said of each change."""
    from ourshard import shard_model

    said = {}
    for name, change in CHANGES.items():
        model = shard_model(toy(), config)
        square_loss(model, part(joined(0))).backward()
        with pytest.raises(RuntimeError) as caught:
            train_changed(model, change)
        said[name] = str(caught.value)
    return said


def train_changed(model: Toy, change: Callable[[Toy], None]) -> None:
    change(model)
    square_loss(model, part(joined(0))).backward()


@pytest.mark.parametrize("config", ENDS.values(), ids=ENDS)
def test_what_is_added_or_replaced_after_sharding_is_refused_by_name(ranks, config):
    for said in ranks(2)(train_changed_models, config):
        for name, text in said.items():
            assert name in text
            assert "before `prepare`" in text


def operate(config: dict[str, Any]) -> list[str]:
    """Return what is said where torch gives a layer of a sharded model other parameters."""
    from ourshard import shard_model

    model, said = shard_model(toy(), config), list[str]()
    up = model.blocks[0].up  # type: ignore[union-attr]
    for surgery in (
        lambda: parametrizations.weight_norm(up),
        lambda: parametrizations.spectral_norm(up),
        lambda: prune.l1_unstructured(up, "weight", 0.5),
    ):
        with pytest.raises(RuntimeError) as caught:
            surgery()
        said.append(str(caught.value))
    return said


def test_parametrizing_or_pruning_a_resting_weight_says_when_to_do_it(ranks):
    for said in ranks(2)(operate, TOY["stage 3"]):
        assert all("parametrizing or pruning it is not possible any more" in text for text in said), said


def train_with_others(config: dict[str, Any]) -> None:
    both = pair({**config, "wrap": {"ignore": ["last"]}}, toy, sgd)
    both.train(1)
    both.sharded.blocks[0].seen = nn.Parameter(torch.ones(2), requires_grad=False)
    both.sharded.last.gain = nn.Parameter(torch.ones(2))  # in a module that ourshard was told to leave alone
    square_loss(both.sharded, part(joined(1))).backward()


def test_frozen_newcomers_and_those_of_ignored_modules_are_the_users_own(ranks):
    ranks(2)(train_with_others, TOY["stage 3"])


def call_again_after_a_refusal(config: dict[str, Any]) -> list[str]:
    from ourshard import shard_model

    model, said = shard_model(toy(), config), []
    model.last.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            model(part(joined(0)))
        said.append(str(caught.value))
    assert not model.last.weight.any()
    return said


@pytest.mark.parametrize("name", ["stage 1", "stage 3"])
def test_a_weight_that_was_replaced_is_refused_in_each_forward(ranks, name):
    """The second one once took the old weight, and put it back."""
    for said in ranks(2)(call_again_after_a_refusal, TOY[name]):
        assert all("'weight' of unit 'the root unit' was replaced" in text for text in said)

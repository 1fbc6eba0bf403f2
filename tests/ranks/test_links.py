"""`communication: auto`: the links are measured, all ranks decide alike, and rank 0 can say why."""

from __future__ import annotations

from typing import Any

import pytest
from ourshard.config import Codec, ShardConfig
from ourshard.runtime import links
from ourshard.runtime.links import Pace, assumed

from tests.ranks.nets import llama, token_loss, tokens

AUTO: dict[str, Any] = {"weights": "auto", "gradients": "auto", "error_feedback": True, "block": 64}


def test_a_codec_has_to_save_a_tenth_of_the_time() -> None:
    assert Pace(1.0, 0.5).pays
    assert not Pace(1.0, 0.95).pays
    assert Pace(0.002, 0.001).told("weights") == "weights auto: 2.0 ms exact, 1.0 ms as int8, so int8"


def test_options_of_a_codec_that_is_not_chosen_go_with_it() -> None:
    config = ShardConfig.from_dict({"communication": {**AUTO, "node_size": 2}})
    none = assumed(config, Codec.INT8, Codec.NONE).communication
    assert (none.weights, none.gradients, none.error_feedback, none.node_size) == (Codec.INT8, Codec.NONE, False, None)
    both = assumed(config, Codec.NONE, Codec.INT8).communication
    assert (both.weights, both.gradients, both.error_feedback, both.node_size) == (Codec.NONE, Codec.INT8, True, 2)
    fixed = ShardConfig.from_dict({"communication": {"weights": "fp8"}})
    assert assumed(fixed, Codec.NONE, Codec.NONE) == fixed


def choose(pays: float | None, config: dict[str, Any]) -> dict[str, Any]:
    """Prepare a model and train a step; where `pays` is given, the codec has to be that much faster."""
    from ourshard import engine_of, shard_model

    before = links.PAYS
    links.PAYS = before if pays is None else pays
    try:
        model = shard_model(llama(), {"persist_below": 0, "ledger": True, **config})
    finally:
        links.PAYS = before
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    wire = set(engine.ledger.wire)
    token_loss(model, tokens(0, 1)).backward()
    chosen = engine.config.communication
    return {
        "chosen": (chosen.weights.value, chosen.gradients.value, chosen.error_feedback),
        "told": engine.chosen,
        "in summary": engine.chosen in engine.summary(),
        "before training": wire,
        "coded": "all_to_all/shard" in engine.ledger.wire,
        "residual": engine.ledger.held["residual"],
    }


@pytest.mark.ranks
@pytest.mark.parametrize(("pays", "codec"), [(None, None), (0.0, "none"), (1e9, "int8")], ids=["as it is", "no", "yes"])
def test_all_ranks_choose_alike_and_say_what_was_measured(pays, codec, ranks):
    told = ranks(2)(choose, pays, {"communication": AUTO})
    assert told[0] == told[1]
    weights, gradients, feedback = told[0]["chosen"]
    assert {weights, gradients} <= ({"none", "int8"} if codec is None else {codec})
    assert feedback is told[0]["coded"] is (gradients == "int8") is (told[0]["residual"] > 0)
    assert told[0]["told"].count("ms exact") == 2
    assert told[0]["in summary"]
    assert told[0]["before training"] == {"broadcast/world"}  # what was measured is not counted


@pytest.mark.ranks
def test_without_other_ranks_nothing_is_measured(ranks):
    config = {"shard_size": 1, "communication": {"weights": "auto"}}
    assert all("one rank has a copy, so none" in told["told"] for told in ranks(2)(choose, None, config))


def refused() -> list[str]:
    from ourshard import shard_model

    found = []
    for stage, what in ((2, "weights"), (0, "gradients")):
        with pytest.raises(ValueError, match="communication") as caught:
            shard_model(llama(), {"stage": stage, "communication": {what: "auto"}})
        found.append(str(caught.value))
    return found


@pytest.mark.ranks
def test_auto_is_refused_where_its_codec_would_be(ranks):
    for weights, gradients in ranks(2)(refused):
        assert "weights: auto needs stage 3" in weights
        assert "gradients: at stage 0" in gradients

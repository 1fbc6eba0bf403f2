"""Weights gathered as blocks of 8 bits: training stays near the exact one, evaluation is exact, bytes are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.nets import llama, token_loss, tokens
from tests.ranks.training import Configs, adamw, difference, llama_task, reference, train_all

pytestmark = pytest.mark.ranks

INT8: dict[str, Any] = {"stage": 3, "communication": {"weights": "int8", "block": 64}}
FP8: dict[str, Any] = {"stage": 3, "communication": {"weights": "fp8", "block": 64}}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
CODED: Configs = {
    "int8": INT8,
    "fp8": FP8,
    "whole until backward": {**INT8, "reshard_after_forward": False},
    "nothing persists": {**INT8, "persist_below": 0},
    "on the host": {**INT8, "offload": {"optimizer": "cpu", "params": "cpu"}},
    "recomputed": {**INT8, "activation_checkpointing": True},
}


def check_near(results: list[dict[str, Any]], configs: Configs, expected: Any) -> None:
    """Losses within 1%, weights within 5e-3 after 4 steps of at most 1e-3: a wrong gradient moves them the other way.

    They must differ, too: else nothing was coded.
    """
    for name in configs:
        for result in results:
            assert result[name].losses == pytest.approx(expected.losses, rel=1e-2), name
            assert 1e-6 < difference(result[name].state, expected.state) < 5e-3, name
        first = results[0][name].state
        assert all(difference(result[name].state, first) == 0 for result in results), name


def test_training_with_coded_weights_stays_near_one_process(ranks):
    task = llama_task(optimizer=adamw, accumulate=2, clip=1.0, steps=4)
    check_near(ranks(2)(train_all, task, CODED, timeout=120), CODED, reference(task, 2))


def test_hybrid_meshes_stay_near_one_process(ranks):
    """X01: 2 x 2, 4 x 1, and 1 x 4 where nothing is gathered and all is exact."""
    task = llama_task(optimizer=adamw, steps=3)
    configs = {"2x2": {**INT8, "shard_size": 2}, "4x1": INT8, "1x4": {**INT8, "shard_size": 1}}
    results, expected = ranks(4)(train_all, task, configs, timeout=120), reference(task, 4)
    alone = [result.pop("1x4") for result in results]
    assert all(difference(result.state, expected.state) < 1e-6 for result in alone)
    configs.pop("1x4")
    check_near(results, configs, expected)


def evaluate(config: dict[str, Any]) -> dict[str, Any]:
    """Return losses of a sharded model and of a plain one with its weights, and the bytes of a gather of each kind."""
    from ourshard import engine_of, full_state_dict, gathered, shard_model

    batch = tokens(0, 2)
    model = shard_model(llama(tie=False), {**config, "ledger": True, "persist_below": 0})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    seen: dict[str, Any] = {}
    plain = llama(tie=False)
    token_loss(model, batch).backward()
    for mode in ("training", "no_grad", "eval", "gathered"):
        model.train(mode in ("training", "no_grad"))
        engine.ledger.reset()
        with torch.set_grad_enabled(mode == "training"):
            if mode == "gathered":
                with gathered(model):
                    seen[mode] = token_loss(model, batch).item()
            else:
                loss = token_loss(model, batch)
                seen[mode] = loss.item()
        seen[f"{mode} bytes"] = engine.ledger.wire["all_gather/shard"]
        if mode == "training":
            loss.backward()
    plain.load_state_dict(full_state_dict(model))
    with torch.no_grad():
        seen["plain"] = token_loss(plain.eval(), batch).item()
    lanes = [lane for lane in engine.lanes() if lane.codec is not None]
    assert lanes
    assert all(len(parameter.shape) > 1 for lane in lanes for parameter in lane.parameters)
    exact = sum(lane.layout.numel * 4 // 2 for lane in engine.lanes() if lane.codec is None)
    seen["exact"] = exact + sum(lane.layout.numel * 4 // 2 for lane in lanes)
    seen["coded"] = exact + sum((lane.layout.numel + lane.layout.numel // 64 * 4) // 2 for lane in lanes)
    return seen


@pytest.mark.parametrize("config", [INT8, FP8], ids=["int8", "fp8"])
def test_only_training_is_coded_and_the_bytes_are_those_of_the_codes(config, ranks):
    for seen in ranks(2)(evaluate, config, timeout=60):
        for mode in ("no_grad", "eval", "gathered"):
            assert seen[mode] == pytest.approx(seen["plain"], abs=1e-6), mode
            assert seen[f"{mode} bytes"] == seen["exact"], mode
        assert abs(seen["training"] - seen["plain"]) > 1e-6
        assert seen["training bytes"] == seen["coded"]


def write_in_forward() -> str:
    from ourshard import gathered, shard_model

    model = shard_model(llama(), {**INT8, "persist_below": 0})

    def write(*_: Any) -> None:
        with gathered(model.model.layers[0], writeback=True):
            pass

    model.model.layers[0].register_forward_pre_hook(write)
    with pytest.raises(ValueError, match="as a codec left it"):
        token_loss(model, tokens(0, 2))
    return "refused"


def test_a_write_back_inside_of_a_training_forward_is_refused(ranks):
    assert ranks(2)(write_in_forward, timeout=60) == ["refused", "refused"]


def refusals() -> list[str]:
    from ourshard import shard_model

    found = []
    for config in ({"stage": 2, "communication": {"weights": "int8"}}, {"communication": {"gradients": "int8"}}):
        with pytest.raises(ValueError, match="communication") as caught:
            shard_model(llama(), config)
        found.append(str(caught.value))
    return found


def test_what_a_codec_cannot_do_is_refused_by_name(ranks):
    for weights, gradients in ranks(2)(refusals, timeout=60):
        assert "communication.weights: int8 needs stage 3" in weights
        assert "communication.gradients: coded reductions are not available" in gradients

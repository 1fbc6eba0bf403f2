"""Weights and gradients as blocks of few bits: training stays near the exact one, evaluation exact, bytes counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.ranks.nets import llama, token_loss, tokens
from tests.ranks.training import Configs, adamw, difference, llama_task, reference, sgd, train_all

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


def check_near(results: list[dict[str, Any]], configs: Configs, expected: Any, weights: float = 5e-3) -> None:
    """Losses within 1%, weights within 5e-3 after 4 steps of at most 1e-3: a wrong gradient moves them the other way.

    They must differ, too: else nothing was coded.
    """
    for name in configs:
        for result in results:
            assert result[name].losses == pytest.approx(expected.losses, rel=1e-2), name
            assert 1e-6 < difference(result[name].state, expected.state) < weights, name
        first = results[0][name].state
        assert all(difference(result[name].state, first) == 0 for result in results), name


def test_training_with_coded_weights_stays_near_one_process(ranks):
    task = llama_task(optimizer=adamw, accumulate=2, clip=1.0, steps=4)
    check_near(ranks(2)(train_all, task, CODED), CODED, reference(task, 2))


@pytest.mark.slow
def test_hybrid_meshes_stay_near_one_process(ranks):
    """X01: 2 x 2, 4 x 1, and 1 x 4 where nothing is gathered and all is exact."""
    task = llama_task(optimizer=adamw, steps=3)
    configs = {"2x2": {**INT8, "shard_size": 2}, "4x1": INT8, "1x4": {**INT8, "shard_size": 1}}
    results, expected = ranks(4)(train_all, task, configs), reference(task, 4)
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
    for seen in ranks(2)(evaluate, config):
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
    assert ranks(2)(write_in_forward) == ["refused", "refused"]


def refusals() -> list[str]:
    from ourshard import shard_model

    found = []
    whole = {"stage": 0, "communication": {"gradients": "int8"}}
    for config in ({"stage": 2, "communication": {"weights": "int8"}}, whole):
        with pytest.raises(ValueError, match="communication") as caught:
            shard_model(llama(), config)
        found.append(str(caught.value))
    return found


def test_what_a_codec_cannot_do_is_refused_by_name(ranks):
    for weights, gradients in ranks(2)(refusals):
        assert "communication.weights: int8 needs stage 3" in weights
        assert "communication.gradients: at stage 0" in gradients


def coded_gradients(stage: int, codec: str, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "persist_below": 0, "communication": {"gradients": codec, "block": 64}, **more}


GRADIENTS: Configs = {f"int8 {stage}": coded_gradients(stage, "int8") for stage in (1, 2, 3)}
GRADIENTS["int8 both"] = {**INT8, "communication": {"weights": "int8", "gradients": "int8", "block": 64}}


def test_training_with_coded_gradients_stays_near_one_process(ranks):
    task = llama_task(optimizer=adamw, accumulate=2, clip=1.0, steps=4)
    expected = reference(task, 2)
    check_near(ranks(2)(train_all, task, GRADIENTS), GRADIENTS, expected)
    int4: Configs = {"int4 3": coded_gradients(3, "int4")}
    # Gradients near zero may round to zero, whose steps of Adam are lost: 2 * 4 steps of 1e-3 bound the weights.
    check_near(ranks(2)(train_all, task, int4), int4, expected, weights=8e-3)


@pytest.mark.parametrize(("codec", "levels"), [("int8", 127), ("int4", 7)])
def test_the_mean_is_off_by_half_a_step_of_the_largest_scale_at_most(codec, levels, ranks):
    task = llama_task(optimizer=sgd, steps=1)
    most = 0.0
    for part in task.batch(0, 2 * task.rows).chunk(2):
        model = task.make()
        task.loss(model, part).backward()
        most = max(most, *(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None))
    configs = {codec: coded_gradients(3, codec)}
    for result in ranks(2)(train_all, task, configs):
        apart = difference(result[codec].state, reference(task, 2).state) / 0.1  # the learning rate
        assert 0 < apart <= most / levels / 2 * 1.001


def in_two_hops(stage: int, codec: str, **more: Any) -> dict[str, Any]:
    """Two nodes of two ranks, where there are four."""
    config = coded_gradients(stage, codec, **more)
    return {**config, "communication": {**config["communication"], "node_size": 2}}


def test_coded_gradients_over_two_nodes_or_two_replicas_stay_near_one_process(ranks):
    task = llama_task(optimizer=adamw, accumulate=2, clip=1.0, steps=3, rows=1)
    short = {"precision": {"reduce_dtype": "bfloat16"}}
    configs = {
        "2 nodes": in_two_hops(3, "int8"),
        "2 nodes, sums beside": in_two_hops(2, "int8", **short),
        "2 nodes, second shard": coded_gradients(3, "int8", secondary_shard_size=2),
        "2 replicas": coded_gradients(3, "int8", shard_size=2),
        "2 replicas, on the host": coded_gradients(2, "int8", shard_size=2, offload={"optimizer": "cpu"}),
    }
    check_near(ranks(4)(train_all, task, configs), configs, reference(task, 4))


def wire_of(config: dict[str, Any], **environment: str) -> tuple[dict[str, int], dict[str, int], bool]:
    """Return the bytes of a step by axis, those of the formulas, and whether a NaN of rank 0 alone is in each shard."""
    import os

    from ourshard import engine_of, shard_model

    from tests.wire_formulas import Axes, Step, Transport, by_collective, lane_traffic

    os.environ.update(environment)
    model = shard_model(llama(tie=False), {**config, "ledger": True})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    engine.ledger.reset()
    poison = float("nan") if engine.mesh.world.rank == 0 else 1.0
    (token_loss(model, tokens(0, 2)) * poison).backward()
    axes = Axes(engine.mesh.shard.size, engine.mesh.replicate.size, 2 if engine.mesh.node.size > 1 else None)
    wanted: Counter[str] = Counter()
    for lane in engine.lanes():
        codec = lane.coder.codec if lane.coder is not None else None
        transport = Transport(4, 4, gradients=codec)
        wanted += by_collective(lane_traffic(lane.layout.numel, axes, Step(3), transport))
        assert (codec is None) is (len(lane.parameters[0].shape) < 2)
    got = {name: nbytes for name, nbytes in engine.ledger.wire.items() if not name.startswith("all_gather/shard")}
    wanted = Counter({name: nbytes for name, nbytes in wanted.items() if not name.startswith("all_gather/shard")})
    return got, dict(wanted), not any(lane.gradient.isfinite().all() for lane in engine.lanes() if lane.coder)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_two_nodes_of_two_ranks_send_the_bytes_of_the_formulas_hop_by_hop(codec, ranks):
    """The launcher's number of ranks on a machine decides, where the config does not."""
    for got, wanted, poisoned in ranks(4)(wire_of, coded_gradients(3, codec), LOCAL_WORLD_SIZE="2"):
        assert got == wanted
        assert got["all_to_all/node"] == 2 * got["all_to_all/cross"] > 0
        assert "all_to_all/shard" not in got
        assert poisoned
    one_hop = ranks(4)(wire_of, in_two_hops(3, codec) | {"communication": {"gradients": codec, "node_size": 1}})
    assert all(got == wanted and "all_to_all/shard" in got for got, wanted, _ in one_hop)


@pytest.mark.parametrize("codecs", [{"gradients": "int8", "block": 64}, {"weights": "int8", "gradients": "int4"}])
def test_two_replicas_of_two_shards_send_the_bytes_of_the_formulas(codecs, ranks):
    """Also where blocks are of 256 for weights and 32 for gradients."""
    config = {"stage": 3, "persist_below": 0, "shard_size": 2, "communication": codecs}
    for got, wanted, poisoned in ranks(4)(wire_of, config):
        assert got == wanted
        assert got["all_to_all/replicate"] == got["all_gather/replicate"] > 0
        assert got["all_reduce/replicate"] < got["all_to_all/replicate"]  # norms and biases alone
        assert poisoned


def uneven_machines() -> str:
    import os

    import torch.distributed as dist
    from ourshard import shard_model

    os.environ["LOCAL_WORLD_SIZE"] = "3" if dist.get_rank() < 3 else "1"
    with pytest.raises(ValueError, match=r"different numbers of ranks \(1 to 3\)"):
        shard_model(llama(), coded_gradients(3, "int8"))
    with pytest.raises(ValueError, match="node_size: 3 does not divide the shard size of 4 ranks") as caught:
        shard_model(llama(), {"communication": {"gradients": "int8", "node_size": 3}})
    return str(caught.value)


def test_nodes_that_are_not_alike_are_refused_on_all_ranks(ranks):
    assert all("use 1 or 2 or 4" in text for text in ranks(4)(uneven_machines))


def reduce_once(config: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of one reduction, those expected, and whether a NaN on rank 0 alone is in this rank's norm."""
    from ourshard import engine_of, shard_model

    model = shard_model(llama(tie=False), {**config, "ledger": True})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    token_loss(model, tokens(0, 2)).backward()
    seen: dict[str, Any] = {"wire": dict(engine.ledger.wire), "coded": 0, "exact": 0}
    for lane in engine.lanes():
        bits = {"int8": 8, "int4": 4}[config["communication"]["gradients"]]
        if lane.coder is None:
            seen["exact"] += lane.layout.numel * 4 // 2
            assert all(len(parameter.shape) < 2 for parameter in lane.parameters)
        else:
            seen["coded"] += (lane.layout.numel * bits // 8 + lane.layout.numel // 64 * 4) // 2
    seen["finite"] = _is_finite(engine)
    poison = float("nan") if engine.mesh.world.rank == 0 else 1.0
    (token_loss(model, tokens(0, 2)) * poison).backward()
    seen["poisoned finite"] = _is_finite(engine)
    return seen


def _is_finite(engine: Any) -> bool:
    gradients = [lane.gradient for lane in engine.lanes() if lane.coder is not None]
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_reductions_send_the_bytes_of_the_codes_and_show_nan(codec, stage, ranks):
    for seen in ranks(2)(reduce_once, coded_gradients(stage, codec)):
        assert seen["wire"]["all_to_all/shard"] == seen["coded"] > 0
        assert seen["wire"]["reduce_scatter/shard"] == seen["exact"] > 0
        assert seen["finite"]
        assert not seen["poisoned finite"]

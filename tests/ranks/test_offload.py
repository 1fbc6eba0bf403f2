"""Masters, moments and gradients on the host: the numbers of training on the device, and the bytes by kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.nets import llama
from tests.ranks.training import (
    Configs,
    Task,
    adamw,
    assert_same_bits,
    compare,
    llama_task,
    reference,
    train,
    train_all,
)

pytestmark = pytest.mark.ranks

CPU = {"optimizer": "cpu"}
BOTH = {"optimizer": "cpu", "params": "cpu"}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
PLAIN: Configs = {f"stage {stage}": {"stage": stage} for stage in (1, 2, 3)}
PLAIN |= {f"bf16 {name}": {**config, "precision": BF16} for name, config in PLAIN.items()}
PLAIN["deferred"] = {"stage": 3, "accumulate": "deferred"}
PLAIN["whole until backward"] = {"stage": 3, "reshard_after_forward": False}
PLAIN["nothing persists"] = {"stage": 3, "persist_below": 0}


def offloaded(configs: Configs) -> Configs:
    """Return every config with the optimizer on the host; at stage 3 those with parameters there too."""
    there = {name: {**config, "offload": CPU} for name, config in configs.items()}
    return there | {f"params {n}": {**c, "offload": BOTH} for n, c in configs.items() if c["stage"] == 3}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("accumulate", "clip"),
    [(3, 0.5), pytest.param(1, None, marks=SLOW), pytest.param(1, 0.5, marks=SLOW), pytest.param(3, None, marks=SLOW)],
)
def test_training_has_the_same_bits_as_with_masters_on_the_device(ranks, accumulate, clip):
    """G01: clipping counts what is on the host."""
    task = llama_task(optimizer=adamw, accumulate=accumulate, clip=clip, steps=4)
    here = ranks(2)(train_all, task, PLAIN)
    there = ranks(2)(train_all, task, offloaded(PLAIN))
    for name in offloaded(PLAIN):
        for results, others in zip(here, there, strict=True):
            assert_same_bits(others[name], results[name.removeprefix("params ")], name)


def test_hybrid_meshes_and_one_rank_match_one_process(ranks):
    task = llama_task(optimizer=adamw, accumulate=2, clip=1.0, steps=3)
    hybrid = {f"hybrid {stage}": {"stage": stage, "shard_size": 2, "offload": CPU} for stage in (1, 2, 3)}
    compare(ranks(4), task, hybrid, reference(task, 4))
    compare(ranks(1), task, offloaded({"stage 3": {"stage": 3}, "stage 1": {"stage": 1}}), reference(task, 1))


def bytes_by_kind(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is held after training a few steps, and what the law says the host has."""
    from ourshard import engine_of, shard_model

    from tests.ranks.nets import token_loss, tokens

    model = shard_model(llama(), {**config, "ledger": True})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    optimizer = adamw(model.parameters())
    for step in range(2):
        token_loss(model, tokens(step, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    lanes = [lane for lane in engine.lanes() if not lane.placement.whole]
    return {
        "held": engine.ledger.held,
        "total": engine.ledger.held_total,
        "shards": sum(lane.layout.shard_numel for lane in lanes),
        "left": sum(lane.layout.shard_numel for lane in lanes if lane.offloaded),
        "shortest": min((lane.layout.shard_numel for lane in lanes if not lane.offloaded), default=0),
        "taken": engine.host.nbytes if engine.host else 0,
        "moments": sum(v.nbytes for s in optimizer.state.values() for k, v in s.items() if k == "exp_avg"),
    }


def test_the_host_has_master_and_gradient_and_the_device_a_shard_in_compute_dtype(ranks):
    config = {"stage": 3, "persist_below": 0, "precision": BF16}
    for there in ranks(2)(bytes_by_kind, {**config, "offload": CPU}):
        assert there["held"]["host"] == 2 * 4 * there["shards"]
        assert there["held"]["states"] == 2 * 4 * there["shards"]
        assert there["taken"] == 4 * 4 * there["shards"]
        assert there["held"]["shard"] == 2 * there["shards"]
        assert there["held"]["master"] == there["held"]["gradient"] == 0
        assert there["total"] == there["held"]["shard"]
    for there in ranks(2)(bytes_by_kind, {**config, "offload": BOTH}):
        assert there["held"]["host"] == (2 * 4 + 2) * there["shards"]
        assert there["taken"] == (4 * 4 + 2) * there["shards"]
        assert there["total"] == 0
    for here in ranks(2)(bytes_by_kind, config):
        assert here["held"]["master"] == 4 * here["shards"]
        assert here["held"]["host"] == here["held"]["shard"] == here["held"]["states"] == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_a_part_of_the_masters_leaves_and_the_numbers_stay(ranks, tmp_path, stage):
    task = llama_task(optimizer=adamw, accumulate=2, clip=0.5, steps=3)
    plain = {"stage": stage, "persist_below": 0, "precision": BF16}
    tiers = {"cpu": {"optimizer": "cpu"}, "nvme": {"optimizer": "nvme", "nvme_path": str(tmp_path)}}
    parts = {
        f"{t} {r}": {**plain, "offload": {**o, "optimizer_ratio": r}} for t, o in tiers.items() for r in (0.3, 0.8)
    }
    for results in ranks(2)(train_all, task, {"all here": plain, **parts}):
        here = results.pop("all here")
        for name, result in results.items():
            assert_same_bits(result, here, name)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.6, 1.0])
def test_no_more_than_the_ratio_leaves_and_each_byte_is_where_it_should_be(ranks, ratio):
    config = {"stage": 3, "persist_below": 0, "precision": BF16, "offload": {**CPU, "optimizer_ratio": ratio}}
    for seen in ranks(2)(bytes_by_kind, config):
        held, shards, left = seen["held"], seen["shards"], seen["left"]
        assert left <= ratio * shards
        assert left >= ratio * shards - seen["shortest"]
        assert held["host"] == held["states"] == 8 * left
        assert seen["taken"] == 16 * left
        assert held["shard"] == 2 * left
        assert held["master"] == 4 * (shards - left)


def frozen_bytes(offload: dict[str, str]) -> tuple[dict[str, int], int, float]:
    """Train one parameter of a frozen model; return what is held, the elements of frozen shards, and a loss."""
    from ourshard import engine_of, shard_model

    from tests.ranks.nets import token_loss, tokens

    model = llama().requires_grad_(False)
    next(p for n, p in model.named_parameters() if "q_proj" in n).requires_grad_(True)
    shard_model(model, {"stage": 3, "persist_below": 0, "offload": offload, "ledger": True})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    for step in range(2):
        loss = token_loss(model, tokens(step, 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine.ledger.held, sum(x.layout.shard_numel for x in engine.lanes() if not x.trainable), loss.item()


def test_frozen_parameters_rest_on_the_host_with_offloaded_parameters(ranks):
    """G05: what adapters train on is not on the device between uses."""
    there, here = ranks(2)(frozen_bytes, BOTH), ranks(2)(frozen_bytes, {})
    for (held, frozen, loss), (plain, _, same) in zip(there, here, strict=True):
        assert loss == same
        assert held["master"] == 0
        assert held["host"] >= 4 * frozen
        assert plain["master"] >= 4 * frozen


def write_and_read(offload: dict[str, str]) -> list[float]:
    """Write into masters that are not on the device by every way in, and read whole values back."""
    import ourshard
    from ourshard import engine_of, full_state_dict, shard_model

    model = shard_model(llama(), {"stage": 3, "persist_below": 0, "precision": BF16, "offload": offload})
    engine = engine_of(model)
    assert engine is not None
    name, parameter = next((n, p) for n, p in model.named_parameters() if "q_proj" in n)
    seen = []
    with ourshard.gathered(model, writeback=True), torch.no_grad():
        dict(model.named_parameters())[name].fill_(0.5)
    seen.append(full_state_dict(model)[name].mean().item())
    with torch.no_grad():
        parameter.copy_(torch.full(parameter.shape, 0.25))
    with ourshard.gathered(model):
        seen.append(dict(model.named_parameters())[name].float().mean().item())
    model.load_state_dict({n: torch.full_like(v, 2.0) for n, v in full_state_dict(model).items()})
    with ourshard.gathered(model):
        seen.append(dict(model.named_parameters())[name].float().mean().item())
    return seen


def test_writes_reach_the_masters_and_go_up_again(ranks):
    assert ranks(2)(write_and_read, CPU) == [[0.5, 0.25, 2.0]] * 2


def saved(folder: str, config: dict[str, Any], load: bool) -> Any:
    """Train and save, or load and train on, through Accelerate."""
    from accelerate import Accelerator
    from ourshard import ShardPlugin, full_state_dict

    from tests.ranks.nets import token_loss, tokens

    accelerator = Accelerator(ourshard_plugin=ShardPlugin(config))
    model = llama()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    if load:
        accelerator.load_state(folder)
    for step in range(2 * load, 2 * load + 2):
        accelerator.backward(token_loss(model, tokens(step, 4).chunk(2)[accelerator.process_index]))
        optimizer.step()
        optimizer.zero_grad()
    if not load:
        accelerator.save_state(folder)
    return full_state_dict(model)


def test_a_checkpoint_moves_between_host_and_device(ranks, tmp_path):
    here, there = {"stage": 2}, {"stage": 3, "offload": CPU}
    ranks(2)(saved, str(tmp_path / "a"), there, False)
    ranks(2)(saved, str(tmp_path / "b"), here, False)
    results = [ranks(2)(saved, str(tmp_path / f), c, True) for f in "ab" for c in (here, there)]
    for name, value in results[0][0].items():
        for result in results[1:]:
            torch.testing.assert_close(result[0][name], value, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"stage": 0, "offload": CPU}, "at stage 0 masters are whole"),
    ],
)
def test_what_is_not_there_is_refused_on_every_rank(ranks, config, said):
    with pytest.raises(AssertionError, match=said) as caught:
        ranks(2)(train, Task(), config)
    assert len(caught.value.failures) == 2


def short_of_memory(free: int) -> tuple[str, list[str]]:
    """Shard with so many bytes free on the host; return the error, and what rank 0 logged."""
    import logging

    from ourshard import shard_model
    from ourshard.runtime import host_room

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ourshard").addHandler(handler)
    before, host_room.free_memory = host_room.free_memory, lambda: free
    given_back, host_room._on_host = host_room._on_host, lambda model: 0
    try:
        shard_model(llama(), {"stage": 3, "persist_below": 0, "offload": BOTH})
    except ValueError as error:
        return str(error), said
    finally:
        host_room.free_memory, host_room._on_host = before, given_back
        logging.getLogger("ourshard").removeHandler(handler)
    return "", said


def test_memory_that_the_host_does_not_have_is_named_before_the_model_is_sharded(ranks):
    """I14: masters and gradients must fit; AdamW's state should."""
    numel = sum(p.numel() for p in llama().parameters())
    for error, _ in ranks(2)(short_of_memory, 7 * numel):
        assert "parameters of 2 ranks, with" in error
        assert "offload.optimizer: nvme" in error
    (error, said), _ = ranks(2)(short_of_memory, 12 * numel)
    assert not error
    assert any("The kernel ends a process" in each for each in said)
    (error, said), _ = ranks(2)(short_of_memory, 32 * numel)
    assert not any("The kernel" in each for each in said)

"""Every combination of tiers for masters and for parameters: the bits of training on the device, and what is where."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.nets import llama, token_loss, tokens
from tests.ranks.test_offload import saved
from tests.ranks.training import Configs, adamw, assert_same_bits, llama_task, train_all

pytestmark = pytest.mark.ranks

TIERS = ("none", "cpu", "nvme")
PARAMS = TIERS
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
ALONE = {"params": "cpu"}


def combinations(stage: int) -> list[tuple[str, str]]:
    """Return (params, optimizer) of all that leave something on no device; below stage 3 parameters stay."""
    pairs = itertools.product(PARAMS if stage == 3 else ("none",), TIERS)
    return [pair for pair in pairs if pair != ("none", "none")]


def tiers(params: str, optimizer: str, folder: Path, **more: Any) -> dict[str, Any]:
    path = {"nvme_path": str(folder)} if "nvme" in (params, optimizer) else {}
    return {"params": params, "optimizer": optimizer, **path, **more}


def same_bits(ranks: Any, folder: Path, plain: Configs, ratios: tuple[float, ...] = (1.0,), **options: Any) -> None:
    """Train each of `plain` on the device, then with each combination, and compare."""
    task = llama_task(optimizer=adamw, **options)
    there: Configs = {}
    for name, config in plain.items():
        for (params, optimizer), ratio in itertools.product(combinations(config["stage"]), ratios):
            offload = tiers(params, optimizer, folder, optimizer_ratio=ratio)
            there[f"{name}: params {params}, optimizer {optimizer}, {ratio}"] = {**config, "offload": offload}
    mine, others = ranks(2)(train_all, task, plain), ranks(2)(train_all, task, there, timeout=240)
    for name in there:
        for results, twins in zip(mine, others, strict=True):
            assert_same_bits(twins[name], results[name.partition(":")[0]], name)


STAGE_3: Configs = {"bf16": {"stage": 3, "persist_below": 0, "precision": BF16}}


def test_every_combination_of_tiers_has_the_bits_of_training_on_the_device(ranks, tmp_path):
    same_bits(ranks, tmp_path, STAGE_3, accumulate=2, clip=0.5, steps=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 1e-3, 1e9])
def test_at_every_stage_with_any_accumulation_and_clipping_too(ranks, tmp_path, accumulate, clip):
    plain = {f"stage {stage}": {"stage": stage, "persist_below": 0} for stage in (1, 2, 3)} | STAGE_3
    same_bits(ranks, tmp_path, plain, accumulate=accumulate, clip=clip, steps=3)


@pytest.mark.slow
def test_with_a_part_of_the_masters_too(ranks, tmp_path):
    same_bits(ranks, tmp_path, STAGE_3, ratios=(0.3, 0.8), accumulate=2, clip=0.5, steps=3)


def with_masters_over_replicas(offload: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, int], int]:
    from ourshard import engine_of, full_state_dict, shard_model

    config = {"stage": 3, "shard_size": 2, "shard_optimizer_over": "all", "persist_below": 0, "precision": BF16}
    model = shard_model(llama(), {**config, "offload": offload, "ledger": True})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    optimizer = adamw(model.parameters())
    for step in range(2):
        token_loss(model, tokens(step, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model), engine.ledger.held, sum(lane.segment.numel() for lane in engine.lanes())


def test_a_segment_beside_masters_on_the_device_rests_on_the_host(ranks):
    there, here = ranks(4)(with_masters_over_replicas, ALONE), ranks(4)(with_masters_over_replicas, {})
    for (state, held, numel), (plain, above, _) in zip(there, here, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in plain.items())
        assert (held["host"], held["shard"]) == (2 * numel, 0)
        assert (above["host"], above["shard"]) == (0, 2 * numel)
        assert held["master"] == above["master"]


def lora(stage: int, offload: dict[str, Any], reentrant: bool) -> tuple[dict[str, torch.Tensor], dict[str, int], int]:
    """Train adapters over a frozen base with checkpointing; return them, what is held, and the frozen elements."""
    from ourshard import engine_of, full_state_dict, shard_model
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama().to(torch.bfloat16), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    precision = {"param_dtype": "bfloat16"}
    config = {"stage": stage, "persist_below": 0, "precision": precision, "offload": offload, "ledger": True}
    shard_model(model, config)
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    for step in range(2):
        token_loss(model, tokens(step, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    frozen = sum(lane.master.numel() for lane in engine.lanes() if not lane.trainable)
    state = full_state_dict(model)
    return {name: value for name, value in state.items() if "lora" in name}, engine.ledger.held, frozen


def loras(stage: int, folder: str, pairs: list[tuple[str, str]], ways: tuple[bool, ...] = (True, False)) -> None:
    """Compare adapters bit for bit with those trained on the device, and see where the frozen base is."""
    for reentrant in ways:
        here, _, _ = lora(stage, {}, reentrant)
        for params, optimizer in pairs:
            offload = tiers(params, optimizer, Path(folder))
            there, held, frozen = lora(stage, offload, reentrant)
            assert all(torch.equal(value, there[name]) for name, value in here.items()), (params, optimizer)
            below = {"none": "master", "cpu": "host", "nvme": "disk"}[params]
            assert stage < 3 or held[below] >= 2 * frozen, (params, optimizer)
            assert stage < 3 or params == "none" or held["master"] < 2 * frozen, (params, optimizer)


def test_adapters_over_a_checkpointed_base_train_the_same_wherever_it_rests(ranks, tmp_path):
    """G05."""
    ranks(2)(loras, 3, str(tmp_path), [("nvme", "none"), ("cpu", "nvme")], (False,))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adapters_at_every_stage_and_with_every_combination_too(ranks, tmp_path, stage):
    """G05."""
    ranks(2)(loras, stage, str(tmp_path), combinations(stage), timeout=240)


def used(offload: dict[str, Any]) -> list[Any]:
    """Train a little, then evaluate, generate, look at whole values, unfreeze, and train on."""
    import ourshard
    from ourshard import clip_grad_norm_, full_state_dict, shard_model

    model = llama()
    model.model.layers[0].requires_grad_(False)
    shard_model(model, {"stage": 3, "persist_below": 0, "precision": BF16, "offload": offload})
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    seen: list[Any] = []

    def train(number: int) -> None:
        loss = token_loss(model, tokens(number, 2))
        loss.backward()
        seen.append((loss.item(), clip_grad_norm_(model, 0.3).item()))
        optimizer.step()
        optimizer.zero_grad()

    for step in range(2):
        train(step)
    with torch.no_grad():
        seen.append(token_loss(model, tokens(7, 3)).item())
        seen.append(model.generate(input_ids=tokens(8, 2)[:, :4], max_new_tokens=5, do_sample=False).tolist())
    with ourshard.gathered(model):
        seen.append([p.double().sum().item() for p in model.parameters()])
    model.load_state_dict({name: value * 0.5 for name, value in full_state_dict(model).items()})
    model.model.layers[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.model.layers[0].parameters())})
    for step in range(2, 4):
        train(step)
    return [*seen, {name: value.double().sum().item() for name, value in full_state_dict(model).items()}]


def uses(folder: str, pairs: list[tuple[str, str]]) -> None:
    here = used({})
    for params, optimizer in pairs:
        assert used(tiers(params, optimizer, Path(folder))) == here, (params, optimizer)


def test_evaluation_generation_gathered_loading_and_unfreezing_are_the_same(ranks, tmp_path):
    ranks(2)(uses, str(tmp_path), [("nvme", "nvme")])


@pytest.mark.slow
def test_they_are_with_every_combination(ranks, tmp_path):
    ranks(2)(uses, str(tmp_path), combinations(3), timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize(("params", "optimizer"), combinations(3))
def test_a_checkpoint_of_every_combination_goes_on_on_the_device(ranks, tmp_path, params, optimizer):
    files = tmp_path / "disk"
    files.mkdir()
    there = {"stage": 3, "persist_below": 0, "offload": tiers(params, optimizer, files)}
    here = {"stage": 3, "persist_below": 0}
    ranks(2)(saved, str(tmp_path / "a"), there, False)
    first, second = [ranks(2)(saved, str(tmp_path / "a"), config, True) for config in (here, there)]
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


def windows_of_adapters(folder: str) -> tuple[int, int]:
    """Train a norm over a frozen base, all on the disk; return the bytes of the host, and what was said of them."""
    from ourshard import engine_of, shard_model
    from ourshard.runtime.layout import UnitLayout
    from ourshard.runtime.tiers import host_need

    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    offload = tiers("nvme", "nvme", Path(folder))
    engine = engine_of(shard_model(model, {"stage": 3, "persist_below": 0, "offload": offload}))
    assert engine is not None
    assert engine.host is not None
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    token_loss(model, tokens(0, 2)).backward()
    optimizer.step()
    layouts = [UnitLayout(tuple(lane.layout for lane in unit.lanes)) for unit in engine.units]
    return engine.host.nbytes, host_need(layouts, engine.config.offload, engine.mesh.shard.size).with_adamw


def test_windows_of_what_is_stepped_are_no_longer_than_what_is_stepped(ranks, tmp_path):
    """Those for a few adapters were as long as the longest frozen lane."""
    for taken, said in ranks(2)(windows_of_adapters, str(tmp_path)):
        assert taken == said


def law(params: str, optimizer: str, folder: str) -> dict[str, Any]:
    """Return what a rank holds after two steps, the most of whole parameters at once, and its elements."""
    from ourshard import engine_of, shard_model
    from ourshard.runtime.layout import UnitLayout
    from ourshard.runtime.tiers import host_need

    offload = tiers(params, optimizer, Path(folder))
    model = llama(layers=6)
    shard_model(model, {"stage": 3, "persist_below": 0, "precision": BF16, "offload": offload, "ledger": True})
    engine = engine_of(model)
    assert engine is not None
    assert engine.ledger is not None
    optimizer_ = adamw(model.parameters())
    for step in range(3):
        engine.ledger.reset()
        token_loss(model, tokens(step, 2)).backward()
        optimizer_.step()
        optimizer_.zero_grad()
    lanes = list(engine.lanes())
    layouts = [UnitLayout(tuple(lane.layout for lane in unit.lanes)) for unit in engine.units]
    units = sorted(sum(lane.full.nbytes for lane in unit.lanes) for unit in engine.units[:-1])
    return {
        "held": engine.ledger.held,
        "slots": engine.ledger.peak["slot"],
        "units": units,
        "root": sum(lane.full.nbytes for lane in engine.root.lanes),
        "numel": sum(lane.layout.shard_numel for lane in lanes),
        "longest": max(lane.layout.shard_numel for lane in lanes),
        "disk": engine.disk.nbytes if engine.disk else 0,
        "host": engine.host.nbytes if engine.host else 0,
        "need": host_need(layouts, engine.config.offload, engine.mesh.shard.size),
    }


def padded(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "params", "optimizer"),
    [
        (1, "cpu", "cpu"),
        (2, "nvme", "nvme"),
        *(pytest.param(1, *pair, marks=SLOW) for pair in (("none", "cpu"), ("nvme", "cpu"), ("nvme", "nvme"))),
        *(pytest.param(2, *pair, marks=SLOW) for pair in (("none", "cpu"), ("cpu", "cpu"), ("nvme", "cpu"))),
    ],
)
def test_each_byte_is_where_the_tier_says_and_the_device_has_two_units(ranks, tmp_path, world, params, optimizer):
    """One unit computes and one is on its way, on a single rank too, unless whole parameters stay on the device."""
    for seen in ranks(world)(law, params, optimizer, str(tmp_path)):
        numel, held = seen["numel"], seen["held"]
        on_disk = 12 * numel * (optimizer == "nvme") + 2 * numel * (params == "nvme")
        windows = 3 * 3 * padded(4 * seen["longest"]) * (optimizer == "nvme")
        windows += 3 * padded(2 * seen["longest"]) * (params == "nvme")
        host = (4 if optimizer == "nvme" else 8) * numel + 2 * numel * (params == "cpu") + windows
        assert held["host"] == host
        assert held["states"] == 8 * numel * (optimizer == "cpu")
        assert seen["host"] == held["host"] + held["states"] == seen["need"].with_adamw
        assert seen["need"].nbytes == host - 3 * 3 * padded(4 * seen["longest"]) * (optimizer == "nvme")
        assert held["disk"] == seen["disk"] == on_disk
        assert held["master"] == held["gradient"] == 0
        if params == "none" and world == 1:
            assert held["full"] == 2 * numel
            continue
        assert held["shard"] == 2 * numel * (params == "none")
        assert held["slot"] == 0
        assert seen["slots"] <= seen["root"] + sum(seen["units"][-2:])

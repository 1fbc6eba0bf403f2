"""Clients as they are, on two ranks against one process: C01, C06, D02, F01, F06, F07 of CASES.md, and adapters."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.client_runs import RUNS, apart, run_all, stops_early, trainer_of, world
from tests.integrations.trainer_runs import Case

pytestmark = pytest.mark.ranks

SHARD = {"persist_below": 50}
# Metrics of logits are sums over thousands of values, those of roots amplify rounding.
TOLERANCE = {"evaluates_in_pieces": 1e-3, "learns_from_a_teacher": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@functools.cache
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    return run_all(str(folder / "alone"), None)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_clients_on_two_ranks_get_what_one_process_gets(ranks, folder, stage):
    results = ranks(2)(run_all, str(folder / str(stage)), {**SHARD, "stage": stage}, timeout=200)
    for name in RUNS:
        wanted = dict(alone(folder)[name])
        norm = wanted["whole"][0][1] if name == "classifier" else 0.0
        if norm and wanted["accumulated"][0][1] > 1.9 * norm:
            wanted["accumulated"] = wanted["whole"]  # one process multiplies such a loss by the accumulation steps
        for found in results:
            assert apart(found[name], wanted) < TOLERANCE.get(name, 2e-6), (name, found[name], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("peft", [None, "lora"])
@pytest.mark.parametrize("alone", [False, True])
def test_stopping_early_gives_the_best_model_back(ranks, tmp_path, peft, alone):
    options = {"peft": peft, "save_only_model": alone}
    wanted = stops_early(str(tmp_path / "one"), None, **options)
    for found in ranks(2)(stops_early, str(tmp_path / "two"), {**SHARD, "stage": 3}, **options):
        assert apart(found, wanted) < 2e-6


def saves_adapters(folder: str) -> dict[str, Any]:
    """Save adapters; tell what was gathered, and whether what is in the file is what the ranks have."""
    import ourshard
    from ourshard.runtime.part import part_state
    from safetensors.torch import load_file

    trainer = trainer_of(Case(peft="lora", steps=1), folder, {**SHARD, "stage": 3, "ledger": True})
    trainer.train()
    engine = ourshard.engine_of(trainer.model)
    with torch.no_grad(), ourshard.gathered(trainer.model, writeback=True):
        for name, parameter in trainer.model.named_parameters():
            if "lora_" in name:  # other values in each half, so that a half alone would show
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    engine.ledger.reset()
    trainer.save_model()
    moved = dict(engine.ledger.wire)
    trainer.accelerator.wait_for_everyone()
    state = part_state(trainer.model, "the test reads the weights")
    saved = load_file(f"{folder}/adapter_model.safetensors")
    held = {name.replace(".default.", "."): value for name, value in state.items() if "lora_" in name}
    padded = sum(lane.layout.numel * 4 for lane in engine.lanes() if lane.trainable and not lane.placement.whole)
    return {"moved": moved, "padded": padded, "saved": saved, "held": held, "world": world()}


def test_a_save_of_adapters_gathers_adapters_alone_and_all_of_them(ranks, tmp_path):
    """B06, A15."""
    for told in ranks(2)(saves_adapters, str(tmp_path)):
        assert sum(told["moved"].values()) == told["padded"] * (told["world"] - 1) // told["world"]
        assert set(told["saved"]) == set(told["held"])
        assert all(torch.equal(told["saved"][name], value) for name, value in told["held"].items())


def attaches_adapters() -> tuple[int, int]:
    import ourshard
    import peft

    from tests.integrations.trainer_runs import llama, quiet

    quiet()
    model = ourshard.shard_model(llama(), {**SHARD, "stage": 3, "ledger": True})
    ledger = ourshard.engine_of(model).ledger
    ledger.reset()
    adapters = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return ledger.wire_total, sum("lora_" in name for name, _ in adapters.named_parameters())


def test_attaching_adapters_to_a_sharded_model_gathers_nothing(ranks):
    """B09."""
    assert ranks(2)(attaches_adapters) == [(0, 4), (0, 4)]


def reads_on_one_rank(folder: str, stage: int) -> list[str]:
    """Train with a callback that reads weights, gradients and names on the first rank alone."""
    from transformers import TrainerCallback

    told = []

    class Reads(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            if args.process_index == 0:
                weight = model.model.embed_tokens.weight
                told.append(f"{tuple(weight.shape)} {weight.numel()} {weight.dtype}")
                try:
                    told.append(f"{weight.norm().item():.5f}")
                except RuntimeError as error:
                    told.append(str(error))

    trainer = trainer_of(Case(steps=2), folder, {**SHARD, "stage": stage}, callbacks=[Reads()])
    trainer.train()
    told.append(str(trainer.state.global_step))
    return told


def test_a_callback_that_reads_weights_on_one_rank_sees_them_or_hears_what_to_do(ranks, tmp_path):
    """D07: no hang, no zeros, and training goes on."""
    whole, none = ranks(2)(reads_on_one_rank, str(tmp_path / "2"), 2)
    assert float(whole[1]) > 1
    sharded, _ = ranks(2)(reads_on_one_rank, str(tmp_path / "3"), 3)
    assert sharded[0] == whole[0] == "(101, 32) 3232 torch.float32"
    assert "'model.embed_tokens.weight' (shape (101, 32)) is sharded" in sharded[1]
    assert "ourshard.gathered(model)" in sharded[1]
    assert sharded[-1] == none[-1] == "2"

"""TRL's trainers on two ranks at stage 3, unchanged. Needs the extra `trl`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.commands import free_port, run_cli

pytest.importorskip("trl", reason="needs TRL: pip install -e '.[trl]'")

from tests.integrations import trl_runs
from tests.integrations.client_runs import apart, trainer_of
from tests.integrations.trainer_runs import Case

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

OURS = {"ACCELERATE_USE_OURSHARD": "true", "OURSHARD_CONFIG": json.dumps({"stage": 3, "persist_below": 30})}
Told = dict[str, tuple[bool, np.ndarray]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trl")
    trl_runs.save_models(made)
    return made


def train(folder: Path, kinds: list[str], ranks: int, env: dict[str, str] | None = None) -> Told:
    command: list[str | Path] = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_port())]
    out = run_cli([*command, trl_runs.__file__, folder, *kinds], env=env, timeout=200).stdout
    told = [json.loads(line.removeprefix("TOLD")) for line in out.splitlines() if line.startswith("TOLD")]
    assert [kind for kind, *_ in told] == kinds, out
    return {kind: (sharded, np.array(steps)) for kind, sharded, steps in told}


def assert_same(ours: Told, wanted: Told) -> None:
    for kind, (sharded, steps) in ours.items():
        assert sharded
        assert not wanted[kind][0]
        assert steps.shape == (3, 2)
        assert np.allclose(steps, wanted[kind][1], rtol=1e-6, atol=1e-5), (kind, steps, wanted[kind][1])
        assert steps[:, 1].max() > 0, (kind, steps)


def test_sft_dpo_kto_and_reward_train_as_one_process_on_the_joined_batches(folder):
    kinds = ["sft", "dpo", "kto", "reward"]
    assert_same(train(folder, kinds, 2, OURS), train(folder, kinds, 1))


def test_a_model_that_is_its_own_reference_is_sharded_before_it_is_run(folder):
    """Under DDP the Trainer has put it onto the GPU by then; here `prepare` does."""
    kinds = list(trl_runs.PRECOMPUTED)
    assert_same(train(folder, kinds, 2, OURS), train(folder, kinds, 1))


def test_grpo_and_rloo_train_as_under_stock_ddp(folder):
    """What a rank samples depends on the number of ranks, so the measure is DDP on as many."""
    kinds = ["grpo", "rloo"]
    stock = train(folder, kinds, 2, {"ACCELERATE_USE_CPU": "true"})
    assert_same(train(folder, kinds, 2, OURS), stock)


def sent_to_vllm(folder: str, shard: dict[str, Any] | None) -> dict[str, dict[str, torch.Tensor]]:
    """Return what TRL would send to vLLM, which is not installed, of a trained model and of one with adapters."""
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    found = {}
    for kind in (None, "lora"):
        trainer = trainer_of(Case(steps=2, peft=kind), folder, shard)
        trainer.train()
        sender = object.__new__(VLLMGeneration)  # its constructor starts vLLM
        sender.model, sender.accelerator = trainer.model, trainer.accelerator
        sender._dist = DistributedBackend(trainer.accelerator)
        found[str(kind)] = {name: weight.detach().clone() for name, weight in sender._iter_named_params()}
        trainer.train()  # adapters are merged no more
    return found


def test_weights_on_their_way_to_vllm_are_whole_and_merged(ranks, tmp_path):
    """X07."""
    wanted = sent_to_vllm(str(tmp_path / "one"), None)
    assert len(wanted["None"]) == len(wanted["lora"]) == 21
    for found in ranks(2)(sent_to_vllm, str(tmp_path / "two"), {"stage": 3, "persist_below": 30}):
        assert apart(found, wanted) < 2e-6
        assert all(type(weight) is torch.Tensor for weight in found["None"].values())

"""Kinds of adapters that PEFT has, each trained, saved and opened again, on two ranks against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.integrations.client_runs import apart, column, trainer_of
from tests.integrations.trainer_runs import Case, Tokens, llama, whole_state
from tests.ranks.families import DECODER, EXPERTS, build, labelled, words

pytestmark = pytest.mark.ranks

SHARD = {"persist_below": 50, "stage": 3}
QUERIES = ["q_proj", "v_proj"]


def config_of(kind: str) -> Any:
    """Return the config of a kind; small ranks and blocks that divide 32."""
    import peft

    low = {"r": 4, "target_modules": QUERIES}
    virtual = {"num_virtual_tokens": 5, "encoder_hidden_size": 32}
    waves = {"n_frequency": 20, "target_modules": QUERIES}
    made: dict[str, Callable[..., Any]] = {
        "prefix": lambda **task: peft.PrefixTuningConfig(**virtual, prefix_projection=True, **task),
        "vera": lambda **task: peft.VeraConfig(r=8, target_modules=QUERIES, projection_prng_key=3, **task),
        "tokens": lambda **task: peft.LoraConfig(**low, trainable_token_indices=[3, 5, 7], **task),
        "embedding": lambda **task: peft.LoraConfig(r=4, target_modules=["embed_tokens"], use_dora=True, **task),
        "all linear": lambda **task: peft.LoraConfig(
            r=4, target_modules="all-linear", use_rslora=True, bias="lora_only", **task
        ),
        "pissa": lambda **task: peft.LoraConfig(**low, init_lora_weights="pissa", **task),
        "trained tokens": lambda **task: peft.TrainableTokensConfig(
            token_indices=[3, 5, 7], target_modules=["embed_tokens"], **task
        ),
        "prompt encoder": lambda **task: peft.PromptEncoderConfig(**virtual, **task),
        "adaption prompt": lambda **task: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, **task),
        "loha": lambda **task: peft.LoHaConfig(**low, **task),
        "lokr": lambda **task: peft.LoKrConfig(**low, **task),
        "hra": lambda **task: peft.HRAConfig(**low, **task),
        "randlora": lambda **task: peft.RandLoraConfig(**low, **task),
        "oft": lambda **task: peft.OFTConfig(r=0, oft_block_size=8, target_modules=QUERIES, **task),
        "boft": lambda **task: peft.BOFTConfig(boft_block_size=8, target_modules=QUERIES, **task),
        "layer norm": lambda **task: peft.LNTuningConfig(target_modules=["input_layernorm"], **task),
        "fourier": lambda **task: peft.FourierFTConfig(**waves, **task),
        "vector bank": lambda **task: peft.VBLoRAConfig(num_vectors=16, vector_length=8, topk=2, **low, **task),
    }
    return made[kind](task_type="CAUSAL_LM")


QUICK = ["prefix", "vera", "tokens"]
OTHERS = [
    *("embedding", "all linear", "pissa", "trained tokens", "prompt encoder", "adaption prompt", "loha", "lokr", "hra"),
    *("randlora", "oft", "boft", "layer norm", "fourier", "vector bank"),
]


def trained(kind: str, folder: str, shard: dict[str, Any] | None) -> dict[str, Any]:
    """Train, save, and open what was saved over a new base, without ourshard: the logits show what was kept."""
    import peft
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), config_of(kind))
    trainer = trainer_of(Case(steps=3, arguments={"learning_rate": 1e-3}), folder, shard, model)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    opened = peft.PeftModel.from_pretrained(llama(), folder).eval()
    with torch.no_grad():
        logits = opened(input_ids=Tokens(2, seed=9).tokens).logits
    return {
        "logs": column(trainer, "loss", "grad_norm"),
        "state": whole_state(trainer.model),
        "saved": load_file(f"{folder}/adapter_model.safetensors"),
        "logits": logits,
    }


def trained_all(kinds: list[str], folder: str, shard: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {kind: trained(kind, f"{folder}/{kind}", shard) for kind in kinds}


@pytest.mark.parametrize("kinds", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["quick", "others"])
def test_each_kind_trains_saves_and_opens_as_in_one_process(ranks, tmp_path, kinds):
    wanted = trained_all(kinds, str(tmp_path / "one"), None)
    for found in ranks(2)(trained_all, kinds, str(tmp_path / "two"), SHARD):
        for kind in kinds:
            assert apart(found[kind], wanted[kind]) < 5e-6, kind  # norms of randlora are above 10
            norms = [norm for _, norm in wanted[kind]["logs"]]
            assert max(norms) > 0, kind


def trained_experts(config: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Train LoRA on fused experts, which PEFT parametrizes for each forward; return units and losses."""
    import peft
    from accelerate import Accelerator
    from ourshard import ShardPlugin, engine_of

    accelerator = Accelerator(ourshard_plugin=ShardPlugin(config), mixed_precision="bf16")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    sizes = {**DECODER, **EXPERTS, "intermediate_size": 40, "moe_intermediate_size": 24}
    model = peft.get_peft_model(build("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **sizes), lora)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for batch in range(3):
        loss = labelled(model, words(batch, 4))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine = engine_of(model)
    assert engine is not None
    return [unit.label for unit in engine.units], losses


@pytest.mark.parametrize("stage", [0, 3])
def test_what_an_adapter_wraps_is_no_unit_by_size(ranks, stage):
    small = {"stage": stage, "persist_below": 0}
    by_size = {**small, "wrap": {"min_params": 1000}}
    (_, wanted), (units, found) = ranks(2)(trained_experts, small)[0], ranks(2)(trained_experts, by_size)[0]
    assert not any("base_layer" in unit for unit in units)
    assert any(unit.endswith("mlp.experts") for unit in units)
    assert found == pytest.approx(wanted, abs=0.02)


def allocates(folder: str, shard: dict[str, Any] | None) -> dict[str, Any]:
    """Train AdaLoRA, whose ranks are allocated anew after each step, by a callback as PEFT's guide has it."""
    import peft
    from transformers import TrainerCallback

    steps = {"total_step": 10, "tinit": 1, "tfinal": 2, "deltaT": 1}
    low = {"init_r": 4, "target_r": 2, "target_modules": QUERIES, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(llama(), peft.AdaLoraConfig(**low, **steps, orth_reg_weight=1e-9))
    said: list[str] = []

    class Allocates(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            try:
                model.base_model.update_and_allocate(state.global_step)
            except RuntimeError as error:
                said.append(str(error))

    case = Case(steps=4, arguments={"learning_rate": 1e-3})
    trainer = trainer_of(case, folder, shard, model, callbacks=[Allocates()])
    trainer.train()
    return {"logs": column(trainer, "loss", "grad_norm"), "state": whole_state(trainer.model), "said": said}


def test_adalora_allocates_where_its_adapters_are_whole_and_is_told_what_to_do_where_not(ranks, tmp_path):
    wanted = allocates(str(tmp_path / "one"), None)
    assert wanted["said"] == []
    for found in ranks(2)(allocates, str(tmp_path / "two"), {"stage": 3, "persist_below": 500}):
        assert apart(found, wanted) < 2e-6
    for found in ranks(2)(allocates, str(tmp_path / "cut"), SHARD):
        assert "lora_A" in found["said"][0]
        assert "is sharded and not whole" in found["said"][0]

"""Whole parameters on their way to an inference engine, with adapters added to their weights (CASES X07, I13)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.nets import llama

pytestmark = pytest.mark.ranks

LINEAR = ["q_proj", "v_proj", "up_proj"]


def adapted(kind: str) -> Any:
    from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model

    kinds: dict[str, Any] = {
        "LoRA": LoraConfig(r=3, target_modules=[*LINEAR, "embed_tokens"], lora_bias=False),
        "DoRA": LoraConfig(r=3, target_modules=LINEAR, use_dora=True),
        "rsLoRA, a module trained whole": LoraConfig(
            r=3, target_modules=LINEAR, use_rslora=True, modules_to_save=["lm_head"]
        ),
        "IA3": IA3Config(target_modules=LINEAR, feedforward_modules=["up_proj"]),
        "LoHa": LoHaConfig(r=2, target_modules=LINEAR),
    }
    model = get_peft_model(llama(tie=False), kinds[kind])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def exported(kind: str, config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], bool, int]:
    import ourshard

    plain = adapted(kind)
    model = ourshard.shard_model(adapted(kind), config)
    before = ourshard.full_state_dict(model)
    rank = torch.distributed.get_rank()
    found = dict(ourshard.iter_full_parameters(model, merge_adapters=True, wanted=rank == 0))
    plain_names = [name for name, _ in ourshard.iter_full_parameters(model, wanted=rank == 0)]
    assert bool(plain_names) == (rank == 0)
    assert set(plain_names) <= set(before)
    after = ourshard.full_state_dict(model)
    same = all(torch.equal(before[name], after[name]) for name in before)
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5, rtol=0)
    return found, same, len(before)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "rsLoRA, a module trained whole", "IA3", "LoHa"])
def test_adapters_are_added_to_weights_that_have_the_names_of_the_base(ranks: Any, kind: str, stage: int) -> None:
    wanted = dict(adapted(kind).merge_and_unload().named_parameters())
    first, second = ranks(2)(exported, kind, {"stage": stage, "persist_below": 40})
    assert second[0] == {}
    found, same, _ = first
    assert same
    assert set(found) == set(wanted)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name].detach(), atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_units_inside_of_units_are_handed_out_once(ranks: Any) -> None:
    wanted = dict(adapted("LoRA").merge_and_unload().named_parameters())
    nested = {"stage": 3, "wrap": {"policy": "classes", "classes": ["LlamaDecoderLayer", "LlamaMLP"]}}
    (found, _, _), _ = ranks(2)(exported, "LoRA", nested)
    assert set(found) == set(wanted)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name].detach(), atol=1e-6, rtol=0)


def refused() -> str:
    import ourshard
    from peft import PromptTuningConfig, TaskType, get_peft_model

    prompts = get_peft_model(llama(), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3))
    model = ourshard.shard_model(prompts, {"stage": 3})
    with pytest.raises(ValueError, match="merge_adapters") as error:
        list(ourshard.iter_full_parameters(model, merge_adapters=True))
    with pytest.raises(ValueError, match="not sharded"):
        list(ourshard.iter_full_parameters(nn.Linear(2, 2)))
    return str(error.value)


def test_what_has_no_sum_is_refused(ranks: Any) -> None:
    for error in ranks(2)(refused):
        assert "prompts and prefixes have no sum with weights" in error

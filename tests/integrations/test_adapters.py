"""Adapters over a base of other dtypes, on two ranks against one process: cases B01, B03, B05, B08 of CASES.md."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.integrations import trainer_runs
from tests.integrations.client_runs import apart, column, trainer_of, world
from tests.integrations.trainer_runs import Case, Run, changed, on_rank, run

pytestmark = pytest.mark.ranks

LORA = Case(peft="lora", steps=3, after=("save",))


class Bytes(nn.Module):
    """A projection whose frozen weight is stored as bytes with a scale, as 8-bit checkpoints hold it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax() / 127
        codes = (linear.weight.detach() / scale).round() + 128
        self.codes = nn.Parameter(codes.to(torch.uint8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, (self.codes.to(rows.dtype) - 128) * self.scale.to(rows.dtype))


def mixed(model: nn.Module) -> None:
    """Hold the base in bf16, its norms in fp32 and one tensor in fp16; peft makes adapters over it in fp32."""
    model.to(torch.bfloat16)
    model.model.layers[1].mlp.up_proj.to(torch.float16)
    for name, module in model.named_modules():
        if "norm" in name:
            module.to(torch.float32)


def resized(model: Any) -> None:
    model.resize_token_embeddings(trainer_runs.VOCAB + 3, mean_resizing=False)


def stored_as_bytes(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj = Bytes(layer.mlp.up_proj)


BASES: dict[str, tuple[Any, Case, float]] = {  # what is done to the base, the case, the tolerance
    "mixed dtypes": (mixed, changed(LORA, arguments={"bf16": True}), 2e-2),
    "resized": (resized, changed(LORA, peft="head"), 1e-5),
    "bytes": (stored_as_bytes, LORA, 1e-5),
}


def trained(name: str, folder: str, shard: dict[str, Any] | None, alone: bool = False) -> Run:
    change, case, _ = BASES[name]
    build = trainer_runs.llama

    @functools.wraps(build)
    def changed_base(**changes: Any) -> Any:
        model = build(**changes)
        change(model)
        return model

    trainer_runs.llama = changed_base
    try:
        return run(case, Path(folder)) if alone else on_rank(case, folder, shard)
    finally:
        trainer_runs.llama = build


def saved_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    from safetensors.torch import load_file

    found = load_file(str(folder / "adapter_model.safetensors"))
    return {key: (str(value.dtype), tuple(value.shape)) for key, value in found.items()}


def is_trained(name: str) -> bool:
    return "lora_" in name or "modules_to_save" in name


EACH = [(name, 3) for name in BASES]
SLOW = [pytest.param(name, stage, marks=pytest.mark.slow) for name in BASES for stage in (1, 2)]


@pytest.mark.parametrize(("name", "stage"), [*EACH, *SLOW])
def test_adapters_train_over_a_base_of_any_dtype_which_stays_as_it_was(ranks, tmp_path, name, stage):
    """B01, B03, B05: losses as in one process, frozen bits and every dtype kept, adapters saved whole."""
    wanted = trained(name, str(tmp_path / "one"), None, alone=True)
    results = ranks(2)(trained, name, str(tmp_path / "two"), {"stage": stage, "persist_below": 50})
    for found in results:
        assert np.allclose(found.column("loss"), wanted.column("loss"), atol=BASES[name][2])
        assert {k: v.dtype for k, v in found.state.items()} == {k: v.dtype for k, v in wanted.state.items()}
        frozen = [key for key in wanted.state if not is_trained(key)]
        assert frozen
        assert all(torch.equal(found.state[key], wanted.state[key]) for key in frozen)
    assert saved_tensors(tmp_path / "two") == saved_tensors(tmp_path / "one")


def reloads(folder: str, shard: dict[str, Any] | None) -> list[Any]:
    """Train fp16 adapters over a bf16 base, save them, and train on from what PEFT loads in both of its ways."""
    import peft

    trainer_runs.quiet()
    model = trainer_runs.adapted(trainer_runs.llama().to(torch.bfloat16), "lora")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.float16)
    told: list[Any] = []
    for cast in (None, True, False):
        if cast is not None:
            base = trainer_runs.llama().to(torch.bfloat16)
            model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True, autocast_adapter_dtype=cast)
        before = sorted({str(parameter.dtype) for parameter in model.parameters()})
        trainer = trainer_of(Case(steps=2, arguments={"learning_rate": 1e-3}), folder, shard, model)
        trainer.train()
        if cast is None:
            trainer.save_model()
            trainer.accelerator.wait_for_everyone()
        assert sorted({str(parameter.dtype) for parameter in model.parameters()}) == before
        told.append([before, column(trainer, "loss")])
    return [*told, saved_tensors(Path(folder))]


def test_adapters_keep_their_dtype_and_train_on_in_the_one_that_they_are_loaded_in(ranks, tmp_path):
    """B08."""
    *wanted, saved = reloads(str(tmp_path / "one"), None)
    for *found, told in ranks(2)(reloads, str(tmp_path / "two"), {"stage": 3, "persist_below": 50}):
        assert told == saved
        assert {dtype for dtype, _ in told.values()} == {"torch.float16"}
        for (dtypes, losses), (wanted_dtypes, wanted_losses) in zip(found, wanted, strict=True):
            assert dtypes == wanted_dtypes
            assert np.allclose(losses, wanted_losses, atol=2e-3)


def composed(folder: str) -> str:
    """Train adapters over a base of which one weight is two tensors behind one, as weights of torchao are."""
    from torch.testing._internal.two_tensor import TwoTensor

    trainer_runs.quiet()
    base = trainer_runs.llama()
    proj = base.model.layers[1].mlp.up_proj
    halves = proj.weight.detach() / 2
    proj.weight = nn.Parameter(TwoTensor(halves, halves.clone()), requires_grad=False)
    model = trainer_runs.adapted(base, "lora")
    try:
        trainer_of(Case(steps=1), folder, {"stage": 3, "persist_below": 50}, model).train()
    except ValueError as error:
        return str(error)
    return "trained"


def test_a_base_of_composed_tensors_is_refused_by_name_on_every_rank(ranks, tmp_path):
    for said in ranks(2)(composed, str(tmp_path)):
        assert "layers.1.mlp.up_proj.weight' is a TwoTensor, several tensors behind one" in said
        assert "bitsandbytes" in said


def over_quantized(folder: str, base: str, bits: int, shard: dict[str, Any] | None) -> dict[str, Any]:
    """Train adapters over a base that bitsandbytes quantizes while it is loaded."""
    import peft
    from safetensors.torch import load_file
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    trainer_runs.quiet()
    trainer_runs.enable(shard)
    case = Case(steps=3, arguments={"learning_rate": 1e-3})
    trainer_runs.arguments(case, Path(folder), world())  # ranks join their group here, as in a script
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
    model = LlamaForCausalLM.from_pretrained(base, quantization_config=config)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    trainer = trainer_of(case, folder, shard, trainer_runs.adapted(model, "lora"))
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    saved = load_file(f"{folder}/adapter_model.safetensors")
    return {"logs": column(trainer, "loss", "grad_norm"), "saved": saved}


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_over_a_base_of_bitsandbytes_train_as_in_one_process(ranks, tmp_path, bits):
    """Its frozen bytes are sharded as they are."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    base = str(tmp_path / "base")
    trainer_runs.llama(hidden_size=64, intermediate_size=128).save_pretrained(base)
    wanted = over_quantized(str(tmp_path / "one"), base, bits, None)
    shard = {"stage": 3, "persist_below": 50}
    for found in ranks(2)(over_quantized, str(tmp_path / "two"), base, bits, shard):
        assert apart(found, wanted) < 1e-5

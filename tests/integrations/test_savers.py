"""Models of packages beside transformers are saved whole, each by its own `save_pretrained`: A01, A03."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from tests.integrations.trainer_runs import adapted, enable, llama, quiet

pytestmark = pytest.mark.ranks

SHARD = {"stage": 3, "persist_below": 30}


def hub_class() -> Any:
    from huggingface_hub import PyTorchModelHubMixin

    class Mixed(nn.Module, PyTorchModelHubMixin):
        """A block, and two names of one weight."""

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(31, 17)
            self.down = nn.Linear(31, 17)
            self.down.weight = self.up.weight
            self.register_buffer("scale", torch.ones(3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.up(rows) + self.down(rows)

    return Mixed


def diffusers_module() -> Any:
    """Return what stands for `diffusers.models.modeling_utils`: one rank writes, if it is told to."""

    class ModelMixin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(31, 17)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.up(rows)

        def save_pretrained(self, save_directory: str, is_main_process: bool = True) -> None:
            Path(save_directory).mkdir(parents=True)  # a second writer would raise
            save_file(self.state_dict(), f"{save_directory}/model.safetensors")

    module: Any = types.ModuleType("diffusers.models.modeling_utils")
    module.ModelMixin = ModelMixin
    return module


def sentence_module() -> Any:
    """Return what stands for `sentence_transformers.base.model`: a model of transformers and a module beside it."""

    class BaseModel(nn.Sequential):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](tokens).logits)

        def save(self, path: str) -> None:
            self[0].save_pretrained(f"{path}/0")
            Path(path, "1").mkdir(parents=True, exist_ok=True)
            save_model(self[1], f"{path}/1/model.safetensors")

    module: Any = types.ModuleType("sentence_transformers.base.model")
    module.BaseModel = BaseModel
    return module


def trained(make: Any, rows: torch.Tensor) -> Any:
    """Return a model that was stepped once under bf16, so that its masters are no numbers of bf16."""
    from accelerate import Accelerator

    quiet()
    enable(SHARD)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    accelerator.backward(model(rows).square().mean())
    optimizer.step()
    return model


def saves_itself(kind: str, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what a model wrote, and what it holds; it computes afterwards as before."""
    import ourshard
    from ourshard.integrations import savers

    module = diffusers_module()
    savers.diffusers_model(module)
    make = hub_class() if kind == "hub" else module.ModelMixin
    rows = torch.randn(3, 31, generator=torch.Generator().manual_seed(1))
    model = trained(make, rows)
    with torch.no_grad():
        before = model(rows)
        model.save_pretrained(folder)
        assert torch.equal(model(rows), before)
    return load_file(f"{folder}/model.safetensors"), ourshard.full_state_dict(model)


@pytest.mark.parametrize("kind", ["hub", "diffusers"])
def test_models_of_other_packages_write_whole_masters_once(ranks, tmp_path, kind):
    for saved, held in ranks(2)(saves_itself, kind, str(tmp_path / "model")):
        assert {name: value.dtype for name, value in saved.items()} == dict.fromkeys(saved, torch.float32)
        assert all(torch.equal(value, held[name]) for name, value in saved.items())
        tied = {"up.weight", "down.weight"}  # of which safetensors keeps one
        assert set(held) - tied == set(saved) - tied


def saves_pieces(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    import ourshard
    from ourshard.integrations import savers

    module = sentence_module()
    savers.sentence_model(module)

    def make() -> Any:
        return module.BaseModel(llama(), nn.Linear(101, 13))

    model = trained(make, torch.arange(12).view(2, 6))
    model.save(folder)
    parts = {number: load_file(f"{folder}/{number}/model.safetensors") for number in (0, 1)}
    saved = {f"{number}.{name}": value for number, part in parts.items() for name, value in part.items()}
    return saved, ourshard.full_state_dict(model)


def test_a_model_of_a_transformer_and_other_modules_writes_all_of_them_whole(ranks, tmp_path):
    for saved, held in ranks(2)(saves_pieces, str(tmp_path / "model")):
        assert set(saved) == set(held)
        assert all(torch.equal(value, held[name]) for name, value in saved.items())


def saves_in_a_hook(kind: str, alone: bool, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Save a state with a hook that saves the model: on the first rank alone, as diffusers' examples do, or on all."""
    import ourshard
    from accelerate import Accelerator

    quiet()
    enable({**SHARD, "checkpoint": {"format": "full" if alone else "sharded"}})
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(hub_class()() if kind == "hub" else adapted(llama(), kind))

    def hook(found: list[Any], weights: list[Any], where: str) -> None:
        if accelerator.is_main_process or not alone:
            more = {} if kind == "hub" else {"is_main_process": accelerator.is_main_process}
            accelerator.unwrap_model(found[0]).save_pretrained(f"{folder}/model", **more)
        if weights:
            weights.pop()

    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(f"{folder}/state")
    held = ourshard.full_state_dict(model)
    name = "adapter_model" if kind == "lora" else "model"
    saved = load_file(f"{folder}/model/{name}.safetensors")
    return saved, {name.replace(".default.", "."): value for name, value in held.items()}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", [None, "lora", "hub"])
def test_a_hook_of_save_state_may_save_models_on_one_rank_or_on_all(ranks, tmp_path, kind, alone):
    for saved, held in ranks(2)(saves_in_a_hook, kind, alone, str(tmp_path)):
        assert saved
        assert all(torch.equal(value, held[name]) for name, value in saved.items())

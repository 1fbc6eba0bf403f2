"""What an Accelerator saves is whole, and loads on any number of ranks at any stage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ourshard import shard_model
from ourshard.checkpoint.source import detect
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from tests.integrations.tiny import adamw, halving, rows, tiny

pytestmark = pytest.mark.ranks

FULL: dict[str, Any] = {"checkpoint": {"format": "full"}}
BATCH = 12  # examples of one step over all ranks: divides by 1, 2 and 3


def steps(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, which: range) -> list[float]:
    """Train on the same examples whatever the number of ranks; return the mean loss of each step."""
    data, share = rows(), BATCH // accelerator.num_processes
    losses = []
    for step in which:
        first = (step * BATCH + accelerator.process_index * share) % len(data)
        inputs, labels = data[first : first + share]
        loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def prepared(config: dict[str, Any], build: str = "adamw", **options: Any) -> Any:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin(config), step_scheduler_with_optimizer=False, **options)
    model = tiny()
    optimizer = adamw(model) if build == "adamw" else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accelerator, *accelerator.prepare(model, optimizer, halving(optimizer))


def save_and_go_on(config: dict[str, Any], folder: str, build: str) -> list[float]:
    accelerator, model, optimizer, scheduler = prepared(config, build)
    steps(accelerator, model, optimizer, scheduler, range(2))
    accelerator.save_state(folder)
    return steps(accelerator, model, optimizer, scheduler, range(2, 4))


def load_and_go_on(config: dict[str, Any], folder: str, build: str) -> dict[str, Any]:
    accelerator, model, optimizer, scheduler = prepared(config, build)
    groups = [id(group) for group in optimizer.param_groups]
    accelerator.load_state(folder)
    kept = groups == [id(group) for group in optimizer.param_groups]
    return {"losses": steps(accelerator, model, optimizer, scheduler, range(2, 4)), "groups kept": kept}


@pytest.mark.parametrize(
    ("saved", "world", "loaded"),
    [
        ({"stage": 3}, 2, {"stage": 3}),
        ({"stage": 3, **FULL}, 2, {"stage": 2}),
        ({"stage": 3}, 2, {"stage": 3, **FULL}),
        ({"stage": 3, "persist_below": 0}, 3, {"stage": 1}),
        ({"stage": 3}, 1, {"stage": 0}),
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped(ranks, tmp_path, saved, world, loaded):
    build = "momentum" if world == 3 else "adamw"
    expected = ranks(2)(save_and_go_on, saved, str(tmp_path), build)[0]
    results = ranks(world)(load_and_go_on, loaded, str(tmp_path), build)
    for result in results:
        assert result["losses"] == pytest.approx(expected, abs=1e-6)
        assert result["groups kept"]


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 33)
        self.body = nn.Linear(33, 33)
        self.head = nn.Linear(33, 101, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("lost", torch.arange(3.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def save_tied(folder: str, dtype: str | None) -> dict[str, Any]:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 3, "checkpoint": {"save_dtype": dtype}}))
    torch.manual_seed(3)
    model = accelerator.prepare(Tied())
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, folder)
    return {"names": list(state), "one tensor": state["embed.weight"] is state["head.weight"], "state": state}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_saved_model_is_whole_and_ties_are_one_tensor(ranks, tmp_path, dtype):
    torch.manual_seed(3)
    plain = Tied()
    for told in ranks(2)(save_tied, str(tmp_path), dtype):
        assert told["names"] == list(plain.state_dict())
        assert told["one tensor"]
    saved = load_file(tmp_path / "model.safetensors")
    expected = plain.to(torch.bfloat16).state_dict() if dtype else plain.state_dict()
    assert set(expected) - set(saved) == {"head.weight"}  # safetensors writes a tie once
    for name, value in saved.items():
        assert torch.equal(value, expected[name]), name


def hooked(folder: str) -> list[Any]:
    """Hooks as diffusers registers them: they see one weight a model, and may take models out."""
    accelerator, _, optimizer, scheduler = prepared({"stage": 3})
    model = accelerator._models[0]
    seen: list[Any] = []

    def on_save(models: list[Any], weights: list[Any], where: str) -> None:
        seen.append((len(models), len(weights), models[0] is model))

    def on_load(models: list[Any], where: str) -> None:
        seen.append((len(models), models[0] is model))

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(on_load)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    assert accelerator._optimizers == [optimizer]
    assert accelerator._schedulers == [scheduler]
    return seen


def test_hooks_of_users_see_models_and_weights_as_ever(ranks, tmp_path):
    assert ranks(2)(hooked, str(tmp_path)) == [[(1, 1, True), (1, True)]] * 2


def load_another(folder: str, what: str) -> None:
    accelerator, *_ = prepared({"stage": 3, **(FULL if what == "file" else {})})
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if what == "file":
        if accelerator.is_main_process:
            (Path(folder) / "ourshard_optimizer.bin").unlink()
        accelerator.wait_for_everyone()
        accelerator.load_state(folder)
    else:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
        other, *_ = prepared({"stage": 3}, build="sgd")
        other.load_state(folder)


@pytest.mark.parametrize(
    ("what", "message"), [("file", "ourshard_optimizer.bin is missing"), ("groups", "2 parameter groups")]
)
def test_a_state_that_does_not_fit_is_refused_on_every_rank(ranks, tmp_path, what, message):
    with pytest.raises(AssertionError, match=message) as caught:
        ranks(2)(load_another, str(tmp_path), what)
    kind = "ValueError" if what == "file" else "CheckpointError"
    assert [failure.type_name for failure in caught.value.failures] == [kind, kind]


def save_three(folder: str) -> str:
    """Save at three steps of which two are kept; then once more with a hook that fails on rank 1."""
    accelerator, model, optimizer, scheduler = prepared({"stage": 3, "checkpoint": {"keep": 2}})
    for step in range(3):
        steps(accelerator, model, optimizer, scheduler, range(step, step + 1))
        accelerator.save_state(f"{folder}/step-{step}")

    def on_save(models: list[Any], weights: list[Any], where: str) -> None:
        if accelerator.process_index == 1:
            raise OSError("no room for the hook's file")

    accelerator.register_save_state_pre_hook(on_save)
    with pytest.raises((OSError, ValueError)) as error:
        accelerator.save_state(f"{folder}/step-2")
    return str(error.value)


def test_old_checkpoints_go_and_a_save_that_fails_on_one_rank_fails_on_all(ranks, tmp_path):
    for told in ranks(2)(save_three, str(tmp_path)):
        assert "no room for the hook's file" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    with detect(tmp_path / "step-2") as source:
        assert source.description.step == 3
        assert all(problem is None for _, problem in source.verify_files())
    assert not (tmp_path / "step-2" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"format": "full", "asynchronous": True}, "use sharded, or false"),
        ({"format": "full", "keep": 2}, "are not counted"),
    ],
)
def test_what_a_save_would_not_follow_is_refused_at_the_start(config, message):
    with pytest.raises(ValueError, match=message):
        shard_model(tiny(), {"checkpoint": config})


def resume_after_a_crash(folder: str) -> tuple[list[float], list[float]]:
    """Save under automatic names twice, lose the second's manifest, and load; return losses after each."""
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator, *parts = prepared({"stage": 3}, project_config=naming)
    steps(accelerator, *parts, range(2))
    accelerator.save_state()
    expected = steps(accelerator, *parts, range(2, 3))
    accelerator.save_state()
    if accelerator.is_main_process:
        (Path(folder) / "checkpoints" / "checkpoint_1" / "ourshard" / "ourshard.json").unlink()
    accelerator.wait_for_everyone()
    accelerator.load_state()
    return expected, steps(accelerator, *parts, range(2, 3))


def test_a_save_that_did_not_finish_is_skipped(ranks, tmp_path):
    for expected, found in ranks(2)(resume_after_a_crash, str(tmp_path)):
        assert found == expected


def save_quantized(folder: str) -> str:
    """Save a base of which a quantizer made the weights, as `get_base_model().save_pretrained` of a PEFT model does."""
    from tests.integrations.trainer_runs import llama

    model = llama()
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(quant_method="bitsandbytes"))
    shard_model(model, {"stage": 3})
    with pytest.raises(ValueError, match="are quantized") as caught:
        model.save_pretrained(folder)
    return str(caught.value)


def test_a_quantized_base_is_not_saved_without_what_tells_how_to_read_it(ranks, tmp_path):
    for said in ranks(2)(save_quantized, str(tmp_path)):
        assert "save the adapters (`trainer.save_model`" in said
    assert list(tmp_path.iterdir()) == []

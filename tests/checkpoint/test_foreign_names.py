"""What names leave open in a checkpoint of another engine, a model in hand decides: A15, X04."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.source import BUFFER, PARAM, TensorKey, detect
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.checkpoint.foreign import same

pytestmark = pytest.mark.ranks


class Router(nn.Module):
    """A frozen parameter with the name of a buffer, as in ERNIE's experts; two names of one frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4).requires_grad_(False)
        self.again = self.embed
        self.gate = nn.Linear(4, 3)
        self.e_score_correction_bias = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.gate(self.embed(tokens) + self.again(tokens))
        return (hidden * self.e_score_correction_bias).square().mean()


class Outer(nn.Module):
    """All of its names begin as those of DDP do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Router()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.module(tokens)
        return loss


def trained(kind: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(torch.arange(7)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_as(form: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write what accelerate's FSDP writes, sharded or whole, or what a script writes with DCP alone."""
    state = get_optimizer_state_dict(model, optimizer)
    folder.mkdir()
    if form == "full":
        torch.save(model.state_dict(), folder / "pytorch_model_fsdp.bin")
        torch.save(state, folder / "optimizer.bin")
    elif form == "sharded":
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        dcp.save({"optimizer": state}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    else:
        marked = {f"module.{name}": value for name, value in model.state_dict().items()} if form == "ddp" else None
        content = {"model": marked or model.state_dict(), "optimizer": state}
        dcp.save(content, checkpoint_id=folder, no_dist=True)


def load_on_ranks(kind: type[nn.Module], folder: str, out: str) -> None:
    """Load into a model with other weights, and save what was loaded."""
    import ourshard

    torch.manual_seed(1)
    model = kind()
    model = ourshard.shard_model(model, {"stage": 3, "persist_below": 0})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=7.0)
    ourshard.load(model, optimizer, folder)
    ourshard.save(model, optimizer, out)


def assert_loaded(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with detect(out) as source:
        for name, parameter in model.named_parameters():
            assert same(source.read(TensorKey(PARAM, name)), parameter.detach()), name
            for kind in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
                assert same(source.read(TensorKey(kind, name)), optimizer.state[parameter][kind]), name


@pytest.mark.parametrize("kind", [Router, Outer])
@pytest.mark.parametrize("form", ["full", "sharded", "alone", "ddp"])
def test_names_that_tell_too_little_load_into_the_model_that_has_them(
    ranks: Any, form: str, kind: type[nn.Module], tmp_path: Path
) -> None:
    model, optimizer = trained(kind)
    save_as(form, model, optimizer, tmp_path / "saved")
    ranks(2)(load_on_ranks, kind, str(tmp_path / "saved"), str(tmp_path / "loaded"))
    assert_loaded(tmp_path / "loaded", model, optimizer)
    convert(tmp_path / "saved", tmp_path / "converted", to="ourshard")
    ranks(2)(load_on_ranks, kind, str(tmp_path / "converted"), str(tmp_path / "again"))
    assert_loaded(tmp_path / "again", model, optimizer)


def test_one_weight_here_that_has_two_values_there_is_refused_by_name(ranks: Any, tmp_path: Path) -> None:
    model, optimizer = trained(Router)
    save_as("full", model, optimizer, tmp_path / "saved")
    weights = torch.load(tmp_path / "saved" / "pytorch_model_fsdp.bin")
    weights["again.weight"] = weights["again.weight"] + 1
    torch.save(weights, tmp_path / "saved" / "pytorch_model_fsdp.bin")
    with pytest.raises(AssertionError, match=r"tied to another weight here, and of other values: again\.weight"):
        ranks(2)(load_on_ranks, Router, str(tmp_path / "saved"), str(tmp_path / "loaded"))


def test_an_attribute_whose_name_ends_as_a_mark_of_torch_compile_keeps_it(tmp_path: Path) -> None:
    torch.save({"my_orig_mod.weight": torch.ones(2), "a._orig_mod.bias": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with detect(tmp_path) as source:
        assert {key.name for key in source.tensors} == {"my_orig_mod.weight", "a.bias"}


class Layers(nn.Module):
    """Layers that are all alike: shapes tell nothing about which is in which group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.square().mean()


def by_depth(model: nn.Module) -> list[dict[str, Any]]:
    """Return a group for odd layers and one for even ones, each with a rate of its own, without the third layer."""
    named = [(int(name.split(".")[1]), parameter) for name, parameter in model.named_parameters()]
    odd = [parameter for number, parameter in named if number % 2]
    return [{"params": odd, "lr": 0.1}, {"params": [p for number, p in named if number == 0], "lr": 0.2}]


def load_layers(folder: str, out: str, alone: bool) -> None:
    import ourshard

    torch.manual_seed(1)
    model = ourshard.shard_model(Layers(), {"stage": 2, "persist_below": 0})
    groups = by_depth(model)
    optimizer = torch.optim.AdamW(groups[:1] if alone else groups)
    ourshard.load(model, optimizer, folder)
    ourshard.save(model, optimizer, out)


def save_layers(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Write what accelerate writes under DDP: an optimizer that numbers its parameters."""
    torch.manual_seed(0)
    model = Layers()
    optimizer = torch.optim.AdamW(by_depth(model))
    model(torch.ones(1, 4)).backward()
    optimizer.step()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return model, optimizer


def test_numbers_are_those_of_the_groups_of_the_optimizer_in_hand(ranks: Any, tmp_path: Path) -> None:
    model, optimizer = save_layers(tmp_path / "saved")
    ranks(2)(load_layers, str(tmp_path / "saved"), str(tmp_path / "loaded"), False)
    with detect(tmp_path / "loaded") as source:
        for name, parameter in model.named_parameters():
            assert same(source.read(TensorKey(PARAM, name)), parameter.detach()), name
            for kind, value in optimizer.state.get(parameter, {}).items():
                assert torch.equal(source.read(TensorKey(kind, name)), value), f"{kind} of {name}"
        assert [group["lr"] for group in source.description.param_groups] == [0.1, 0.2]


def test_numbers_that_fit_no_group_are_said_to_be_there(ranks: Any, tmp_path: Path) -> None:
    save_layers(tmp_path / "saved")
    with pytest.raises(
        AssertionError, match=r"what it holds of an optimizer can't be read: .*tried the model and its optimizer"
    ):
        ranks(2)(load_layers, str(tmp_path / "saved"), str(tmp_path / "loaded"), True)


class Twice(nn.Module):
    """A part with a buffer that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.again(self.norm(hidden))  # type: ignore[no-any-return]


def save_twice(folder: str) -> None:
    import ourshard

    torch.manual_seed(0)
    model = ourshard.shard_model(Twice(), {"stage": 3})
    model(torch.randn(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    ourshard.save(model, optimizer, folder)


def deepspeed_twice(folder: Path) -> None:
    """Write what DeepSpeed does at stage 0: `buffer_names` has each buffer under one of its names."""
    model = Twice()
    (folder / "global_step1").mkdir(parents=True)
    states = {"module": model.state_dict(), "buffer_names": [name for name, _ in model.named_buffers()]}
    torch.save({**states, "optimizer": None}, folder / "global_step1" / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step1")


@pytest.mark.parametrize("origin", ["ourshard", "deepspeed"])
@pytest.mark.parametrize("to", ["torch", "fsdp-full", "dcp"])
def test_a_buffer_is_in_the_result_under_each_of_its_names(ranks: Any, origin: str, to: str, tmp_path: Path) -> None:
    if origin == "ourshard":
        ranks(2)(save_twice, str(tmp_path / "saved"))
    else:
        deepspeed_twice(tmp_path / "saved")
    with detect(tmp_path / "saved") as source:
        assert all(problem is None for _, problem in source.verify_files())
        expected = source.read(TensorKey(BUFFER, "norm.running_var"))
    convert(tmp_path / "saved", tmp_path / "made", to=to)
    model = Twice()
    if to == "dcp":
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "made" / "pytorch_model_fsdp_0", no_dist=True)
    else:
        name = "pytorch_model.bin" if to == "torch" else "pytorch_model_fsdp.bin"
        model.load_state_dict(torch.load(tmp_path / "made" / name), strict=True)
    assert same(model.norm.running_var, expected)

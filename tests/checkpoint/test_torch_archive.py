"""Files of torch.save, written in blocks, as torch.load and torch's optimizers take them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.source import BUFFER, PARAM, TensorKey, detect

from tests.checkpoint.making import NAMES, assert_same, make_state, save


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_torch_load_reads_every_tensor_with_weights_only(tmp_path: Path, mmap: bool, dtype: torch.dtype) -> None:
    state = make_state(1, dtype)
    save(tmp_path / "ours", state, 2)
    convert(tmp_path / "ours", tmp_path / "out", to="torch")
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True, mmap=mmap)
    for key, tensor in state.items():
        if key.kind in (PARAM, BUFFER):
            assert_same(found[key.name], tensor, str(key))
            assert tensor.numel() == 0 or found[key.name].data_ptr() % 16 == 0
    assert found["head.tied"].data_ptr() == found["embed.weight"].data_ptr()
    assert torch.load(tmp_path / "out" / "scheduler.bin", weights_only=True)["last_epoch"] == 3
    assert torch.load(tmp_path / "out" / "scaler.pt", weights_only=True) == {"scale": 65536.0}


def test_a_plain_optimizer_of_torch_goes_on_from_what_was_converted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3, bias=False))
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [named["0.weight"], named["1.weight"]], "weight_decay": 0.1},
        {"params": [named["0.bias"]]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(10.0).reshape(2, 5)).square().sum().backward()
        optimizer.step()

    step(model, optimizer)
    names = {id(tensor): name for name, tensor in named.items()}
    state = {TensorKey(PARAM, name): tensor.detach().clone() for name, tensor in named.items()}
    for tensor, values in optimizer.state.items():
        state |= {TensorKey(kind, names[id(tensor)]): value.clone() for kind, value in values.items()}
    described = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(t)] for t in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    from ourshard.checkpoint.source import Description

    save(tmp_path / "ours", state, 2, description=Description(world_size=2, param_groups=tuple(described)))
    convert(tmp_path / "ours", tmp_path / "out", to="torch")

    other = copy.deepcopy(model)
    for tensor in other.parameters():
        torch.nn.init.zeros_(tensor)
    other.load_state_dict(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True))
    named = dict(other.named_parameters())
    groups = [{"params": [named["0.weight"], named["1.weight"]]}, {"params": [named["0.bias"]]}]
    resumed = torch.optim.AdamW(groups, lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True))
    step(model, optimizer)
    step(other, resumed)
    for name, tensor in model.named_parameters():
        assert_same(dict(other.named_parameters())[name].detach(), tensor.detach(), name)


@pytest.mark.parametrize("max_shard_size", [None, 400])
def test_what_was_written_is_read_back_by_names_with_the_optimizer(tmp_path: Path, max_shard_size: int | None) -> None:
    state = make_state()
    save(tmp_path / "ours", state, 2)
    convert(tmp_path / "ours", tmp_path / "out", to="torch", max_shard_size=max_shard_size)
    with detect(tmp_path / "out") as source, detect(tmp_path / "ours") as ours:
        kinds = {key.name: BUFFER for key in state if key.kind == BUFFER}
        as_read = {key: source.read(key) for key in source.tensors}
        renamed = {key._replace(kind=kinds.get(key.name, key.kind)): tensor for key, tensor in as_read.items()}
        for key, tensor in state.items():
            assert_same(renamed[key], tensor, str(key))
        assert source.description.ties == ours.description.ties
        for found, group in zip(source.description.param_groups, ours.description.param_groups, strict=True):
            assert found == group
        assert source.description.param_state == ours.description.param_state
    assert set(NAMES)


@pytest.mark.parametrize("to", ["torch", "fsdp-full", "dcp"])
def test_dtypes_of_untyped_storages_come_back(to: str, tmp_path: Path) -> None:
    state = {TensorKey(PARAM, str(d)): torch.arange(4).to(d) for d in (torch.float8_e4m3fn, torch.float8_e5m2fnuz)}
    state |= {TensorKey(BUFFER, str(d)): torch.arange(4).to(d) for d in (torch.uint16, torch.uint64)}
    save(tmp_path / "ours", state, 1)
    convert(tmp_path / "ours", tmp_path / "out", to=to, weights_only=True)
    with detect(tmp_path / "out") as source:
        for key, tensor in state.items():
            assert_same(source.read(key), tensor, str(key))
    if to == "torch":
        found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
        for key, tensor in state.items():
            assert_same(found[key.name], tensor, str(key))

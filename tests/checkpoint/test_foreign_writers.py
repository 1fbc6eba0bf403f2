"""What we write for other frameworks is loaded by them, bit for bit, and comes back the same."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.foreign.universal_sink import UniversalSink
from ourshard.checkpoint.source import PARAM, Source, TensorKey, detect
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpoint.foreign import made_folder, made_names, same
from tests.commands import ROOT
from tests.fixtures.net import batches, make_net

WRITERS = ("dcp", "fsdp-full", "deepspeed-universal")
WITHOUT_OPTIMIZER = ("hf_shards",)


def written(name: str, to: str, tmp_path: Path, **options: Any) -> Path:
    """Convert a made fixture and return the result's folder."""
    convert(made_folder() / name, tmp_path / to, to=to, **options)
    return tmp_path / to


def assert_same_state(one: Source, other: Source) -> None:
    """Assert equal tensors, options, ties and steps."""
    missing = {key for key in one.tensors if key not in other.tensors}
    assert not missing
    for key in one.tensors:
        assert same(one.read(key), other.read(key)), str(key)
    before, after = one.description, other.description
    assert after.ties == before.ties
    if not any("its optimizer took" in oddity for oddity in before.oddities):  # fp16 of DeepSpeed takes one more
        assert after.step == before.step
    assert after.scheduler == before.scheduler
    assert [dict(group) for group in after.param_groups] == [dict(group) for group in before.param_groups]


@pytest.mark.parametrize("to", WRITERS)
@pytest.mark.parametrize("name", made_names())
def test_each_checkpoint_comes_back_from_each_format_as_it_was(name: str, to: str, tmp_path: Path) -> None:
    if to == "deepspeed-universal" and name in WITHOUT_OPTIMIZER:
        with pytest.raises(ValueError, match="parameter groups"):
            written(name, to, tmp_path)
        return
    folder = written(name, to, tmp_path)
    with detect(made_folder() / name) as one, detect(folder) as other:
        assert_same_state(one, other)
        extra = [key for key in other.tensors if key not in one.tensors]
        assert all(key.name == "unused" for key in extra) if to == "deepspeed-universal" else not extra


def test_options_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for to, options in (
        ("dcp", {"max_shard_size": "1MB"}),
        ("fsdp-full", {"world_size": 2}),
        ("deepspeed-universal", {"world_size": 2}),
    ):
        with pytest.raises(ValueError, match="has no meaning"):
            convert(made_folder() / "ds_z2", tmp_path / to, to=to, **options)
        assert not (tmp_path / to).exists()


def test_what_a_format_cannot_hold_is_said() -> None:
    with detect(made_folder() / "fsdp2_sharded") as source:
        lost = UniversalSink.losses(source)
    assert any("zeros are written" in loss for loss in lost)  # the parameter that never had a gradient
    assert any("frozen" in loss for loss in lost)


@pytest.mark.parametrize("world_size", [1, 3, 16])
def test_torch_loads_our_dcp_folders_with_its_own_reader(world_size: int, tmp_path: Path) -> None:
    folder = written("ds_z2", "dcp", tmp_path, world_size=world_size)
    with detect(made_folder() / "ds_z2") as source:
        expected = {key: source.read(key) for key in source.tensors}
        ties = source.description.ties
    model = {key.name: torch.zeros_like(value) for key, value in expected.items() if not key.is_state}
    model |= {alias: torch.zeros_like(model[owner]) for alias, owner in ties.items()}
    dcp.load({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    for name, value in model.items():
        key = TensorKey(PARAM, ties.get(name, name))
        assert same(value, expected.get(key, expected.get(TensorKey("buffer", name)))), name
    dcp_to_torch_save(folder / "optimizer_0", tmp_path / "optimizer.pt")
    optimizer = torch.load(tmp_path / "optimizer.pt", weights_only=False)["optimizer"]
    for key, value in expected.items():
        if key.is_state:
            assert same(optimizer["state"][key.name][key.kind], value), str(key)
    assert optimizer["param_groups"][0]["betas"] == (0.9, 0.95)


def test_a_tied_name_takes_no_room_in_a_dcp_folder(tmp_path: Path) -> None:
    folder = written("ds_z2", "dcp", tmp_path) / "pytorch_model_fsdp_0"
    metadata = dcp.FileSystemReader(folder).read_metadata()
    places = {(place.relative_path, place.offset) for place in metadata.storage_data.values()}
    assert len(places) < len(metadata.storage_data)
    assert metadata.storage_meta.checkpoint_id is None  # no path of this machine


def load_in_accelerate(folder: str, kind: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Load a folder into another net on this rank with FSDP2 of accelerate; return all that it then holds."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    from tests.fixtures.fsdp_recipes import accelerator
    from tests.fixtures.net import OPTIONS, groups, make_net

    made = accelerator(2, kind)
    net = make_net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(5.0)
    optimizer = torch.optim.AdamW(groups(net), **{**OPTIONS, "lr": 1.0})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = made.prepare(net, optimizer, schedule)
    made.load_state(folder)
    options = StateDictOptions(full_state_dict=True)
    params = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer.optimizer, options=options)
    dist.barrier()
    return params, state, schedule.get_last_lr()[0]


@pytest.mark.ranks
@pytest.mark.parametrize(("to", "kind"), [("dcp", "SHARDED_STATE_DICT"), ("fsdp-full", "FULL_STATE_DICT")])
def test_fsdp2_of_accelerate_resumes_from_what_was_a_deepspeed_run(
    to: str, kind: str, ranks: Any, tmp_path: Path
) -> None:
    folder = written("ds_z3", to, tmp_path)
    with detect(made_folder() / "ds_z3") as source:
        params, state, rate = ranks(2)(load_in_accelerate, str(folder), kind)[0]
        for key in source.tensors:
            value = state["state"][key.name][key.kind] if key.is_state else params[key.name]
            assert torch.equal(value, source.read(key).to(value.dtype)), str(key)
        assert rate == source.description.param_groups[0]["lr"]
        assert state["param_groups"][0]["lr"] == rate


DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (extra: peers)"
)


@DEEPSPEED
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "world_size"),
    [
        ("fsdp2_sharded", 1, 2),
        ("fsdp2_sharded", 2, 3),
        ("fsdp2_sharded", 3, 2),
        ("ds_z3", 1, 3),
        ("ds_z3", 2, 2),
        ("ds_z2", 3, 3),
    ],
)
def test_deepspeed_resumes_at_any_stage_from_what_was_another_run(
    name: str, stage: int, world_size: int, tmp_path: Path
) -> None:
    folder = written(name, "deepspeed-universal", tmp_path)
    program = ROOT / "tests" / "checkpoint" / "load_deepspeed.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command += [str(program), str(folder), str(stage), str(tmp_path / "live.safetensors")]
    subprocess.run(command, check=True, timeout=240, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    from safetensors.torch import load_file

    live = load_file(tmp_path / "live.safetensors")
    with detect(folder) as source:
        trained = {member for group in source.description.param_groups for member in group["params"]}
        for key in source.tensors:
            if key.name in trained and key.kind != "step":
                assert same(live[f"{key.kind}/{key.name}"], source.read(key)), str(key)
        assert live["steps"].tolist() == [source.description.step] * 2
        if stage < 3:  # for stage 3 DeepSpeed gives the options of the first group to all
            rates = [group["weight_decay"] for group in source.description.param_groups]
            assert live["weight_decay"].tolist() == pytest.approx(rates)
        assert live["losses"][0].item() == pytest.approx(_next_loss(source), rel=1e-6)
        assert torch.isfinite(live["losses"]).all()


def _next_loss(source: Source) -> float:
    """Return the loss of rank 0's first batch with the trained weights of the source, in one plain process."""
    net = make_net()
    trained = [name for group in source.description.param_groups for name in group["params"]]
    net.load_state_dict({name: source.read(TensorKey(PARAM, name)) for name in trained}, strict=False)
    return net(next(batches(0))).item()

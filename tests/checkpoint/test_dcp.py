"""Folders of torch's distributed checkpoint, as other planners than accelerate's write them, and the table we write."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.foreign import dcp_sink
from ourshard.checkpoint.foreign.dcp_source import group_options
from ourshard.checkpoint.source import PARAM, CheckpointError, Source, TensorKey, detect
from torch import nn
from torch.distributed.checkpoint import metadata as torch_metadata

from tests.checkpoint.foreign import made_folder, same
from tests.fixtures.net import OPTIONS, batches, groups, make_net

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained() -> tuple[nn.Module, torch.optim.AdamW]:
    net = make_net()
    optimizer = torch.optim.AdamW(groups(net), **OPTIONS)
    for tokens in batches(0):
        net(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def save(content: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.save(content, checkpoint_id=folder, no_dist=True, **options)


def assert_holds(source: Source, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Assert that parameters, moments and the members of groups are those of the run."""
    names = {parameter: name for name, parameter in net.named_parameters()}
    for parameter, name in names.items():
        assert same(source.read(TensorKey(PARAM, name)), parameter.detach()), name
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind in optimizer.state[parameter]:
                assert same(source.read(TensorKey(kind, name)), optimizer.state[parameter][kind]), (kind, name)
    expected = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    assert [list(group["params"]) for group in source.description.param_groups] == expected


@pytest.mark.parametrize("flatten", [True, False])
def test_an_optimizer_that_numbers_parameters_is_read_however_its_dicts_are_saved(
    flatten: bool, tmp_path: Path
) -> None:
    net, optimizer = trained()
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "note": {"text": "x", "numbers": [1, 2]}}
    save(content, tmp_path / "dcp", planner=dcp.DefaultSavePlanner(flatten_state_dict=flatten))
    with detect(tmp_path / "dcp") as source:
        assert_holds(source, net, optimizer)
        assert source.description.client_state["note"]["text"] == "x"


def test_an_order_that_ranks_have_mixed_is_not_taken_for_the_models(tmp_path: Path) -> None:
    """With replicas the ranks share the tensors among them, and the table lists them by rank."""
    net, optimizer = trained()
    save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    (tmp_path / "__0_0.distcp").rename(tmp_path / "__1_0.distcp")
    table = pickle.loads((tmp_path / ".metadata").read_bytes())
    for place in table.storage_data.values():
        place.relative_path = "__1_0.distcp"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    with detect(tmp_path) as source:
        assert not any(key.is_state for key in source.tensors)
        assert "order of the model's parameters is not known" in " ".join(source.description.losses)
    with detect(tmp_path, parameter_order=[name for name, _ in net.named_parameters()]) as source:
        assert_holds(source, net, optimizer)


@pytest.mark.parametrize("path", [("model", "a"), ("other", "model", "a")])
def test_two_items_of_one_name_are_refused(path: tuple[str, ...], tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "b": torch.zeros(2)}, "x": {"y": torch.ones(1)}}, tmp_path)
    table = pickle.loads((tmp_path / ".metadata").read_bytes())
    table.planner_data["model.b"] = path
    if path[0] == "other":
        table.planner_data["x.y"] = ("other", "model", "a", "b")
        table.planner_data["model.b"] = ("other", "model", "a.b")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match=r"the same path|two tensors are called a\.b"):
        detect(tmp_path)


def test_a_part_of_a_tensor_in_a_pickle_of_its_own_is_refused(tmp_path: Path) -> None:
    """A planner that does not flatten leaves rank 0's part of a DTensor, which is all that there is."""
    tensors = torch.load(made_folder() / "fsdp2_rank" / "pytorch_model_fsdp_0_rank0.bin", weights_only=False)
    save({"model": tensors}, tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    with pytest.raises(CheckpointError, match="one rank's part"):
        detect(tmp_path)


def test_flattened_options_are_one_group_whatever_the_order_of_their_items() -> None:
    options = {"a": {"lr": 0.1, "eps": 1.0}, "b": {"eps": 1.0, "lr": 0.1}, "c": {"lr": 0.2, "eps": 1.0}}
    assert [group["params"] for group in group_options(options)] == [["a", "b"], ["c"]]


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_table_we_write_is_what_torch_would_pickle(world_size: int, tmp_path: Path) -> None:
    convert(made_folder() / "ds_z2", tmp_path / "out", to="dcp", world_size=world_size)
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        table = pickle.loads((tmp_path / "out" / name / ".metadata").read_bytes())
        assert type(table) is torch_metadata.Metadata
        again = pickle.loads(pickle.dumps(table))
        assert again == table
        assert (table.version, table.storage_meta) == ("1.0.0", torch_metadata.StorageMeta())
        for index, place in table.storage_data.items():
            assert (tmp_path / "out" / name / place.relative_path).stat().st_size >= place.offset + place.length > 0
            record = table.state_dict_metadata[index.fqn]
            if index.offset is not None:
                assert record.chunks[index.index].offsets == index.offset
                assert record.properties == torch_metadata.TensorProperties(dtype=record.properties.dtype)
        assert table.planner_data.keys() == table.state_dict_metadata.keys()


def test_a_rank_with_much_has_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_sink, "FILE_NBYTES", 100)
    convert(made_folder() / "ds_z2", tmp_path / "out", to="dcp", world_size=2)
    assert len(list((tmp_path / "out" / "pytorch_model_fsdp_0").glob("__1_*.distcp"))) > 1
    with detect(made_folder() / "ds_z2") as one, detect(tmp_path / "out") as other:
        assert other.description.world_size == 2
        for key in one.tensors:
            assert same(one.read(key), other.read(key)), str(key)
        wanted = {key.name: torch.zeros_like(one.read(key)) for key in one.keys_of(PARAM)}
        dcp.load({"model": wanted}, checkpoint_id=tmp_path / "out" / "pytorch_model_fsdp_0", no_dist=True)
        assert all(same(value, one.read(TensorKey(PARAM, name))) for name, value in wanted.items())


def test_a_conversion_to_dcp_does_not_import_torchs_checkpoints(tmp_path: Path) -> None:
    """They take a second, of the few that a conversion has."""
    program = (
        "import sys; from ourshard.checkpoint.conversion import convert; "
        "convert(*sys.argv[1:], to='dcp'); assert 'torch.distributed.checkpoint' not in sys.modules"
    )
    folder = made_folder() / "ds_z2"
    subprocess.run([sys.executable, "-c", program, str(folder), str(tmp_path / "out")], check=True, timeout=60)

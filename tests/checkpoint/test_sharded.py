"""Our sharded format: written by any world, read by rows, with all that is not a tensor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint import commit
from ourshard.checkpoint.manifest import NAME
from ourshard.checkpoint.shard_writer import LocalBox, ShardWriter
from ourshard.checkpoint.sharded import ShardedSource
from ourshard.checkpoint.source import BUFFER, PARAM, CheckpointError, Description, TensorKey, detect

from tests.checkpoint.making import assert_holds, assert_loads, boxes_on, describe, make_state, save


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_what_any_world_wrote_is_read_back_bit_for_bit(tmp_path: Path, world_size: int) -> None:
    state = make_state()
    save(tmp_path / "step-3", state, world_size)
    assert_loads(tmp_path / "step-3", state)


@pytest.mark.parametrize("saved", [1, 3, 5])
@pytest.mark.parametrize("loaded", [1, 2, 4])
def test_each_rank_of_another_world_reads_its_own_runs(tmp_path: Path, saved: int, loaded: int) -> None:
    state = make_state(1, torch.bfloat16)
    save(tmp_path / "c", state, saved)
    seen: dict[TensorKey, list[bool]] = {key: [] for key in state}
    with ShardedSource(tmp_path / "c") as source:
        for rank in range(loaded):
            for key, boxes in boxes_on(state, rank, loaded).items():
                for box in boxes:
                    start, stop = box.run()
                    assert torch.equal(source.read_run(key, start, stop), box.tensor.reshape(-1)), key
                    seen[key].append(True)
    assert all(seen.values())


def test_a_rank_that_loads_its_own_layout_opens_its_own_files_only(tmp_path: Path) -> None:
    state = {key: tensor for key, tensor in make_state().items() if tensor.dim() and key.kind != BUFFER}
    save(tmp_path / "c", state, 3)
    with ShardedSource(tmp_path / "c") as source:
        opened = []
        pool_open = source._pool._open_checked

        def watched(name: str) -> int:
            opened.append(name)
            return pool_open(name)

        source._pool._open_checked = watched  # type: ignore[method-assign]
        for key, boxes in boxes_on(state, 1, 3).items():
            for box in boxes:
                source.read_run(key, *box.run())
        own = {record.path for record in source.manifest.files if record.rank == 1}
    assert opened
    assert set(opened) <= own


def test_all_that_is_no_tensor_comes_back_equal(tmp_path: Path) -> None:
    description = describe(2)
    save(tmp_path / "c", make_state(), 2, description=description)
    with ShardedSource(tmp_path / "c") as source:
        found = source.description
        for name in ("world_size", "stage", "step", "param_groups", "param_state", "ties", "frozen", "own_dtypes"):
            assert getattr(found, name) == getattr(description, name), name
        for name in ("scheduler", "scaler", "versions"):
            assert getattr(found, name) == getattr(description, name), name
        assert found.client_state["seen"] == {3: "three"}
        assert torch.equal(found.client_state["tensor"], torch.arange(3))
        assert isinstance(found.param_groups[0]["betas"], tuple)
        assert list(found.files) == ["config.json"]
        assert source.manifest.mesh == {"shard": 2}
        assert source.rank_state(1)["rank"] == 1
        assert source.rank_state(1)["rng"].dtype == torch.uint8
        assert source.rank_state(2) == {}


def test_steps_are_in_the_manifest_once_and_in_no_file(tmp_path: Path) -> None:
    save(tmp_path / "c", make_state(), 2)
    body = json.loads((tmp_path / "c" / NAME).read_bytes())["body"]
    assert [group["value"] for group in body["scalars"]["step"]] == [3.0]
    assert not (tmp_path / "c" / "optimizer" / "step").exists()


def test_a_second_piece_of_a_tensor_goes_to_a_second_file(tmp_path: Path) -> None:
    whole = torch.arange(20.0).reshape(10, 2)
    key = TensorKey(PARAM, "w")
    temporary = commit.begin(tmp_path / "c")
    ShardWriter(temporary, 0, 2).write({key: [LocalBox((10, 2), whole[0:2]), LocalBox((10, 2), whole[6:9], (6, 0))]})
    ShardWriter(temporary, 1, 2).write(
        {key: [LocalBox((10, 2), whole[2:6], (2, 0)), LocalBox((10, 2), whole[9:], (9, 0))]}
    )
    commit.publish(temporary, tmp_path / "c", commit.assemble(temporary, Description(world_size=2)))
    assert len(list((tmp_path / "c").glob("shard-*.safetensors"))) == 4
    assert_loads(tmp_path / "c", {key: whole})


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    state = {
        TensorKey(PARAM, "w"): torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        TensorKey("step", "w"): torch.tensor(float("inf")),
        TensorKey("count", "w"): torch.tensor(2**53 + 1),
        TensorKey("extra.ema", "w"): torch.tensor([1, 2, 3, 4], dtype=torch.float8_e4m3fn),
    }
    temporary = commit.begin(tmp_path / "c")
    ShardWriter(temporary, 0, 1).write({key: LocalBox(tuple(tensor.shape), tensor) for key, tensor in state.items()})
    commit.publish(temporary, tmp_path / "c", commit.assemble(temporary, Description(world_size=1)))
    assert_loads(tmp_path / "c", state)


def calls_to_save_and_load(root: Path, count: int) -> tuple[int, int]:
    """Save and load `count` tensors of one row; return the calls of Python functions that each took."""
    state = {TensorKey(PARAM, f"layers.{index}.gain"): torch.randn(1, 8) for index in range(count)}
    boxes = {key: LocalBox((1, 8), tensor) for key, tensor in state.items()}
    calls: list[int] = []

    def counting(frame: Any, event: str, argument: Any) -> None:
        calls[-1] += event == "call"

    try:
        calls.append(0)
        sys.setprofile(counting)
        temporary = commit.begin(root / "c")
        ShardWriter(temporary, 0, 1).write(boxes)
        commit.publish(temporary, root / "c", commit.assemble(temporary, Description(world_size=1)))
        calls.append(0)
        with ShardedSource(root / "c") as source:
            read = {key: source.read(key) for key in state}
    finally:
        sys.setprofile(None)
    assert all(torch.equal(read[key], tensor) for key, tensor in state.items())
    return calls[0], calls[1]


def test_each_of_thousands_of_small_tensors_costs_as_much_as_each_of_a_few(tmp_path: Path) -> None:
    few, many = (calls_to_save_and_load(tmp_path / str(count), count) for count in (200, 1000))
    for what, at_few, at_many in zip(("saving", "loading"), few, many, strict=True):
        assert at_many < 5.5 * at_few, f"{what}: {at_few} calls for 200 tensors, {at_many} for 1000"
        assert at_many < 1000 * 60, f"{what}: {at_many / 1000} calls a tensor"


def test_a_slice_that_is_not_what_its_place_needs_is_refused_by_the_writer() -> None:
    """CASES A01: a placeholder or a flat slice never becomes a file."""
    for shape, tensor, starts in [
        ((4, 3), torch.zeros(12), None),
        ((4, 3), torch.zeros(2, 2), None),
        ((4, 3), torch.zeros(2, 3), (3, 0)),
        ((), torch.zeros(1), None),
    ]:
        with pytest.raises(ValueError, match="no run of elements"):
            LocalBox(shape, tensor, starts)
    with pytest.raises(ValueError, match="contiguous"):
        LocalBox((4, 3), torch.zeros(3, 4).T)


def test_a_save_with_a_hole_or_a_double_or_without_a_rank_is_not_committed(tmp_path: Path) -> None:
    key = TensorKey(PARAM, "w")
    cases = {
        "no rank wrote rows 2:3": [(0, 2), (3, 5)],
        "rows 1:3 are in": [(0, 3), (1, 5)],
        "rank 1 has written no part.* or a folder above it was removed while": [(0, 5)],
    }
    for message, parts in cases.items():
        temporary = commit.begin(tmp_path / "c")
        for rank, (start, stop) in enumerate(parts):
            box = LocalBox((5, 2), torch.zeros(stop - start, 2), (start, 0))
            ShardWriter(temporary, rank, 2).write({key: box})
        with pytest.raises((RuntimeError, CheckpointError, FileNotFoundError), match=message):
            commit.publish(temporary, tmp_path / "c", commit.assemble(temporary, Description(world_size=2)))
        assert not (tmp_path / "c").exists()


def test_ranks_that_disagree_on_a_shape_or_a_step_are_named(tmp_path: Path) -> None:
    temporary = commit.begin(tmp_path / "c")
    ShardWriter(temporary, 0, 2).write({TensorKey("step", "w"): LocalBox((), torch.tensor(3.0))})
    ShardWriter(temporary, 1, 2).write({TensorKey("step", "w"): LocalBox((), torch.tensor(4.0))})
    with pytest.raises(RuntimeError, match=r"w \(step\).*on rank 1"):
        commit.assemble(temporary, Description(world_size=2))
    temporary = commit.begin(tmp_path / "c")
    ShardWriter(temporary, 0, 2).write({TensorKey(PARAM, "w"): LocalBox((4, 2), torch.zeros(2, 2))})
    ShardWriter(temporary, 1, 2).write({TensorKey(PARAM, "w"): LocalBox((5, 2), torch.zeros(2, 2), (2, 0))})
    with pytest.raises(RuntimeError, match="rank 1 says"):
        commit.assemble(temporary, Description(world_size=2))


def test_nodes_with_disks_of_their_own_load_what_is_there_and_name_what_is_not(tmp_path: Path) -> None:
    """CASES A16: one manifest for each node, self-sufficient, and the gap is said."""
    state = {key: tensor for key, tensor in make_state().items() if tensor.dim() and key.kind != BUFFER}
    save(tmp_path / "node0" / "c", state, 4, ranks=[0, 1])
    save(tmp_path / "node1" / "c", state, 4, ranks=[2, 3])
    with ShardedSource(tmp_path / "node1" / "c") as source:
        for rank in (2, 3):
            for key, boxes in boxes_on(state, rank, 4).items():
                for box in boxes:
                    assert torch.equal(source.read_run(key, *box.run()), box.tensor.reshape(-1))
        with pytest.raises(CheckpointError, match=r"embed.weight: rows 0:\d+ are in no file.*ranks \[0, 1\]"):
            source.read(TensorKey(PARAM, "embed.weight"))
        assert "ranks [0, 1] of 4" in source.description.oddities[0]
    for path in (tmp_path / "node1" / "c").rglob("*.*"):
        if path.is_file() and path.name != "config.json":
            target = tmp_path / "node0" / "c" / path.relative_to(tmp_path / "node1" / "c")
            target.write_bytes(path.read_bytes())
    assert_loads(tmp_path / "node0" / "c", state)


def test_a_checkpoint_is_found_from_its_folder_the_one_above_and_its_manifest(tmp_path: Path) -> None:
    state = make_state()
    save(tmp_path / "checkpoint-3" / "ourshard_0", state, 2)
    inner = tmp_path / "checkpoint-3" / "ourshard_0"
    for path in (inner, inner.parent, inner / NAME):
        with detect(path) as source:
            assert source.format == "ourshard"
            assert_holds(source, state)


def test_what_is_no_checkpoint_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"(?s)no checkpoint of a known format.*ourshard.json.*model.safetensors"):
        detect(tmp_path)
    save(tmp_path / "checkpoint-3", make_state(), 1)
    save(tmp_path / "checkpoint-4", make_state(), 1)
    with pytest.raises(CheckpointError, match=r"name one of them: checkpoint-4, checkpoint-3\."):
        detect(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        detect(tmp_path / "nothing")

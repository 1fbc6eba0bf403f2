"""Every truncation and every flipped bit in our folder is refused, with the file named; hostile manifests are, too."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.manifest import NAME, seal, unseal
from ourshard.checkpoint.sharded import ShardedSource
from ourshard.checkpoint.source import PARAM, CheckpointError, TensorKey
from safetensors.torch import load_file

from tests.checkpoint.making import make_state, save


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "c", make_state(), 2, rank_state={"seed": 1})
    return tmp_path / "c"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def problems(folder: Path) -> str:
    """Return what verify says; damage to the manifest is raised when the folder is opened."""
    try:
        with ShardedSource(folder) as source:
            return "\n".join(f"{name}: {problem}" for name, problem in source.verify_files() if problem)
    except CheckpointError as error:
        return str(error)


def test_a_folder_as_written_has_no_problem(folder: Path) -> None:
    assert problems(folder) == ""
    assert len(files_of(folder)) == 2 * 3 + 2 + 2  # 3 kinds and a state file a rank, manifest, config.json


def test_every_truncation_is_refused_with_the_file_named(folder: Path, tmp_path: Path) -> None:
    for path in files_of(folder):
        data = path.read_bytes()
        for keep in sorted({0, 1, 7, 8, 9, len(data) // 2, len(data) - 1}):
            path.write_bytes(data[:keep])
            assert path.name in problems(folder), f"{path} cut to {keep} bytes"
        path.write_bytes(data + b"\0")
        assert path.name in problems(folder), f"{path} with a byte more"
        path.unlink()
        assert path.name in problems(folder), f"{path} removed"
        path.write_bytes(data)
    assert problems(folder) == ""


def test_every_flipped_bit_is_refused_with_the_file_named(folder: Path) -> None:
    chosen = random.Random(0)
    for path in files_of(folder):
        data = path.read_bytes()
        every = range(len(data) * 8)
        for bit in every if len(every) < 200 else chosen.sample(every, 200):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            assert path.name in problems(folder), f"{path} with bit {bit} flipped"
        path.write_bytes(data)


def test_a_read_that_verifies_refuses_the_damaged_piece_and_no_other(folder: Path) -> None:
    key, other = TensorKey("exp_avg", "embed.weight"), TensorKey("exp_avg_sq", "embed.weight")
    for path in (folder / "optimizer" / "exp_avg").iterdir():
        data = bytearray(path.read_bytes())
        data[-4] ^= 1
        path.write_bytes(data)
    with ShardedSource(folder, verify_reads=True) as source:
        source.read(other)
        damaged = [k for k in source.tensors if k.kind == "exp_avg" and not readable(source, k)]
        assert damaged
        assert key in source.tensors
    with ShardedSource(folder) as source:
        source.read(key)


def test_a_conversion_refuses_damaged_rows_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    path = folder / "shard-00001-model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"shard-00001.* is damaged: the hash of"):
        convert(folder, tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()


def test_shards_without_their_manifest_are_read_if_they_are_all_there(folder: Path, tmp_path: Path) -> None:
    """A lost last shard once gave a model of half the rows, and no word."""
    convert(folder, tmp_path / "whole", to="safetensors")
    (folder / NAME).unlink()
    convert(folder, tmp_path / "same", to="safetensors")
    whole, same = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "same"))
    assert whole.keys() == same.keys()
    assert all(torch.equal(value, same[key]) for key, value in whole.items())
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no ourshard\.json, and of 2 shards that it had shard-00002 is missing"):
        convert(folder, tmp_path / "half", to="safetensors")


def readable(source: ShardedSource, key: TensorKey) -> bool:
    try:
        source.read(key)
    except CheckpointError as error:
        return "is damaged: the hash of" not in str(error)
    return True


def test_a_lost_shard_is_named_with_its_rows(folder: Path) -> None:
    lost = folder / "shard-00002-model-00001-of-00001.safetensors"
    lost.unlink()
    message = r"embed.weight: rows \d+:\d+ cannot be read: .*shard-00002.* is missing"
    with ShardedSource(folder) as source, pytest.raises(CheckpointError, match=message):
        source.read(TensorKey(PARAM, "embed.weight"))


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest's body and seal it again, as somebody hostile would."""
    path = folder / NAME
    body = unseal(path.read_bytes(), path)
    change(body)
    path.write_bytes(seal(body))


HOSTILE: dict[str, Callable[[Any], object]] = {
    "a path that leads outside": lambda body: body["files"][0].update(path="../secret"),
    "an absolute path": lambda body: body["files"][0].update(path="/etc/passwd"),
    "a negative length": lambda body: body["tensors"]["param"]["embed.weight"].__setitem__(1, [-37, 5]),
    "an absurd shape": lambda body: body["tensors"]["param"]["embed.weight"].__setitem__(1, [1 << 61, 1 << 61]),
    "an unknown dtype": lambda body: body["tensors"]["param"]["embed.weight"].__setitem__(0, "Q8"),
    "a piece outside of its tensor": lambda body: body["files"][0]["pieces"][0].__setitem__(2, 10**9),
    "a piece of no tensor": lambda body: body["files"][0]["pieces"][0].__setitem__(0, "ghost"),
    "overlapping pieces": lambda body: body["files"].append(body["files"][0]),
    "a file length that does not fit": lambda body: body["files"][0].update(nbytes=10**15),
    "a negative head": lambda body: body["files"][0].update(head_nbytes=-8),
    "groups that are no list": lambda body: body.update(param_groups={"lr": 1}),
    "groups without names": lambda body: body.update(param_groups=[{"lr": 1}]),
    "ties to a list": lambda body: body.update(ties={"a": ["b"]}),
    "ranks that are text": lambda body: body.update(ranks=["a"]),
    "ranks beyond the world": lambda body: body.update(ranks=[0, 99]),
    "a rank twice": lambda body: body.update(ranks=[0, 0]),
    "a world that no memory holds": lambda body: body.update(world_size=10**12),
    "a world below zero": lambda body: body.update(world_size=-1),
    "no tensors": lambda body: body.pop("tensors"),
    "not complete": lambda body: body.update(complete=False),
    "another format": lambda body: body.update(format="theirs"),
    "a newer version": lambda body: body.update(version=99),
    "an unknown tag": lambda body: body.update(scheduler={"$": "pickle", "value": "gASV"}),
    "a tensor shorter than its shape": lambda body: body.update(
        scaler={"$": "tensor", "dtype": "F32", "shape": [1 << 40], "value": "AAAA"}
    ),
    "text that is not base64": lambda body: body.update(scaler={"$": "bytes", "value": "!"}),
    "an array of objects": lambda body: body.update(
        scaler={"$": "array", "dtype": "|O", "shape": [1], "value": "AAAAAAAAAAA="}
    ),
    "a scalar that is a list": lambda body: body["scalars"]["step"][0].update(value=[]),
    "files of a kind that is no text": lambda body: body["files"][0].update(group=[0]),
    "a scalar that is text": lambda body: body["scalars"]["step"][0].update(value="three"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused_when_opened(folder: Path, what: str) -> None:
    rewrite(folder, HOSTILE[what])
    with pytest.raises(CheckpointError, match=NAME):
        ShardedSource(folder)


def test_a_symbolic_link_does_not_pass_for_a_shard_of_other_content(folder: Path, tmp_path: Path) -> None:
    shard = folder / "shard-00001-model-00001-of-00001.safetensors"
    shutil.move(shard, tmp_path / "elsewhere")
    (tmp_path / "other").write_bytes(bytes(len((tmp_path / "elsewhere").read_bytes())))
    shard.symlink_to(tmp_path / "other")
    assert shard.name in problems(folder)


def test_the_manifest_is_json_that_other_tools_can_read(folder: Path) -> None:
    body = json.loads((folder / NAME).read_bytes())["body"]
    assert body["tensors"]["param"]["embed.weight"] == ["F32", [37, 5]]
    assert body["ties"] == {"head.tied": "embed.weight"}
    assert torch.__version__ in body["versions"].values()

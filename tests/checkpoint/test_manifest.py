"""Manifests of several nodes, joined into one."""

from __future__ import annotations

import pytest
import torch
from ourshard.checkpoint.manifest import MODEL, FileRecord, Manifest, PieceRecord, merge
from ourshard.checkpoint.source import BUFFER, PARAM, CheckpointError, Description, TensorInfo, TensorKey


def of_node(rank: int, digest: str, kind: str = PARAM, token: str = "one") -> Manifest:
    """Return the manifest of a node of one rank, on which a tensor of four elements lies whole."""
    key = TensorKey(kind, "w")
    file = FileRecord(f"shard-{rank}", MODEL, rank, 24, 8, "head", (PieceRecord("w", 0, 4, digest),))
    description = Description(world_size=2, step=3)
    return Manifest(description, {key: TensorInfo(key, (4,), torch.float32)}, {}, (file,), (rank,), token=token)


def test_copies_of_one_save_are_joined_and_one_of_them_is_read() -> None:
    joined = merge([of_node(0, "same"), of_node(1, "same")])
    assert joined.ranks == (0, 1)
    ((piece,),) = joined.pieces(prefer=["shard-1"]).values()
    assert piece.file == "shard-1"


def test_copies_that_are_not_alike_are_refused_unless_each_rank_has_its_own() -> None:
    with pytest.raises(CheckpointError, match="are in shard-0 and in shard-1"):
        merge([of_node(0, "same"), of_node(1, "other")]).pieces()
    ((piece,),) = merge([of_node(0, "same", BUFFER), of_node(1, "other", BUFFER)]).pieces().values()
    assert piece.file == "shard-0"


def test_two_saves_of_the_same_step_are_not_joined() -> None:
    with pytest.raises(CheckpointError, match="are of different saves"):
        merge([of_node(0, "same"), of_node(1, "same", token="two")])

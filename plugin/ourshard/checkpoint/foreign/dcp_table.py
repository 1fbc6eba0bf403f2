"""The `.metadata` of a DCP folder that is being written; not in dcp_sink.py, since torch's classes import slowly."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from ..source import TensorInfo, TensorKey

if TYPE_CHECKING:
    from .dcp_sink import Piece


class Table:
    """The records of a folder while they are gathered."""

    def __init__(self, tensors: Mapping[TensorKey, TensorInfo]) -> None:
        self._tensors = tensors
        self._records: dict[str, Any] = {}
        self._paths: dict[str, tuple[str | int, ...]] = {}
        self._places: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self._indexes: defaultdict[str, list[dcp.MetadataIndex]] = defaultdict(list)

    def add(self, piece: Piece, file: str, begin: int, nbytes: int) -> None:
        """Add an item that lies there."""
        fqn, place = piece.fqn, _StorageInfo(file, begin, nbytes)
        self._paths[fqn] = piece.path
        if piece.key is not None:
            info = self._tensors[piece.key]
            self._add_chunk(fqn, info.shape, info.dtype, (piece.start, piece.stop), place)
        elif isinstance(piece.value, torch.Tensor):
            self._add_chunk(fqn, tuple(piece.value.shape), piece.value.dtype, (0, 1), place)
        else:
            self._records[fqn] = dcp.BytesStorageMetadata()
            self._place(dcp.MetadataIndex(fqn), place)

    def alias(self, path: tuple[str | int, ...], owner: tuple[str | int, ...]) -> None:
        """Add a name for items that are there."""
        fqn, of = ".".join(map(str, path)), ".".join(map(str, owner))
        self._paths[fqn], self._records[fqn] = path, self._records[of]
        for index in list(self._indexes[of]):
            self._place(dcp.MetadataIndex(fqn, index.offset, index.index), self._places[index])

    def pickled(self) -> bytes:
        """Return the content of `.metadata`; no path of this machine goes into it."""
        metadata = dcp.Metadata(
            state_dict_metadata=self._records,
            planner_data=self._paths,
            storage_data=self._places,
            storage_meta=dcp.StorageMeta(),
            version=CURRENT_DCP_VERSION,
        )
        return pickle.dumps(metadata, protocol=4)

    def _add_chunk(
        self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, rows: tuple[int, int], place: _StorageInfo
    ) -> None:
        offsets = torch.Size((rows[0], *(0 for _ in shape[1:])) if shape else ())
        sizes = torch.Size((rows[1] - rows[0], *shape[1:]) if shape else ())
        record = self._records.setdefault(
            fqn, dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), [])
        )
        record.chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
        self._place(dcp.MetadataIndex(fqn, offsets, len(record.chunks) - 1), place)

    def _place(self, index: dcp.MetadataIndex, place: _StorageInfo) -> None:
        self._places[index] = place
        self._indexes[index.fqn].append(index)

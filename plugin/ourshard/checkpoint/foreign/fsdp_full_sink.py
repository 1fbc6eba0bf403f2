"""Write whole state in one file each, as accelerate's FSDP with FULL_STATE_DICT loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..sink import Sink
from ..source import BUFFER, PARAM, Source
from ..torch_archive import Archive
from ..workspace import Workspace
from .dcp_sink import DcpSink, write_run_files
from .fsdp_files import MODEL_FILE, OPTIMIZER_FILE


class FsdpFullSink(Sink):
    """Writer of `pytorch_model_fsdp.bin` and `optimizer.bin`, whose state goes by name."""

    format: ClassVar[str] = "fsdp-full"
    summary: ClassVar[str] = "pytorch_model_fsdp.bin and optimizer.bin, as FSDP of accelerate loads FULL_STATE_DICT"
    refused_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("max_shard_size", "world_size"), "the model is one file"
    )

    @classmethod
    def can_hold(cls, kind: str) -> bool:
        """Hold weights, buffers and the optimizer's state."""
        return DcpSink.can_hold(kind)

    @classmethod
    def losses(cls, source: Source) -> tuple[str, ...]:
        """Name what has no place."""
        return DcpSink.losses(source)

    def write(self, source: Source, workspace: Workspace) -> None:
        """Write the model, the optimizer if its groups are known, scheduler, scaler and companions."""
        archive = Archive(source)
        model = {key.name: archive.tensor(key) for key in source.tensors if key.kind in (PARAM, BUFFER)}
        for alias, owner in source.description.ties.items():
            key = source.weight_key(owner)
            if key is not None:
                model[alias] = archive.tensor(key)
        archive.write(workspace, MODEL_FILE, model)
        if source.description.param_groups:
            archive = Archive(source)
            archive.write(workspace, OPTIMIZER_FILE, _optimizer(source, archive))
        write_run_files(workspace, source)


def _optimizer(source: Source, archive: Archive) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for key in source.tensors:
        if key.is_state:
            state.setdefault(key.name, {})[key.kind] = archive.tensor(key)
    for name, values in source.description.param_state.items():
        state.setdefault(name, {}).update(archive.plain(values))
    groups = [
        {**archive.plain(dict(group)), "params": list(group["params"])} for group in source.description.param_groups
    ]
    return {"state": state, "param_groups": groups}

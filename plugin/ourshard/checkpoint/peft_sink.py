"""Write an adapter as PEFT reads it: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from .foreign.adapters import adapter_only_names
from .huggingface_sink import SafetensorsSink, training_losses
from .safetensors_file import lay_out
from .source import PARAM, Source
from .transfer import FilePlan, TensorRun, write_files
from .view import only_adapters
from .workspace import Workspace

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


class PeftSink(SafetensorsSink):
    """The adapter's weights alone, under the names of PEFT's files, which leave the adapter's own name out."""

    format = "peft"
    summary = "an adapter for PeftModel.from_pretrained: adapter_model.safetensors, adapter_config.json"
    refused_options: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("max_shard_size", "world_size"), "PEFT reads one file"
    )

    @classmethod
    def can_hold(cls, kind: str) -> bool:
        """Hold weights; those of the base model are left out."""
        return kind == PARAM

    @classmethod
    def losses(cls, source: Source) -> tuple[str, ...]:
        """Name the base weights and what belongs to training."""
        left = len(source.keys_of(PARAM)) - len(only_adapters(source).keys_of(PARAM))
        base = (f"{left} weights of the base model",) if left else ()
        others = {key.kind for key in source.tensors} - {PARAM}
        return (*base, *(f"tensors of kind {kind!r}" for kind in sorted(others)), *training_losses(source))

    def write(self, source: Source, workspace: Workspace) -> None:
        """Write the adapter. Raises ValueError if there is none, or if no adapter_config.json is known."""
        config = source.description.adapter_config
        if not config:
            raise ValueError(f"{source.path} has no {CONFIG}: put the one that PEFT wrote for this adapter beside it")
        adapter = only_adapters(source)
        names = adapter_only_names(key.name for key in adapter.keys_of(PARAM))
        if not names or len(set(names.values())) < len(names):
            raise ValueError(f"{source.path} has no adapter under PEFT's names, or several; choose one with include")
        infos = {names[key.name]: adapter.tensors[key] for key in adapter.keys_of(PARAM)}
        layout = lay_out([(name, info.dtype, info.shape) for name, info in infos.items()], {"format": "pt"})
        runs = [TensorRun(infos[entry.name], 0, infos[entry.name].numel) for entry in layout.entries]
        write_files(workspace, [FilePlan(ADAPTER, layout, runs)], adapter)
        workspace.write_bytes(CONFIG, json.dumps(dict(config), indent=2, sort_keys=True).encode() + b"\n")
        for name, path in source.description.files.items():
            if name.startswith(("tokenizer", "README", "chat_template")):
                workspace.copy(name, path)

"""`from_pretrained` without memory: weights stay in their files until `prepare` reads each rank's rows of them.

Note [Lazy loading]
-------------------
transformers builds a model on the meta device, maps the names in the checkpoint to those of the model, converts and
casts what it reads, and puts it into the model (`PreTrainedModel._load_pretrained_model`). All of that works on what
it is given as state dict. Under ourshard it is given lazy tensors (`runtime/lazy.py`) that know file and offset, so the
parameters it makes are lazy, too, with renaming, fusing and casting in place. Missing parameters, ties and buffers are
transformers' own affair, as always: a new head is made in memory by each rank, and rank 0's counts.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ourshard.checkpoint.safetensors_file import read_header
from ourshard.checkpoint.source import CheckpointError
from ourshard.config import ShardConfig
from ourshard.integrations import switch
from ourshard.runtime.lazy import LazyTensor, lazy, materialize
from ourshard.runtime.quantized import why_not
from ourshard.runtime.source import FileSource, TensorSource

logger = logging.getLogger("ourshard")


class _NotByRows(Exception):
    """A checkpoint whose tensors can't be read by rows; the message says why."""


def active_config() -> ShardConfig | None:
    """Return the config that models of this process will be sharded with; None when ourshard is not asked for."""
    from accelerate.state import AcceleratorState

    plugin = switch.enabled_plugin() or AcceleratorState._shared_state.get("ourshard_plugin")
    if plugin is None and switch.flag(switch.SWITCH):
        from ourshard.integrations.plugin import ShardPlugin

        plugin = ShardPlugin()
    config: ShardConfig | None = plugin.config if plugin is not None else None
    return config


def wants_rows() -> bool:
    """Return whether weights should stay in their files until the model is sharded."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return False
    config = active_config()
    return config is not None and config.low_memory_loading


def load_pretrained(load: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call transformers' `_load_pretrained_model` with lazy tensors in place of the checkpoint's: Note [Lazy loading].

    `arguments` holds what transformers gives, by name. Where it can't be done, the model is loaded whole, and a warning
    says why.
    """
    _warn_quantized(arguments["load_config"])
    if arguments.get("state_dict") is not None or not arguments.get("checkpoint_files") or not wants_rows():
        return load(**arguments)
    try:
        _refuse_special(arguments["load_config"])
        state = lazy_state([Path(file) for file in arguments["checkpoint_files"]])
    except (_NotByRows, CheckpointError) as why:
        _warn_whole(why)
        return load(**arguments)
    result = load(**{**arguments, "state_dict": state})
    make_buffers(arguments["model"])
    return result


def _warn_quantized(load_config: Any) -> None:
    """Say before anything is read that a quantized model can't be sharded; a model that is not prepared need not be."""
    quantizer = getattr(load_config, "hf_quantizer", None)
    problem = why_not(quantizer) if quantizer is not None else None
    if problem is not None and active_config() is not None:
        _warn(f"from_pretrained: this model can be loaded and not be prepared, because {problem}")


def _warn_whole(why: Exception) -> None:
    _warn(f"from_pretrained: every rank loads the whole model into host memory, because {why}")


def _warn(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s", text)


def _refuse_special(load_config: Any) -> None:
    """Raise `_NotByRows` for what transformers places or converts itself."""
    quantizer = getattr(load_config, "hf_quantizer", None)
    if quantizer is not None:
        method = quantizer.quantization_config.quant_method
        raise _NotByRows(f"its weights are quantized ({getattr(method, 'value', method)}).")
    if getattr(load_config, "device_mesh", None) is not None:
        raise _NotByRows("a device mesh was given.")
    places = set((getattr(load_config, "device_map", None) or {}).values())
    if places - {"cpu", torch.device("cpu")}:
        raise _NotByRows("a device_map was given; leave it out, ourshard places the shards.")


def lazy_state(files: list[Path]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name, without reading them.

    Raises:
        _NotByRows: a file of pickles that can't be mapped.
    """
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state.update(_of_safetensors(file) if file.suffix == ".safetensors" else _of_pickle(file))
    return state


def _of_safetensors(file: Path) -> dict[str, torch.Tensor]:
    entries = read_header(file).entries
    return {entry.name: lazy(FileSource(file, entry.begin, entry.shape, entry.dtype)) for entry in entries}


def _of_pickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError) as error:
        raise _NotByRows(f"{file} can't be mapped ({str(error).splitlines()[0]}); save it as safetensors.") from error
    shared: dict[int, torch.Tensor] = {}  # a tied tensor stays one
    return {name: shared.setdefault(id(value), _lazy_or_plain(value)) for name, value in state.items()}


def _lazy_or_plain(value: Any) -> Any:
    return lazy(TensorSource(value.detach())) if isinstance(value, torch.Tensor) else value


def make_buffers(model: nn.Module) -> None:
    """Bring lazy buffers into memory: they are small, and every rank has them whole."""
    for buffer in model.buffers():
        materialize(buffer)


def is_lazy(model: nn.Module) -> bool:
    """Return whether any parameter of `model` has no memory yet."""
    return any(isinstance(parameter, LazyTensor) for parameter in model.parameters())


def checkpoint_files(folder: Path, names: Mapping[str, str]) -> list[Path]:
    """Return the weight files of a folder in Hugging Face's layout: one file, or those that an index lists.

    `names` has `single` and `index`, the names of the two in this folder's kind of file.
    """
    single, index = folder / names["single"], folder / names["index"]
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return [folder / name for name in sorted(set(listed.values()))]

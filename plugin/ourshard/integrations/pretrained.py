"""`save_pretrained` of models that are sharded, or are parts of one: whole tensors, written once.

Every rank calls it, as it would any other collective. What is written is what transformers writes of a model that is
not sharded; each tensor in the dtype that it was loaded in, or in `checkpoint.save_dtype`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ourshard.checkpoint.agreeing import together
from ourshard.integrations import planned_files
from ourshard.runtime.handle import ShardParameter
from ourshard.runtime.part import engines_in, is_here, outline, part_state
from ourshard.runtime.state import persistent

Save = Callable[..., Any]

_LABEL = "save_pretrained"
_elsewhere = 0  # of models that are sharded, whose whole values other ranks hold, to save them


@contextmanager
def held_elsewhere(is_so: bool) -> Iterator[None]:
    """Let saves of sharded models do nothing on this rank for a while, if it has not the values that are saved."""
    global _elsewhere
    _elsewhere += is_so
    try:
        yield
    finally:
        _elsewhere -= is_so


def save_pretrained(save: Save, model: Any, arguments: dict[str, Any]) -> None:
    """Call transformers' `save_pretrained` with whole tensors; `arguments` holds what the user gave, by name.

    Raises:
        DesyncError: another rank does not save, but waits for something else; within seconds, naming both.
        ValueError: a distributed checkpoint in DCP's format is asked for, or the model's weights are quantized.
    """
    if _is_whole(arguments.get("state_dict")) or not engines_in(model):
        save(model, **arguments)
        return
    if _elsewhere:
        return
    if arguments.get("distributed_checkpoint"):
        raise ValueError(
            "save_pretrained: distributed_checkpoint=True is torch FSDP's; leave it out, ourshard gathers."
        )
    _refuse_codes(model)
    asked = writers(model, arguments)
    writes, dtype = is_among(asked, model, arguments), save_dtype(model)
    state = None
    if len(asked) > 1 or not _save_by_rows(save, model, arguments, writes, dtype):
        state = part_state(model, _LABEL, names=_adapter_names(model), dtype=dtype, keep=writes)
    with ending_together(model):
        if writes and state is not None:
            save(model, **{**arguments, "state_dict": state, "is_main_process": True})
        if writes:
            _agree_with_config(model, dtype, arguments["save_directory"])


def _refuse_codes(model: Any) -> None:
    """Refuse a quantized base in shards: transformers would take what its quantizer says in place of what is given."""
    in_shards = any(isinstance(parameter, ShardParameter) for parameter in model.parameters())
    if in_shards and vars(model).get("hf_quantizer") is not None and _adapter_names(model) is None:
        raise ValueError(
            "save_pretrained: the weights of this base are quantized, and what tells how to read them is not sharded "
            "with them. Training does not change it: save the adapters (`trainer.save_model`, or the PEFT model's own "
            "save_pretrained), and load them over the base that you loaded here."
        )


def saved_elsewhere() -> bool:
    """Return whether other ranks have the values of sharded models, and save them: `held_elsewhere`."""
    return _elsewhere > 0


def ending_together(model: nn.Module) -> AbstractContextManager[None]:
    """Return what lets all ranks go on when the files are there, or raise; the next line may read them."""
    return nullcontext() if is_here(model, save_dtype(model)) else together(engines_in(model)[0], f"{_LABEL}: files")


def _save_by_rows(save: Save, model: Any, arguments: dict[str, Any], writes: bool, dtype: torch.dtype | None) -> bool:
    if not planned_files.streams(model, arguments):
        return False
    plan = planned_files.plan_pretrained(save, model, arguments)
    return planned_files.write(model, plan, writes=writes, dtype=dtype, label=_LABEL)


def save_adapters(save: Save, model: Any, arguments: dict[str, Any]) -> None:
    """Call PEFT's `save_pretrained` with whole adapters; nothing else is gathered.

    Raises:
        DesyncError: as `save_pretrained`.
        ValueError: the adapter is to be converted, for which PEFT loads another one into the model.
    """
    if _is_whole(arguments.get("state_dict")) or not engines_in(model):
        save(model, **arguments)
        return
    if _elsewhere:
        return
    if arguments.get("path_initial_model_for_weight_conversion") is not None:
        raise ValueError(
            "save_pretrained: path_initial_model_for_weight_conversion loads a second adapter, which a sharded model "
            "can't take. Save without it, load the adapter into a model that is not sharded, and convert there."
        )
    from ourshard.runtime.api import gathered

    writes = is_among(writers(model, arguments), model, arguments)
    outlines = _outlines(model)
    prompts = [part for part in (getattr(model, "prompt_encoder", None),) if isinstance(part, nn.Module)]
    with gathered([parameter for part in prompts for parameter in part.parameters()]):
        names = _names_of(model, outlines, arguments)
        state = part_state(model, _LABEL, names=names, dtype=save_dtype(model), keep=writes)
        save(model, **{**arguments, "state_dict": {**outlines, **state}, "is_main_process": writes})
    _wait_for_files(model)


def save_dtype(model: nn.Module) -> torch.dtype | None:
    """Return the dtype that `checkpoint.save_dtype` asks for; None keeps each tensor's own."""
    name = next((engine.config.checkpoint.save_dtype for engine in engines_in(model)), None)
    found: torch.dtype | None = getattr(torch, name) if name else None
    return found


def _is_whole(state: dict[str, Any] | None) -> bool:
    """Return whether the user gave tensors to write; `model.state_dict()` of a sharded model has none."""
    return state is not None and not any(isinstance(value, ShardParameter) for value in state.values())


def writers(model: nn.Module, arguments: dict[str, Any]) -> list[int]:
    """Return the ranks that write: where several would write the same folder on one host, the first does.

    Empty where nothing is gathered, so that this rank may be the only one that saves.
    """
    if is_here(model, save_dtype(model)):
        return []
    asked = bool(arguments.get("is_main_process", True))
    host, path = os.environ.get("GROUP_RANK", "0"), str(Path(arguments["save_directory"]).absolute())
    told: list[Any] = engines_in(model)[0].control.gather_objects((asked, host, path), _LABEL)
    return [rank for rank, said in enumerate(told) if said[0] and told.index(said) == rank]


def is_among(ranks: list[int], model: nn.Module, arguments: dict[str, Any]) -> bool:
    """Return whether this rank writes."""
    if is_here(model, save_dtype(model)):
        return bool(arguments.get("is_main_process", True))
    return engines_in(model)[0].control.rank in ranks


def _wait_for_files(model: nn.Module) -> None:
    """Return when the files are there, on every rank that helped to write them: the next line may read them."""
    if not is_here(model, save_dtype(model)):
        engines_in(model)[0].control.meet(f"{_LABEL}: files are written")


def _adapter_names(model: Any) -> Collection[str] | None:
    """Return the names that a transformers model with adapters of its own (`add_adapter`) saves; None: all."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return None
    outlines = _outlines(model)
    return _same_objects(model.get_adapter_state_dict(state_dict=dict(outlines)), outlines)


def _outlines(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model without values."""
    return {name: torch.empty(v.shape, dtype=v.dtype, device="meta") for name, v in persistent(model)}


def _names_of(model: Any, outlines: dict[str, torch.Tensor], arguments: dict[str, Any]) -> Collection[str] | None:
    """Return which parameters PEFT puts into the files: it is let choose among tensors without values."""
    from peft import get_peft_model_state_dict

    chosen: set[str] = set()
    for adapter in arguments.get("selected_adapters") or list(model.peft_config):
        layers = arguments.get("save_embedding_layers", "auto")
        picked = get_peft_model_state_dict(
            model, state_dict=dict(outlines), adapter_name=adapter, save_embedding_layers=layers
        )
        names = _same_objects(picked, outlines)
        if names is None:
            return None
        chosen |= names
    return chosen


def _same_objects(picked: dict[str, Any], outlines: dict[str, torch.Tensor]) -> set[str] | None:
    """Return the names of the outlines in `picked`; None, for all, if one was made anew out of others."""
    names = {id(outline): name for name, outline in outlines.items()}
    meta = [value for value in picked.values() if isinstance(value, torch.Tensor) and value.is_meta]
    return {names[id(value)] for value in meta} if all(id(value) in names for value in meta) else None


def _agree_with_config(model: Any, dtype: torch.dtype | None, folder: str | os.PathLike[str]) -> None:
    """Let the folder's config name the dtype of its file, where they differ."""
    names = _adapter_names(model)
    saved = (value.dtype for name, value in outline(model, dtype).items() if names is None or name in names)
    found = next((each for each in saved if each.is_floating_point), None)
    config = getattr(model, "config", None)
    if found is None or config is None or not (Path(folder) / "config.json").is_file() or model.dtype == found:
        return
    config.dtype = str(found).removeprefix("torch.")
    config.save_pretrained(folder)


def named(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, the first (`self`) left out, those of `**kwargs` among the others."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = bound.signature.parameters[name].kind
        found.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return found

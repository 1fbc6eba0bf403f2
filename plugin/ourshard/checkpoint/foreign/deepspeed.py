"""Checkpoints of DeepSpeed, ZeRO stages 0 to 3, as its engine, accelerate and the Trainer write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ourshard.runtime.wording import counted

from ..numbered import Models, numbered
from ..source import CheckpointError
from .classes import PickledTensor
from .deepspeed_files import (
    LATEST,
    DeepSpeedFiles,
    ModelStates,
    has_model_states,
    loss_scale,
    open_files,
    tag_folder,
)
from .draft import Draft, ForeignSource
from .fsdp_files import optimizer_of_content
from .integer_keys import name_integer_keys, order_of_model
from .plaindata import materialize
from .runfiles import add_run_files
from .stored import Readable, StoredTensor
from .torchfile import TorchFile
from .zero_layout import cut_each, cut_flat

Shapes = dict[str, tuple[int, ...]]


class DeepSpeedSource(ForeignSource):
    """One tag of a DeepSpeed checkpoint."""

    format: ClassVar[str] = "deepspeed"
    looks_for: ClassVar[str] = "latest, and *_model_states.pt in the folder that it names (DeepSpeed)"

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the folder of the tag, for the folder around it or itself; that around it if each tag is a model."""
        return path if len(cls.models_in(path)) > 1 else tag_folder(path)

    @classmethod
    def models_in(cls, found: Path) -> Models:
        """Return the tags by which accelerate numbers models; `latest` names the last of them."""
        tags = numbered(found, r"pytorch_model(?:_(?P<n>\d+))?")
        tags = {number: names for number, names in tags.items() if has_model_states(found / names[0])}
        return tags if len(tags) > 1 else {}

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None, model: int = 0) -> None:
        super().__init__(path, parameter_order)
        models = self.models_in(path)
        if models:
            path = path / models[model][0]
        files, draft = open_files(path), Draft()
        add_engine_values(draft, files.models[0])
        if not files.optimizers:
            _add_stage_0(draft, files.models[0], parameter_order)
        elif "fp32_flat_groups" in files.states[0]:
            _add_stage_3(draft, files)
        else:
            _add_stage_1_2(draft, files)
        if files.optimizers:
            _note_left_out(draft, files.models[0])
            draft.world_size = len(files.optimizers)
            draft.scaler = loss_scale(files.states[0])
        add_outer_files(draft, path, LATEST, model, len(models))
        self.publish(draft)


def _note_left_out(draft: Draft, states: ModelStates) -> None:
    """Say that frozen weights are not here; the engine writes no fragments then, not even empty ones."""
    if (draft.stage or 0) >= 2 and states.content.get("frozen_param_fragments") is None:
        draft.losses.append("frozen parameters, if the model has any: left out when it was saved")


def add_outer_files(draft: Draft, tag: Path, latest: str, model: int = 0, models: int = 1) -> None:
    """Add what accelerate and the Trainer put into the folder around the tag's, if that is what it is."""
    if (tag.parent / latest).is_file():
        add_run_files(draft, tag.parent, model, models)


def add_engine_values(draft: Draft, states: ModelStates) -> None:
    """Add steps, scheduler, versions and client state."""
    steps, skipped = states.content.get("global_steps"), states.content.get("skipped_steps", 0)
    if type(steps) is int and type(skipped) is int:
        draft.step = steps - skipped
    world = states.content.get("dp_world_size")
    draft.world_size = world if type(world) is int else None
    draft.scheduler = states.plain("lr_scheduler")
    draft.client_state = states.client_state()
    if isinstance(states.content.get("ds_version"), str):
        draft.versions["deepspeed"] = states.content["ds_version"]
    config = states.content.get("ds_config")
    stage = config.get("zero_optimization", {}).get("stage") if isinstance(config, dict) else None
    draft.stage = stage if type(stage) is int else None
    for key in ("data_sampler", "random_ltd"):
        if states.content.get(key):
            draft.losses.append(f"{key} of DeepSpeed")
    draft.buffers = frozenset(states.content.get("buffer_names") or ())
    draft.ties = states.ties


def add_module(draft: Draft, states: ModelStates) -> None:
    """Add the whole module of stages 0 to 2; names that show the same bytes are tied even if no list says so."""
    first: dict[PickledTensor, str] = {}
    ties = draft.ties if draft.ties is not None else {}
    for name, tensor in states.module.items():
        draft.model[name] = states.file.stored(tensor)
        owner = first.setdefault(tensor, name)
        if owner != name and tensor.numel and name not in ties and name not in (draft.buffers or ()):
            ties[name] = owner
    draft.ties = ties


def add_partitioned_module(draft: Draft, models: Sequence[ModelStates], trained: Mapping[str, Readable]) -> None:
    """Add the module of stage 3 in its own order: trained parameters, rank 0's buffers, frozen ones joined."""
    states, frozen = models[0], _frozen_of_all_ranks(models)
    for name, tensor in states.module.items():
        if name in trained:
            draft.model[name] = trained[name]
            draft.own_dtypes[name] = tensor.dtype
        elif name in frozen:
            draft.model[name] = frozen[name]
        elif name in (draft.buffers or ()) or tensor.numel:
            draft.model[name] = states.file.stored(tensor)
        elif name not in (draft.ties or {}):
            draft.losses.append(f"{name}: has no data in this checkpoint (frozen, and left out when it was saved)")
    for name, reader in (*trained.items(), *frozen.items()):
        draft.model.setdefault(name, reader)


def _frozen_of_all_ranks(models: Sequence[ModelStates]) -> dict[str, Readable]:
    fragments = [model.content.get("frozen_param_fragments") or {} for model in models]
    found: dict[str, Readable] = {}
    for name, shape in models[0].frozen_shapes.items():
        parts: list[StoredTensor] = []
        for model, own in zip(models, fragments, strict=True):
            if not isinstance(own, Mapping) or not isinstance(own.get(name), PickledTensor):
                raise CheckpointError(f"{model.file.where}: lacks the fragment of {name}")
            parts.append(model.file.stored(own[name]))
        found[name] = cut_each([[part] for part in parts], {name: shape}, "frozen parameters")[name]
    return found


def _add_stage_1_2(draft: Draft, files: DeepSpeedFiles) -> None:
    states, shapes = files.models[0], files.models[0].shapes
    add_module(draft, states)
    draft.stage = _stage(files.states[0], draft.stage)
    parts = [_tensors(file, state, "single_partition_of_fp32_groups") for file, state in _ranks(files)]
    if any(len(groups) != len(shapes) for groups in parts):
        raise CheckpointError(
            f"{states.file.where}: param_shapes has {counted(len(shapes), 'group')}, the optimizer states do not"
        )
    base = [state.get("base_optimizer_state") for state in files.states]
    paddings = _paddings(files.states[0], shapes)
    for index, group in enumerate(shapes):
        label = f"{files.optimizers[0].path.parent}: group {index}"
        draft.masters.update(cut_flat([groups[index] for groups in parts], group, paddings[index], label))
        _add_state(
            draft,
            [file.where for file in files.optimizers],
            [_group_state(part, index, file) for part, file in zip(base, files.optimizers, strict=True)],
            group,
            lambda flat, group=group, index=index, label=label: cut_flat(flat, group, paddings[index], label),
        )
    options = base[0].get("param_groups") if isinstance(base[0], dict) else None
    _add_groups(draft, files, options, [list(group) for group in shapes], round_robin=_is_round_robin(files))


def _ranks(files: DeepSpeedFiles) -> zip[tuple[TorchFile, dict[str, Any]]]:
    return zip(files.optimizers, files.states, strict=True)


def _stage(state: Mapping[str, Any], configured: int | None) -> int | None:
    stage = state.get("zero_stage")
    return stage if type(stage) is int else configured


def _is_round_robin(files: DeepSpeedFiles) -> bool:
    return bool(files.config.get("round_robin_gradients"))


def _tensors(file: TorchFile, state: Mapping[str, Any], key: str) -> list[StoredTensor]:
    values = state.get(key)
    if not isinstance(values, list) or not all(isinstance(value, PickledTensor) for value in values):
        raise CheckpointError(f"{file.where}: {key} is no list of tensors")
    return [file.stored(value) for value in values]


def _paddings(state: Mapping[str, Any], shapes: Sequence[Shapes]) -> list[list[int]]:
    """Return the padding after each parameter of each group; zeros in files of versions that know of none."""
    paddings = state.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    ok = isinstance(paddings, list) and [len(group) for group in paddings] == [len(group) for group in shapes]
    if not ok or any(type(n) is not int or n < 0 for group in paddings for n in group):
        raise CheckpointError("param_alignment_paddings does not fit param_shapes")
    return paddings


def _group_state(base: Any, index: int, file: TorchFile) -> dict[str, Any]:
    """Return the state of one group on one rank: of a torch optimizer, or of a list as elastic checkpoints have it."""
    if isinstance(base, list):
        found = base[index] if index < len(base) else {}
    elif isinstance(base, dict) and isinstance(base.get("state"), dict):
        found = base["state"].get(index, {})
    else:
        found = None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file.where}: the state of group {index} is damaged")
    return {str(key): file.stored(value) if isinstance(value, PickledTensor) else value for key, value in found.items()}


def _add_state(
    draft: Draft, where: Sequence[str], ranks: Sequence[Mapping[str, Any]], shapes: Shapes, cut: Any
) -> None:
    """Add the state of one flat group: flat tensors are cut as the weights, single values belong to each parameter."""
    for key in dict.fromkeys(key for values in ranks for key in values):
        first = next(values[key] for values in ranks if key in values)
        if isinstance(first, StoredTensor) and len(first.shape) == 1:
            parts = [values.get(key) for values in ranks]
            if not all(isinstance(part, StoredTensor) for part in parts):
                lost = next(rank for rank, part in enumerate(parts) if not isinstance(part, StoredTensor))
                raise CheckpointError(f"{where[lost]}: lacks {key}")
            for name, reader in cut(parts).items():
                draft.state.setdefault(name, {})[key] = reader
        else:
            for name in shapes:
                draft.state.setdefault(name, {})[key] = first


def _add_groups(
    draft: Draft, files: DeepSpeedFiles, options: Any, names: list[list[str]], *, round_robin: bool = False
) -> None:
    """Add the groups by name; elastic checkpoints have no options."""
    if round_robin:  # the flat order is shuffled; the model's order is what groups are made in
        place = {name: index for index, name in enumerate(draft.model)}
        names = [sorted(group, key=lambda name: place.get(name, len(place))) for group in names]
    if options is None:
        draft.losses.append("options of the optimizer's groups (lr, betas): elastic checkpoints do not have them")
        draft.groups = [{"params": group} for group in names]
        return
    plain = materialize(files.optimizers[0], options)
    if not isinstance(plain, list) or len(plain) != len(names) or not all(isinstance(group, dict) for group in plain):
        raise CheckpointError(f"{files.optimizers[0].where}: the groups of the optimizer do not fit param_shapes")
    draft.groups = [{**group, "params": members} for group, members in zip(plain, names, strict=True)]


def _add_stage_3(draft: Draft, files: DeepSpeedFiles) -> None:
    states, shapes = files.models[0], files.models[0].shapes
    merged = {name: shape for group in shapes for name, shape in group.items()}
    if len(merged) != sum(len(group) for group in shapes):
        raise CheckpointError(f"{states.file.where}: param_shapes has a name twice")
    draft.stage = _stage(files.states[0], 3)
    flat = [_tensors(file, state, "fp32_flat_groups") for file, state in _ranks(files)]
    label = str(files.optimizers[0].path.parent)
    masters = cut_each(flat, merged, label)
    add_partitioned_module(draft, files.models, masters)
    inner = [_inner_state(file, state) for file, state in _ranks(files)]
    if len(shapes) != len(flat[0]):
        raise CheckpointError(
            f"{label}: param_shapes has {counted(len(shapes), 'group')}, the optimizer {len(flat[0])}"
        )
    for index, group in enumerate(shapes):
        _add_state(
            draft,
            [file.where for file in files.optimizers],
            [_group_state(part, index, file) for part, file in zip(inner, files.optimizers, strict=True)],
            group,
            lambda parts, group=group: cut_each([[part] for part in parts], group, label),
        )
    _add_grouped_names(draft, files, inner[0].get("param_groups"), shapes)


def _inner_state(file: TorchFile, state: Mapping[str, Any]) -> dict[str, Any]:
    inner = state.get("optimizer_state_dict")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{file.where}: the optimizer states hold no state_dict of an optimizer")
    return inner


def _add_grouped_names(draft: Draft, files: DeepSpeedFiles, options: Any, shapes: Sequence[Shapes]) -> None:
    """Add the groups of stage 3, each of which lists its sub-groups by number."""
    names = []
    for group in options if isinstance(options, list) else []:
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < len(shapes) for n in numbers):
            raise CheckpointError("a group of the optimizer does not list its sub-groups")
        names.append([name for number in numbers for name in shapes[number]])
    _add_groups(draft, files, options, names)


def _add_stage_0(draft: Draft, states: ModelStates, parameter_order: Sequence[str] | None) -> None:
    """Add a checkpoint without partitions. Its optimizer numbers its parameters, in the order of the module."""
    add_module(draft, states)
    optimizer = states.content.get("optimizer")
    if not isinstance(optimizer, dict):
        draft.losses.append("the optimizer's state: the checkpoint has none")
        return
    if "fp32_groups_flat" in optimizer:
        draft.losses.append(
            "the optimizer's state and fp32 weights: flat and without names (fused FP16_Optimizer, stage 0)"
        )
        return
    content = optimizer.get("optimizer_state_dict", optimizer)
    order = order_of_model(draft, parameter_order, "the order of the module")
    name_integer_keys(draft, optimizer_of_content(states.file, content), [order])
    if draft.groups is not None:
        _add_masters(draft, states.file, optimizer.get("fp32_groups"))


def _add_masters(draft: Draft, file: TorchFile, groups: Any) -> None:
    """Add the fp32 weights that the 16-bit optimizer of stage 0 keeps, group by group."""
    if groups is None:
        return
    for members, group in zip(groups, draft.groups or (), strict=True):
        for tensor, name in zip(members, group["params"], strict=True):
            if not isinstance(tensor, PickledTensor):
                raise CheckpointError(f"{file.where}: fp32_groups holds something that is no tensor")
            draft.masters[name] = file.stored(tensor)

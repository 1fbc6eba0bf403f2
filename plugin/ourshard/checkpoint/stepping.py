"""The state of optimizers of a running model, by parameter name: out of the tensors they step, and back into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ourshard.runtime.engine import Engine
from ourshard.runtime.optim import has_owners, put_away
from ourshard.runtime.run import Run
from ourshard.runtime.states import is_of_elements, problem_of_class, problem_of_nested

from .local_state import SavedLocal
from .portions import Portion
from .shard_writer import LocalBox
from .source import BUFFER, EXTRA_PREFIX, PARAM, Source, TensorInfo, TensorKey
from .staging import ToHost

Boxes = dict[TensorKey, list[LocalBox]]
State = dict[str, Any]

_NO_KIND = {"params", "initial_lr"}  # options that optimizers of all kinds may have


def group_names(optimizer: Optimizer, portions: Sequence[Portion]) -> list[list[str]]:
    """Return the names of each group's parameters, also of those that this rank has no elements of."""
    places = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    names: list[list[str]] = [[] for _ in optimizer.param_groups]
    for portion in portions:
        if id(portion.stepped) in places:
            names[places[id(portion.stepped)]].append(portion.name)
    return names


def steps_any(optimizer: Optimizer, portions: Sequence[Portion]) -> bool:
    """Say whether the optimizer has any of these parameters; the same on every rank."""
    return any(group_names(optimizer, portions))


def describe_groups(optimizer: Optimizer, portions: Sequence[Portion]) -> list[dict[str, Any]]:
    """Return the options of each group, with parameters by name."""
    names = group_names(optimizer, portions)
    return [{**group, "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)]


# ---- saving ------------------------------------------------------------------------------------------------


def take_state(
    optimizer: Optimizer,
    portions: Sequence[Portion],
    lead: bool,
    boxes: Boxes,
    to_host: ToHost,
    *,
    local: bool = False,
) -> dict[str, State]:
    """Add this rank's elements of each state tensor to `boxes`; return by name what is neither element nor scalar.

    Scalars, and the rest, are the same on all ranks, since a parameter without elements here is stepped beside others:
    the rank that has the `lead` gives them. What an owner steps whole, it gives alone. With `local`, tensors of flat
    parts are left to `take_local`: Note [Local state].
    Raises ValueError for tensors in a list or dict that are neither of one value an element nor of the whole parameter.
    """
    rest: dict[str, State] = {}
    places = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for portion in portions:
        state = optimizer.state.get(portion.stepped) if id(portion.stepped) in places else None
        gives = lead if portion.owner is None else portion.writes
        for key, value in (state or {}).items():
            _refuse_key(optimizer, key)
            _refuse_state(optimizer, key, value, portion)
            if local and portion.flat and isinstance(value, torch.Tensor) and value.dim():
                continue
            if portion.owner is not None and isinstance(value, torch.Tensor) and value.shape == portion.shape:
                if gives:
                    whole = to_host(value.detach().contiguous())
                    boxes[TensorKey(key, portion.name)] = [LocalBox(portion.shape, whole)]
            elif _is_elementwise(value, portion):
                if portion.writes:
                    parts = portion.boxes(portion.elements(value), to_host)
                    boxes.setdefault(TensorKey(key, portion.name), []).extend(parts)
            elif isinstance(value, torch.Tensor) and not value.shape:
                if gives:
                    boxes[TensorKey(key, portion.name)] = [LocalBox((), value.detach().cpu().clone())]
            elif gives:
                rest.setdefault(portion.name, {})[key] = value.cpu() if isinstance(value, torch.Tensor) else value
    return rest


def _refuse_key(optimizer: Optimizer, key: Any) -> None:
    if not isinstance(key, str):
        raise ValueError(f"{type(optimizer).__name__} has state of the name {key!r}; a checkpoint needs text")
    if key in (PARAM, BUFFER) or key.startswith(EXTRA_PREFIX):
        raise ValueError(f"{type(optimizer).__name__} has state of the name {key!r}, which a checkpoint uses")


def _refuse_state(optimizer: Optimizer, key: str, value: Any, portion: Portion) -> None:
    problem_of = problem_of_nested if portion.flat else problem_of_class
    problem = problem_of(optimizer, key, value, portion.name)
    if problem is not None:
        raise ValueError(problem)


def join_rest(found: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, State]:
    """Join what `take_state` returned on each rank, where owners have it."""
    joined: dict[str, State] = {}
    for told in found:
        for name, state in told.items():
            joined.setdefault(name, {}).update(state)
    return joined


def _is_elementwise(value: Any, portion: Portion) -> bool:
    if portion.owner is not None:
        return False
    shapes = {portion.state_shape, portion.shape} if portion.resting else {portion.state_shape}
    return isinstance(value, torch.Tensor) and tuple(value.shape) in shapes and value.dim() > 0


# ---- loading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedState:
    """The optimizer state in a checkpoint; `names` maps a parameter of the model to its name there."""

    source: Source
    names: Mapping[str, str]
    infos: Mapping[str, Mapping[str, TensorInfo]]  # name there -> state key -> tensor
    local: SavedLocal

    @classmethod
    def of(cls, source: Source, names: Mapping[str, str], engine: Engine) -> SavedState:
        """Sort the state tensors of `source` by parameter."""
        infos: dict[str, dict[str, TensorInfo]] = {}
        for key, info in source.tensors.items():
            if key.is_state:
                infos.setdefault(key.name, {})[key.kind] = info
        return cls(source, names, infos, SavedLocal.of(source, engine))

    def tensors(self, name: str) -> Mapping[str, TensorInfo]:
        """Return the state tensors of a parameter of the model, which may be new."""
        return self.infos.get(self.names.get(name, ""), {})

    def master_dtype(self, portion: Portion) -> torch.dtype:
        """Return the dtype in which the checkpoint has what a portion is of."""
        return self.source.tensors[self.weight_key(portion)].dtype

    def weight_key(self, portion: Portion) -> TensorKey:
        """Return where the checkpoint has what a portion is of."""
        key = self.source.weight_key(self.names[portion.name])
        assert key is not None
        return key

    def rest(self, name: str) -> Mapping[str, Any]:
        """Return the state of a parameter that is no tensor."""
        return self.source.description.param_state.get(self.names.get(name, ""), {})

    def keys(self, name: str) -> list[str]:
        """List the state keys of a parameter."""
        return [*self.tensors(name), *self.rest(name)]

    def shared(self, portion: Portion) -> str:
        """Describe what has to be equal for all parameters that are stepped as one tensor; "" without state."""
        scalars = {
            key: self.source.read(info.key).item()
            for key, info in self.tensors(portion.name).items()
            if not is_elementwise(info, portion)
        }
        keys = sorted(self.keys(portion.name))
        return repr((keys, sorted(scalars.items()), sorted(self.rest(portion.name).items()))) if keys else ""


def is_elementwise(info: TensorInfo, portion: Portion) -> bool:
    """Say whether a saved state tensor has one value an element; of a 0-d parameter, all but its step count has."""
    return info.shape == portion.shape and (bool(portion.shape) or info.key.kind != "step")


def misfits(optimizers: Sequence[Optimizer], portions: Sequence[Portion], saved: SavedState) -> Iterator[str]:
    """Yield what does not fit between the optimizers and the checkpoint, one sentence each."""
    if not optimizers:
        return
    mine = [group for optimizer in optimizers for group in group_names(optimizer, portions)]
    known_groups = saved.source.description.param_groups
    known = [set(group["params"]) for group in known_groups]
    if mine and not known and not saved.infos:
        lost = [loss for loss in saved.source.description.losses if "optimizer" in loss]
        what = (
            f"what it holds of an optimizer can't be read: {'; '.join(lost)}"
            if lost
            else "it holds no state of an optimizer"
        )
        yield f"{what}; for the weights alone: ourshard.load(model, None, folder)"
        return
    strange = sorted(
        name
        for number, group in enumerate(mine)
        for name in group
        if number >= len(known) or saved.names.get(name) not in known[number]
    )
    if len(known) != len(mine) or strange:
        yield (
            f"it has {len(known)} parameter groups, the optimizer {len(mine)}; not in the same group there: "
            f"{', '.join(strange[:5]) or 'none'}; build the optimizer as it was built when the state was saved"
        )
    elif saved.source.is_own:
        yield from other_kinds(optimizers, known_groups)
    stepped = {name for group in mine for name in group} & saved.names.keys()
    for portion in portions:
        for info in saved.tensors(portion.name).values() if portion.name in stepped else ():
            if info.shape not in (portion.shape, ()):
                yield f"{info.key} has shape {info.shape}, its parameter {portion.shape}"
    yield from cut_misfits(optimizers, [portion for portion in portions if portion.name in stepped], saved)
    yield from saved.local.misfits(optimizers)
    saved.local.check_classes(optimizers)


def cut_misfits(optimizers: Sequence[Optimizer], portions: Sequence[Portion], saved: SavedState) -> Iterator[str]:
    """Yield what was saved of parameters that were stepped whole, and can't be cut for ranks that step rows of them."""
    owners = any(has_owners(optimizer) for optimizer in optimizers)
    for portion in portions:
        for key, value in saved.rest(portion.name).items() if portion.flat or (portion.resting and not owners) else ():
            if is_of_elements(value):
                yield (
                    f"{key!r} of {portion.name} was saved of the whole parameter, in a layout of the optimizer's own, "
                    "and here ranks step rows of it; use the stage, persist_below and optimizer of the save"
                )


def other_kinds(optimizers: Sequence[Optimizer], known: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the groups that an optimizer of another kind had; torch's versions differ on one side alone."""
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    for number, ((optimizer, group), values) in enumerate(zip(groups, known, strict=True)):
        here, there = group.keys() - _NO_KIND, values.keys() - _NO_KIND
        if here - there and there - here:
            yield (
                f"group {number} has the options {', '.join(sorted(there - here))}, {type(optimizer).__name__} has "
                f"{', '.join(sorted(here - there))}: the state is of another kind of optimizer"
            )


def split_uneven(
    engine: Engine, optimizers: Sequence[Optimizer], portions: Sequence[Portion], saved: SavedState
) -> None:
    """Step parameters one by one where their saved step counts differ, some have no state, or it was saved apart."""
    shared = {portion.name: saved.shared(portion) for portion in portions}
    for lane in engine.lanes():
        for run in list(lane.runs):
            optimizer = run.optimizer()
            if optimizer is not None and optimizer in optimizers and len({shared[name] for name in _names_of(run)}) > 1:
                optimizer.state.pop(run.parameter, None)  # which is about to be replaced, and may be none that is cut
                run._split()
    saved.local.split(optimizers)


def _names_of(run: Run) -> list[str]:
    return [run.lane.name_of(position) for position in run.positions]


def restore(optimizers: Sequence[Optimizer], portions: Sequence[Portion], saved: SavedState) -> None:
    """Put the saved options into the groups, whose dicts stay the same objects, and the saved state into the state."""
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    beside: dict[int, list[Portion]] = {}
    for portion in portions:
        beside.setdefault(id(portion.stepped), []).append(portion)
    for (optimizer, group), values in zip(groups, saved.source.description.param_groups, strict=True):
        _set_options(group, _options_of(values, group, saved.source))
        on_device = bool(group.get("fused") or group.get("capturable"))
        for stepped in group["params"]:
            if id(stepped) not in beside:  # of another model
                continue
            state = _state_of(stepped, beside[id(stepped)], saved, on_device, has_owners(optimizer))
            if state:
                optimizer.state[stepped] = state
                put_away(optimizer, stepped)
            else:
                optimizer.state.pop(stepped, None)
    saved.local.restore(optimizers)


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the options of a group; one that is a tensor, as the rate of a captured step, stays the same tensor."""
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
            new = torch.as_tensor(value, device=own.device)
            if new.shape == own.shape:
                own.copy_(new)
                continue
        group[key] = value


def _options_of(values: Mapping[str, Any], group: Mapping[str, Any], source: Source) -> State:
    """Return the saved options for a group; of another engine's those that this optimizer knows, bar its kernels."""
    options = {key: value for key, value in values.items() if key != "params"}
    if source.is_own:
        return options
    known = (group.keys() | {"initial_lr"}) - {"fused", "foreach", "capturable", "differentiable"}
    return {key: value for key, value in options.items() if key in known}


def _state_of(
    stepped: torch.Tensor, parts: Sequence[Portion], saved: SavedState, on_device: bool, owners: bool
) -> State:
    """Return the state of one stepped tensor, which stands for all of `parts`; `owners`: each is stepped whole."""
    first = parts[0]
    if first.owner is False:
        return {}
    state: State = {}
    for key, value in saved.rest(first.name).items():
        state[key] = value
        if isinstance(value, torch.Tensor):
            dtype = following(value.dtype, saved.master_dtype(first), stepped) if value.dim() else value.dtype
            state[key] = value.to(stepped.device, dtype, copy=True)
    for key, info in saved.tensors(first.name).items():
        if is_elementwise(info, first):
            whole = bool(first.owner or (first.resting and owners))
            state[key] = _elements(key, stepped, parts, saved, whole=whole)
        else:
            value = saved.source.read(info.key).clone()
            state[key] = value.to(stepped.device) if on_device and key == "step" else value
    if "step" in state and not saved.source.is_own:  # others count in integers, torch's optimizers in fp32
        step = torch.as_tensor(state["step"], dtype=torch.float32, device="cpu")
        state["step"] = step.to(stepped.device) if on_device else step
    return state


def following(dtype: torch.dtype, was: torch.dtype | None, stepped: torch.Tensor) -> torch.dtype:
    """Return the dtype for state of `dtype`, of a parameter that was stepped in `was` and now as `stepped`.

    State in the dtype of the masters follows it; where `was` is not known all does, as torch loads it.
    """
    follows = dtype.is_floating_point and stepped.is_floating_point() and was in (None, dtype)
    return stepped.dtype if follows else dtype


def _elements(
    key: str, stepped: torch.Tensor, parts: Sequence[Portion], saved: SavedState, *, whole: bool
) -> torch.Tensor:
    infos = [saved.tensors(part.name)[key] for part in parts]
    dtype = following(infos[0].dtype, saved.master_dtype(parts[0]), stepped)
    if whole:
        return saved.source.read(infos[0].key).to(stepped.device, dtype, copy=True)
    own = torch.zeros(parts[0].state_shape, dtype=dtype, device=stepped.device)
    for part, info in zip(parts, infos, strict=True):
        flat = own.view(-1)[part.offset : part.offset + part.numel]
        flat.copy_(saved.source.read_run(info.key, part.start, part.stop))
    return own

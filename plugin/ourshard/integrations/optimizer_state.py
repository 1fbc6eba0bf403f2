"""The whole state of an optimizer, by parameter name, gathered from the ranks' shards and cut for them again.

Shape of what is saved: `{"state": {"0/name": {"exp_avg": whole tensor, "step": ...}}, "param_groups": [{..., "params":
["0/name", ...]}]}`; the number before the name is the model's, in the order of `prepare`. Where one rank steps a
parameter whole (Note [Owners] in runtime/owners.py), its state is sent by that rank as it is, of whatever shape.
Tensors of classes that stand for others are saved as those (checkpoint/tensor_classes.py), and made again. What only
this layout can read (Note [Local state] in checkpoint/local_state.py) is beside "state", under "local":
`{"0/name of a run and of a rank's part": {"absmax": that rank's tensor, ...}}`. "dtypes" has those that parameters were
stepped in: state in the same one goes into that of the masters it is loaded for. Masters that the file of the weights
rounds are there too: `whole_masters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ourshard.checkpoint.coding import begin_anew
from ourshard.checkpoint.local_state import all_keep_local, split_local
from ourshard.checkpoint.source import MASTERS
from ourshard.checkpoint.source import WHOLE_LOCAL as LOCAL
from ourshard.checkpoint.stepping import following, other_kinds
from ourshard.checkpoint.tensor_classes import CLASS, check_classes, flattened, rebuilt
from ourshard.integrations import whole_local, whole_masters
from ourshard.runtime.engine import Engine
from ourshard.runtime.lane import Lane
from ourshard.runtime.optim import has_owners, put_away
from ourshard.runtime.run import Run
from ourshard.runtime.states import is_of_elements, problem_of_nested, stands_for_others
from ourshard.runtime.wording import shorten

State = dict[str, Any]

DTYPES = "dtypes"


class _Piece(NamedTuple):
    """A parameter that this rank's optimizer steps: a tensor of a group, and where it is from."""

    key: str
    group: int
    lane: Lane
    position: int
    run: Run | None  # None: a whole parameter, which the user's own tensor is, or one that is not trained

    @property
    def owner(self) -> int | None:
        """Return the rank of the shard axis that steps it whole, and has all of its state; None without one."""
        return self.run.owner if self.run is not None else None

    @property
    def flat(self) -> bool:
        """Tell whether rows of it are stepped, and not the parameter: the state is of this rank."""
        return self.run is not None and self.run.owner is None

    @property
    def rests(self) -> bool:
        """Tell whether the group has the handle of a sharded parameter, whose state is of elements that are here."""
        return self.run is None and not self.lane.placement.whole

    @property
    def rows_numel(self) -> int:
        """Count the elements that are on this rank."""
        return self.lane.rows(self.position).numel(self.lane.layout.tensors[self.position].granule)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of a state that has one value an element."""
        return (max(1, self.rows_numel),) if self.rests else tuple(_stepped(self).shape)


class _AtOwner(NamedTuple):
    """What stands for a state tensor until its owner sends it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def gather(optimizer: Optimizer, engines: Sequence[Engine], keep: bool = True) -> dict[str, Any]:
    """Return the whole state. Collective; a rank that does not `keep` it takes part and returns an empty one.

    One state tensor of one lane, or of one rank's run, is on a device at a time. Raises ValueError for tensors in a
    list or dict that are neither of one value an element nor of the whole parameter.
    """
    pieces = list(_pieces(optimizer, engines))
    (local,) = all_keep_local(engines, [optimizer], "saving the optimizer whole")
    _refuse_unsaved(optimizer, pieces, engines)
    mine = {piece.key: _scalars(optimizer, piece, local=local) for piece in pieces if _state(optimizer, piece)}
    told = _exchange(engines, (mine, [(piece.key, piece.group, _stepped(piece).dtype) for piece in pieces]))
    state: dict[str, State] = {}
    dtypes: dict[str, torch.dtype] = {}
    groups: list[dict[str, None]] = [{} for _ in optimizer.param_groups]
    for scalars, keys in told:
        for key, values in scalars.items():
            state.setdefault(key, dict(values))
        for key, group, dtype in keys:
            groups[group][key] = None
            dtypes[key] = dtype
    masters: dict[str, torch.Tensor] = {}
    stepped = {key for group in groups for key in group}
    for number, engine in enumerate(engines):
        for lane in engine.lanes():
            _gather_lane(optimizer, number, lane, [p for p in pieces if p.lane is lane], state, keep=keep)
            positions = {_key(number, lane, position): position for position in range(len(lane.parameters))}
            of_lane = {key: position for key, position in positions.items() if key in stepped}
            masters |= whole_masters.gather(lane, of_lane, keep=keep)
    _gather_owned(optimizer, {piece.key: piece for piece in pieces if piece.owner is not None}, state, keep=keep)
    beside: dict[str, Any] = {LOCAL: whole_local.gather(optimizer, engines, keep=keep)} if local else {}
    beside |= {MASTERS: masters} if masters else {}
    if not keep:
        return {"state": {}, "param_groups": []}
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    param_groups = [{**s, "params": list(g)} for s, g in zip(settings, groups, strict=True)]
    return {"state": state, "param_groups": param_groups, DTYPES: dtypes, **beside}


def _refuse_unsaved(optimizer: Optimizer, pieces: Sequence[_Piece], engines: Sequence[Engine]) -> None:
    """Raise ValueError on all ranks for state that has no place in a file."""
    problems = [
        problem_of_nested(optimizer, key, value, piece.lane.name_of(piece.position))
        for piece in pieces
        if piece.flat
        for key, value in _state(optimizer, piece).items()
    ]
    for engine in engines[:1]:
        engine.control.check(next((each for each in problems if each), None), "reading the optimizer's state")


def _exchange(engines: Sequence[Engine], value: Any) -> list[Any]:
    return engines[0].control.gather_objects(value, "reading the optimizer's state") if engines else [value]


def _pieces(optimizer: Optimizer, engines: Sequence[Engine]) -> Iterator[_Piece]:
    places = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for number, engine in enumerate(engines):
        for lane in engine.lanes():
            for run in lane.runs:
                if id(run.parameter) in places:
                    for position in run.positions:
                        yield _Piece(_key(number, lane, position), places[id(run.parameter)], lane, position, run)
            for position, parameter in enumerate(lane.resting):
                if id(parameter) in places:
                    yield _Piece(_key(number, lane, position), places[id(parameter)], lane, position, None)


def _key(model: int, lane: Lane, position: int) -> str:
    return f"{model}/{lane.name_of(position)}"


def _stepped(piece: _Piece) -> torch.Tensor:
    return piece.run.parameter if piece.run is not None else piece.lane.resting[piece.position]


def _state(optimizer: Optimizer, piece: _Piece) -> State:
    """Return the state of what the optimizer steps, that of a whole parameter in plain tensors."""
    state: State = optimizer.state.get(_stepped(piece), {})
    if piece.flat or not any(stands_for_others(value) for value in state.values()):
        return state
    plain = (flattened(key, value) if stands_for_others(value) else {key: value} for key, value in state.items())
    return {key: value for each in plain for key, value in each.items()}


def _is_elementwise(value: Any, piece: _Piece) -> bool:
    shape = piece.lane.parameters[piece.position].shape
    shapes = {piece.state_shape, tuple(shape)} if piece.rests else {piece.state_shape}
    return isinstance(value, torch.Tensor) and tuple(value.shape) in shapes and value.dim() > 0


def _scalars(optimizer: Optimizer, piece: _Piece, *, local: bool) -> State:
    """Return what the state holds beside one value an element; the names of the latter with their dtype.

    `local`: tensors of flat parts are left to `whole_local`.
    """
    if piece.owner is not None:
        return {
            k: _AtOwner(tuple(v.shape), v.dtype) if _is_whole(v) else v for k, v in _state(optimizer, piece).items()
        }
    return {
        key: value.dtype if _is_elementwise(value, piece) else value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in _state(optimizer, piece).items()
        if not (local and piece.flat and isinstance(value, torch.Tensor) and value.dim())
    }


def _gather_owned(optimizer: Optimizer, pieces: dict[str, _Piece], state: dict[str, State], *, keep: bool) -> None:
    """Replace what stands for tensors of whole parameters by the tensors, which the owners send one by one."""
    for key, piece in sorted(pieces.items()):
        lane, owner = piece.lane, piece.owner
        assert owner is not None
        for name, told in sorted(state.get(key, {}).items()):
            if not isinstance(told, _AtOwner):
                continue
            if owner == lane.spread.rank:
                value = _state(optimizer, piece)[name].detach().to(lane.device).contiguous()
            else:
                value = torch.empty(told.shape, dtype=told.dtype, device=lane.device)
            lane.unit.engine.collectives.broadcast(value, lane.spread, f"state of {lane.unit.label}", owner)
            if keep:
                state[key][name] = value.cpu()


def _gather_lane(
    optimizer: Optimizer, model: int, lane: Lane, pieces: list[_Piece], state: dict[str, State], *, keep: bool
) -> None:
    """Replace, in `state`, the dtypes that stand for this lane's state tensors by the tensors, whole."""
    positions = {_key(model, lane, position): position for position in range(len(lane.parameters))}
    wanted = sorted(
        {(k, str(v)) for key in positions for k, v in state.get(key, {}).items() if isinstance(v, torch.dtype)}
    )
    for name, text in wanted:
        dtype = getattr(torch, text.removeprefix("torch."))
        flat = torch.zeros(lane.master.numel(), dtype=dtype, device=lane.master.device)
        for piece in pieces:
            value = _state(optimizer, piece).get(name)
            if value is not None and _is_elementwise(value, piece):  # of one name, another parameter's may be factored
                lane.rows_view(flat, piece.position).copy_(_rows_of(value, piece))
        whole = lane.gather_exact(flat)
        for key, position in positions.items() if keep else ():
            if isinstance(state.get(key, {}).get(name), torch.dtype):
                state[key][name] = lane.whole_view(whole, position).cpu()


def _rows_of(value: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Return the part of a state tensor that belongs to one parameter, in the shape of this rank's rows of it."""
    lane, position = piece.lane, piece.position
    shape = lane.local_rows(position).shape
    if piece.rests and tuple(value.shape) == tuple(lane.parameters[position].shape):  # of before it was sharded
        return _own_rows(value, piece)
    if piece.rests:
        return value[: piece.rows_numel].view(shape)
    if piece.run is None:
        return value.view(shape)
    return value[lane.rows(position).offset - piece.run.start :][: piece.rows_numel].view(shape)


def load(optimizer: Optimizer, engines: Sequence[Engine], path: Path) -> None:
    """Load what `gather` returned, on any number of ranks. Group dicts keep their identity.

    Raises:
        ValueError: the file is missing, or its groups hold other parameters.
    """
    if not path.exists():
        raise ValueError(
            f"load_state: {path} is missing; a folder of ourshard's save_state has one for each optimizer."
        )
    restore(optimizer, engines, torch.load(path, map_location="cpu", mmap=True, weights_only=True), path)


def restore(optimizer: Optimizer, engines: Sequence[Engine], saved: dict[str, Any], path: Path) -> None:
    """Take over a state in the form that `gather` returns, which was read from `path`; raises as `load` does."""
    _check_groups(optimizer, engines, saved["param_groups"], path)
    local = saved.get(LOCAL, {})
    for state in saved["state"].values():
        check_classes({key: value for key, value in state.items() if str(key).endswith(CLASS)})
    _refuse_other_layout(optimizer, engines, saved["state"], local, path)
    for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    _split_uneven(optimizer, engines, saved["state"])
    for number, engine in enumerate(engines):
        split_local(engine, optimizer, whole_local.of_engine(local, number))
    runs: dict[int, list[_Piece]] = {}
    for piece in _pieces(optimizer, engines):
        runs.setdefault(id(_stepped(piece)), []).append(piece)
    for pieces in runs.values():
        whole = [saved["state"].get(piece.key) for piece in pieces]
        elsewhere = pieces[0].owner not in (None, pieces[0].lane.spread.rank)
        if elsewhere or all(state is None for state in whole):
            optimizer.state.pop(_stepped(pieces[0]), None)
        else:
            if pieces[0].rests and has_owners(optimizer):  # for the owner, once it is trained
                optimizer.state[_stepped(pieces[0])] = dict(whole[0] or {})
                continue
            group = optimizer.param_groups[pieces[0].group]
            on_device = bool(group.get("fused") or group.get("capturable"))
            was = saved.get(DTYPES, {}).get(pieces[0].key)
            optimizer.state[_stepped(pieces[0])] = _cut(pieces, [state or {} for state in whole], was, on_device)
            put_away(optimizer, _stepped(pieces[0]))
    whole_local.restore(optimizer, engines, local)
    for number, engine in enumerate(engines):
        places = {_key(number, lane, at): (lane, at) for lane in engine.lanes() for at in range(len(lane.parameters))}
        whole_masters.restore(engine, places, saved.get(MASTERS, {}))
        begin_anew(engine, "a whole checkpoint has none; checkpoint.format: sharded keeps them")


def keys_by_group(optimizer: Optimizer, engines: Sequence[Engine]) -> list[set[str]]:
    """Return the keys of the parameters in each group, those that this rank has no rows of among them."""
    keys: list[set[str]] = [set() for _ in optimizer.param_groups]
    for piece in _pieces(optimizer, engines):
        keys[piece.group].add(piece.key)
    return keys


def _check_groups(optimizer: Optimizer, engines: Sequence[Engine], saved: list[dict[str, Any]], path: Path) -> None:
    mine = keys_by_group(optimizer, engines)
    known = [set(group["params"]) for group in saved]
    trained = {p.key for p in _pieces(optimizer, engines) if p.lane.leaves[p.position].requires_grad}
    strange = sorted(k for n, keys in enumerate(mine) for k in keys & trained - (known[n] if n < len(known) else set()))
    if len(known) != len(mine) or strange:
        raise ValueError(
            f"load_state: {path} has {len(known)} parameter groups, the optimizer {len(mine)}; not in the same group "
            f"there: {shorten(strange) or 'none'}. Build the optimizer as it was built when the state was saved."
        )
    for problem in other_kinds([optimizer], saved):
        raise ValueError(f"load_state: nothing of {path} was loaded: {problem}")


def _refuse_other_layout(
    optimizer: Optimizer, engines: Sequence[Engine], state: dict[str, State], local: dict[str, State], path: Path
) -> None:
    """Refuse what was saved in a layout of the optimizer's own, where rows are stepped in another."""
    problems = list(whole_local.misfits(optimizer, engines, local))
    owners = has_owners(optimizer)
    problems += [
        f"{name!r} of {piece.key} is of the whole parameter, in a layout of the optimizer's own, and here ranks step "
        "rows of it"
        for piece in _pieces(optimizer, engines)
        if piece.flat or (piece.rests and not owners)
        for name, value in state.get(piece.key, {}).items()
        if not _has_an_element_each(name, value, piece) and is_of_elements(value)
    ]
    if problems:
        raise ValueError(f"load_state: nothing of {path} was loaded: {problems[0]}.")


def _split_uneven(optimizer: Optimizer, engines: Sequence[Engine], state: dict[str, State]) -> None:
    """Step parameters one by one where their saved scalars (step counts) differ, or some have no state."""
    for engine in engines:
        for lane in engine.lanes():
            for run in list(lane.runs):
                if run.optimizer() is optimizer and len({_shared(state, p) for p in _of_run(engines, run)}) > 1:
                    optimizer.state.pop(run.parameter, None)  # which is about to be replaced
                    run._split()


def _of_run(engines: Sequence[Engine], run: Run) -> list[_Piece]:
    number = next(n for n, engine in enumerate(engines) if engine is run.lane.unit.engine)
    return [_Piece(_key(number, run.lane, position), 0, run.lane, position, run) for position in run.positions]


def _shared(saved: dict[str, State], piece: _Piece) -> str:
    """Describe what has to be equal for all parameters that are stepped as one tensor."""
    state = saved.get(piece.key)
    scalars = {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in (state or {}).items()
        if not _has_an_element_each(key, value, piece)
    }
    return repr(None if state is None else (sorted(state), sorted(scalars.items())))


def _has_an_element_each(key: str, value: Any, piece: _Piece) -> bool:
    """Say whether a whole state tensor has one value an element; of a 0-d parameter, all but its step count has."""
    if piece.owner is not None or not isinstance(value, torch.Tensor):
        return False
    shape = piece.lane.parameters[piece.position].shape
    return tuple(value.shape) == tuple(shape) and (value.dim() > 0 or key != "step")


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _cut(pieces: list[_Piece], whole: list[State], was: torch.dtype | None, on_device: bool) -> State:
    """Return this rank's state of one stepped tensor, from the whole state of its parameters.

    `was`: the dtype that they were stepped in, if it is known. `on_device`: the optimizer's kernels read its scalars
    (step counts) where the parameter is.
    """
    state: State = {}
    stepped = _stepped(pieces[0])
    for key, value in whole[0].items():
        if _has_an_element_each(key, value, pieces[0]):
            dtype = following(value.dtype, was, stepped)
            own = torch.zeros(pieces[0].state_shape, dtype=dtype, device=stepped.device)
            for states, piece in zip(whole, pieces, strict=True):
                _rows_of(own, piece).copy_(_own_rows(states[key], piece))
            state[key] = own
        else:
            state[key] = value
            if isinstance(value, torch.Tensor) and not str(key).endswith(CLASS):
                plain = value.dim() and f"{key.rpartition('.')[0]}{CLASS}" not in whole[0]
                dtype = following(value.dtype, was, stepped) if plain else value.dtype
                state[key] = value.to(stepped.device if on_device or value.dim() else value.device, dtype, copy=True)
    return rebuilt(state)


def _own_rows(value: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Return what this rank has of a whole state tensor, in the shape of its rows."""
    rows = piece.lane.rows(piece.position)
    granule = piece.lane.layout.tensors[piece.position].granule
    local = piece.lane.local_rows(piece.position)
    return value.reshape(-1)[rows.start * granule : rows.stop * granule].view(local.shape)

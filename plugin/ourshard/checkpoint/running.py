"""Save and load a sharded model and its optimizers while they run: each rank its own rows, whatever the stage.

Note [Ranks of a save]
All ranks know the layout, so nothing is planned over the wire but one flag for each optimizer: Note [Local state].
There are three agreements, and an error of one rank is an error of all in each: the temporary folder is there; all
ranks have written and flushed; rank 0 has renamed it. A load has two: what all ranks read of the folder fits and is
undamaged, and then all ranks have read their rows.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ourshard.config import WhenBusy
from ourshard.runtime.api import engine_of
from ourshard.runtime.engine import Engine
from ourshard.runtime.optim import bring_up_to_date, has_owners
from ourshard.runtime.state import check_no_writes, check_readable, extra_states, with_extra_state
from ourshard.runtime.wording import shorten
from ourshard.runtime.wrap import canonical

from . import commit, frozen_base, stepping
from .agreeing import together
from .background import BACKGROUND
from .coding import restore_coding, take_coding
from .disks import Disk, Joined, find_disk, join_disks
from .extra_state import load_extra_states
from .io import DISK, DiskIO
from .local_state import all_keep_local, take_local
from .manifest import carried
from .matching import key_of, names_there, tied_here
from .portions import Buffer, Portion, buffers_of, portions_of
from .shard_writer import LocalBox, ShardWriter
from .sharded import ShardedSource, is_ours
from .source import BUFFER, PARAM, CheckpointError, Description, ParameterOrder, Source, TensorKey, detect
from .staging import ToHost, on_host
from .stepping import Boxes, SavedState

logger = logging.getLogger("ourshard")


# ---- saving ------------------------------------------------------------------------------------------------


def save(
    model: nn.Module,
    optimizer: Any | Sequence[Any],
    folder: str | Path,
    *,
    client_state: Mapping[str, Any] | None = None,
    replace: bool = False,
    io: DiskIO = DISK,
    then: Callable[[], None] | None = None,
) -> None:
    """Write a sharded model and its optimizer (or several, or None) into `folder`, each rank its own rows. Collective.

    `client_state` is plain data and tensors, the same on all ranks, which `load` returns. Where machines have disks of
    their own, each gets the rows of its own ranks: Note [Disks of nodes]. If a rank fails, all raise, and nothing is
    left; an existing `folder` is replaced if `replace`, and stays until the new one is complete. With
    `checkpoint.asynchronous` it returns when all is copied to host memory: Note [Background saves]. Rank 0 calls `then`
    when the folder is in its place, and logs an OSError of it.
    """
    if not skips(_engine(model)):
        write(model, optimizer, folder, client_state=client_state, replace=replace, io=io, then=then)


@torch.inference_mode(False)
@torch.no_grad()
def write(
    model: nn.Module,
    optimizer: Any | Sequence[Any],
    folder: str | Path,
    *,
    client_state: Mapping[str, Any] | None = None,
    replace: bool = False,
    io: DiskIO = DISK,
    then: Callable[[], None] | None = None,
    background: bool | None = None,
    several_disks: bool = True,
) -> None:
    """Do what `save` does, where the save before has been waited for; `background` as said here. Collective.

    Where not all ranks see one disk: a ValueError without `several_disks`; else the first rank on each gives the
    `client_state` for its own and calls `then`.
    """
    engine = _engine(model)
    check_readable(engine)
    final = Path(folder).expanduser().absolute()
    temporary = commit.temporary_of(final)
    disk = find_disk(engine, final, replace=replace, io=io, several=several_disks)
    lead = disk.leads
    background = engine.config.checkpoint.asynchronous if background is None else background
    writer = ShardWriter(temporary, engine.mesh.world.rank, engine.mesh.world.size, io)

    def publish() -> None:
        disk.publish(final, found, engine, replace=replace, io=io)
        _clear_up(final, then)

    label = f"save: {'staging' if background else 'writing'} {final.name}"
    try:
        local = all_keep_local([engine], _unwrapped(optimizer), label)
        frozen = frozen_base.left_out(engine)
        with together(engine, label):
            given = dict(zip(_optimizers(optimizer), local, strict=True))
            boxes, found, staged = _take(engine, disk, given, client_state or {}, frozen, copied=background)
            if not background:
                writer.write(boxes)
        found = _with_state_of_others(engine, disk, _optimizers(optimizer), found)
        if not background:
            with together(engine, f"save: committing {final.name}"):
                if lead:
                    publish()
    except Exception:
        if lead:
            commit.abandon(temporary, io)
        raise
    if background:

        def write_staged() -> None:
            staged()
            writer.write(boxes)

        BACKGROUND.start(
            final.name,
            write=write_staged,
            publish=publish if lead else None,
            abandon=(lambda: commit.abandon(temporary, io)) if lead else None,
        )


def _clear_up(final: Path, then: Callable[[], None] | None) -> None:
    try:
        if then is not None:
            then()
    except OSError as error:  # the checkpoint is there all the same
        logger.error("%s is complete, but clearing up after it failed: %s", final, error)


def _with_state_of_others(
    engine: Engine, disk: Disk, optimizers: Sequence[Optimizer], found: Description
) -> Description:
    """Add what other ranks alone have: state, not of elements, of parameters that they step whole. Collective.

    On disks of nodes all get what rank 0 knows beside the tensors.
    """
    if disk.token:
        first: Any = engine.control.gather_objects(
            dataclasses.replace(found, client_state={}) if engine.mesh.world.rank == 0 else None, "save: description"
        )[0]
        found = dataclasses.replace(first, client_state=found.client_state, param_state=found.param_state)
    if not any(has_owners(optimizer) for optimizer in optimizers):
        return found
    told: list[Any] = engine.control.gather_objects(found.param_state, "save: the state of whole parameters")
    return dataclasses.replace(found, param_state=stepping.join_rest(told))


def skips(engine: Engine) -> bool:
    """Wait for the save that is being written, or tell on all ranks that a new one is to be skipped. Collective.

    Raises CheckpointError if the earlier one failed.
    """
    checkpoint = engine.config.checkpoint
    may_skip = checkpoint.asynchronous and checkpoint.when_busy is WhenBusy.SKIP
    if may_skip and engine.control.any_of([BACKGROUND.busy], "save: is one being written")[0]:
        logger.warning("A save was skipped: the one before is being written, and checkpoint.when_busy is skip.")
        return True
    BACKGROUND.wait()
    return False


def _take(
    engine: Engine,
    disk: Disk,
    local: Mapping[Optimizer, bool],
    client_state: Mapping[str, Any],
    frozen: Mapping[str, int],
    *,
    copied: bool,
) -> _Taken:
    """Return what this rank writes, and rank 0's description; with `copied` nothing of it is training's any more.

    `local`: the optimizers, each with whether its state is saved as it is: Note [Local state]. `frozen`: what is left
    out: Note [Frozen base].
    """
    portions, buffers = portions_of(engine, disk), buffers_of(engine)
    written = [portion for portion in portions if portion.writes and portion.name not in frozen]

    def take(to_host: ToHost) -> tuple[Boxes, dict[str, dict[str, Any]]]:
        boxes: Boxes = {TensorKey(PARAM, p.name): p.boxes(p.values.reshape(-1), to_host) for p in written}
        return boxes, _add_boxes(engine, disk, boxes, portions, buffers, local=local, to_host=to_host)

    boxes, rest = BACKGROUND.staging.copy(engine.mesh.device, take) if copied else take(on_host)
    found = _describe(engine, portions, buffers, list(local), boxes)
    found = dataclasses.replace(found, param_state=rest, client_state=client_state, left_out=frozen)
    if not copied:
        return _Taken(boxes, found, lambda: None)
    if disk.leads:
        carried(found)  # what can't be written is an error here, not later in the thread
    return _Taken(boxes, copy.deepcopy(found), BACKGROUND.staging.finish())


class _Taken(NamedTuple):
    boxes: Boxes
    description: Description
    wait: Callable[[], None]  # for copies that are on their way


def _engine(model: nn.Module) -> Engine:
    engine = engine_of(model)
    if engine is None:
        raise ValueError(f"{type(model).__name__} is not sharded by ourshard; shard it before it is saved or loaded.")
    return engine


def _model(engine: Engine) -> nn.Module:
    model = engine.model()
    assert model is not None
    return model


def _optimizers(given: Any) -> list[Optimizer]:
    """Return torch's optimizers, out of accelerate's wrappers, with their groups as the model now is."""
    found = _unwrapped(given)
    for optimizer in found:
        bring_up_to_date(optimizer)
    return found


def _unwrapped(given: Any) -> list[Optimizer]:
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in _several(given)]


def _several(given: Any) -> Sequence[Any]:
    return given if isinstance(given, Sequence) else [] if given is None else [given]


def _count(given: Any) -> str:
    """Say how many optimizers there are, which has to be the same on all ranks."""
    return f" (optimizers: {len(_several(given))})"


def _add_boxes(
    engine: Engine,
    disk: Disk,
    boxes: Boxes,
    portions: Sequence[Portion],
    buffers: Sequence[Buffer],
    *,
    local: Mapping[Optimizer, bool],
    to_host: ToHost,
) -> dict[str, dict[str, Any]]:
    """Add what this rank writes of buffers and states; return the state that is no tensor, where it leads and owns."""
    lead = disk.leads
    for buffer in buffers if lead else ():
        tensor = to_host(buffer.tensor)
        boxes[TensorKey(BUFFER, buffer.name)] = [LocalBox(tuple(tensor.shape), tensor)]
    if local:
        take_coding(engine, boxes, to_host, lead)
    rest: dict[str, dict[str, Any]] = {}
    for optimizer, is_local in local.items():
        rest.update(stepping.take_state(optimizer, portions, lead, boxes, to_host, local=is_local))
        if is_local:
            take_local(engine, optimizer, boxes, to_host, disk)
    return rest


def _describe(
    engine: Engine,
    portions: Sequence[Portion],
    buffers: Sequence[Buffer],
    optimizers: Sequence[Optimizer],
    boxes: Boxes,
) -> Description:
    concerned = [optimizer for optimizer in optimizers if stepping.steps_any(optimizer, portions)]
    steps = [int(held[0].tensor.item()) for key, held in boxes.items() if key.kind == "step" and not held[0].shape]
    tied: list[Portion | Buffer] = [*portions, *buffers]
    return Description(
        world_size=engine.mesh.world.size,
        stage=engine.config.stage,
        step=max(steps, default=None),
        param_groups=tuple(g for optimizer in concerned for g in stepping.describe_groups(optimizer, portions)),
        ties={alias: held.name for held in tied for alias in held.aliases},
        extra_state=extra_states(_model(engine)),
        frozen=frozenset(portion.name for portion in portions if not portion.trained),
        own_dtypes={p.name: p.own_dtype for p in portions if p.own_dtype != p.values.dtype},
        versions={name: version(name) for name in ("ourshard", "torch")},
    )


# ---- loading -----------------------------------------------------------------------------------------------


@torch.inference_mode(False)
@torch.no_grad()
def load(
    model: nn.Module,
    optimizer: Any | Sequence[Any],
    folder: str | Path,
    *,
    weights: bool = True,
    number: int | None = None,
    beside: bool = False,
    strict: bool = True,
) -> Mapping[str, Any]:
    """Load what `save` wrote, at any stage, on any number of ranks; return its `client_state`. Collective.

    A folder of another engine (DeepSpeed, FSDP, DCP, plain) loads too, with its optimizer's state if it has one.
    Each rank reads its own rows of masters and moments. Names, shapes and every byte's hash are checked before anything
    is changed. `weights=False` loads the optimizer alone; with None for `optimizer` the weights alone are loaded.
    `number`: which model of the folder, where another engine put several into one. `beside`: the caller reads what lies
    beside it (random states, positions in the data); else rank 0 says that it is not loaded. Without `strict`, what
    one side alone has is left alone: parameters that are not in the folder keep their values, and have no state.
    Raises CheckpointError on every rank, listing what is missing, unexpected, mismatched, or damaged.
    """
    engine = _engine(model)
    check_no_writes(engine)
    BACKGROUND.wait()
    name = Path(folder).name
    folder = commit.standing(Path(folder).expanduser().absolute())
    joined = join_disks(engine, folder)
    with ExitStack() as stack:
        with together(engine, f"load: checking {name}", _count(optimizer)):
            optimizers = _optimizers(optimizer)
            portions, buffers = portions_of(engine), buffers_of(engine)
            concerned = [each for each in optimizers if stepping.steps_any(each, portions)]
            source = stack.enter_context(_open(folder, _order(model, concerned, portions), number, joined))
            _say_losses(engine, source, beside)
            saved = SavedState.of(source, names_there(source, portions), engine)
            if source.description.is_adapter_alone or not strict:  # alone: the base stays as the script has loaded it
                portions = [each for each in portions if each.name in saved.names or (strict and each.trained)]
                buffers = [each for each in buffers if key_of(source, each) is not None]
            portions, stay = frozen_base.without_left_out(source.description, portions, saved.names)
            _refuse_misfits(
                source, portions, buffers, concerned, saved, extra=with_extra_state(_model(engine)), strict=strict
            )
            if joined is not None:
                _refuse_elsewhere(source, portions, buffers, concerned, saved)
            _refuse_damage(source, _share(engine) if joined is None else joined.share)
        if weights and source.description.left_out:
            frozen_base.refuse_another(engine, source.description, stay)
        with together(engine, f"load: reading {name}"):
            if weights:
                engine.land_masters()
                _load_weights(engine, source, portions, buffers, saved)
                load_extra_states(_model(engine), source, tells=engine.mesh.world.rank == 0)
            if concerned:
                stepping.split_uneven(engine, concerned, portions_of(engine), saved)
                stepping.restore(concerned, portions_of(engine), saved)
                restore_coding(engine, source)
        if weights:
            if engine.in_backward is not None:
                engine.in_backward.mend()
            engine.masters_changed()
        return source.description.client_state


def _open(folder: Path, order: Sequence[str], number: int | None, joined: Joined | None) -> Source:
    """Open our own format, or that of another engine, whose optimizer may number parameters."""
    if joined is not None:
        return ShardedSource(folder, manifest=joined.manifest, own=joined.own)
    if is_ours(folder):
        return ShardedSource(folder)
    return detect(folder, model=number, parameter_order=order)


def _order(model: nn.Module, optimizers: Sequence[Optimizer], portions: Sequence[Portion]) -> Sequence[str]:
    names = [canonical(name) for name, _ in model.named_parameters()]
    groups = [group for optimizer in optimizers for group in stepping.group_names(optimizer, portions)]
    return ParameterOrder(names, groups) if groups else names


def _say_losses(engine: Engine, source: Source, beside: bool) -> None:
    """Name what the folder of another engine has and is not loaded."""
    losses = (*source.description.losses, *(() if beside else source.description.beside))
    for loss in losses if engine.mesh.world.rank == 0 else ():
        logger.warning("load: not loaded: %s", loss)


def _refuse_misfits(
    source: Source,
    portions: Sequence[Portion],
    buffers: Sequence[Buffer],
    optimizers: Sequence[Optimizer],
    saved: SavedState,
    *,
    extra: Collection[str],
    strict: bool,
) -> None:
    held: list[Portion | Buffer] = [*portions, *buffers]
    keys = {each.name: key_of(source, each) for each in held}
    tied = tied_here(source, held)
    shapes = {p.name: p.shape for p in portions} | {b.name: tuple(b.tensor.shape) for b in buffers}
    taken = {*keys.values(), *tied}
    others = [key.name for key in source.tensors if key.kind in (PARAM, BUFFER) and key not in taken]
    unexpected = [name for name in (*others, *source.description.extra_state) if name not in extra]
    wrong = [
        f"{name} {source.tensors[key].shape}, here {shapes[name]}"
        for name, key in keys.items()
        if key is not None and source.tensors[key].shape != shapes[name]
    ]
    dtypes = {p.name: p.values.dtype for p in portions} | {b.name: b.tensor.dtype for b in buffers}
    strange = [
        f"{name} {source.tensors[key].dtype}, here {dtypes[name]}"
        for name, key in keys.items()
        if key is not None and not torch.can_cast(source.tensors[key].dtype, dtypes[name])
    ]
    lists = {
        "missing": [name for name, key in keys.items() if key is None],
        "unexpected": unexpected if strict else [],
        "of another shape": wrong,
        "tied to another weight here, and of other values": [key.name for key, is_same in tied.items() if not is_same],
        "of a dtype that does not go into the one here": strange,
    }
    problems = [f"{what}: {shorten(items, 8)}" for what, items in lists.items() if items]
    problems += stepping.misfits(optimizers, portions, saved) if not problems else []
    if problems:
        raise CheckpointError(f"{source.path} does not fit, and nothing was loaded: {'; '.join(problems)}.")


def _refuse_elsewhere(
    source: Source,
    portions: Sequence[Portion],
    buffers: Sequence[Buffer],
    optimizers: Sequence[Optimizer],
    saved: SavedState,
) -> None:
    """Refuse rows that this rank needs and that lie on another node's disk."""
    assert isinstance(source, ShardedSource)
    lost: list[str] = []
    for portion in portions:
        run = (portion.start, portion.stop)
        lost += source.elsewhere(saved.weight_key(portion), *run)
        for info in saved.tensors(portion.name).values() if portion.owner is not False else ():
            if stepping.is_elementwise(info, portion):
                lost += source.elsewhere(info.key, *((0, info.numel) if portion.owner else run))
    for info in saved.local.of_rank(optimizers):
        lost += source.elsewhere(info.key, 0, info.numel)
    for buffer in buffers:
        key = key_of(source, buffer)
        lost += source.elsewhere(key, 0, source.tensors[key].numel) if key is not None else []
    if lost:
        raise CheckpointError(
            f"nothing was loaded: rows that this rank needs are not on its disk: {shorten(lost, 4)}. Load on as many "
            f"ranks, in the same places, in the same layout; or copy {source.path} of all machines into one folder."
        )


def _share(engine: Engine) -> slice:
    """Return which of the files this rank checks."""
    return slice(engine.mesh.world.rank, None, engine.mesh.world.size)


def _refuse_damage(source: Source, share: slice) -> None:
    try:
        source.refuse_damage(share)
    except CheckpointError as error:
        raise CheckpointError(f"nothing was loaded: {error}") from error


def _load_weights(
    engine: Engine,
    source: Source,
    portions: Sequence[Portion],
    buffers: Sequence[Buffer],
    saved: SavedState,
) -> None:
    for portion in portions:
        run = source.read_run(saved.weight_key(portion), portion.start, portion.stop)
        portion.values.copy_(run.view(portion.values.shape))
    for buffer in buffers:
        key = key_of(source, buffer)
        assert key is not None
        buffer.tensor.copy_(source.read(key))
    engine.buffers.take_loaded(buffer.tensor for buffer in buffers)

"""Whole parameters outside of a forward: gathered contexts, full state dicts, streaming."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ourshard.runtime.engine import Engine
from ourshard.runtime.in_backward import check_whole_step
from ourshard.runtime.kept import count_references, count_uses, hear_of_gradients, leave_views, note_taken
from ourshard.runtime.lane import Lane
from ourshard.runtime.settling import settle
from ourshard.runtime.shown import hide_gradients, show, show_gradients, take_writes
from ourshard.runtime.unit import Unit
from ourshard.runtime.wrap import canonical
from ourshard.runtime.writing import take_group_writes, take_whole, write_whole

_EXTRA_STATE = "_extra_state"  # as torch names it


@contextmanager
def gathered_engine(engine: Engine, units: list[Unit], writeback: bool, modifier_rank: int | None) -> Iterator[None]:
    """Make `units` whole, in place, for the time of the context; see `api.gathered`."""
    check_whole_step(engine)
    engine.control.agree(f"gathered({', '.join(unit.label for unit in units[:3])}{', ...' if len(units) > 3 else ''})")
    _close_forward(engine)
    resting = [unit for unit in units if not unit.installed]
    leaves = count_references([unit for unit in resting if not unit.whole])
    uses = count_uses(resting)
    with torch.no_grad():
        for unit in units:
            unit.issue_gather()
            unit.finish_gather()
            unit.install()
            unit.pinned += 1
            unit.open_writes += writeback
            show(unit)
    everything = len(units) == len(engine.units)
    before = _direct_gradients(engine) if everything else []
    engine.gathered_depth += everything
    engine.open_writes += writeback
    try:
        if engine.read_disk is not None:
            engine.read_disk.agree("gathered")
        yield
        if writeback:
            _refuse_coded(units)
            with torch.no_grad():
                for unit in units:
                    for lane in unit.lanes:
                        _write_back(lane, modifier_rank)
        hear_of_gradients(engine, units)
    finally:
        engine.gathered_depth -= everything
        engine.open_writes -= writeback
        for unit in units:
            unit.pinned -= 1
            unit.open_writes -= writeback
            if unit in resting:
                unit.held = False
                if not unit.pinned:
                    leave_views(unit, uses)
                unit.release()
        note_taken(leaves)
        if writeback:
            engine.masters_changed()
    if everything and engine.outside_of_forward:
        made = _direct_gradients(engine) != before or _has_leaf_gradients(engine)
        if engine.control.any_of([made], "the end of gathered")[0]:
            _take_gradients(engine)


def _take_gradients(engine: Engine) -> None:
    """Reduce what backwards inside of `gathered` left, where no hook did. Collective."""
    for lane in engine.lanes():
        lane.forget_released()  # a unit that got nothing is not reduced, which would have noticed
    if not engine.require_sync:
        for unit in engine.units:
            unit.put_aside()
        engine.unsynced = True
        return
    engine.sync_backward = True
    for unit in engine.units:
        unit.reduced = False
    settle(engine, engine.units)
    show_gradients(engine.held)


def check_readable(engine: Engine) -> None:
    """Raise RuntimeError where masters are not to be read or saved: of two steps, or about to be written."""
    check_whole_step(engine)
    check_no_writes(engine)


def check_no_writes(engine: Engine) -> None:
    """Raise RuntimeError where `gathered` is about to write the masters."""
    if engine.open_writes:
        raise RuntimeError(
            "Inside of gathered(writeback=True) what was changed is in the modules only, until the block ends: save, "
            "load, and read whole parameters after it (`model.state_dict()` works inside)."
        )


def _close_forward(engine: Engine) -> None:
    """Let no leaf be as a forward left it, and each as its parameter: Note [Shown leaves] in shown.py."""
    hide_gradients(engine.held)
    take_group_writes(engine.units)
    if engine.outside_of_forward:
        engine.follow_requires_grad(engine.units)


def _direct_gradients(engine: Engine) -> list[tuple[int, int]]:
    """Return what tells whether a backward changed the gradients of plain parameters."""
    leaves = [leaf for lane in engine.lanes() if lane.direct for leaf in lane.leaves]
    return [(id(leaf.grad), leaf.grad._version) for leaf in leaves if leaf.grad is not None]


def _has_leaf_gradients(engine: Engine) -> bool:
    return any(lane.has_leaf_gradients() for lane in engine.lanes() if not lane.direct)


def _refuse_coded(units: list[Unit]) -> None:
    """Refuse to take what a codec left of the weights into the masters: Note [Coded weights] in coded.py."""
    for unit in units:
        if any(lane.shows_coded for lane in unit.lanes):
            raise ValueError(
                f"gathered(writeback=True): {unit.label} is whole as a codec left it, since this runs inside of a "
                "training forward; write outside of the forward, or set communication.weights: none."
            )


def _write_back(lane: Lane, modifier_rank: int | None) -> None:
    """Take changed elements of the whole parameters into the masters; unchanged ones keep the master's precision."""
    if lane.direct and modifier_rank is None:
        return
    if modifier_rank is not None:
        world = lane.unit.engine.mesh.world
        lane.unit.engine.collectives.broadcast(lane.full.tensor, world, lane.unit.label, modifier_rank)
    take_whole(lane)


def full_state_dict(
    engine: Engine, *, dtype: torch.dtype | None = None, rank0_only: bool = False, trainable_only: bool = False
) -> dict[str, torch.Tensor]:
    """Return whole parameters and persistent buffers on the CPU, by name, in the model's own order.

    Collective: call it on every rank (the others may throw theirs away with `rank0_only`, which saves host memory; they
    get an empty dict). One unit is whole at a time. Values come from the masters, in the dtype that the parameter was
    loaded in, or `dtype`. Tied names share one tensor.
    """
    model = engine.model()
    assert model is not None
    keep = not rank0_only or engine.mesh.world.rank == 0
    found: dict[str, torch.Tensor] = {}
    for names, tensor in iter_full(engine, dtype=dtype, trainable_only=trainable_only, wanted=keep):
        for name in names:
            found[name] = tensor
    order: OrderedDict[str, Any] = OrderedDict()  # by which accelerate knows a state dict, and writes ties once
    if not keep:
        return order
    for name, value in persistent(model):
        if name in found:
            order[name] = found[name]
        elif not isinstance(value, nn.Parameter) and not trainable_only:
            order[name] = value.detach().cpu().clone()
    if not trainable_only:
        order.update(extra_states(model))
    return order


def persistent(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a state dict holds, under canonical names, in its order; tied tensors under each name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        entries: dict[str, torch.Tensor | None] = {**module._parameters}
        entries.update({k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set})
        for attribute, value in entries.items():
            if value is not None:
                yield canonical(f"{prefix}.{attribute}" if prefix else attribute), value


def with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have an extra state of their own, by its name in a state dict."""
    return {
        canonical(f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE): module
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the extra states by name; tensors on the CPU, with memory of their own."""
    states = {name: module.get_extra_state() for name, module in with_extra_state(model).items()}
    return {name: s.detach().to("cpu", copy=True) if torch.is_tensor(s) else s for name, s in states.items()}


@torch.no_grad()
def iter_full(
    engine: Engine, *, dtype: torch.dtype | None = None, trainable_only: bool = False, wanted: bool = True
) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield (all names of a parameter, its whole value on the CPU), one lane in memory at a time. Collective.

    Those that ourshard was told to ignore come last, unless `trainable_only`. Lanes that are asked for nowhere are not
    gathered. Where `wanted` is false, the rank takes part and yields nothing.
    """
    check_readable(engine)
    take_writes(engine.held)
    engine.control.agree("reading all parameters (state_dict, save)")
    for lane in engine.lanes():
        if trainable_only and not lane.trainable:
            continue
        whole = lane.gather_master()
        if not wanted:
            continue
        for position, parameter in enumerate(lane.parameters):
            if trainable_only and not lane.leaves[position].requires_grad:
                continue
            # A whole parameter that the user holds may have been moved (`model.to(dtype)`): it is the truth.
            source = lane.resting[position] if lane.placement.whole else lane.whole_view(whole, position)
            value = source.detach().to("cpu", dtype=save_dtype(parameter.dtype, dtype), copy=True)
            yield (parameter.name, *parameter.aliases), value
    for names, kept in ignored(engine) if wanted and not trainable_only else ():
        yield names, kept.detach().to("cpu", save_dtype(kept.dtype, dtype), copy=True)


def ignored(engine: Engine) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Return the parameters that ourshard was told to ignore, with all names of each."""
    model = engine.model()
    assert model is not None
    known = {name for lane in engine.lanes() for p in lane.parameters for name in (p.name, *p.aliases)}
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, value in persistent(model):
        if isinstance(value, nn.Parameter) and name not in known:
            found.setdefault(id(value), ([], value))[0].append(name)
    return [(tuple(names), value) for names, value in found.values()]


def save_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype to save in: `wanted` where there is one and the parameter is floating-point, else its own."""
    return wanted if wanted is not None and own.is_floating_point and own.itemsize > 1 else own


@torch.no_grad()
def load_full_state_dict(engine: Engine, state: Mapping[str, Any], strict: bool = True) -> None:
    """Load whole tensors by name; every rank gives the same `state`, and keeps its rows. No communication.

    Checks names and shapes before it changes anything. Raises `ValueError` listing what is missing, unexpected
    or of another shape; with `strict=False` only shapes are checked.
    """
    check_no_writes(engine)
    model = engine.model()
    assert model is not None
    state = {canonical(name): value for name, value in state.items()}
    names = {
        name: (lane, i)
        for lane in engine.lanes()
        for i, p in enumerate(lane.parameters)
        for name in (p.name, *p.aliases)
    }
    others = {n: v for n, v in persistent(model) if n not in names}  # buffers, and parameters that are ignored
    extra = with_extra_state(model)
    _check_state(names, others, extra, state, strict)
    for name, value in state.items():
        if name in names:
            lane, position = names[name]
            write_whole(lane, position, value)
        elif name in others:
            others[name].copy_(value)
        elif name in extra:
            extra[name].set_extra_state(value)
    engine.buffers.take_loaded(others[name] for name in state if name in others)
    if engine.in_backward is not None:
        engine.in_backward.mend()
    engine.masters_changed()


def _check_state(
    names: Mapping[str, tuple[Lane, int]],
    others: Mapping[str, torch.Tensor],
    extra: Collection[str],
    state: Mapping[str, Any],
    strict: bool,
) -> None:
    shapes = {name: tuple(lane.parameters[i].shape) for name, (lane, i) in names.items()}
    shapes |= {name: tuple(value.shape) for name, value in others.items()}
    wrong = [
        f"{name}: {tuple(state[name].shape)} given, {shape} wanted"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    tied: dict[object, list[str]] = {}  # one of these names is enough
    for name in (*names, *others):
        tied.setdefault(names[name] if name in names else id(others[name]), []).append(name)
    missing = [group[0] for group in tied.values() if not any(name in state for name in group)]
    missing += [name for name in extra if name not in state]
    unexpected = [name for name in state if name not in shapes and name not in extra]
    if wrong or (strict and (missing or unexpected)):
        parts = [("of another shape", wrong), ("missing", missing), ("unexpected", unexpected)]
        text = "; ".join(
            f"{label}: {', '.join(items[:8])}{' ...' if len(items) > 8 else ''}" for label, items in parts if items
        )
        raise ValueError(f"The state does not fit the model, and nothing was loaded. {text}.")


def units_of(engine: Engine, parameters: Iterable[nn.Parameter]) -> list[Unit]:
    """Return the units that hold any of `parameters`, in the engine's order."""
    wanted = {id(p) for p in parameters}
    return [u for u in engine.units if any(id(t) in wanted for lane in u.lanes for t in (*lane.resting, *lane.leaves))]

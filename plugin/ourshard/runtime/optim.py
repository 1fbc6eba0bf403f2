"""Optimizers: point their groups at master views, and hand them gradients: Note [Runs] in run.py.

Flat runs are right only for optimizers that treat each element by itself. `probe` finds out: it steps a small matrix
whole, and the same matrix in flat pieces, and compares. Adafactor, Muon, and those that say `elementwise = False`, step
whole parameters on one rank each: Note [Owners] in owners.py. Others (LBFGS, unknown ones) are refused by name where
masters are shards.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ourshard.runtime import own_rows
from ourshard.runtime.buffer import give_back_unused
from ourshard.runtime.compiling import outside_of_compile
from ourshard.runtime.engine import ENGINES, Engine
from ourshard.runtime.fused import prefer_fused
from ourshard.runtime.handle import USE_OUR_SCALER, ShardParameter
from ourshard.runtime.in_backward import StepsInBackward
from ourshard.runtime.lane import Lane
from ourshard.runtime.lane_step import (
    StepApart,
    StepByLane,
    can_be_cut,
    can_step_by_lane,
    divide_now,
    dividing_apart,
    has_hooks,
)
from ourshard.runtime.owners import Loan, StepByOwner, assign_owners, lend_whole
from ourshard.runtime.probe import TRIALS, can_step_in_turns, needs_whole, steps_each_alone
from ourshard.runtime.run import Run, keep_runs
from ourshard.runtime.settling import bring_in_waiting
from ourshard.runtime.shown import take_own, take_writes
from ourshard.runtime.states import refuse_to_cut
from ourshard.runtime.step_hooks import add_hooks


class _Adopted:
    """What is remembered of an optimizer: how many parameters it had, and for which state of the engines."""

    __slots__ = ("adoption", "by_lane", "count", "engines", "loans", "orphaned", "stepped")

    def __init__(self, count: int, adoption: tuple[tuple[int, int], ...]) -> None:
        self.count = count
        self.adoption = adoption
        self.orphaned = False  # another optimizer took its parameters over
        self.stepped = False
        self.loans: list[Loan] = []  # whole parameters that are with their owners, during a step
        self.by_lane: StepApart | None = None  # the step that is going on, where some lanes are stepped apart
        self.engines: list[weakref.ref[Engine]] | None = None  # whose parameters it steps, once asked for


def _count(optimizer: Optimizer) -> int:
    return sum([len(group["params"]) for group in optimizer.param_groups])


_ADOPTED: weakref.WeakKeyDictionary[Optimizer, _Adopted] = weakref.WeakKeyDictionary()


def adopt_optimizer(optimizer: Optimizer) -> Optimizer:
    """Point the groups of `optimizer` at this rank's masters, in place; called again, look for new parameters.

    Works before and after the first step, and keeps state that exists. Raises `ValueError` for an optimizer that can
    step neither flat rows nor whole parameters one by one, where masters are shards.
    """
    add_hooks(optimizer)
    take_own(optimizer)
    groups = [group for group in optimizer.param_groups if any(_adoptable(p) for p in group["params"])]
    needs = [needs_whole(optimizer, group) for group in groups]  # of each: one may be stepped unlike the others
    whole = any(needs)
    for group in groups:
        _refuse_from_disk(optimizer, group, whole)
        _refuse_in_backward(optimizer, group, whole)
        _adopt_group(optimizer, group, whole)
        prefer_fused(optimizer, group)
    if whole:
        _settle_owners(optimizer)
    _follow_zero_grad(optimizer)
    count = _count(optimizer)
    _ADOPTED[optimizer] = _Adopted(count, _adoption())
    return optimizer


def _refuse_from_disk(optimizer: Optimizer, group: dict[str, Any], whole: bool) -> None:
    """Refuse an optimizer that can't step one lane after the other, where masters pass through memory lane by lane."""
    on_disk = any(_adoptable(p) and p._lane.on_disk for p in group["params"])
    if on_disk and not _steps_in_turns(optimizer, group, whole):
        raise ValueError(
            f"offload.optimizer: nvme steps lane by lane, and {type(optimizer).__module__}.{type(optimizer).__name__} "
            "then does not do what it does at once. Use an optimizer of torch (AdamW, Adam, SGD, Adafactor, Muon, ...; "
            "not LBFGS) or another that keeps nothing for all parameters together, or offload.optimizer: cpu."
        )


def _refuse_in_backward(optimizer: Optimizer, group: dict[str, Any], whole: bool) -> None:
    """Refuse an optimizer that can't step a lane while backward runs: Note [Steps in backward] in in_backward.py."""
    asked = any(_adoptable(p) and p._lane.unit.engine.in_backward is not None for p in group["params"])
    if not asked or (not whole and _steps_in_turns(optimizer, group, whole)):
        return
    why = "steps whole parameters, which ranks bring together once all gradients are there"
    if not whole:
        why = "does not do the same lane by lane as at once"
    raise ValueError(
        f"optimizer_in_backward: {type(optimizer).__module__}.{type(optimizer).__name__} {why}. Use an optimizer of "
        "torch that treats each element by itself (AdamW, Adam, SGD, ...) or another that keeps nothing for all "
        "parameters together, or set optimizer_in_backward: false."
    )


def _steps_in_turns(optimizer: Optimizer, group: dict[str, Any], whole: bool) -> bool:
    """Say whether an optimizer that steps lane by lane does what it does at once."""
    if not can_be_cut(optimizer):
        return False
    if whole:
        return steps_each_alone(type(optimizer))
    return can_step_by_lane(optimizer) or can_step_in_turns(optimizer, group)


def put_away(optimizer: Optimizer, stepped: torch.Tensor) -> None:
    """Move the state of one tensor of an optimizer, which was just set, to where it rests."""
    for engine in ENGINES:
        if engine.disk is not None:
            for lane in engine.lanes():
                if lane.on_disk and any(run.parameter is stepped for run in lane.runs):
                    engine.disk.put_away(optimizer, lane)


def _adoption() -> tuple[tuple[int, int], ...]:
    """Return what changes whenever there may be parameters to adopt: a new engine, or a lane that became trainable."""
    return tuple((engine.order, engine.adoption) for engine in ENGINES)


def _adoptable(parameter: Any) -> bool:
    return isinstance(parameter, ShardParameter) and parameter._lane.trainable


def _settle_owners(optimizer: Optimizer) -> None:
    """Give the new runs owners; state of whole parameters stays with these alone."""
    runs = _runs_of(optimizer)
    assign_owners(runs)
    for run in runs:
        if run.owner != run.lane.spread.rank:
            optimizer.state.pop(run.parameter, None)


def _adopt_group(optimizer: Optimizer, group: dict[str, Any], whole: bool) -> None:
    """Replace the handles of one group by runs, each at the place of its first parameter.

    `whole`: parameters are stepped whole, each a run of its own.
    """
    by_lane: dict[Lane, list[int]] = {}
    for parameter in group["params"]:
        if _adoptable(parameter):
            by_lane.setdefault(parameter._lane, []).append(parameter._position)
    fresh: dict[int, nn.Parameter] = {}  # id of the handle that a run takes the place of
    for lane, positions in by_lane.items():
        _release_from_others(lane, positions)
        states = {p: optimizer.state.pop(lane.resting[p], None) for p in positions}
        for run in _make_runs(lane, sorted(positions), states, optimizer, group, apart=whole):
            fresh[id(lane.resting[run.positions[0]])] = run.parameter
            if not whole:
                _move_state(optimizer, run, states)
            elif state := states[run.positions[0]]:
                optimizer.state[run.parameter] = state
            lane.runs.append(run)
        lane.runs.sort(key=lambda run: run.start)
    kept = [fresh.get(id(p), None if _adoptable(p) else p) for p in group["params"]]
    group["params"][:] = [p for p in kept if p is not None]
    for run in [run for lane in by_lane for run in lane.runs]:
        run.hand_out()


def _release_from_others(lane: Lane, positions: list[int]) -> None:
    """Let the last adoption win: an optimizer that had these parameters before no longer steps them."""
    taken = set(positions)
    for run in lane.runs:
        other = run.optimizer()
        if other is not None and taken & set(run.positions) and other in _ADOPTED:
            _ADOPTED[other].orphaned = True
    lane.forget_released()
    keep_runs(lane, [run for run in lane.runs if not taken & set(run.positions)])


def _make_runs(
    lane: Lane,
    positions: list[int],
    states: dict[int, Any],
    optimizer: Optimizer,
    group: dict[str, Any],
    *,
    apart: bool,
) -> list[Run]:
    """Cut sorted positions into runs of neighbours; those that come with state are kept apart, or all if `apart`."""
    parts: list[list[int]] = []
    for position in positions:
        mergeable = parts and not apart and not states[position] and not states[parts[-1][-1]]
        if mergeable and not _between(lane, parts[-1][-1], position):
            parts[-1].append(position)
        else:
            parts.append([position])
    return [Run(lane, part, optimizer, group) for part in parts]


def _between(lane: Lane, left: int, right: int) -> bool:
    """Say whether the master has rows of another parameter between two positions."""
    return any(lane.rows(position).rows for position in range(left + 1, right))


def _move_state(optimizer: Optimizer, run: Run, states: dict[int, Any]) -> None:
    """Carry state that the optimizer had for a whole parameter, or for this rank's rows of it, over to the run."""
    state = states[run.positions[0]]
    if not state:
        return
    position = run.positions[0]
    lane, rows = run.lane, run.lane.rows(position)
    shape = lane.parameters[position].shape
    granule = lane.layout.tensors[position].granule
    why = f"it stepped {lane.name_of(position)} before it was sharded: prepare the optimizer before its first step"

    def cut(key: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == run.parameter.shape and value.shape != shape:
            return value.to(run.parameter.device)  # what a load has left for a parameter that was not trained
        if getattr(value, "shape", None) != shape:
            refuse_to_cut(optimizer, key, value, run.numel, why=why)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape) or key == "step":
            return value
        if not rows.rows:
            return torch.zeros_like(run.parameter, dtype=value.dtype)  # one element, as the parameter has
        return value.reshape(-1)[rows.start * granule : rows.stop * granule].to(run.parameter.device, copy=True)

    optimizer.state[run.parameter] = {key: cut(key, value) for key, value in state.items()}


def _follow_zero_grad(optimizer: Optimizer) -> None:
    """Let `zero_grad` drop, or zero, also gradients that were not handed out since they wait for a backward that syncs.

    torch has no hook for it, so the method of this one optimizer is wrapped.
    """
    if "zero_grad" in optimizer.__dict__:
        return
    reference = weakref.ref(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        found = reference()
        assert found is not None
        _end_failed_step(found)
        if not set_to_none:
            _await_steps(found)
        runs = _runs_of(found)
        for lane in {run.lane for run in runs}:
            lane.notes.forget()  # this optimizer has all of a gradient that waits, which is gone now, or zero
        type(found).zero_grad(found, set_to_none)
        for run in runs:
            if set_to_none:
                run.lane.drop_gradients(run.positions)
                continue
            for position in run.positions:
                run.lane.zero_gradient(position)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.register_state_dict_pre_hook(_await_steps)
    optimizer.register_state_dict_post_hook(lambda which, state: own_rows.mark(state, _runs_of(which)))
    optimizer.register_load_state_dict_pre_hook(_await_steps)
    optimizer.register_load_state_dict_pre_hook(lambda which, state: own_rows.check(which, state, _runs_of(which)))


def _await_steps(optimizer: Optimizer, *_: Any) -> None:
    for lane in {run.lane for run in _runs_of(optimizer)}:
        lane.await_step()


def _runs_of(optimizer: Optimizer) -> list[Run]:
    return [r for engine in ENGINES for lane in engine.lanes() for r in lane.runs if r.optimizer() is optimizer]


# ---- global hooks ------------------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not ENGINES or optimizer in TRIALS:
        return
    for engine in ENGINES:
        engine.land_masters()
        take_writes(engine.held)
    bring_up_to_date(optimizer)
    _refuse_in_hooks(optimizer)
    bring_in_gradients(optimizer)
    known = _ADOPTED[optimizer]
    if not known.stepped:  # it is about to make its state
        _refuse_scaler_of_torch(optimizer)
        known.stepped = True
        for device in {engine.mesh.device for engine in engines_of(optimizer)}:
            give_back_unused(device)
    has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
    for steps in _in_backward_of(optimizer):
        steps.before_step(optimizer, has_closure)
    runs = _runs_of(optimizer)
    owned = [run for run in runs if run.owner is not None]
    lanes = _lanes_on_host(optimizer)
    mine = dict.fromkeys(run.lane for run in runs)
    if owned or has_hooks(optimizer):
        divide_now(mine)
    if owned:
        _refuse_closure(optimizer, has_closure)
        if steps_each_alone(type(optimizer)) and can_be_cut(optimizer):
            known.by_lane = StepByOwner(optimizer, owned)
        else:
            with torch.no_grad():
                known.loans = list(lend_whole(owned))
                for loan in known.loans:
                    loan.open()
    elif lanes:
        divide_now(mine.keys() - set(lanes))
        known.by_lane = StepByLane(optimizer, lanes)
    else:
        known.by_lane = dividing_apart(optimizer, mine, has_closure)


def _refuse_in_hooks(optimizer: Optimizer) -> None:
    """Refuse a step that a hook makes as soon as it has a gradient: other ranks have not added theirs."""
    if torch._C._current_graph_task_id() == -1:
        return
    running = [engine for engine in engines_of(optimizer) if engine.phase_is_backward]
    if any(engine.mesh.world.size > 1 or not all(lane.direct for lane in engine.lanes()) for engine in running):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called inside of a backward, by a hook on a gradient (an optimizer "
            "in backward): the gradients of other ranks are not in it yet, and ranks would part. Make one optimizer, "
            "and step it after `backward`; optimizer_in_backward: true frees gradients as soon as they are reduced."
        )


def _in_backward_of(optimizer: Optimizer) -> list[StepsInBackward]:
    return [engine.in_backward for engine in engines_of(optimizer) if engine.in_backward is not None]


def _refuse_scaler_of_torch(optimizer: Optimizer) -> None:
    """Refuse a step that torch's own loss scaler makes: it has looked at this rank's rows alone."""
    frame = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return
        # Other frames are not asked: what `f_locals` returns keeps all that it shows alive.
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "_maybe_opt_step" else None
        if isinstance(caller, GradScaler) and not getattr(caller, "agrees", False) and _steps_rows(optimizer):
            raise RuntimeError(USE_OUR_SCALER)
        frame = frame.f_back  # type: ignore[assignment]


def _steps_rows(optimizer: Optimizer) -> bool:
    return any(run.lane.unit.engine.mesh.world.size > 1 for run in _runs_of(optimizer))


def _lanes_on_host(optimizer: Optimizer) -> list[Lane]:
    """Return the lanes to be stepped one by one, in the order of forward; none where the step can't be cut."""
    engines = [engine for engine in engines_of(optimizer) if engine.host is not None or engine.disk is not None]
    if not engines:
        return []
    units = [unit for engine in engines for unit in (*engine.rooted, *engine.units)]
    here = can_step_by_lane(optimizer)  # others, too, from a disk: those that can't were refused
    lanes = [lane for unit in dict.fromkeys(units) for lane in unit.lanes if lane.offloaded and (here or lane.on_disk)]
    return [lane for lane in lanes if any(run.optimizer() is optimizer for run in lane.runs)]


def _refuse_closure(optimizer: Optimizer, has_closure: bool) -> None:
    if has_closure:
        raise ValueError(
            f"{type(optimizer).__name__}.step(closure): whole parameters are brought together before the closure would "
            "make their gradients; call the closure yourself, then step() without it."
        )


def bring_up_to_date(optimizer: Optimizer) -> None:
    """Adopt what is new, and hand out gradients as they are now: before a step, and before gradients are unscaled."""
    known = _ADOPTED.get(optimizer)
    count = _count(optimizer)
    if known is not None and known.orphaned:
        raise RuntimeError(
            f"This {type(optimizer).__name__} no longer steps anything: another optimizer that was prepared (or "
            "stepped) after it has the same sharded parameters. Use the last one."
        )
    _end_failed_step(optimizer)
    if known is None or known.adoption != _adoption() or known.count != count:
        adopt_optimizer(optimizer)
    for engine in list(ENGINES):
        for run in [run for lane in engine.lanes() for run in lane.runs if run.uneven and run.optimizer() is not None]:
            run.hand_out()
    _ADOPTED[optimizer].count = _count(optimizer)


def bring_in_gradients(optimizer: Optimizer) -> None:
    """Reduce gradients that wait for a backward that syncs: Note [Gradients that wait] in settling.py."""
    for engine in engines_of(optimizer):
        bring_in_waiting(engine)


def _end_failed_step(optimizer: Optimizer) -> None:
    """Let the runs show rows again, where a step raised while they showed whole parameters."""
    known = _ADOPTED.get(optimizer)
    if known is not None:
        for loan in known.loans:
            loan.abandon()
        known.loans = []
        if known.by_lane is not None:
            known.by_lane.end()
            known.by_lane = None


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    known = _ADOPTED.get(optimizer)
    sent: list[Lane] = []
    if known is not None:
        with torch.no_grad():
            for loan in known.loans:
                loan.give_back()
            for loan in known.loans:
                loan.close()
        known.loans = []
        if known.by_lane is not None:
            known.by_lane.end()
            sent, known.by_lane = known.by_lane.sent, None
    for steps in _in_backward_of(optimizer):
        steps.after_step(optimizer)
    _outdate_graphs(optimizer)
    for engine in engines_of(optimizer):
        engine.control.steps += 1
        engine.masters_changed([lane for lane in sent if lane.unit.engine is engine])


def _outdate_graphs(optimizer: Optimizer) -> None:
    """Let graphs that saved parameters from before a step raise in their backward, as torch does without sharding.

    The step writes to masters; the whole parameters, which follow at their next gather, are what autograd knows.
    """
    stepped = [leaf for run in _runs_of(optimizer) for leaf in run.newly_stepped()]
    torch.autograd.graph.increment_version(stepped)


def show_gradients(optimizer: Optimizer) -> None:
    """Let the optimizer's own tensors have the gradients as they are, clipped: before a kernel changes them there."""
    lanes = {run.lane for run in _runs_of(optimizer)}
    divide_now(lanes)
    for lane in lanes:
        lane.notes.norms = None


def has_owners(optimizer: Optimizer) -> bool:
    """Say whether each parameter is stepped whole, on one rank; the same on every rank."""
    return any(run.owner is not None for run in _runs_of(optimizer))


@contextmanager
def writing_masters(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer write its parameters outside of `step`; whole parameters follow. On all ranks."""
    engines = engines_of(optimizer)
    for engine in engines:
        engine.land_masters()
    yield
    _outdate_graphs(optimizer)
    for engine in engines:
        engine.masters_changed()


def engines_of(optimizer: Optimizer) -> list[Engine]:
    """Return the engines whose parameters an optimizer steps."""
    known = _ADOPTED.get(optimizer)
    if known is None or known.adoption != _adoption() or known.count != _count(optimizer):
        return _search_engines(optimizer)
    if known.engines is None:
        known.engines = [weakref.ref(engine) for engine in _search_engines(optimizer)]
    return [engine for engine in (reference() for reference in known.engines) if engine is not None]


def _search_engines(optimizer: Optimizer) -> list[Engine]:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = []
    for engine in list(ENGINES):
        runs = any(id(run.parameter) in mine for lane in engine.lanes() for run in lane.runs)
        if runs or any(id(p) in mine for lane in engine.lanes() if lane.placement.whole for p in lane.resting):
            found.append(engine)
    return found


register_optimizer_step_pre_hook(outside_of_compile(_before_step))
register_optimizer_step_post_hook(outside_of_compile(_after_step))

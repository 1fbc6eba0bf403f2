"""Optimizers: point their groups at master views, and hand them gradients.

Note [Runs]
-----------
An optimizer is given parameters of the model; those that are handles are replaced, in place, by runs: one flat tensor
for all neighbouring parameters of one lane in one group. Parameters of which this rank holds no rows belong to the
run beside them, so that all ranks see the same gradients come and go; where a rank holds none of a group's rows in a
lane, its run is one element that stays zero (an empty tensor breaks some optimizers). The group dicts keep their
identity, so schedulers and users who hold them see no change. A run is one tensor as long as all of its parameters
have gradients in the same steps; when they differ (a branch that a step does not use) it is split, with its state, so
that the optimizer skips exactly the parameters that it would skip in one process.

Flat runs are right only for optimizers that treat each element by itself. `probe` finds out: it steps a small matrix
whole, and the same matrix in flat pieces, and compares. Others (Adafactor, Muon, LAMB, LBFGS) need whole matrices and
are refused by name where masters are shards.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ourshard.runtime.buffer import give_back_unused
from ourshard.runtime.engine import ENGINES, Engine
from ourshard.runtime.handle import ShardParameter
from ourshard.runtime.lane import Lane


class Run:
    """Neighbouring parameters of one lane as one flat tensor of this rank's rows: Note [Runs]."""

    __slots__ = ("group", "handed_out", "lane", "optimizer", "parameter", "positions", "start", "stop", "uneven")

    def __init__(self, lane: Lane, positions: list[int], optimizer: Optimizer, group: dict[str, Any]) -> None:
        self.lane = lane
        self.positions = positions
        held = [position for position in positions if lane.rows(position).rows]
        self.start = self.stop = 0
        if held:
            last = lane.rows(held[-1])
            self.start = lane.rows(held[0]).offset
            self.stop = last.offset + last.numel(lane.layout.tensors[held[-1]].granule)
        self.parameter = nn.Parameter(torch.zeros(1, device=lane.master.device, dtype=lane.store_dtype))
        if held:
            self.parameter.data = lane.master[self.start : self.stop]
        self.handed_out = False
        self.uneven = False  # gradients of some parameters were dropped since `hand_out`
        self.group = group
        self.optimizer = weakref.ref(optimizer)

    def hand_out(self) -> None:
        """Set the run's gradient from the lane's; split where some parameters have one and others do not."""
        self.uneven = False
        flags = {self.lane.valid[position] for position in self.positions}
        if len(flags) > 1:
            self._split()
            return
        self.handed_out = flags == {True}
        if self.handed_out and self.parameter.grad is None:
            self.parameter.grad = self._rows_of(self.lane.gradient)
        elif not self.handed_out:
            self.parameter.grad = None

    def _rows_of(self, gradient: torch.Tensor | None) -> torch.Tensor:
        if self.stop == self.start:
            return torch.zeros_like(self.parameter)
        assert gradient is not None
        return gradient[self.start : self.stop]

    def dropped(self) -> None:
        """Follow `p.grad = None` of one of the parameters.

        Others may follow (`module.zero_grad()` drops all in turn), so the run is split no sooner than at a step.
        """
        if not any(self.lane.valid[position] for position in self.positions):
            self.parameter.grad = None
            self.handed_out = self.uneven = False
        elif self.handed_out:
            self.uneven = True

    def _split(self) -> None:
        """Replace this run by one run a parameter, in the optimizer and in the lane, with the state cut likewise."""
        optimizer = self.optimizer()
        assert optimizer is not None
        parts = [Run(self.lane, [position], optimizer, self.group) for position in self.positions]
        place = _index_of(self.group["params"], self.parameter)
        self.group["params"][place : place + 1] = [part.parameter for part in parts]
        state = optimizer.state.pop(self.parameter, None)
        for part in parts:
            if state:
                optimizer.state[part.parameter] = {k: self._cut(v, part) for k, v in state.items()}
        gradient = self.lane.gradient  # may be kept alive by this run alone
        place = self.lane.runs.index(self)
        self.lane.runs[place : place + 1] = parts
        for part in parts:
            if gradient is not None and self.lane.valid[part.positions[0]]:
                part.parameter.grad = part._rows_of(gradient)
            part.hand_out()

    def _cut(self, value: Any, part: Run) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == self.parameter.shape and value.dim():
            if part.stop == part.start:
                return torch.zeros_like(part.parameter, dtype=value.dtype)  # one element, as the parameter has
            return value[part.start - self.start : part.stop - self.start].clone()
        return value.clone() if isinstance(value, torch.Tensor) else value


def _index_of(params: list[Any], parameter: Any) -> int:
    return next(i for i, p in enumerate(params) if p is parameter)


class _Adopted:
    """What is remembered of an optimizer: how many parameters it had, and for which state of the engines."""

    __slots__ = ("adoption", "count", "orphaned", "stepped")

    def __init__(self, count: int, adoption: tuple[tuple[int, int], ...]) -> None:
        self.count = count
        self.adoption = adoption
        self.orphaned = False  # another optimizer took its parameters over
        self.stepped = False


_ADOPTED: weakref.WeakKeyDictionary[Optimizer, _Adopted] = weakref.WeakKeyDictionary()


def adopt_optimizer(optimizer: Optimizer) -> Optimizer:
    """Point the groups of `optimizer` at this rank's masters, in place; called again, look for new parameters.

    Works before and after the first step, and keeps state that exists. Raises `ValueError` for an optimizer that
    needs whole matrices, where masters are shards.
    """
    probed = False
    for group in optimizer.param_groups:
        if any(_adoptable(p) for p in group["params"]):
            if not probed:
                _refuse_whole_matrix(optimizer, group)
                probed = True
            _adopt_group(optimizer, group)
            _prefer_fused(optimizer, group)
    _follow_zero_grad(optimizer)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    _ADOPTED[optimizer] = _Adopted(count, _adoption())
    return optimizer


def _adoption() -> tuple[tuple[int, int], ...]:
    """Return what changes whenever there may be parameters to adopt: a new engine, or a lane that became trainable."""
    return tuple((engine.order, engine.adoption) for engine in ENGINES)


def _adoptable(parameter: Any) -> bool:
    return isinstance(parameter, ShardParameter) and parameter._lane.trainable


def _adopt_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Replace the handles of one group by runs, each at the place of its first parameter."""
    by_lane: dict[Lane, list[int]] = {}
    for parameter in group["params"]:
        if _adoptable(parameter):
            by_lane.setdefault(parameter._lane, []).append(parameter._position)
    fresh: dict[int, nn.Parameter] = {}  # id of the handle that a run takes the place of
    for lane, positions in by_lane.items():
        _release_from_others(lane, positions)
        states = {p: optimizer.state.pop(lane.resting[p], None) for p in positions}
        for run in _make_runs(lane, sorted(positions), states, optimizer, group):
            fresh[id(lane.resting[run.positions[0]])] = run.parameter
            _move_state(optimizer, run, states)
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
    lane.runs = [run for run in lane.runs if not taken & set(run.positions)]


def _make_runs(
    lane: Lane, positions: list[int], states: dict[int, Any], optimizer: Optimizer, group: dict[str, Any]
) -> list[Run]:
    """Cut sorted positions into runs of neighbours; parameters that come with state are kept apart."""
    parts: list[list[int]] = []
    for position in positions:
        mergeable = parts and not states[position] and not states[parts[-1][-1]]
        if mergeable and not _between(lane, parts[-1][-1], position):
            parts[-1].append(position)
        else:
            parts.append([position])
    return [Run(lane, part, optimizer, group) for part in parts]


def _between(lane: Lane, left: int, right: int) -> bool:
    """Say whether the master has rows of another parameter between two positions."""
    return any(lane.rows(position).rows for position in range(left + 1, right))


def _move_state(optimizer: Optimizer, run: Run, states: dict[int, Any]) -> None:
    """Carry state that the optimizer had for a whole parameter over to this rank's rows of it."""
    state = states[run.positions[0]]
    if not state:
        return
    position = run.positions[0]
    lane, rows = run.lane, run.lane.rows(position)
    shape = lane.parameters[position].shape
    granule = lane.layout.tensors[position].granule

    def cut(key: str, value: Any) -> Any:
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
        type(found).zero_grad(found, set_to_none)
        for run in _runs_of(found):
            if set_to_none:
                run.lane.drop_gradients(run.positions)
                continue
            for position in run.positions:
                run.lane.zero_gradient(position)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _runs_of(optimizer: Optimizer) -> list[Run]:
    return [r for engine in ENGINES for lane in engine.lanes() for r in lane.runs if r.optimizer() is optimizer]


def _prefer_fused(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Use the fused implementation of Adam where the user did not choose.

    Not that of SGD: it fails where a parameter gets its first gradient later than others. Nor that of Adagrad, which
    torch has for CPUs alone.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    if group["fused"] is not None or group["foreach"] or group["differentiable"]:
        return
    devices = {p.device.type for p in group["params"]}
    floating = all(p.is_floating_point() for p in group["params"])
    if floating and devices <= {"cpu", "cuda"}:
        group["fused"] = True
        group["foreach"] = False
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


# ---- probe -------------------------------------------------------------------------------------------------

_PROBED: dict[Any, str | None] = {}


def _refuse_whole_matrix(optimizer: Optimizer, group: dict[str, Any]) -> None:
    why = probe(optimizer, group)
    if why is not None:
        raise ValueError(
            f"The optimizer {type(optimizer).__name__} {why}, but at this stage each rank holds some rows of each "
            "parameter. Use stage 0, or an optimizer that treats each element by itself (AdamW, SGD, Lion, ...). If it "
            f"does, say so with `{type(optimizer).__name__}.elementwise = True`."
        )


def probe(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return why an optimizer can't step flat pieces, or None if it can. Cached by class and options."""
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        return None if declared else "says that it needs whole matrices"
    options = _constructor_options(optimizer, group)
    key = (type(optimizer), tuple(sorted((k, repr(v)) for k, v in options.items() if k not in ("lr", "initial_lr"))))
    if key not in _PROBED:
        _PROBED[key] = _probe(type(optimizer), options)
    return _PROBED[key]


def _constructor_options(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that the optimizer's constructor takes; those that choose a kernel are left out."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    known = {key for key in optimizer.defaults if anything or key in accepted}
    return {k: v for k, v in group.items() if k in known and k not in ("fused", "foreach", "capturable")}


@torch.enable_grad()
def _probe(kind: type[Optimizer], options: dict[str, Any]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(6, 8, generator=generator, dtype=torch.float64).float()
    grads = [torch.randn(6, 8, generator=generator, dtype=torch.float64).float() for _ in range(3)]
    try:
        whole = _stepped(kind, options, value, grads, pieces=1)
        flat = _stepped(kind, options, value, grads, pieces=3)
    except Exception as problem:
        return f"could not be tried on small tensors ({type(problem).__name__}: {problem})"
    return None if torch.allclose(whole, flat, rtol=1e-5, atol=1e-7) else "needs whole matrices"


def _stepped(
    kind: type[Optimizer], options: dict[str, Any], value: torch.Tensor, grads: list[torch.Tensor], pieces: int
) -> torch.Tensor:
    """Return `value` after a few steps, held whole as a matrix or as flat pieces."""

    def cut(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone()] if pieces == 1 else [t.clone().reshape(-1) for t in tensor.chunk(pieces)]

    parameters = [nn.Parameter(piece) for piece in cut(value)]
    optimizer = kind(parameters, **options)  # type: ignore[call-arg]
    _ADOPTED[optimizer] = _Adopted(pieces, _adoption())
    for grad in grads:
        for parameter, piece in zip(parameters, cut(grad), strict=True):
            parameter.grad = piece
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


# ---- global hooks ------------------------------------------------------------------------------------------


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not ENGINES:
        return
    bring_up_to_date(optimizer)
    for engine in ENGINES:
        if engine.host is not None:
            engine.streams.land()  # an evaluation may still copy masters up
    known = _ADOPTED[optimizer]
    if not known.stepped:  # it is about to make its state
        known.stepped = True
        for device in {engine.mesh.device for engine in engines_of(optimizer)}:
            give_back_unused(device)


def bring_up_to_date(optimizer: Optimizer) -> None:
    """Adopt what is new, and hand out gradients as they are now: before a step, and before gradients are unscaled."""
    known = _ADOPTED.get(optimizer)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if known is not None and known.orphaned:
        raise RuntimeError(
            f"This {type(optimizer).__name__} no longer steps anything: another optimizer that was prepared (or "
            "stepped) after it has the same sharded parameters. Use the last one."
        )
    if known is None or known.adoption != _adoption() or known.count != count:
        adopt_optimizer(optimizer)
    for engine in list(ENGINES):
        for run in [run for lane in engine.lanes() for run in lane.runs if run.uneven]:
            run.hand_out()
    _ADOPTED[optimizer].count = sum(len(group["params"]) for group in optimizer.param_groups)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for engine in engines_of(optimizer):
        engine.masters_changed()


def engines_of(optimizer: Optimizer) -> list[Engine]:
    """Return the engines whose parameters an optimizer steps."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = []
    for engine in list(ENGINES):
        runs = any(id(run.parameter) in mine for lane in engine.lanes() for run in lane.runs)
        if runs or any(id(p) in mine for lane in engine.lanes() if lane.placement.whole for p in lane.resting):
            found.append(engine)
    return found


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)

"""Step units in the backward that makes their gradients, and let the gradients go.

Note [Steps in backward]
------------------------
With `optimizer_in_backward` a backward that syncs steps the lanes of a unit as soon as their gradients are reduced, and
frees them: at most three units have any at a time, on a CPU one. `optimizer.step()` steps what is left, which then has
the bits of a run without the option: a lane is stepped by the step of the optimizer's class, with the groups that the
user has, and each parameter by itself (Note [Steps by lane] in lane_step.py).

Left for `step()` are lanes of whole parameters, whose gradients are plain tensors of the user's; those of the root and
of units that stay whole until the end of backward, which may get more; and lanes of which this rank's backwards have
not reached every parameter, since only the end of backward tells whether those of another rank have. Ranks need not
agree on it: an optimizer that is allowed here steps this rank's rows without asking anyone.

On a GPU a unit is stepped on the compute stream, once it has waited for the reduction, which it does for the third one
before the newest anyway. So nothing waits for it, and the memory of gradients and states is that of one stream.

A step that is begun can't be taken back. Therefore what would see half of one raises: a forward, a backward, a save, a
look at a gradient or `zero_grad` between this backward and `optimizer.step()`; a value of a group that changes in
between; gradients that come after their unit was stepped, or that were to add up over steps. A backward that fails
leaves a model between two steps, which computes nothing more until all weights were loaded. Of the gradients a lane
keeps the norm, from which the norm of all comes, for the logs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ourshard.runtime.behind import is_ours
from ourshard.runtime.buffer import give_back_unused
from ourshard.runtime.lane_step import showing
from ourshard.runtime.meter import Spent
from ourshard.runtime.norms import norms_of
from ourshard.runtime.wording import counted

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine
    from ourshard.runtime.lane import Lane
    from ourshard.runtime.unit import Unit

logger = logging.getLogger("ourshard")

REDUCTIONS = 2  # that may be under way on a GPU: `InFlight.keep`

Values = list[dict[str, Any]]  # of the groups of an optimizer, without the parameters


class StepsInBackward:
    """The lanes of one engine that its backwards step: Note [Steps in backward]."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reduced: list[tuple[Unit, Any]] = []  # units in this backward, with the end of the reduction
        self._unfinished: dict[Lane, Optimizer] = {}  # stepped, and `optimizer.step()` is still to come
        self._values: WeakKeyDictionary[Optimizer, Values] = WeakKeyDictionary()  # that these were stepped with
        self._known: WeakSet[Optimizer] = WeakSet()  # that have stepped before, and have their state
        self._is_torn = False  # a backward failed that had stepped some
        self._has_warned = False

    # ---- in backward ---------------------------------------------------------------------------------------

    def reduced(self, unit: Unit, event: Any) -> None:
        """Step a unit whose reduction was issued; on a GPU the one before the two newest, which is over."""
        self._reduced.append((unit, event))
        while len(self._reduced) > (0 if event is None else REDUCTIONS):
            unit, event = self._reduced.pop(0)
            if self._is_complete(unit):
                self._engine.streams.wait(event, Spent.REDUCE, unit.label)
                for lane in unit.lanes:
                    optimizer = _optimizer_of(lane)
                    if optimizer is not None:
                        self._step(lane, optimizer)

    def _is_complete(self, unit: Unit) -> bool:
        """Say whether this backward brings the unit no more gradients, as far as it can be known."""
        engine = self._engine
        opened = engine.phase_is_backward and engine.sync_backward and not engine.keeps_graph
        return opened and not unit.is_pending and not unit.held

    @torch.no_grad()
    def _step(self, lane: Lane, optimizer: Optimizer) -> None:
        assert lane.gradient is not None
        norm = norms_of([lane.gradient])[0]  # before the step, as SGD may change what it is given
        if optimizer not in self._values:
            _refuse_hooks(optimizer)
            self._values[optimizer] = _values_of(optimizer)
        self._unfinished[lane] = optimizer
        for run in lane.runs:
            run.hand_out_all()
        if optimizer not in self._known:
            give_back_unused(lane.device)  # what the optimizer is about to make stays
        with showing(optimizer, [run.parameter for run in lane.runs]):
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # without hooks
        lane.let_go_of_gradient(norm)

    def end_backward(self) -> list[bool]:
        """Leave the units reduced last to `optimizer.step()`; say of each unit whether this rank has stepped it."""
        self._reduced.clear()
        if not (self._has_warned or self._unfinished or any(lane.runs for lane in self._engine.lanes())):
            self._has_warned = True
            logger.warning(
                "optimizer_in_backward: this backward kept all gradients, since the optimizer is not known before its "
                "first step. Give it to accelerator.prepare or ourshard.adopt_optimizer."
            )
        return [any(lane.spent for lane in unit.lanes) for unit in self._engine.units]

    def check_late(self, known: list[bool]) -> None:
        """Raise RuntimeError where, on any rank, gradients arrived after their unit was stepped, on any rank.

        `known` is what ranks told each other: first what arrived, and last, taken off here, what `end_backward` said.
        """
        units = self._engine.units
        spent = known[-len(units) :]
        del known[-len(units) :]
        for unit, arrived, stepped in zip(units, known[: len(units)], spent, strict=True):
            if arrived and stepped:
                self.refuse_late(unit)

    def refuse_late(self, unit: Unit) -> NoReturn:
        """Raise RuntimeError about a gradient that came to a unit that was stepped."""
        raise RuntimeError(
            f"{unit.label}: a gradient came after the unit was stepped in this backward (optimizer_in_backward). Its "
            "parameters are used by a part of the model that they do not belong to, or ranks use units in another "
            "order: leave the option out."
        )

    # ---- what would see half of a step ---------------------------------------------------------------------

    def check_forward(self) -> None:
        """Raise RuntimeError where a forward would compute with weights of two steps."""
        self._refuse_torn()
        if self._unfinished:
            self._refuse("this forward comes before its step() was called")

    def check_backward(self) -> None:
        """Raise RuntimeError where a backward would add to gradients that are gone."""
        self._refuse_torn()
        if self._unfinished:
            self._refuse("another backward comes before its step() was called")
        kept = next((lane for lane in self._engine.lanes() if lane.spent), None)
        if kept is not None:
            raise RuntimeError(
                f"optimizer_in_backward: the gradients of the last step were not dropped ({kept.unit.label}, ...), and "
                "this backward would add to them, but they were let go as they were stepped. Call zero_grad() after "
                "each step."
            )

    def check_drop(self, lane: Lane) -> None:
        """Raise RuntimeError where gradients are dropped of which some were stepped."""
        if lane in self._unfinished:
            self._refuse("its gradients are dropped (zero_grad) before its step() was called")

    def check_read(self) -> None:
        """Raise RuntimeError where weights would be read that are of two steps."""
        self._refuse_torn()
        if self._unfinished:
            self._refuse("weights are read or saved before its step() was called")

    def _refuse(self, what: str) -> NoReturn:
        lane, optimizer = next(iter(self._unfinished.items()))
        raise RuntimeError(
            f"optimizer_in_backward: the {type(optimizer).__name__} has stepped "
            f"{counted(len(self._unfinished), 'lane')} ({lane.unit.label}, ...) while the last backward ran, and "
            f"{what}. That can't be taken back: each backward that syncs is to be followed by optimizer.step(), then "
            "zero_grad(). Add losses and call backward once, or run the earlier backwards in "
            "accelerator.accumulate(model) or accelerator.no_sync(model); look at a loss before its backward; freeze a "
            "model that another one's loss passes through. Or leave the option out."
        )

    def _refuse_torn(self) -> None:
        if self._is_torn:
            raise RuntimeError(
                "optimizer_in_backward: a backward ended in an exception after it had stepped some units, so that the "
                "weights are of two steps, and ranks may differ in which. Load a checkpoint (accelerator.load_state, "
                "ourshard.load_full_state_dict), or build the model anew. To try batch sizes, leave the option out."
            )

    def abandon(self) -> None:
        """Note that a backward, or the loop around it, was left in an exception."""
        self._reduced.clear()
        self._is_torn = self._is_torn or bool(self._unfinished)
        self._unfinished.clear()
        self._values.clear()

    def mend(self) -> None:
        """Note that all weights were loaded."""
        self.abandon()
        self._is_torn = False

    # ---- the user's step -----------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Raise where what is left to step would not be stepped as the rest was."""
        self._refuse_torn()
        name = type(optimizer).__name__
        if has_closure:
            raise ValueError(
                f"{name}.step(closure): with optimizer_in_backward units are stepped while the closure runs backward, "
                "before the step begins. Call the closure yourself, then step() without it."
            )
        before, now = self._values.get(optimizer), _values_of(optimizer)
        for number, (then, values) in enumerate(zip(before or (), now, strict=False)):
            for key in then.keys() & values.keys():
                if then[key] != values[key]:
                    raise RuntimeError(
                        f"optimizer_in_backward: {key!r} of group {number} of the {name} was {then[key]!r} while "
                        f"backward stepped units, and is {values[key]!r} in step(). Change it before the backward."
                    )
        for lane, whose in self._unfinished.items():
            if whose is optimizer and any(run.parameter.grad is not None for run in lane.runs):
                raise RuntimeError(
                    f"optimizer_in_backward: a gradient was given to {lane.name_of(0)!r} in the groups of the {name}, "
                    "but the last backward has stepped it. Change gradients through the loss, or leave the option out."
                )

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that a step is over."""
        self._values.pop(optimizer, None)
        self._known.add(optimizer)
        self._unfinished = {lane: whose for lane, whose in self._unfinished.items() if whose is not optimizer}


def steps_in_backward(engine: Engine) -> StepsInBackward | None:
    """Return what steps the units of an engine in backward, where the config asks for it and there are any."""
    there = any(not lane.placement.whole for unit in engine.units if not unit.rooted for lane in unit.lanes)
    return StepsInBackward(engine) if engine.config.optimizer_in_backward and there else None


def check_whole_step(engine: Engine) -> None:
    """Raise RuntimeError where the weights of an engine are of two steps: before they are read or saved."""
    if engine.in_backward is not None:
        engine.in_backward.check_read()


def refuse_clipping(lanes: Iterable[Lane]) -> None:
    """Raise RuntimeError where gradients are to be clipped of which most are stepped before the last one is there."""
    if any(lane.unit.engine.in_backward is not None for lane in lanes):
        raise RuntimeError(f"Gradients can't be clipped: {NO_CLIPPING}")


def refuse_part_of(lane: Lane) -> NoReturn:
    """Raise RuntimeError where the norm is asked for of some gradients of a lane, of which one number is left."""
    raise RuntimeError(
        f"optimizer_in_backward: the gradients of {lane.unit.label} were let go as they were stepped, and one norm is "
        "known for all of them. Ask for the norm of the whole model, or leave the option out."
    )


NO_SCALING = (
    "optimizer_in_backward: with loss scaling (fp16) a step must wait until the last gradient was looked at for "
    "overflows, and units are stepped while backward runs. Use bf16, or set optimizer_in_backward: false."
)
NO_CLIPPING = (
    "with optimizer_in_backward units are stepped while backward runs, before the last gradient is known. Leave "
    "clipping out (max_grad_norm=0 of TrainingArguments, no gradient_clipping; clip_grad_norm_ with max_norm=inf "
    "returns the norm of order 2), or set optimizer_in_backward: false."
)


def _optimizer_of(lane: Lane) -> Optimizer | None:
    """Return the optimizer that steps all of a lane, where this rank knows that all of it has a gradient."""
    if lane.placement.whole or lane.spent or not lane.trainable or False in lane.touched or not lane.accumulated:
        return None
    optimizers = [run.optimizer() for run in lane.runs]
    several = any(other is not optimizers[0] for other in optimizers)
    stepped = sum(len(run.positions) for run in lane.runs)
    return None if several or stepped < len(lane.parameters) else optimizers[0]


def _values_of(optimizer: Optimizer) -> Values:
    return [{key: _value(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _value(value: Any) -> Any:
    """Return what tells whether a value was changed; of a tensor, without a look at the device."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


def _refuse_hooks(optimizer: Optimizer) -> None:
    strangers = [hook for hook in _global_optimizer_pre_hooks.values() if not is_ours(hook)]
    if strangers or optimizer._optimizer_step_pre_hooks:
        raise RuntimeError(
            f"optimizer_in_backward: a hook is registered to run before the step of the {type(optimizer).__name__}; it "
            "would find most gradients stepped and gone. Remove the hook, or leave the option out."
        )

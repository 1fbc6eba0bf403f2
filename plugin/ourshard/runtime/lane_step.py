"""Step an optimizer lane by lane, where masters are not on the device, or parameters are stepped whole.

Note [Steps by lane]
--------------------
`optimizer.step()` of torch's own optimizers treats each parameter by itself, so that stepping the parameters of one
lane after those of another gives the same bits as stepping all at once. A step whose lanes are on the host is cut so:
the step of the optimizer's class runs once a lane, with groups that show this lane alone, and a lane's new values go
up while the CPU steps the next. This happens after all hooks that run before a step, and before those that run after
it; for the step that then follows, which is to find nothing to do, the gradients are hidden. Group dicts,
hyper-parameters, states and step counters are those of the user's optimizer all the time.

Gradients on the device that are still to be divided (Note [Late division] in gradient_notes.py) are stepped so too, all
lanes at once; those that are not to be are left to the step that follows.

With `offload.overlap_step` a thread does it while the next forward begins: Note [Overlapped steps] in behind.py.

A step is taken as one where the optimizer is of another class (it may keep one value for all parameters), or gets a
closure, which makes its gradients inside of the step. Steps of whole parameters (Note [Owners] in owners.py) are cut
the same way, for optimizers that are known to step each alone.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ourshard.runtime.behind import Stepping, can_overlap
from ourshard.runtime.compiling import outside_of_compile
from ourshard.runtime.fused import divide_in_step
from ourshard.runtime.handle import GET_GRAD
from ourshard.runtime.lane import Lane
from ourshard.runtime.states import keep_on_host


def can_step_by_lane(optimizer: Optimizer) -> bool:
    """Say whether an optimizer is one of torch's, all of which treat each parameter by itself (bar LBFGS)."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS and can_be_cut(optimizer)


def can_be_cut(optimizer: Optimizer) -> bool:
    """Say whether the step of an optimizer's class can be run without its hooks: nobody has put another around it."""
    step = type(optimizer).step
    return hasattr(step, "hooked") and not hasattr(step.__wrapped__, "hooked")  # type: ignore[attr-defined]


class StepApart(ABC):
    """One step, some lanes of which are stepped apart before it: `end` when it is over or has failed."""

    def __init__(self, optimizer: Optimizer, lanes: Sequence[Lane]) -> None:
        self.sent: list[Lane] = []  # lanes whose masters went up
        self._lanes = lanes
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
        # torch runs it last, after all that are there.
        before = optimizer.register_step_pre_hook(outside_of_compile(self._step))
        after = optimizer.register_step_post_hook(outside_of_compile(self._show))
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        self._handles = (before, after)

    def end(self) -> None:
        """Take the hooks off, and let all gradients be seen. Idempotent."""
        self._show()
        for handle in self._handles:
            handle.remove()

    @abstractmethod
    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Run as a hook before the step."""

    def _step_rest(self, optimizer: Optimizer, step: Callable[[Any], Any]) -> None:
        """Step what is of no lane that is stepped apart; first, so that where it fails nothing has been stepped."""
        apart = {id(run.parameter) for lane in self._lanes for run in lane.runs}
        with showing(optimizer, [p for group in optimizer.param_groups for p in group["params"] if id(p) not in apart]):
            step(optimizer)

    def _hide(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _show(self, *_: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()


class StepDividing(StepApart):
    """A step whose `lanes`, on the device, wait for one division: Note [Late division] in gradient_notes.py."""

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without hooks
        self._step_rest(optimizer, step)
        _step_dividing(optimizer, step, self._lanes)
        for group in optimizer.param_groups:
            self._hide(group["params"])


class StepByLane(StepApart):
    """One step by lanes: Note [Steps by lane]."""

    def __init__(self, optimizer: Optimizer, lanes: Sequence[Lane]) -> None:
        self._overlaps = can_overlap(optimizer, lanes)  # before hooks of ours are there
        super().__init__(optimizer, lanes)

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            if any(lane.on_disk for lane in self._lanes):
                raise ValueError(
                    "step(closure): with offload.optimizer: nvme masters are on the disk while the closure would run; "
                    "call the closure yourself, then step() without it."
                )
            divide_now(self._lanes)
            return  # a closure
        step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without hooks
        self._step_rest(optimizer, step)
        self._step_lanes(optimizer, step)
        for group in optimizer.param_groups:
            self._hide(group["params"])

    def _step_lanes(self, optimizer: Optimizer, step: Callable[[Any], Any]) -> None:
        with _scaling_on_host(optimizer):
            if self._overlaps:
                for lane in self._lanes:
                    lane.stepping = Stepping(optimizer, lane)
            else:
                self._step_here(optimizer, step)

    def _step_here(self, optimizer: Optimizer, step: Callable[[Any], Any]) -> None:
        with closing(self._in_memory(optimizer)) as lanes:
            for lane, master in lanes:
                _step_dividing(optimizer, step, [lane])
                if not lane.on_disk:
                    keep_on_host(optimizer, lane)
                self._send_up(lane, master)

    def _in_memory(self, optimizer: Optimizer) -> Generator[tuple[Lane, torch.Tensor], None, None]:
        """Yield each lane with its master, while optimizer and master are in memory."""
        for engine in dict.fromkeys(lane.unit.engine for lane in self._lanes):
            lanes = [lane for lane in self._lanes if lane.unit.engine is engine]
            yield from ((lane, lane.master) for lane in lanes if not lane.on_disk)
            if any(lane.on_disk for lane in lanes):
                assert engine.disk is not None
                yield from engine.disk.bring(optimizer, [lane for lane in lanes if lane.on_disk])

    def _send_up(self, lane: Lane, master: torch.Tensor) -> None:
        with lane.unit.engine.streams.gather:
            lane.send_up(master)
        self.sent.append(lane)


def has_hooks(optimizer: Optimizer) -> bool:
    """Say whether someone else than the runtime looks at the gradients before the step."""
    return len(_global_optimizer_pre_hooks) > 1 or bool(optimizer._optimizer_step_pre_hooks)


def dividing_apart(optimizer: Optimizer, lanes: Iterable[Lane], has_closure: bool) -> StepDividing | None:
    """Return a step that divides the gradients of those `lanes` that wait for it, or do it now where it can't.

    A loss scaler may skip the step, and gradients are then to be what clipping has made of them.
    """
    waiting = [lane for lane in lanes if lane.notes.divisor is not None]
    scaled = any(getattr(optimizer, key, None) is not None for key in ("grad_scale", "found_inf"))
    one = len({id(lane.notes.divisor) for lane in waiting}) == 1 and not any(lane.offloaded for lane in waiting)
    if one and can_be_cut(optimizer) and not (has_closure or scaled):
        return StepDividing(optimizer, waiting)
    divide_now(waiting)
    return None


def divide_now(lanes: Iterable[Lane]) -> None:
    """Do what waits for a step, in lanes that are to be read, or stepped in another way: Note [Late division]."""
    for lane in lanes:
        if lane.notes.divisor is not None:
            lane.divide_now()


def _step_dividing(optimizer: Optimizer, step: Callable[[Any], Any], lanes: Sequence[Lane]) -> None:
    """Step `lanes` alone, whose gradients are divided where they all wait for one division: Note [Late division].

    Then group by group, so that where a step fails it is known which gradients are still to be divided; they are.
    """
    parameters = [run.parameter for lane in lanes for run in lane.runs]
    taken = [lane.take_divisor() for lane in lanes]
    divisor = next((each for each in taken if each is not None), None)
    if divisor is None:
        with showing(optimizer, parameters):
            step(optimizer)
        return
    ids = {id(parameter) for parameter in parameters}
    groups = [[p for p in group["params"] if id(p) in ids] for group in optimizer.param_groups]
    undivided = {number: group for number, group in enumerate(groups) if group}
    before = {key: value for key, value in vars(optimizer).items() if key == "grad_scale"}  # a loss scaler's
    try:
        for number in list(undivided):
            with showing(optimizer, undivided[number]):
                in_step = divide_in_step(optimizer, divisor)
                if not in_step:
                    del undivided[number]
                step(optimizer)
            if in_step:
                del undivided[number]
            _put_back(optimizer, before)
    except BaseException:
        for parameter in itertools.chain.from_iterable(undivided.values()):
            gradient = GET_GRAD(parameter)
            if gradient is not None:
                gradient.div_(divisor)
        _put_back(optimizer, before)
        raise


def _put_back(optimizer: Optimizer, before: dict[str, Any]) -> None:
    vars(optimizer).pop("grad_scale", None)
    vars(optimizer).update(before)


@contextmanager
def _scaling_on_host(optimizer: Optimizer) -> Iterator[None]:
    """Let what a loss scaler tells the optimizer be on the host; torch would copy it there without waiting."""
    above = {key: value for key, value in vars(optimizer).items() if key in ("grad_scale", "found_inf")}
    vars(optimizer).update({key: None if value is None else value.cpu() for key, value in above.items()})
    try:
        yield
    finally:
        vars(optimizer).update(above)


@contextmanager
def showing(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let the groups have those of `parameters` alone that are theirs. The lists that users may hold are put back."""
    wanted = {id(parameter) for parameter in parameters}
    kept = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in wanted]
        yield
    finally:
        for group, everything in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = everything

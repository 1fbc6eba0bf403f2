"""`Accelerator.join_uneven_inputs` for sharded models; see Note [Joining] in `ourshard.runtime.joining`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ourshard.integrations import models
from ourshard.runtime import api
from ourshard.runtime.joining import Seat

if TYPE_CHECKING:
    from accelerate import Accelerator as _Base
else:
    _Base = object


_CLIPS: dict[str, Callable[..., Any]] = {"norm": api.clip_grad_norm_, "value": api.clip_grad_value_}


class JoiningMixin(_Base):
    """Joins, and the calls that ranks without batches make with the others."""

    _seat: Seat | None = None  # of the join that this rank is in

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let ranks run out of batches at different times: they go on answering for the others until all are done.

        Gradients stay the mean over all ranks. Optimizers and schedulers must have been prepared by this Accelerator.

        Raises:
            ValueError: sharded models and other joinables are mixed; after it, if the ranks' optimizers differ.
        """
        engines = [models.engine_of(joinable) for joinable in joinables]
        found = [engine for engine in engines if engine is not None]
        if not found or self.num_processes == 1:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        if len(found) < len(engines):
            strange = [type(j).__name__ for j, engine in zip(joinables, engines, strict=True) if engine is None]
            raise ValueError(
                f"join_uneven_inputs: {', '.join(strange)} is not sharded and cannot join with models that are."
            )
        calls = _Calls(self, found)
        with super().join_uneven_inputs([calls.seat], even_batches), calls.seat.working(), calls.announced(joinables):
            yield
        _check_same_settings(self, found[0])

    def _clip(self, kind: str, parameters: list[Any], *limits: float) -> Any:
        """Clip; in a join on all ranks, and the parameters travel by model and name."""
        if self._seat is None:
            return self._clip_here(kind, parameters, limits)
        wanted = {id(parameter) for parameter in parameters}
        names = [
            [name for name, parameter in models.inner(model).named_parameters() if id(parameter) in wanted]
            for model in self._models
        ]
        return self._seat.call("clip", (kind, names, limits), lambda: self._clip_here(kind, parameters, limits))

    def _clip_here(self, kind: str, parameters: list[Any], limits: tuple[float, ...]) -> Any:
        self.unscale_gradients()
        return _CLIPS[kind](parameters, *limits)

    def _clip_as_told(self, payload: Any) -> None:
        kind, names, limits = payload
        found = []
        for model, wanted in zip(self._models, names, strict=True):
            parameters = dict(models.inner(model).named_parameters())
            found += [parameters[name] for name in wanted]
        self._clip_here(kind, found, limits)


class _Calls:
    """The methods of prepared objects that all ranks of a join call together."""

    def __init__(self, accelerator: Any, engines: list[api.Engine]) -> None:
        self._accelerator = accelerator
        self._answers: dict[str, Callable[[Any], None]] = {"clip": accelerator._clip_as_told}
        self.seat = Seat(engines, self._answers)

    @contextmanager
    def announced(self, joinables: list[Any]) -> Iterator[None]:
        """Announce steps, zero_grads and clipping, while this rank has batches."""
        accelerator = self._accelerator
        with contextlib.ExitStack() as stack:
            for number, optimizer in enumerate(accelerator._optimizers):
                self._wrap(stack, f"optimizer {number} step", optimizer)
                self._wrap(stack, f"optimizer {number} zero_grad", optimizer)
            for number, scheduler in enumerate(accelerator._schedulers):
                self._wrap(stack, f"scheduler {number} step", scheduler)
            for number, model in enumerate(joinables):
                self._wrap(stack, f"model {number} zero_grad", model)
            accelerator._seat = self.seat
            try:
                yield
            finally:
                accelerator._seat = None

    def _wrap(self, stack: contextlib.ExitStack, name: str, owner: Any) -> None:
        """Let the method that `name` ends with be called by all ranks, until `stack` closes."""
        method = name.rpartition(" ")[2]
        function = getattr(owner, method)
        state = self._accelerator.gradient_state

        def announced(*args: Any, **kwargs: Any) -> Any:
            if method == "step" and not state.sync_gradients:
                return function(*args, **kwargs)  # accumulating: accelerate does nothing
            payload = (args, kwargs, state.sync_gradients, settings(self._accelerator))
            return self.seat.call(name, payload, lambda: function(*args, **kwargs))

        def answer(payload: Any) -> None:
            args, kwargs, syncs, told = payload
            self._take_settings(told)
            before = state.sync_gradients
            state._set_sync_gradients(syncs)
            try:
                function(*args, **kwargs)
            finally:
                state._set_sync_gradients(before)

        self._answers[name] = answer
        setattr(owner, method, announced)
        stack.callback(delattr, owner, method)

    def _take_settings(self, told: list[list[dict[str, Any]]]) -> None:
        for optimizer, groups in zip(self._accelerator._optimizers, told, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)


def settings(accelerator: Any) -> list[list[dict[str, Any]]]:
    """Return the hyper-parameters of every group of every prepared optimizer (learning rate, ...)."""
    return [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in accelerator._optimizers
    ]


def _check_same_settings(accelerator: Any, engine: Any) -> None:
    """Raise on every rank if the ranks left a join with different learning rates: their shards would drift apart."""
    told = [repr(settings(accelerator))]
    if len(set(map(str, engine.control.gather_objects(told, "end of join_uneven_inputs")))) > 1:
        raise ValueError(
            "join_uneven_inputs: the ranks' optimizers have different settings now (a learning rate that some ranks "
            "changed and others did not). Prepare the scheduler with the Accelerator: then all ranks step it."
        )

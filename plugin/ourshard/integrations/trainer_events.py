"""Events of a Trainer that its own callbacks lack, for callbacks of ours; those of others see no difference.

Note [Events of our own]
The Trainer puts trackers (TensorBoard, W&B, trackio) before a user's callbacks and writes its history before both, so
what `on_log` adds to the logs reaches none of them. `before_log` is called ahead of all. An evaluation of several sets
fires `on_evaluate` after each, and none when it raises; `around_evaluation` is around all sets, and closes then too.
`after_step` comes when a step is logged, evaluated and saved, so that a save of ours has all that; it also comes at the
end of an epoch. `before_train` tells from which folder a training goes on. Each event is a wrap of one method, which
calls of subclasses pass through, too. `beside_checkpoint` is for `ShardCheckpointCallback`, which calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ourshard.integrations import switch


class ShardTrainerCallback(TrainerCallback):
    """A callback that hears of the events in Note [Events of our own], also of a Trainer that is not sharded."""

    def require_events(self) -> None:
        """Raise `ValueError` in a process whose Trainer has no events of ours."""
        if switch.flag(switch.DISABLE):
            raise ValueError(
                f"{type(self).__name__} needs ourshard's hooks in the Trainer, and OURSHARD_DISABLE=1 keeps them out: "
                "unset it, or leave the callback out."
            )

    def before_train(self, resume: Path | None, callbacks: Sequence[ShardTrainerCallback]) -> None:
        """Hear from which checkpoint a sharded Trainer is about to go on, if from one, and of all callbacks of ours."""

    def beside_checkpoint(self, model: Any) -> Callable[[Path], None]:
        """Return what writes into a checkpoint's folder, on rank 0, what this callback needs to go on. Collective."""
        return lambda folder: None

    def before_log(self, state: Any, logs: dict[str, Any]) -> None:
        """Add to what is about to be logged, on any rank; no collectives, since a user may log on one rank."""

    def after_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Run at the very end of a step, on all ranks; `kwargs` has model, optimizer, lr_scheduler."""

    def around_evaluation(self, model: Any) -> AbstractContextManager[None]:
        """Return a context for one evaluation, of all its sets, that the Trainer makes while it trains."""
        return nullcontext()


def _ours(trainer: Any) -> list[ShardTrainerCallback]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ShardTrainerCallback)]


def tell_before_train(trainer: Any, resume: str | bool | None) -> None:
    """Let our callbacks know where training goes on; called by `trainer_recovery.train`."""
    ours = _ours(trainer)
    for callback in ours:
        callback.before_train(Path(resume) if isinstance(resume, str) else None, ours)


def log(method: Callable[..., Any], trainer: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Let our callbacks add to the logs before anyone sees them."""
    for callback in _ours(trainer):
        callback.before_log(trainer.state, logs)
    return method(trainer, logs, *args, **kwargs)


def _evaluate(method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Evaluate inside of what our callbacks put around it."""
    with ExitStack() as stack:
        for callback in _ours(trainer):
            stack.enter_context(callback.around_evaluation(trainer.model))
        return method(trainer, *args, **kwargs)


def _maybe_log_save_evaluate(method: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell our callbacks when the Trainer is through with a step."""
    found = method(trainer, *args, **kwargs)
    with_what = {"model": trainer.model, "optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler}
    for callback in _ours(trainer):
        callback.after_step(trainer.args, trainer.state, trainer.control, **with_what)
    return found

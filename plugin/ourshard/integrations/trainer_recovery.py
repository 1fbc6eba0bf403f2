"""`Trainer.train` under a launcher that starts ranks anew, and at SIGTERM.

After a restart (Note [Restarts] in `restart.py`) the first `train()` that is not told what to resume from takes the
newest complete checkpoint of `output_dir`; rank 0 looks, so that all ranks take the same.
`resume_from_checkpoint=False` begins anew.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from ourshard.integrations import trainer_checkpoint, trainer_events
from ourshard.integrations.restart import restarts
from ourshard.integrations.stopping import StopSignal
from ourshard.integrations.trainer_resume import newest_complete

logger = logging.getLogger("ourshard")

_resumed = False


def train(method: Callable[..., Any], trainer: Any, resume: str | bool | None = None, *args: Any, **more: Any) -> Any:
    """Train from the newest checkpoint after a restart, and until SIGTERM."""
    trainer_checkpoint.check(trainer)
    resume = more.pop("resume_from_checkpoint", resume)
    if resume is None:
        resume = _after_restart(trainer.args.output_dir)
    elif resume is True:
        resume = newest(trainer.args.output_dir) or True  # the Trainer says that there is none
    trainer_events.tell_before_train(trainer, resume)
    if trainer.args.enable_jit_checkpoint:  # the Trainer's own answer to SIGTERM
        return method(trainer, resume, *args, **more)
    stop = StopOnSignal()
    trainer.callback_handler.callbacks.insert(0, stop)  # the others hear at the same step's end that it is the last
    try:
        with stop.listening():
            return method(trainer, resume, *args, **more)
    finally:
        trainer.remove_callback(stop)


def _after_restart(folder: str) -> str | None:
    global _resumed
    if _resumed:
        return None
    _resumed = True
    count = restarts()
    if count == 0:
        return None
    found = newest(folder)
    if _rank() == 0:
        where = f"resumes from {found}" if found else f"begins anew: no complete checkpoint in {folder}"
        logger.warning("Restart %d by the launcher: training %s.", count, where)
    return found


def newest(folder: str) -> str | None:
    """Return the newest complete checkpoint, which rank 0 looks for. Collective."""
    from accelerate.utils import broadcast_object_list

    found = [newest_complete(folder) if _rank() == 0 and os.path.isdir(folder) else None]
    broadcast_object_list(found)
    return found[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class StopOnSignal(TrainerCallback):
    """Saves and ends training at the same step on all ranks once any rank got SIGTERM: Note [SIGTERM] in `stopping`."""

    def __init__(self) -> None:
        self._stop = StopSignal()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM meanwhile, unless the script takes it itself or trains in a thread."""
        taken = self._stop.listen()
        try:
            yield
        finally:
            if taken:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop if a rank asked for it."""
        if self._stop.agreed():
            control.should_save = control.should_training_stop = True
            if state.is_world_process_zero:
                logger.warning("SIGTERM: saving a checkpoint at step %d, then training ends.", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the last flags arrive before the process group may go."""
        self._stop.finish()

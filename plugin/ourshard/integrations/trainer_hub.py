"""What a Trainer sends to the Hub, from the first rank alone; each function stands around the method of its name.

Note [The Hub on one rank]
A Hub that can't be reached is an exception on the first rank. Were it raised there alone, a script that catches it
would go on to another collective than the ranks that met no error, or they would wait for a rank that has left. So
each of these methods ends alike on all ranks: the others raise the first rank's error, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]


def init_hf_repo(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> None:
    """Make the repository, and let every rank know its name: those without one would make it again at each push."""
    _alike(lambda: method(trainer, *args, **kwargs))
    trainer.hub_model_id = _of_first_rank(trainer.hub_model_id)


def _push_from_checkpoint(method: Method, trainer: Any, folder: str) -> None:
    _alike(lambda: method(trainer, folder))


def push_to_hub(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return _alike(lambda: method(trainer, *args, **kwargs))


def _alike(action: Callable[[], Any]) -> Any:
    """Run `action` on every rank and return what it gave; raise on all ranks where the first rank's raised."""
    result, error = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    first = _of_first_rank(None if error is None else _sendable(error))
    if error is not None:
        raise error
    if first is not None:
        raise first
    return result


def _of_first_rank(value: Any) -> Any:
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def _sendable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its words where it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank 0: {type(error).__name__}: {error}")
    return error

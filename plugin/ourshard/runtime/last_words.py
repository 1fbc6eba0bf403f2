"""What became of a rank that others wait for: which one it is, and why it has gone if it could say so.

Note [Last words]
-----------------
A rank that ends leaves a word in the store of the process group: that its script is over, or the exception that ended
it. A rank whose collective fails looks for these words first. A rank that was killed leaves none; so it calls the roll,
which the watch of every other rank answers within `ANSWER_WITHIN` seconds, and names those that do not.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist

from ourshard.runtime.wording import counted

ANSWER_WITHIN = 3.0  # seconds; watches look once a second
_CALLED = "roll called"
_MOST = 500  # letters of an exception's text
_LOST = (
    "connection closed",
    "connection reset",
    "connection was",
    "pair closure",
    "broken pipe",
    "socket",
    "gloo",
    "nccl",
)


class LostRankError(RuntimeError):
    """A collective failed since another rank has gone; the message says which rank, and why if that is known."""


def is_about_a_connection(error: BaseException) -> bool:
    """Return whether an error is one of torch's about another rank: its connection, or the time that it took."""
    if isinstance(error, LostRankError):
        return False
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):  # Python's own are of data and workers
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)


def store_is_gone(waits: str) -> str:
    """Return what happened where not even the store of the job answers."""
    return (
        f"Another rank has gone, and the job's store with it, which rank 0 or the launcher keeps, and {waits}. Look at "
        "the exit code and log of rank 0 first."
    )


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of the other ranks: those whose script is over, whom an exception ended, and who do not answer."""

    over: tuple[int, ...]
    failed: dict[int, str]
    silent: tuple[int, ...]

    def told(self, waits: str) -> str:
        """Return what happened, with `waits`: which rank waits in what."""
        if self.failed:
            rank, text = min(self.failed.items())
            others = f" ({counted(len(self.failed), 'rank')} failed)" if len(self.failed) > 1 else ""
            return f"Rank {rank} ended with {text}{others}, and {waits}. Its traceback is in its own log."
        if self.silent:
            names = " and rank ".join(map(str, self.silent))
            return (
                f"Rank {names} {'does' if len(self.silent) == 1 else 'do'} not answer, and {waits}. A rank was killed "
                "(by the system, where memory runs out), stopped, or cut off from the others: look at exit codes, and "
                "at the log of the machine."
            )
        return (
            f"All ranks are there, but one did not take part in time, or a connection was lost, and {waits}. Look for "
            "what keeps a rank busy (data, a debugger, a disk), and at the network."
        )


class LastWords:
    """The words of all ranks about their end, in the job's store: Note [Last words]."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(world) if other != rank]
        self._answered = False
        for name in ("end", "here"):  # of an earlier group of this process
            with suppress(Exception):  # there is nothing to delete
                store.delete_key(f"{name}/{rank}")

    def say(self, error: BaseException | None = None) -> None:
        """Say that this rank ends, by an exception or because its script is over. The first word counts."""
        text = "" if error is None else f"{type(error).__name__}: {error}".strip()[:_MOST]
        for _ in range(2):  # a signal's handler may raise in it: that of a DataLoader, for a worker that was killed
            with suppress(Exception):  # the store may be gone
                if not self._store.check([f"end/{self._rank}"]):
                    self._store.set(f"end/{self._rank}", text)
                return

    def answer(self) -> None:
        """Say that this rank is there, if a rank asks."""
        if not self._answered and self._store.check([_CALLED]):
            self._store.set(f"here/{self._rank}", "")
            self._answered = True

    def account(self) -> Account | None:
        """Return what became of the others, after a collective failed; None where the store is gone, too."""
        try:
            self._store.set(_CALLED, "")
            self._store.set(f"here/{self._rank}", "")
            deadline = time.monotonic() + ANSWER_WITHIN
            while True:
                ends = {rank: self._store.get(f"end/{rank}").decode() for rank in self._having("end")}
                here = self._having("here")
                silent = tuple(rank for rank in self._others if rank not in ends and rank not in here)
                if ends or not silent or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        except Exception:  # the rank that keeps the store has gone
            return None
        failed = {rank: text for rank, text in ends.items() if text}
        return Account(tuple(rank for rank, text in ends.items() if not text), failed, silent)

    def _having(self, name: str) -> list[int]:
        return [rank for rank in self._others if self._store.check([f"{name}/{rank}"])]

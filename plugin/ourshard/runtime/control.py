"""Agreement between ranks, and a clear word when there is none.

Note [Agreements]
-----------------
Collectives of the model pair by order alone: two ranks that issue different ones exchange garbage or hang. So
every collective is either the next of an order that all ranks recorded together (`schedule.py`), or is agreed on
first: each rank says, over a gloo group on the host, what it is about to do, and goes on only if all say the same.

A rank that waits in an agreement looks about every few seconds. Each rank that waits for more than `REPORT_AFTER`
seconds puts what it waits for into the store of the process group. If all ranks wait, and not for the same thing,
no collective can ever complete: the waiting ranks raise, naming who is where.

So does a rank that waits in a collective of the model itself, where the host is what waits (gloo). There a rank may
be ahead of another that a slow link still serves; so it raises at once only if all have begun as many waits as it has,
and else when nothing has changed for `UNEVEN_AFTER` seconds.

A rank that ends says so, too: what is left of the others' collectives then fails, and they name that rank
(Note [Last words]).
Where a phase begins, ranks say how many steps there were: one that left a step out has rows of other weights.

Note [Forked processes]
-----------------------
A process that a rank forks (a worker of a DataLoader, multiprocessing, `os.fork`) has the rank's connections, and not
its threads. A word that it sends goes between those of the rank, and groups that it leaves, or a signal that it takes
in the rank's place, are not its own. So it forgets all of this when it begins, and a collective in it is refused. The
groups themselves are never freed there: at the end of a process the interpreter frees what it finds, in an order that
any import changes, and a group of gloo that is freed waits for its threads (a segmentation fault).
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ourshard.runtime.last_words import LastWords, LostRankError, is_about_a_connection, store_is_gone
from ourshard.runtime.mesh import Mesh, host_group
from ourshard.runtime.meter import Meter, Spent
from ourshard.runtime.streams import profiler_range

logger = logging.getLogger("ourshard")

PATIENCE = timedelta(days=1)  # of `meet`; a rank that has gone is noticed at once
REPORT_AFTER = 4.0  # seconds a rank waits before it tells the others what for
UNEVEN_AFTER = 60.0  # seconds after which ranks that began different numbers of waits, and all wait, count as stuck
_LABEL_BYTES = 192

# torch 2.13 renamed it, and warns at the old name on every start.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DesyncError(RuntimeError):
    """Ranks are about to do different things; the message says which rank does what."""


class Waiting:
    """A `with` block in which the main thread waits; each gather and reduction is in one. Left in place if it raises.

    How long it takes is the watch's to find out: it costs a step nothing.
    """

    __slots__ = ("_watch", "label", "number")

    def __init__(self, watch: Watch, label: str) -> None:
        self._watch = watch
        self.label = label
        self.number = 0

    def __enter__(self) -> None:
        watch = self._watch
        self.number = watch.begun = watch.begun + 1
        watch.current = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if kind is None:
            self._watch.last = self.label
            self._watch.current = None
        elif error is not None and is_about_a_connection(error):
            raise self._watch.explain(f" waits in: {self.label}") from error


def _left_alone(waits: str, ended: Iterable[int]) -> str:
    return (
        f"Rank {' and rank '.join(map(str, ended))} came to the end of the script, and {waits}. Every rank must run as "
        "many batches (let the Accelerator prepare the data loader, or put `accelerator.join_uneven_inputs` around the "
        "loop) and make the same calls; look for a `break`, `continue`, exit or `is_main_process` on one rank."
    )


class Word(NamedTuple):
    """What a rank told the others: what it waits for, its how many-th wait it is, and when it said so."""

    label: str
    number: int
    since: float


class Watch:
    """What this process waits for, told to the other ranks once it takes long.

    One a process. The main thread sets `current` around each blocking call; a daemon thread posts it.
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._store = dist.PrefixStore("ourshard/waits", store)
        self.last_words = LastWords(self._store, rank, world)
        self.current: Waiting | None = None
        self.begun = 0  # waits of this process
        self._seen: tuple[Waiting | None, float] = None, 0.0  # what was current when the thread last looked, and since
        self.last = "nothing yet"
        self._posted = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ourshard-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it may be in the middle of a word to the store. Tell the others that this rank ends."""
        self._stopped.set()
        self._thread.join(timeout=1.0)
        self.last_words.say()

    def explain(self, waits: str) -> RuntimeError:
        """Return the error that says why a collective of this rank failed, and `waits`: what this rank did."""
        waits = f"rank {self.rank}{waits}"
        account = self.last_words.account()
        if account is not None and account.over and not account.failed:
            return DesyncError(_left_alone(waits, account.over))
        return LostRankError(account.told(waits) if account is not None else store_is_gone(waits))

    def _run(self) -> None:
        while not self._stopped.wait(1.0):
            try:
                self.last_words.answer()
                self._post(self.current)
            except Exception:  # the store is gone: the job ends
                return

    def _post(self, wait: Waiting | None) -> None:
        if wait is not self._seen[0]:
            self._seen = wait, time.monotonic()
        long = time.monotonic() - self._seen[1] > REPORT_AFTER
        text = wait.label if wait is not None and long else ""
        if text != self._posted:
            if text:
                logger.warning("rank %d waits for other ranks in: %s (before: %s)", self.rank, text, self.last)
            self._posted = text
            self._store.set(str(self.rank), json.dumps((text, wait.number if wait else 0, time.time())))

    def others(self) -> dict[int, Word]:
        """Return what the other ranks said they wait for, by rank; ranks that wait for nothing are left out."""
        found = {}
        for rank in range(self.world):
            if rank != self.rank and self._store.check([str(rank)]):
                word = Word(*json.loads(self._store.get(str(rank))))
                if word.label:
                    found[rank] = word
        return found


_WATCHES: dict[object, Watch] = {}
_parents: object = None  # the world of the rank that forked this process


def forked() -> bool:
    """Return whether the process groups are those of a rank that forked this process: Note [Forked processes]."""
    return _parents is not None and dist.group.WORLD is _parents


def watch() -> Watch | None:
    """Return this process's watch; None without other ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if forked():
        raise _of_another_process()
    world = dist.group.WORLD
    if world not in _WATCHES:
        stop_watching()
        store = dist.distributed_c10d._get_default_store()
        _WATCHES[world] = Watch(
            store.clone() if hasattr(store, "clone") else store, dist.get_rank(), dist.get_world_size()
        )
    return _WATCHES[world]


def waiting(label: str) -> AbstractContextManager[None]:
    """Tell the other ranks what this one waits for in a collective that no engine issues, should it take long."""
    running = watch()
    return Waiting(running, label) if running is not None else nullcontext()


def say_last_words(error: BaseException) -> None:
    """Tell the other ranks which exception ends this one."""
    for running in _WATCHES.values():
        running.last_words.say(error)


def explain_lost_connection() -> str:
    """Return what became of the rank whose connection was lost, "" where nobody can say."""
    for running in _WATCHES.values():
        return str(running.explain(" waits for it in a collective of the script"))
    return ""


def stop_watching() -> None:
    """End this process's watch, which knows its process group."""
    for running in _WATCHES.values():
        running.stop()
    _WATCHES.clear()


def _of_another_process() -> RuntimeError:
    return RuntimeError(
        f"Process {os.getpid()} was forked from process {os.getppid()}, and tries to reach the other ranks, whose "
        "connections belong to the process that forked it. Sharded models, and what gathers or waits over ranks, work "
        "only there. Call them there, or give the forked process (a worker of a DataLoader, of multiprocessing) whole "
        "weights in a plain model: take them with accelerator.get_state_dict(model) before it starts."
    )


class _Exchange:
    """A short text of every rank, on its way."""

    def __init__(self, label: str, world: int, group: dist.ProcessGroup | None) -> None:
        self.label = label
        self._world = world
        raw = label.encode()[: _LABEL_BYTES - 1]
        self._mine = torch.zeros(_LABEL_BYTES, dtype=torch.uint8, device="cpu")
        self._mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else self._mine[:0]
        self._whole = torch.empty(world * _LABEL_BYTES, dtype=torch.uint8, device="cpu")
        self.work = all_gather_flat(self._whole, self._mine, group=group, async_op=True)

    def told(self) -> list[str]:
        """Return what the ranks said, in rank order, once `work` is over."""
        rows = self._whole.view(self._world, _LABEL_BYTES)
        return [bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in rows]


class Control:
    """Host-side messages of one mesh: agreements, small exchanges."""

    def __init__(self, mesh: Mesh) -> None:
        self.group = mesh.control
        self.rank = mesh.world.rank
        self.world = mesh.world.size
        self.agreements = 0
        self.steps = 0  # that optimizers have made; part of what is declared
        self.meter: Meter | None = None  # the engine's, while it measures
        self._declared: _Exchange | None = None
        self._silent = False
        self.patient = host_group("disks", PATIENCE) if mesh.control is not None else None
        self._watch = watch() if mesh.control is not None else None
        self.host_waits = self._watch is not None and mesh.device.type == "cpu"  # in a collective, not the device
        if mesh.control is not None:
            _CONTROLS.add(self)

    @property
    def is_silent(self) -> bool:
        return self._silent

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Say and ask nothing for a while, in which all ranks do the same. A new order can't be agreed on then."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def agree(self, label: str) -> None:
        """Return once every rank has come here with the same `label`; raise `DesyncError` if they can't.

        Collective over all ranks. Costs one small all-gather on the host.
        """
        if self._silent:
            raise RuntimeError(f"ranks would have to agree on: {label}")
        if self.group is None:
            return
        self.agreements += 1
        self._compare(self._exchange(label))

    def meet(self, label: str) -> None:
        """Return once every rank has come here, however long a disk takes it; raise `DesyncError` if they can't.

        Collective over all ranks. The time that a collective may wait (`timeout`) does not count here.
        """
        if self.patient is not None:
            flag = torch.zeros(1, dtype=torch.uint8, device="cpu")
            self._wait(dist.all_reduce(flag, group=self.patient, async_op=True), label)

    def agree_on(self, wish: str, prefix: str) -> list[str]:
        """Return the wishes of all ranks, which begin with `prefix`; raise `DesyncError` if one says something else.

        Collective over all ranks.
        """
        if self._silent:
            raise RuntimeError(f"ranks would have to agree on: {wish}")
        if self.group is None:
            return [wish]
        self.agreements += 1
        said = self._exchange(wish, waiting=f"{prefix}next turn")
        if not all(text.startswith(prefix) for text in said):
            self._compare(said)
        return said

    def first_of(self, words: str) -> tuple[int, str]:
        """Return the lowest rank that has words, and its words; raise `DesyncError` if another has others.

        Collective over all ranks. Some may have none, "", and one has.
        """
        said = {rank: text for rank, text in enumerate(self._exchange(words)) if text}
        if len(set(said.values())) > 1:
            raise DesyncError(self._disagreement(said))
        return min(said.items())

    def declare(self, label: str) -> None:
        """Tell the other ranks what this one begins, without waiting for them; `confirm` compares."""
        assert self._declared is None, self._declared
        if self.group is None or self._silent:
            return
        self._declared = _Exchange(f"{label}, step {self.steps}", self.world, self.group)

    def confirm(self) -> None:
        """Raise `DesyncError` unless all ranks have declared the same. Waits for those that have not yet."""
        declared, self._declared = self._declared, None
        if declared is not None:
            self._wait(declared.work, declared.label)
            self._compare(declared.told())

    def withdraw(self) -> None:
        """Forget what was declared, after an exception."""
        self._declared = None

    def _exchange(self, label: str, waiting: str = "") -> list[str]:
        exchange = _Exchange(label, self.world, self.group)
        self._wait(exchange.work, waiting or f"agreement on: {label}")
        return exchange.told()

    def _compare(self, said: list[str]) -> None:
        if len(set(said)) > 1:
            raise DesyncError(self._disagreement(dict(enumerate(said))))

    def any_of(self, flags: list[bool], label: str) -> list[bool]:
        """Return, for each flag, whether any rank set it. Collective; all ranks give the same number of flags."""
        if self.group is None or self._silent:
            return flags
        return self._reduced(flags, torch.uint8, dist.ReduceOp.MAX, label).bool().tolist()  # type: ignore[no-any-return]

    def add(self, numbers: list[int], label: str) -> list[int]:
        """Return the sums over ranks, modulo 2^64 with a sign. Collective; all ranks give as many numbers."""
        if self.group is None or self._silent:
            return numbers
        return self._reduced(numbers, torch.int64, dist.ReduceOp.SUM, label).tolist()  # type: ignore[no-any-return]

    def _reduced(
        self, numbers: Sequence[int], dtype: torch.dtype, op: dist.ReduceOp.RedOpType, label: str
    ) -> torch.Tensor:
        told = torch.tensor(numbers, dtype=dtype, device="cpu")
        self._wait(dist.all_reduce(told, op=op, group=self.group, async_op=True), label)
        return told

    def gather_objects(self, value: object, label: str) -> list[object]:
        """Return every rank's `value`, in rank order. Collective; for messages, not for tensors."""
        if self.group is None:
            return [value]
        self.agree(label)
        values: list[object] = [None] * self.world
        with self.waiting(label):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def check(self, error: str | None, label: str) -> None:
        """Raise `ValueError` on every rank if any rank has an `error`, with the text of the first. Collective."""
        errors = self.gather_objects(error, label)
        bad = [(rank, text) for rank, text in enumerate(errors) if text]
        if bad:
            rank, text = bad[0]
            where = "" if len(bad) == self.world else f" (found on rank {rank})"
            raise ValueError(f"{text}{where}")

    def waiting(self, label: str, kind: Spent | None = None) -> AbstractContextManager[None]:
        """Tell the other ranks what this one waits for, should it take long; a meter is told as what."""
        if self._watch is None:
            return nullcontext()
        waiting = Waiting(self._watch, label)
        return waiting if kind is None or self.meter is None else self._measured(waiting, self.meter, kind, label)

    @staticmethod
    @contextmanager
    def _measured(waiting: Waiting, meter: Meter, kind: Spent, label: str) -> Iterator[None]:
        span = meter.open(kind, label)
        with waiting:
            yield
        meter.close(span)

    def finish(self, work: dist.Work | None) -> None:
        """Wait for a collective, inside of `waiting`; raise `DesyncError` if it can't end and the host could see that.

        Where the device waits, its stream does. None, of a collective on the current stream, is nothing to wait for.
        """
        if work is None:
            return
        if not self.host_waits:
            work.wait()
        elif not self._done(work):
            self._finish_slowly(work)

    def _finish_slowly(self, work: dist.Work) -> None:
        assert self._watch is not None
        mine = self._watch.current
        assert mine is not None
        before: dict[int, Word] = {}
        since = time.monotonic()
        while not self._done(work):
            others = self._watch.others()
            if others != before:
                before, since = others, time.monotonic()
                continue
            apart = any(word.label != mine.label for word in others.values())
            level = all(word.number == mine.number for word in others.values())
            if len(others) == self.world - 1 and apart and (level or time.monotonic() - since > UNEVEN_AFTER):
                raise DesyncError(self._stuck(mine.label, others))

    def _wait(self, work: dist.Work, label: str) -> None:
        assert self._watch is not None
        measured = nullcontext() if self.meter is None else self.meter.span(Spent.AGREE, label)
        with measured, profiler_range("ourshard::agree"), Waiting(self._watch, label):
            while not self._done(work):
                others = self._watch.others()
                if len(others) == self.world - 1 and any(word.label != label for word in others.values()):
                    raise DesyncError(self._stuck(label, others))

    @staticmethod
    def _done(work: dist.Work) -> bool:
        """Wait for a while, and say whether the collective is over; raise its error.

        An error comes sooner than the end of a wait. gloo's reduce-scatter does not count as completed where it failed.
        """
        patience, began = REPORT_AFTER / 2, time.monotonic()
        try:
            work.wait(timedelta(seconds=patience))
            return True
        except RuntimeError:
            if work.is_completed() or time.monotonic() - began < patience / 2:
                raise
            return False

    def _stuck(self, label: str, others: dict[int, Word]) -> str:
        return self._disagreement({self.rank: label, **{rank: word.label for rank, word in others.items()}})

    def _disagreement(self, said: dict[int, str]) -> str:
        places = "\n".join(f"  rank {rank}: {label}" for rank, label in sorted(said.items()))
        return (
            "The ranks are in different places, and would wait for each other for ever:\n"
            f"{places}\n"
            "Every rank must run the same sharded modules, and make the same collective calls (saving, state_dict, "
            "gathered, clipping), in the same order; look for a branch on the rank or on the data. Where one rank "
            "calls a module more often than all did so far, make the module around it the unit, with "
            "`wrap: {classes: [...]}`."
        )


_CONTROLS: weakref.WeakSet[Control] = weakref.WeakSet()  # that reach other ranks


class _OfAnotherProcess(Control):
    """What a control is in a forked process: nothing of it can be used. Ranks pay nothing for that."""

    def __getattribute__(self, name: str) -> Any:
        raise _of_another_process()


def _forget_ranks() -> None:
    global _parents
    _parents = dist.group.WORLD if dist.is_initialized() else None
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # never freed
    _WATCHES.clear()
    for control in list(_CONTROLS):
        control.__class__ = _OfAnotherProcess


os.register_at_fork(after_in_child=_forget_ranks)

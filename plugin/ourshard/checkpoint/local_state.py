"""State of an optimizer that only the layout it was made in can read: out of a running optimizer and back into it.

Note [Local state]
A run (Note [Runs] in runtime/run.py) is one flat tensor of this rank's rows. Most optimizers keep one value for each
of its elements, which is saved by parameter name and loads in any layout. Those of 8 bits keep codes, a scale for
each block of so many elements, and tables: codes mean nothing without their scales, and blocks begin where the run
begins, which is elsewhere on each rank. So if any rank has such a tensor, all ranks save all tensors of this
optimizer's runs as they are, under a name that tells the run, the layout and the part of the lane. What has no
dimension or is no tensor (step counts) all ranks have alike; it stays by parameter name. So does all state of
parameters that are stepped whole. Tensors of classes that stand for others are saved as those: tensor_classes.py.

In the same layout such state is given back bit for bit. In any other it is refused, with nothing changed: nobody but
the optimizer knows what a value stands for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch.optim import Optimizer

from ourshard.runtime.engine import Engine
from ourshard.runtime.lane import Lane
from ourshard.runtime.optim import put_away
from ourshard.runtime.run import Run
from ourshard.runtime.states import is_laid_out
from ourshard.runtime.wording import counted, shorten

from .disks import Disk
from .portions import has_turn, places_digest
from .shard_writer import LocalBox
from .source import LOCAL_PREFIX, Source, TensorInfo, TensorKey
from .staging import ToHost
from .tensor_classes import CLASS, check_classes, flattened, rebuilt

logger = logging.getLogger("ourshard")

_told: set[type[Optimizer]] = set()  # whose checkpoints were said to be of one layout


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run whose state is saved as it is; `name` is the same on all ranks, and no other run or layout has it."""

    run: Run
    name: str
    digest: str  # of where the parameters of its lane lie

    @classmethod
    def of(cls, run: Run, digest: str) -> LocalRun:
        """Name a run."""
        return cls(run, _name(run, run.positions, digest), digest)

    @property
    def own(self) -> str:
        """Return the name of this rank's part."""
        return f"{self.name}.{self.run.lane.part}"

    def parts(self) -> list[str]:
        """Return the names of all parts of the lane, in their order."""
        return [f"{self.name}.{part}" for part in range(self.run.lane.spread.size)]

    def apart(self) -> list[LocalRun]:
        """Return this run as it is named where each of its parameters is a run of its own."""
        run, digest = self.run, self.digest
        return [LocalRun(run, _name(run, [position], digest), digest) for position in run.positions]

    def own_apart(self) -> list[str]:
        """Return the names of this rank's parts where each parameter is a run of its own."""
        return [each.own for each in self.apart()]

    def tensors(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by state key, plain ones: `tensor_classes.flattened`."""
        return {
            name: part
            for key, value in _tensors(optimizer, self.run).items()
            for name, part in flattened(key, value).items()
        }


def local_runs(engine: Engine, optimizer: Optimizer) -> Iterator[LocalRun]:
    """Yield the runs that an optimizer steps in parts, in the order of the lanes, which is the same on all ranks."""
    for lane in engine.lanes():
        runs = _cut_runs(lane, optimizer)
        digest = places_digest(lane) if runs else ""
        for run in runs:
            yield LocalRun.of(run, digest)


def _cut_runs(lane: Lane, optimizer: Optimizer) -> list[Run]:
    return [run for run in lane.runs if run.owner is None and run.optimizer() is optimizer]


def keeps_local(engines: Sequence[Engine], optimizer: Optimizer) -> bool:
    """Say whether this rank has state in a layout of the optimizer's own. Changes nothing and never fails."""
    runs = [run for engine in engines for lane in engine.lanes() for run in _cut_runs(lane, optimizer)]
    return any(is_laid_out(value, run.numel) for run in runs for value in _tensors(optimizer, run).values())


def _tensors(optimizer: Optimizer, run: Run) -> dict[str, torch.Tensor]:
    state = optimizer.state.get(run.parameter, {})
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}


def all_keep_local(engines: Sequence[Engine], optimizers: Sequence[Optimizer], label: str) -> list[bool]:
    """Return for each optimizer whether any rank has such state. Collective; says once what that means for loading.

    Raises DesyncError if ranks come with other numbers of optimizers, or do something else.
    """
    if not engines:
        return [False] * len(optimizers)
    control = engines[0].control
    control.agree(f"{label} (optimizers: {len(optimizers)})")
    flags = [keeps_local(engines, optimizer) for optimizer in optimizers]
    found = control.any_of(flags, label) if flags else []
    for optimizer, local in zip(optimizers, found, strict=True):
        if local and type(optimizer) not in _told and engines[0].mesh.world.rank == 0:
            _told.add(type(optimizer))
            logger.warning(
                "%s: the state of %s loads on as many ranks in the same layout alone: docs/checkpoints.md, section "
                "'Optimizers of 8 bits'.",
                label, type(optimizer).__name__,
            )  # fmt: skip
    return found


def take_local(
    engine: Engine,
    optimizer: Optimizer,
    boxes: MutableMapping[TensorKey, list[LocalBox]],
    to_host: ToHost,
    disk: Disk,
) -> None:
    """Add this rank's tensors of an optimizer's runs to `boxes`; of ranks that have the same ones, one adds them."""
    numbers = {id(lane): number for number, lane in enumerate(engine.lanes())}
    for each in local_runs(engine, optimizer):
        if has_turn(each.run.lane, numbers[id(each.run.lane)], disk):
            for key, value in each.tensors(optimizer).items():
                boxes[TensorKey(f"{LOCAL_PREFIX}{key}", each.own)] = [LocalBox(tuple(value.shape), to_host(value))]


# ---- loading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SavedLocal:
    """The local state in a checkpoint, for an engine."""

    source: Source
    engine: Engine
    infos: Mapping[str, Mapping[str, TensorInfo]]  # name of a run's part -> state key -> tensor

    @classmethod
    def of(cls, source: Source, engine: Engine) -> SavedLocal:
        """Sort the tensors of `source` by part."""
        infos: dict[str, dict[str, TensorInfo]] = {}
        for key, info in source.tensors.items():
            if key.is_local:
                infos.setdefault(key.name, {})[key.kind.removeprefix(LOCAL_PREFIX)] = info
        return cls(source, engine, infos)

    def misfits(self, optimizers: Sequence[Optimizer]) -> Iterator[str]:
        """Yield why it does not fit, if it does not: the same text on all ranks."""
        yield from layout_misfits(list(self._runs(optimizers)), self.infos)

    def check_classes(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise CheckpointError unless the classes of this rank's tensors can be made here."""
        for info in self.of_rank(optimizers):
            key = info.key.kind.removeprefix(LOCAL_PREFIX)
            check_classes({key: self.source.read(info.key)} if key.endswith(CLASS) else {})

    def of_rank(self, optimizers: Sequence[Optimizer]) -> Iterator[TensorInfo]:
        """Yield what this rank reads, if runs are split as they were."""
        for each in self._runs(optimizers):
            for name in dict.fromkeys([each.own, *each.own_apart()]):
                yield from self.infos.get(name, {}).values()

    def split(self, optimizers: Sequence[Optimizer]) -> None:
        """Step parameters one by one where their state was saved so."""
        for optimizer in optimizers:
            split_local(self.engine, optimizer, self.infos)

    def restore(self, optimizers: Sequence[Optimizer]) -> None:
        """Add this rank's tensors to the state, beside what was loaded by name. Call `split` before that."""
        for optimizer in optimizers:
            for each in self._runs([optimizer]):
                read = {key: self.source.read(info.key) for key, info in self.infos.get(each.own, {}).items()}
                put_local(optimizer, each, read)

    def _runs(self, optimizers: Sequence[Optimizer]) -> Iterator[LocalRun]:
        """Yield the runs of these optimizers; none if there is no local state at all."""
        for optimizer in optimizers if self.infos else ():
            yield from local_runs(self.engine, optimizer)


def layout_misfits(runs: Sequence[LocalRun], saved: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
    """Yield why the names that are saved are not those of these runs, if they are not."""
    if not saved:
        return
    known = {name for run in runs for each in (run, *run.apart()) for name in each.parts()}
    strange = sorted(saved.keys() - known)
    halves = [each for each in runs if 0 < len(saved.keys() & set(each.parts())) < len(each.parts())]
    if strange or halves:
        kinds = sorted({key for name in (strange or saved) for key in saved[name]})
        yield (
            f"its state of the optimizer ({shorten(kinds)}) is laid out for the rows of "
            f"{counted(count_parts(saved), 'rank')}, and here each rank has others. Load it on as many ranks, with the "
            "same stage, shard_size, persist_below and groups, and the same parameters trained; or begin the optimizer "
            "anew: docs/checkpoints.md, section 'Optimizers of 8 bits', says how"
        )


def count_parts(names: Iterable[str]) -> int:
    """Return how many ranks shared a copy of the state that is saved under these names."""
    parts = [name.rpartition(".")[2] for name in names]
    return 1 + max((int(part) for part in parts if part.isdecimal()), default=0)


def split_local(engine: Engine, optimizer: Optimizer, saved: Collection[str]) -> None:
    """Step parameters one by one where their state was saved so. What state there is here is about to be replaced."""
    for each in list(local_runs(engine, optimizer)) if saved else ():
        if each.own not in saved and any(name in saved for name in each.own_apart()):
            optimizer.state.pop(each.run.parameter, None)
            each.run._split()


def put_local(optimizer: Optimizer, each: LocalRun, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add a run's tensors to its state, as they were saved, where its parameter is."""
    if tensors:
        device = each.run.parameter.device
        own = {key: value if key.endswith(CLASS) else value.to(device, copy=True) for key, value in tensors.items()}
        optimizer.state[each.run.parameter].update(rebuilt(own))
        put_away(optimizer, each.run.parameter)


def _name(run: Run, positions: Sequence[int], digest: str) -> str:
    lane = run.lane
    names = [lane.name_of(position) for position in positions]
    layout = (digest, lane.layout.shard_numel, lane.spread.size, names)
    return f"{names[0]}.{xxhash.xxh3_64_hexdigest(repr(layout).encode())}"

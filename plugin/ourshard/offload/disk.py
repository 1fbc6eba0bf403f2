"""What one engine keeps in a file: Note [The file] in file.py.

Masters with the optimizer's state pass by Note [Windows] in windows.py, parameters by Note [Parameters on a disk] in
parameters.py.

A read or write that fails leaves some lanes stepped and some not: the step ends in an error on all ranks, and what
rests on the disk can't be used any more, not for a save either. The last checkpoint is not touched.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer

from ourshard.offload.file import DiskFile
from ourshard.offload.parameters import ParameterWindows
from ourshard.offload.preflight import check_disk
from ourshard.offload.windows import Transit, Window
from ourshard.runtime.disk import DiskNeed, padded
from ourshard.runtime.engine import Engine
from ourshard.runtime.handle import GET_GRAD
from ourshard.runtime.lane import Lane
from ourshard.runtime.ledger import Kind
from ourshard.runtime.run import Run
from ourshard.runtime.states import Column, states_of

logger = logging.getLogger("ourshard")

# Masters of fp32 and seven more values of that size for each element: no optimizer of torch keeps more than four.
CAPACITY = 8
_SLACK = 64 * 2**20  # padding of lanes, beside a part of their size


class LaneFile:
    """Where the columns of one lane are in the file."""

    def __init__(self, disk: ShardDisk, lane: Lane) -> None:
        self.disk = disk
        self.lane = lane
        self.master = Column("", lane.store_dtype)
        self._tensors: dict[Column, torch.Tensor] = {self.master: lane.master}
        self.starts: dict[Column, int] = {self.master: disk.start_of(lane.master)}

    def rows(self, column: Column, run: Run) -> torch.Tensor:
        """Return a run's elements of a column, over the file; the lane's part of the file is taken if it has none."""
        if column not in self._tensors:
            tensor = self.disk.take(self.lane.layout.shard_numel, column.dtype)
            self._tensors[column] = tensor
            self.starts[column] = self.disk.start_of(tensor)
        return self._tensors[column][run.start : run.stop]

    def has(self, column: Column, run: Run, value: torch.Tensor) -> bool:
        """Say whether a state tensor is the part of the file that belongs to it."""
        return column in self._tensors and value.data_ptr() == self.rows(column, run).data_ptr()


class ShardDisk:
    """What `runtime.disk.Disk` asks for."""

    def __init__(self, engine: Engine, file: DiskFile) -> None:
        self.file = file
        self.nbytes = 0
        self._control = engine.control
        self._host = engine.host
        self._ledger = engine.ledger
        self._streams = engine.streams
        self._lost: str | None = None  # why what rests here can't be used
        self._starts: dict[int, int] = {}  # address of a tensor over the mapping -> place in the file
        self._lanes: dict[Lane, LaneFile] = {}
        self._windows = [Window() for _ in range(engine.config.offload.windows)]
        self.shards = ParameterWindows(file, engine.config.offload.windows, self.take_bytes, self.start_of)
        self._longest = 0  # elements of the longest lane that is stepped

    def take(self, numel: int, dtype: torch.dtype, *, stepped: bool = False) -> torch.Tensor:
        """Return a zeroed tensor on the CPU whose elements are in the file."""
        start = self.file.take(numel * dtype.itemsize)
        tensor = self.file.view(start, numel, dtype)
        self._starts[tensor.data_ptr()] = start
        self.nbytes += tensor.nbytes
        if stepped:
            self._longest = max(self._longest, numel)
        if self._ledger is not None:
            self._ledger.hold(Kind.DISK, tensor.nbytes)
        return tensor

    def start_of(self, tensor: torch.Tensor) -> int:
        return self._starts[tensor.data_ptr()]

    def take_buffer(self, column: Column) -> torch.Tensor:
        """Return host memory, bytes, for a column of any lane that is stepped; one unfrozen later leaves the disk."""
        return self.take_bytes(padded(self._longest * column.dtype.itemsize))

    def take_bytes(self, nbytes: int) -> torch.Tensor:
        """Return host memory that bytes pass through on their way to the device."""
        assert self._host is not None
        buffer = self._host.take(nbytes, torch.uint8)
        if self._ledger is not None:
            self._ledger.hold(Kind.HOST, buffer.nbytes)
        return buffer

    def check(self) -> None:
        """Raise RuntimeError where what rests here is lost."""
        if self._lost is None and not self.file.is_whole():
            self._lost = "The file of offload.nvme_path was cut by another process; go on from the last checkpoint."
        if self._lost is not None:
            raise RuntimeError(self._lost)

    def bring(
        self, optimizer: Optimizer, lanes: Sequence[Lane], *, together: bool = False
    ) -> Generator[tuple[Lane, torch.Tensor], None, None]:
        """Yield each lane that has a gradient, with its master, while it is in a window."""
        transits = [Transit(self._file_of(lane), optimizer) for lane in lanes if _has_gradient(optimizer, lane)]
        failure: str | None = None
        try:
            yield from self._pass(transits, together)
        except (OSError, RuntimeError) as problem:
            if not isinstance(problem, OSError) and self._lost is None:
                raise
            failure = str(problem)
        self._agree(failure)

    def _pass(self, transits: list[Transit], together: bool) -> Iterator[tuple[Lane, torch.Tensor]]:
        failure: Exception | None = None
        try:
            if not transits:
                self.check()
            for number, transit in enumerate(transits):
                master = self._enter(transits, number, failure, together)
                if master is None:
                    return
                try:
                    yield transit.lane, master
                finally:  # after a step that failed too: in memory, too, what it changed would stay changed
                    with self._streams.gather as stream:
                        self._windows[number % len(self._windows)].sent = stream.mark(None)
                    try:
                        transit.leave()
                    except OSError as problem:  # for the next lane, where all ranks may be told
                        failure = problem
            if failure is not None:
                raise failure
        finally:
            self._wait()

    def _enter(
        self, transits: list[Transit], number: int, failure: Exception | None, together: bool
    ) -> torch.Tensor | None:
        """Return the master of a lane, in its window, or None where `together` and another rank failed; raises."""
        master: torch.Tensor | None = None
        try:
            if failure is None:
                master = self._read(transits, number)
        except (OSError, RuntimeError) as problem:
            failure = problem
        stops = together and self._control.any_of([failure is not None], "a lane of a step from the disk")[0]
        if failure is not None:
            raise failure
        if stops:
            transits[number].leave()
            return None
        return master

    def _read(self, transits: list[Transit], number: int) -> torch.Tensor:
        if number == 0:
            self.check()
            self._begin(transits, 0)
        self._begin(transits, number + 1)
        return transits[number].enter()

    def _begin(self, transits: list[Transit], number: int) -> None:
        """Begin to read a lane, once the lane that was in its window has left it."""
        if number < len(transits):
            window = self._windows[number % len(self._windows)]
            window.wait()
            transits[number].begin(window)

    def _wait(self) -> None:
        """Return when no window is read or written; raise the first failure."""
        failures = []
        for window in self._windows:
            try:
                window.wait()
            except OSError as problem:
                failures.append(problem)
        if failures:
            raise failures[0]

    def _agree(self, failure: str | None) -> None:
        """Raise on all ranks what any rank met."""
        label = "the end of a step from the disk"
        failure = failure or self.shards.failure
        if not self._control.any_of([failure is not None], label)[0]:
            return
        rank, text = self._first(failure, label)
        self._lost = (
            f"offload.optimizer: nvme: rank {rank} could not read or write its masters and optimizer state ({text}). "
            "This step was taken in part, so that the run can't go on or be saved; go on from the last checkpoint."
        )
        raise RuntimeError(self._lost)

    def agree(self, label: str) -> None:
        """Raise RuntimeError on all ranks where reading or writing parameters failed on any. Collective."""
        if self._control.any_of([self.shards.failure is not None], label)[0]:
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what `agree` does, where the ranks know of it. Collective."""
        rank, text = self._first(self.shards.failure, "a disk that failed")
        self._lost = (
            f"offload.params: nvme: rank {rank} could not read or write its parameters ({text}). The run can't go on "
            "from here; go on from the last checkpoint."
        )
        raise RuntimeError(self._lost)

    def _first(self, failure: str | None, label: str) -> tuple[int, object]:
        """Return the first rank that has a failure, and its words. Collective."""
        told = self._control.gather_objects(failure, label)
        return next((rank, text) for rank, text in enumerate(told) if text)

    def put_away(self, optimizer: Optimizer, lane: Lane) -> None:
        """Move the state that an optimizer has of a lane to the file."""
        file = self._file_of(lane)
        for run in lane.runs:
            if run.optimizer() is not optimizer or run.stop == run.start:
                continue
            for column, value in states_of(optimizer, run):
                if not file.has(column, run, value):
                    optimizer.state[run.parameter][column.name] = file.rows(column, run).copy_(value)

    def _file_of(self, lane: Lane) -> LaneFile:
        if lane not in self._lanes:
            self._lanes[lane] = LaneFile(self, lane)
        return self._lanes[lane]


def _has_gradient(optimizer: Optimizer, lane: Lane) -> bool:
    return any(GET_GRAD(run.parameter) is not None for run in lane.runs if run.optimizer() is optimizer)


def open_disk(engine: Engine, need: DiskNeed) -> ShardDisk:
    """Check the folder, and open this rank's file in it. Collective; raises `ValueError` on all ranks."""
    folder = Path(str(engine.config.offload.nvme_path))
    check_disk(engine, folder, need)
    error, file = None, None
    try:
        file = DiskFile(folder, CAPACITY * (need.nbytes + need.nbytes // 4 + _SLACK))
        file.reserve(need.reserved)
    except OSError as problem:
        error = f"offload.nvme_path: no file could be made in {folder} ({problem})."
    engine.control.check(error, "opening the file of offload.nvme_path")
    assert file is not None
    if not file.is_direct and engine.mesh.world.rank == 0:
        logger.warning(
            "offload.nvme_path: the filesystem of %s has no O_DIRECT: reads and writes go through the page cache, "
            "which is slower and fills host memory. Use a folder on a local ext4 or xfs.",
            folder,
        )
    return ShardDisk(engine, file)

"""Put archives of torch.save into a file: storages in parallel, each checksummed from front to back as it passes."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from .io import Buffer
from .source import Source, TensorInfo
from .workspace import PositionedFile, Workspace
from .zip_layout import Slot, directory, directory_nbytes, lay_out, local_header


@dataclass(frozen=True, slots=True)
class Rows:
    """An entry that is rows of a tensor: those of `info` (its shape is theirs), from row `start` of the tensor on."""

    info: TensorInfo
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Count the bytes."""
        return self.info.nbytes


Content = Rows | bytes | memoryview


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """An archive to be written: what goes into which slot. Positions count from where it begins."""

    slots: tuple[Slot, ...]
    contents: tuple[Content, ...]
    end: int  # of the last entry: where the directory begins
    nbytes: int  # of all
    crcs: list[int] = field(compare=False)  # of the entries, as they become known


def plan_archive(entries: Sequence[tuple[str, Content]]) -> ArchivePlan:
    """Lay out an archive of these (name, content)."""
    slots = lay_out((name, _nbytes(content)) for name, content in entries)
    end = slots[-1].begin + slots[-1].nbytes
    contents = tuple(content for _, content in entries)
    return ArchivePlan(tuple(slots), contents, end, end + directory_nbytes(slots), [0] * len(slots))


def write_archives(
    workspace: Workspace, name: str, source: Source, count: int, plan: Callable[[int], ArchivePlan]
) -> array[int]:
    """Write `count` archives one behind the other into a file, unless it is finished.

    Return where each begins, and where the last one ends. Each is planned when it is due and then forgotten: a folder
    may have millions. `plan(number)` gives the same each time.
    """
    begins, held = array("q", [0]), 0
    for number in range(count):
        due = plan(number)
        begins.append(begins[-1] + due.nbytes)
        held += _tensor_nbytes(due)
    if workspace.finished(name):
        workspace.report(held)
        return begins
    with workspace.create_positioned(name, begins[-1]) as file:
        writer = _Writer(workspace, file, source)
        if count == 1:
            writer.write_alone(plan(0))
        else:
            workspace.map(lambda work: work(), list(writer.works(plan, begins)))
    return begins


class _Writer:
    """Fills the slots of archives in a file."""

    def __init__(self, workspace: Workspace, file: PositionedFile, source: Source) -> None:
        self._workspace = workspace
        self._file = file
        self._source = source

    def works(self, plan: Callable[[int], ArchivePlan], begins: Sequence[int]) -> Iterator[Callable[[], None]]:
        """Yield what can be done at the same time: small neighbours together, each large archive by itself."""
        limit, last = self._workspace.block_nbytes, len(begins) - 1
        first = 0
        while first < last:
            stop = first + 1
            while stop < last and begins[stop + 1] - begins[first] <= limit:
                stop += 1
            whole = self._write_small if begins[stop] - begins[first] <= limit else self._write_in_turn
            yield partial(whole, plan, range(first, stop), begins[first])
            first = stop

    def write_alone(self, plan: ArchivePlan) -> None:
        """Write the only archive of the file: its entries at the same time, the directory when all are there."""
        self._workspace.map(lambda work: work(), list(self._parts(plan, 0)))
        self._file.write_at(plan.end, [directory(plan.slots, plan.crcs)])

    def _write_in_turn(self, plan: Callable[[int], ArchivePlan], numbers: range, begin: int) -> None:
        """Write one large archive."""
        due = plan(numbers[0])
        for work in self._parts(due, begin):
            work()
        self._file.write_at(begin + due.end, [directory(due.slots, due.crcs)])

    def _parts(self, plan: ArchivePlan, begin: int) -> Iterator[Callable[[], None]]:
        limit = self._workspace.block_nbytes
        first = 0
        for number, slot in enumerate(plan.slots):
            if first < number and slot.begin + slot.nbytes - plan.slots[first].header > limit:
                yield partial(self._write_entries, plan, begin, range(first, number))
                first = number
        yield partial(self._write_entries, plan, begin, range(first, len(plan.slots)))

    def _write_small(self, plan: Callable[[int], ArchivePlan], numbers: range, begin: int) -> None:
        """Write whole archives at once."""
        plans = [plan(number) for number in numbers]
        nbytes = sum(map(_tensor_nbytes, plans))
        with self._workspace.buffer(nbytes) as buffer:
            pieces: list[Buffer] = []
            rest = buffer
            for due in plans:
                found, rest = self._fill(due, range(len(due.slots)), rest)
                pieces += [*found, directory(due.slots, due.crcs)]
            self._file.write_at(begin, pieces)
        self._workspace.report(nbytes)

    def _write_entries(self, plan: ArchivePlan, begin: int, numbers: range) -> None:
        """Write neighbouring entries of an archive; one alone may be of any length."""
        held = [content for number in numbers if isinstance(content := plan.contents[number], Rows)]
        nbytes = sum(rows.nbytes for rows in held)
        if len(numbers) == 1 and held and nbytes > self._workspace.block_nbytes:
            self._write_large(plan, begin, numbers[0], held[0])
            return
        with self._workspace.buffer(nbytes) as buffer:
            pieces, _ = self._fill(plan, numbers, buffer)
            self._file.write_at(begin + plan.slots[numbers[0]].header, pieces)
        self._workspace.report(nbytes)

    def _fill(self, plan: ArchivePlan, numbers: range, buffer: memoryview) -> tuple[list[Buffer], memoryview]:
        """Read entries into the buffer; return headers and contents in their order, and the rest of the buffer."""
        pieces: list[Buffer] = []
        for number in numbers:
            content = plan.contents[number]
            if isinstance(content, Rows):
                part, buffer = buffer[: content.nbytes], buffer[content.nbytes :]
                self._read(content, 0, part)
            else:
                part = memoryview(content)
            plan.crcs[number] = zlib.crc32(part)
            pieces += [local_header(plan.slots[number], plan.crcs[number]), part]
        return pieces, buffer

    def _write_large(self, plan: ArchivePlan, begin: int, number: int, content: Rows) -> None:
        """Write one entry in blocks of whole rows, and its header last."""
        info, slot, crc = content.info, plan.slots[number], 0
        block = max(1, self._workspace.block_nbytes // info.row_nbytes)
        for start in range(0, info.rows, block):
            nbytes = (min(info.rows, start + block) - start) * info.row_nbytes
            with self._workspace.buffer(nbytes) as buffer:
                self._read(content, start, buffer)
                crc = zlib.crc32(buffer, crc)
                self._file.write_at(begin + slot.begin + start * info.row_nbytes, [buffer])
            self._workspace.report(nbytes)
        plan.crcs[number] = crc
        self._file.write_at(begin + slot.header, [local_header(slot, crc)])

    def _read(self, content: Rows, start: int, target: memoryview) -> None:
        if target.nbytes:
            self._source.read_run_into(content.info.key, (content.start + start) * content.info.row_numel, target)


def _nbytes(content: Content) -> int:
    return content.nbytes if isinstance(content, Rows) else len(content)


def _tensor_nbytes(plan: ArchivePlan) -> int:
    return sum(content.nbytes for content in plan.contents if isinstance(content, Rows))

"""The frame of a zip archive of stored entries, laid out before their bytes are known.

Python's zipfile writes front to back. Here each place is known at once, so that several threads fill the entries, and
their checksums come into the headers afterwards. Entries begin at multiples of 64 bytes, for torch.load(mmap=True).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_LARGE = 0xFFFFFFFF  # stands for a number that is in the extra field; so many bytes are large
_MANY = 0xFFFF
_DATE = 0x21  # 1 January 1980: the time of a file's making is no part of it
_VERSION, _VERSION_64 = 20, 45
_TAG_64 = 1
_PADDING = b"FB"  # as torch tags the extra field that aligns an entry


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an entry lies: its local header is at `header`, its bytes are [begin, begin + nbytes)."""

    name: bytes
    header: int
    begin: int
    nbytes: int

    @property
    def is_large(self) -> bool:
        """Tell whether the length does not fit into 32 bits."""
        return self.nbytes >= _LARGE


def lay_out(entries: Iterable[tuple[str, int]]) -> list[Slot]:
    """Give each (name, length) its place, counted from where the archive begins."""
    slots, position = [], 0
    for name, nbytes in entries:
        encoded = name.encode("ascii")
        frame = _LOCAL.size + len(encoded) + (20 if nbytes >= _LARGE else 0) + 4
        begin = -(-(position + frame) // _ALIGNMENT) * _ALIGNMENT
        slots.append(Slot(encoded, position, begin, nbytes))
        position = begin + nbytes
    return slots


def local_header(slot: Slot, crc: int) -> bytes:
    """Return the bytes from `slot.header` to `slot.begin`."""
    extra = struct.pack("<2H2Q", _TAG_64, 16, slot.nbytes, slot.nbytes) if slot.is_large else b""
    padding = slot.begin - slot.header - _LOCAL.size - len(slot.name) - len(extra) - 4
    extra += _PADDING + struct.pack("<H", padding) + b"Z" * padding
    nbytes = min(slot.nbytes, _LARGE)
    version = _VERSION_64 if slot.is_large else _VERSION
    sizes = (crc, nbytes, nbytes, len(slot.name), len(extra))
    return _LOCAL.pack(b"PK\3\4", version, 0, 0, 0, _DATE, *sizes) + slot.name + extra


def directory(slots: Sequence[Slot], crcs: Sequence[int]) -> bytes:
    """Return what follows the last entry: the directory of all, and where it is."""
    begin = slots[-1].begin + slots[-1].nbytes
    records = b"".join(_record(slot, crc) for slot, crc in zip(slots, crcs, strict=True))
    count, nbytes = len(slots), len(records)
    if count >= _MANY or begin + nbytes >= _LARGE:
        end = (44, _VERSION_64, _VERSION_64, 0, 0, count, count, nbytes, begin)
        records += _END_64.pack(b"PK\6\6", *end) + _LOCATOR_64.pack(b"PK\6\7", 0, begin + nbytes, 1)
    counts = (min(count, _MANY),) * 2
    return records + _END.pack(b"PK\5\6", 0, 0, *counts, min(nbytes, _LARGE), min(begin, _LARGE), 0)


def directory_nbytes(slots: Sequence[Slot]) -> int:
    """Count the bytes of the directory without making it."""
    return len(directory(slots, [0] * len(slots)))


def _record(slot: Slot, crc: int) -> bytes:
    wide = [slot.nbytes] * 2 if slot.is_large else []
    wide += [slot.header] if slot.header >= _LARGE else []
    extra = struct.pack(f"<2H{len(wide)}Q", _TAG_64, 8 * len(wide), *wide) if wide else b""
    nbytes = min(slot.nbytes, _LARGE)
    version = _VERSION_64 if wide else _VERSION
    sizes = (crc, nbytes, nbytes, len(slot.name), len(extra), 0, 0, 0, 0, min(slot.header, _LARGE))
    return _CENTRAL.pack(b"PK\1\2", version, version, 0, 0, 0, _DATE, *sizes) + slot.name + extra

"""How messages put amounts and lists."""

from __future__ import annotations

from collections.abc import Iterable


def memory_text(nbytes: int) -> str:
    """Return bytes of memory, or of what was or will be in it: "1.5 GiB"."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:,.1f} {units[0]}" if units[0] != "bytes" else f"{nbytes} bytes"


def file_text(nbytes: float) -> str:
    """Return bytes of files, or a second, as disks count: "1.5 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def counted(number: int, word: str) -> str:
    """Return a number with its word: "1 rank", "2,000 ranks", "2 processes"."""
    ending = "" if number == 1 else "es" if word.endswith("s") else "s"
    return f"{number:,} {word}{ending}"


def shorten(names: Iterable[str], limit: int = 4) -> str:
    """Return the first few names: "a, b, c, d and 3 more"."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more

"""Amounts as people read them, in messages."""

from __future__ import annotations


def nbytes_text(nbytes: int) -> str:
    """Return bytes of memory with the unit that leaves few digits: `1.5 GiB`."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:,.1f} {units[0]}" if units[0] != "bytes" else f"{nbytes} bytes"

"""Readers and writers for the checkpoint formats of others, by name; each module is imported on first use.

`READERS` in the order of detection, as "module:class"; `WRITERS` maps the name for `--to` to "module:class".
"""

from __future__ import annotations

READERS: tuple[str, ...] = ()

WRITERS: dict[str, str] = {}

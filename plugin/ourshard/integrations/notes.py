"""What the flags of another engine say and has no meaning here: said once, by rank 0 or the launcher, on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

_said: set[str] = set()


def say_once(notes: Iterable[str]) -> None:
    """Print each note that this process has not printed yet, on rank 0."""
    for note in notes if os.environ.get("RANK", "0") == "0" else ():
        if note not in _said:
            _said.add(note)
            print(f"ourshard: {note}", file=sys.stderr, flush=True)

"""The engines of this process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ourshard.runtime.engine import Engine


class LiveEngines:
    """The live engines of this process in the order in which they were made.

    A set has another order on each rank, and collectives over several engines would not pair.
    """

    def __init__(self) -> None:
        self._by_order: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()

    def add(self, engine: Engine) -> None:
        self._by_order[engine.order] = engine

    def __iter__(self) -> Iterator[Engine]:
        return iter([engine for _, engine in sorted(self._by_order.items())])

    def __len__(self) -> int:
        return len(self._by_order)

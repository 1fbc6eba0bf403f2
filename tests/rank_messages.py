"""What `tests.rank_pool` and `tests.rank_worker` tell each other."""

from __future__ import annotations

from dataclasses import dataclass

FD_VARIABLE = "RANK_POOL_FD"
STACKS_VARIABLE = "RANK_POOL_STACKS"


@dataclass(frozen=True)
class RankFailure:
    """An exception on one rank; `when` is the machine's monotonic clock in seconds."""

    rank: int
    type_name: str
    message: str
    traceback: str
    when: float


@dataclass(frozen=True)
class RankState:
    """What a rank tells between tests: is it in the default group, and its numbers of collectives and groups."""

    joined: bool
    sequence: int
    groups: int

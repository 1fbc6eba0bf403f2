"""What a probe found: one line of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """How good what was found is."""

    FINE = "fine"
    NOTE = "note"  # training works, and something could be better
    PROBLEM = "problem"  # training fails, hangs or learns wrongly


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, on one rank or on all together; `fix` says what to do where it is not fine."""

    name: str
    text: str
    verdict: Verdict = Verdict.FINE
    fix: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # plain numbers and words, with the unit in the key
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.fix) == (self.verdict is not Verdict.FINE), self

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "text": self.text,
            "fix": self.fix,
            "ranks": list(self.ranks),
            "values": self.values,
        }


Probe = Callable[[], list[Finding]]


def run(name: str, probe: Probe) -> list[Finding]:
    """Run a probe; what it could not look at is a problem of the machine, and the others go on."""
    try:
        return probe()
    except (OSError, RuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return [Finding(name, text, Verdict.PROBLEM, "The error says what failed; training would meet it too.")]


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict of them."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.FINE)

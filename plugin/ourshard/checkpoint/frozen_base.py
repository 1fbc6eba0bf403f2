"""What a checkpoint by rows leaves out: weights that training does not change, such as the base under adapters.

Note [Frozen base]
------------------
A script brings the base of its adapters along each time it starts, and training does not change it. Checkpoints by rows
leave out what is frozen and as it was when the model was sharded (frozen.py): always, never, or (auto) where the model
had adapters of PEFT then. What was trained or written to since is saved, since the script would not bring it along.

The manifest has a checksum of each parameter that was left out. It does not depend on who holds which rows, so a load
on any number of ranks compares it with what the model has, and refuses another base.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from ourshard.runtime.engine import Engine
from ourshard.runtime.frozen import checksum, unchanged
from ourshard.runtime.wording import shorten

from .portions import Portion, portions_of
from .source import CheckpointError, Description

_known: WeakKeyDictionary[Engine, dict[str, int]] = WeakKeyDictionary()  # checksums of what is as it was


def left_out(engine: Engine) -> dict[str, int]:
    """Return the parameters that a save leaves out, each with its checksum. Collective."""
    names = list(engine.as_sharded)
    if not names:
        return {}
    same = unchanged(engine)
    changed = engine.control.any_of([name not in same for name in names], "save: which weights are as they were")
    left = {name for name, is_changed in zip(names, changed, strict=True) if not is_changed}
    known = _known.setdefault(engine, {})
    new = left - known.keys()
    if new:
        known.update(_checksums(engine, [each for each in portions_of(engine) if each.name in new]))
    return {name: known[name] for name in names if name in left}


def refuse_another(engine: Engine, description: Description, portions: Iterable[Portion]) -> None:
    """Raise CheckpointError on all ranks where what was left out is another here: Note [Frozen base]. Collective."""
    expected = {each.name: _there(description, each) for each in portions}
    found = _checksums(engine, [each for each in portions_of(engine) if expected.get(each.name) is not None])
    wrong = [name for name, checksum in found.items() if checksum != expected[name]]
    if wrong:
        raise CheckpointError(
            f"nothing was loaded: the checkpoint leaves out frozen weights, and here they are not those that it was "
            f"trained on: {shorten(wrong, 4)}. Start from the same base model, in the same dtype."
        )


def without_left_out(
    description: Description, portions: Iterable[Portion], names: Collection[str]
) -> tuple[list[Portion], list[Portion]]:
    """Return the portions without those that a checkpoint left out, and these; `names` are of what it has."""
    left: list[Portion] = []
    here: list[Portion] = []
    for each in portions:
        is_left = each.name not in names and _there(description, each) is not None
        (left if is_left else here).append(each)
    return here, left


def _there(description: Description, portion: Portion) -> int | None:
    names = (portion.name, *portion.aliases)
    return next((description.left_out[name] for name in names if name in description.left_out), None)


def _checksums(engine: Engine, portions: list[Portion]) -> dict[str, int]:
    """Return a checksum of each parameter, whose rows are on all ranks. Collective."""
    own = [checksum(each.values, each.start) if each.writes else 0 for each in portions]
    return dict(
        zip((each.name for each in portions), engine.control.add(own, "checksums of frozen weights"), strict=True)
    )

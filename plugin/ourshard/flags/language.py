"""A flag language as a table: each key of FSDP or DeepSpeed is mapped, has no meaning here, or is refused.

The tables (`fsdp.py`, `deepspeed_keys.py`, `parallelism.py`) are the one place where a key is described; the reader
below, the page docs/flags.md and the tests all come from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ourshard.flags.result import FlagResult, build, disagreement
from ourshard.values import nearest


class Verdict(str, Enum):
    """What becomes of a key."""

    MAPPED = "mapped"  # it sets something
    NO_MEANING = "no meaning here"  # the engine has nothing that it could change; said once, with the reason
    REFUSED = "refused"  # it asks for something that ourshard does not do


class Kind(str, Enum):
    """How the value of a key is normalised."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    NAMES = "names"  # a list, or text with commas
    ANY = "any"  # left as it is


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one flag says: values by dotted key of `ShardConfig` or `run.`, and a note where part of it is inactive."""

    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


Reader = Callable[[Any, Mapping[str, Any]], Outcome]  # (the value, all values of the language) -> what it says


@dataclass(frozen=True, slots=True)
class Flag:
    """One key of a flag language."""

    key: str  # dotted, in its shortest spelling
    verdict: Verdict
    reason: str  # one sentence: what becomes of it, or why not and what to do
    kind: Kind = Kind.BOOL
    target: str = ""  # the dotted key that it sets, for MAPPED
    read: Reader | None = None  # how a value becomes settings; None: the value itself goes to `target`
    asks_nothing: tuple[Any, ...] = (False,)  # values that are neither refused nor noted
    aliases: tuple[str, ...] = ()
    tree: bool = False  # the key stands for a whole block, whatever is inside

    def __post_init__(self) -> None:
        assert bool(self.target) == (self.verdict is Verdict.MAPPED), self.key
        assert self.reason.endswith("."), self.key

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.key, *self.aliases)


def mapped(key: str, target: str, reason: str, kind: Kind = Kind.BOOL, **more: Any) -> Flag:
    """Describe a key that sets `target`."""
    return Flag(key, Verdict.MAPPED, reason, kind, target=target, **more)


def idle(key: str, reason: str, kind: Kind = Kind.ANY, **more: Any) -> Flag:
    """Describe a key that has no meaning here."""
    return Flag(key, Verdict.NO_MEANING, reason, kind, **more)


def refused(key: str, reason: str, kind: Kind = Kind.BOOL, **more: Any) -> Flag:
    """Describe a key that is refused, unless its value asks for nothing."""
    return Flag(key, Verdict.REFUSED, reason, kind, **more)


@dataclass(frozen=True, slots=True)
class Word:
    """A value that was said: the flag, the key as it was written, and the normalised value."""

    flag: Flag
    spelling: str
    value: Any


@dataclass(frozen=True)
class Language:
    """A table of flags and the way to read values by it."""

    name: str
    flags: tuple[Flag, ...]
    prefix: str = ""  # a prefix that keys may carry

    @functools.cached_property
    def by_spelling(self) -> dict[str, Flag]:
        table = {spelling: flag for flag in self.flags for spelling in flag.spellings}
        assert len(table) == sum(len(flag.spellings) for flag in self.flags), f"{self.name}: a key stands twice"
        return table

    def find(self, key: str) -> Flag:
        """Return the flag of `key`, written with or without the prefix, or of the block around it.

        Raises:
            ValueError: the key is unknown; the nearest name is given.
        """
        bare = key.removeprefix(self.prefix)
        flag = self.by_spelling.get(key) or self.by_spelling.get(bare)
        parent = bare
        while flag is None and "." in parent:
            parent = parent.rpartition(".")[0]
            flag = self.by_spelling.get(parent)
            flag = flag if flag and flag.tree else None
        if flag is None:
            meant = self._misplaced(bare) or nearest(bare, self.by_spelling)
            raise ValueError(f"Unknown {self.name} key {key!r}.{meant}")
        return flag

    def _misplaced(self, key: str) -> str:
        """Return ` Did you mean 'x'?` for a key in the wrong block: the one key, or block, that ends as it does."""
        blocks = {spelling for spelling, flag in self.by_spelling.items() if flag.tree}
        names = key.split(".")
        for tail in (".".join(names[start:]) for start in range(len(names))):
            if tail.partition(".")[0] in blocks:
                return f" Did you mean {tail!r}?"
            ends = {self.by_spelling[name].key for name in self.by_spelling if f".{name}".endswith(f".{tail}")}
            if len(ends) == 1:
                return f" Did you mean {ends.pop()!r}?"
        return ""

    def is_section(self, key: str) -> bool:
        """Say whether `key` only holds other keys, as `zero_optimization` does."""
        return any(spelling.startswith(f"{key}.") for spelling in self.by_spelling)

    def is_empty(self, key: str, value: Any) -> bool:
        """Say whether `key` is a section without content.

        Raises:
            ValueError: a value stands where the section's keys belong.
        """
        section = key not in self.by_spelling and self.is_section(key)
        if section and value is not None:
            inner = ", ".join(name.removeprefix(f"{key}.") for name in self.by_spelling if name.startswith(f"{key}."))
            raise ValueError(f"{key}: expected keys and values, got {value!r}. Its keys: {inner}.")
        return section

    def words(self, flat: Mapping[str, Any], source: str) -> dict[str, Word]:
        """Return what `flat` says, by canonical key; `None` says nothing.

        Raises:
            ValueError: an unknown key, a value of a wrong type, or two spellings of one key that disagree.
        """
        words: dict[str, Word] = {}
        for spelling, given in flat.items():
            if self.is_empty(spelling, given):
                continue
            flag = self.find(spelling)
            if given is None:
                continue
            value = normalise(flag.kind, given, spelling)
            key = spelling.removeprefix(self.prefix) if flag.tree else flag.key
            earlier = words.get(key)
            if earlier and earlier.value != value:
                one, other = f"{source}: {earlier.spelling}", f"{source}: {spelling}"
                raise ValueError(disagreement(key, earlier.value, one, value, other))
            words[key] = Word(flag, spelling, value)
        return words

    def read(self, flat: Mapping[str, Any], source: str) -> FlagResult:
        """Turn `flat`, dotted keys of this language without `"auto"`, into settings with origins and notes.

        Raises:
            ValueError: an unknown key, a refused value (with the reason), or two keys that contradict each other.
        """
        try:
            return self._read(flat, source)
        except ValueError as error:
            raise ValueError(in_source(error, source)) from None

    def _read(self, flat: Mapping[str, Any], source: str) -> FlagResult:
        words = self.words(flat, source)
        values = {key: word.value for key, word in words.items()}
        said: dict[str, Any] = {}
        origins: dict[str, str] = {}
        notes: dict[str, list[str]] = {}
        for key, word in words.items():
            outcome = _outcome(key, word, values)
            if outcome.note:
                notes.setdefault(outcome.note, []).append(word.spelling)
            for target, value in outcome.values.items():
                origin = f"{source}: {word.spelling}={_short(word.value)}"
                if target in said and said[target] != value:
                    raise ValueError(disagreement(target, said[target], origins[target], value, origin))
                said[target] = value
                origins.setdefault(target, origin)
        lines = [f"{', '.join(keys)}: {note}" for note, keys in notes.items()]
        return build(said, origins, lines)  # the values together are checked by who joins the sources


def in_source(error: ValueError, source: str) -> str:
    """Return the message of `error`, with the source that it is about."""
    text = str(error)
    return text if source in text else f"{source}: {text}"


def _outcome(key: str, word: Word, values: Mapping[str, Any]) -> Outcome:
    flag = word.flag
    if flag.verdict is not Verdict.MAPPED and _asks_nothing(word, values):
        return Outcome()
    if flag.verdict is Verdict.NO_MEANING:
        return Outcome(note=f"no meaning here: {flag.reason}")
    if flag.verdict is Verdict.REFUSED:
        raise ValueError(f"{word.spelling}: {_short(word.value)} is refused: {flag.reason}")
    if flag.read is not None:
        return flag.read(word.value, values)
    inner = key.removeprefix(flag.key) if flag.tree else ""
    return Outcome({flag.target + inner: word.value})


def _asks_nothing(word: Word, values: Mapping[str, Any]) -> bool:
    """Say whether a value asks for nothing: it is listed so, or its block carries `enabled: false`."""
    flag = word.flag
    if any(word.value == value or str(word.value).lower() == str(value).lower() for value in flag.asks_nothing):
        return True
    switch = values.get(f"{flag.key}.enabled") if flag.tree else None
    return switch is not None and not normalise(Kind.BOOL, switch, f"{flag.key}.enabled")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


_TRUE = ("true", "yes", "y", "t", "on", "1")
_FALSE = ("false", "no", "n", "f", "off", "0")


def normalise(kind: Kind, value: Any, key: str) -> Any:
    """Bring `value` into one form: `"8"` is 8, `"5e8"` is 500000000, `"true"` is True, `"A,B"` is `["A", "B"]`.

    Raises:
        ValueError: `value` is not of this kind.
    """
    try:
        return _NORMALISERS[kind](value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key}: expected {kind.value}, got {value!r}.") from None


def _to_bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(text)
    return text in _TRUE


def _to_int(value: Any) -> int:
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError(value)
    return int(value) if isinstance(value, int) else int(float(value))


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def _to_text(value: Any) -> str:
    if isinstance(value, (Mapping, list, tuple)):
        raise ValueError(value)
    return str(getattr(value, "name", value)).strip()


def _to_names(value: Any) -> list[str]:
    items = value.split(",") if isinstance(value, str) else list(value)
    if not all(isinstance(item, str) for item in items):
        raise ValueError(value)
    return [item.strip() for item in items if item.strip()]


_NORMALISERS: Mapping[Kind, Callable[[Any], Any]] = {
    Kind.BOOL: _to_bool,
    Kind.INT: _to_int,
    Kind.FLOAT: _to_float,
    Kind.TEXT: _to_text,
    Kind.NAMES: _to_names,
    Kind.ANY: lambda value: value,
}

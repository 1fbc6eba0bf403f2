"""Values from YAML, environment and flags, to and from frozen dataclasses; wrong ones are named by their dotted key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn nested mappings into dotted keys; keys that are dotted already stay so.

    Raises:
        ValueError: a key is there in both forms, with different values.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = flatten(value) if isinstance(value, Mapping) else None
        items = {str(key): value} if inner is None else {f"{key}.{name}": item for name, item in inner.items()}
        for name, item in items.items():
            if name in flat and flat[name] != item:
                raise ValueError(f"{name}: it is there twice, as {flat[name]!r} and as {item!r}; leave one of them.")
            flat[name] = item
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn dotted keys back into nested dictionaries."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = value
    return nested


def to_plain(value: Any) -> Any:
    """Turn dataclasses, enums and tuples into dictionaries, their values and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


_MANY = 60  # names; more would hide what is wrong
# Keys of Accelerate's config file that are taken for ours
_ACCELERATES = ("mixed_precision", "num_processes", "num_machines", "machine_rank", "use_cpu", "distributed_type")


@dataclasses.dataclass(frozen=True, slots=True)
class Except:
    """A value that keys of the same kind take and this one does not: `Annotated[Kind, Except(Kind.VALUE, reason)]`."""

    value: Enum
    reason: str


def nearest(name: str, names: typing.Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest of `names`, or all, if they are few, when none is close."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    close = close or [longer for longer in known if len(name) > 3 and name.lower() in longer.lower()]
    if close:
        return f" Did you mean {close[0]!r}?"
    return (
        f" Known: {', '.join(known)}." if len(known) <= _MANY else f" None of the {len(known)} known names is like it."
    )


def unknown_key(key: str, known: typing.Iterable[str], prefix: str = "") -> str:
    """Return the error for a key that is not one of the ourshard config's; `prefix` is the dotted place of both."""
    known = list(known)
    above = next((name for name in known if key.startswith(f"{name}.")), "")
    if above:
        below = key.removeprefix(f"{above}.")
        return f"{prefix}{above}: expected a value, got the key {below!r} under it."
    if key in _ACCELERATES:
        hint = " It is Accelerate's: it stands beside ourshard_config, not in it."
    else:
        hint = nearest(key, known)
    return f"Unknown key {prefix + key!r} in the ourshard config.{hint}"


class UnknownKey(ValueError):
    """A key that its section of the config does not have."""

    def __init__(self, key: str, known: typing.Iterable[str], prefix: str) -> None:
        super().__init__(unknown_key(key, known, prefix))
        self.key, self.prefix = key, prefix

    def placed(self, keys: typing.Iterable[str]) -> ValueError:
        """Return the error to raise where `keys` are all of the config, dotted: it names the key's own section."""
        places = [key for key in keys if key.rpartition(".")[2] == self.key]
        if not places:
            return self
        meant = " or ".join(map(repr, places))
        return ValueError(f"Unknown key {self.prefix + self.key!r} in the ourshard config. Did you mean {meant}?")


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Tell whether `value` is a finite number, and no truth value; with `whole`, a whole one."""
    kind = numbers.Integral if whole else numbers.Real
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


def build(cls: type, values: Any, prefix: str) -> Any:
    """Build a dataclass from nested mappings; `prefix` is its dotted place, for errors (`ValueError`)."""
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        section, keys = prefix.rstrip(".") or "ourshard_config", ", ".join(hints_of(cls))
        raise ValueError(f"{section}: expected keys and values, got {values!r}. Its keys: {keys}.")
    hints = hints_of(cls)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise UnknownKey(str(unknown[0]), hints, prefix)
    return cls(**{key: convert(hints[key], value, prefix + key) for key, value in values.items()})


@functools.cache
def hints_of(cls: type) -> Mapping[str, Any]:
    """Return the annotated types of a dataclass, by field."""
    return typing.get_type_hints(cls, include_extras=True)


def settle(instance: Any, prefix: str) -> None:
    """Convert the fields of a frozen dataclass as `build` does: its constructor may have been called by hand."""
    cls: type = type(instance)
    for name, hint in hints_of(cls).items():
        object.__setattr__(instance, name, convert(hint, getattr(instance, name), prefix + name))


def convert(hint: Any, value: Any, key: str) -> Any:
    """Convert `value` to the annotated type, or raise `ValueError` with the key."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        first: ValueError | None = None  # of `int | str`, what text that is no number would say misleads
        for option in (o for o in options if o is not type(None)):
            try:
                return convert(option, value, key)
            except ValueError as error:
                first = first or error
        assert first is not None
        raise first
    if dataclasses.is_dataclass(hint):
        return build(hint, value, key + ".")  # type: ignore[arg-type]
    if typing.get_origin(hint) is tuple:
        value = () if value is None else value
        items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{key}: expected a list of names, got {value!r}.")
        return tuple(items)
    kind, *exceptions = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else [hint]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _convert_enum(kind, value, key, exceptions)
    return _convert_scalar(hint, value, key)


def _convert_enum(hint: type[Enum], value: Any, key: str, exceptions: list[Except]) -> Enum:
    text = value.value if isinstance(value, hint) else "none" if value is None else str(value).lower()
    reasons = {str(each.value.value): each.reason for each in exceptions}
    if text in reasons:
        raise ValueError(f"{key}: {reasons[text]}")
    if text not in (known := [str(member.value) for member in hint]):
        raise ValueError(f"{key}: {value!r} is not one of {', '.join(name for name in known if name not in reasons)}.")
    return hint(text)


def _convert_scalar(hint: Any, value: Any, key: str) -> Any:
    if hint is str:
        if isinstance(value, (bool, int, float, bytes, Mapping, list, tuple)):  # a dtype, and a path, are text too
            raise ValueError(f"{key}: expected text, got {value!r}.")
        return str(value)
    if isinstance(value, str):
        value = _parse_scalar(value)
    if hint is bool and isinstance(value, bool):
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int and number and value == int(value):
        return int(value)
    if hint is float and number:
        return float(value)
    wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(hint, str(hint))
    raise ValueError(f"{key}: expected {wanted}, got {value!r}.")


def _parse_scalar(text: str) -> Any:
    """Read a scalar given as text (environment variables and flags give all values so)."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for kind in (int, float):
        try:
            return kind(lowered)
        except ValueError:
            continue
    return text

"""Config files, YAML and JSON, in which each key stands once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

_UNNAMED = "<unicode string>"  # what YAML calls a text in its errors


def load(path: str | Path) -> dict[str, Any]:
    """Load the mapping that a YAML or JSON file holds.

    JSON is read as such: YAML takes a number that is written `1e-5` for text, and no tabs.

    Raises:
        ValueError: the file can't be read, holds something else, or gives a key twice, of which YAML and JSON take
            the last in silence.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = from_json(text) if _is_json(Path(path), text) else yaml.load(text, _Loader)
        _refuse_cycles(values)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split()).replace(f' in "{_UNNAMED}",', " at")
        raise ValueError(f"{path}: no config could be read: {why}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ValueError(f"{path}: expected keys and values, got {found}.")
    return values


def write_text(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a new file, and the folders above it; over a file that is there only where that is asked."""
    refuse_existing(path, overwrite=overwrite)
    if not text.lstrip().startswith("{"):
        refuse_json(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def refuse_json(path: Path) -> None:
    """Raise ValueError if YAML is to be written under a name by which all who read it take it for JSON."""
    if path.suffix == ".json":
        raise ValueError(f"{path}: what is written is YAML, with a comment on each line; give a name in .yaml.")


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise ValueError if `path` is there and not to be overwritten."""
    if path.exists() and not overwrite:
        raise ValueError(f"{path} is already there; give another name, or --overwrite.")


def _is_json(path: Path, text: str) -> bool:
    return path.suffix == ".json" or (path.suffix not in (".yaml", ".yml") and text.lstrip().startswith("{"))


def from_json(text: str) -> Any:
    """Read JSON; `ValueError` where it is none, or an object gives a key twice."""
    return json.loads(text, object_pairs_hook=_each_once)


def _refuse_cycles(value: Any, holders: tuple[int, ...] = ()) -> None:
    if not isinstance(value, (Mapping, list)):
        return
    if id(value) in holders:
        raise ValueError("a section holds itself, by an anchor (&) that is named (*) inside of it.")
    for item in value.values() if isinstance(value, Mapping) else value:
        _refuse_cycles(item, (*holders, id(value)))


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice((key, None) for key, _ in pairs)
    return dict(pairs)


def _refuse_twice(keys: Iterable[tuple[Any, int | None]]) -> None:
    """Refuse a key that comes twice, of keys with their lines, where these are known."""
    first: dict[Any, int | None] = {}
    for key, line in keys:
        if key in first:
            where = f" (lines {first[key]} and {line})" if line is not None else ""
            raise ValueError(f"{str(key)!r} is there twice{where}; leave one of them.")
        first[key] = line


class _Loader(yaml.SafeLoader):
    """Loads plain values, and no mapping that gives a key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Mapping[Any, Any]:  # type: ignore[override]
        if isinstance(node, yaml.MappingNode):
            names = (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
            _refuse_twice((key.value, key.start_mark.line + 1) for key in names)
        return super().construct_mapping(node, deep)

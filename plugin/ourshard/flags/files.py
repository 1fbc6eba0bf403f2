"""Config files, YAML and JSON, in which each key stands once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


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
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: no config could be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ValueError(f"{path}: expected keys and values, got {found}.")
    return values


def write_text(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a new file, and the folders above it; over a file that is there only where that is asked."""
    refuse_existing(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise ValueError if `path` is there and not to be overwritten."""
    if path.exists() and not overwrite:
        raise ValueError(f"{path} is already there; give another name, or --overwrite.")


def _is_json(path: Path, text: str) -> bool:
    return path.suffix == ".json" or (path.suffix not in (".yaml", ".yml") and text.lstrip().startswith("{"))


def from_json(text: str) -> Any:
    """Read JSON; `ValueError` where it is none, or an object gives a key twice."""
    return json.loads(text, object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice(key for key, _ in pairs)
    return dict(pairs)


def _refuse_twice(keys: Iterable[Any]) -> None:
    twice = [str(key) for key, times in Counter(keys).items() if times > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice; leave one of them.")


class _Loader(yaml.SafeLoader):
    """Loads plain values, and no mapping that gives a key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Mapping[Any, Any]:  # type: ignore[override]
        if isinstance(node, yaml.MappingNode):
            _refuse_twice(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        return super().construct_mapping(node, deep)

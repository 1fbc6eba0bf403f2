"""FSDP checkpoints of accelerate and the Trainer with sharded state, and other folders of torch's distributed
checkpoint.

accelerate writes `pytorch_model_fsdp_0/` and `optimizer_0/` into its folder, the Trainer into `checkpoint-N/`. Others
save all into one folder, or the optimizer flattened ("state.NAME.exp_avg"). What an item is follows from its path.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from ourshard.runtime.wording import counted, shorten
from ourshard.runtime.wrap import canonical

from ..numbered import Models, numbered
from ..source import ADAPTER_ALONE, CheckpointError
from .adapters import is_adapter_name, names_with_adapter, with_adapter_name
from .dcp import DcpFolder, KeyPath, is_dcp_folder
from .draft import Draft, ForeignSource
from .integer_keys import Order, given_order, name_integer_keys
from .names import canonical_keys, looks_like_buffer
from .runfiles import add_run_files
from .stored import Readable
from .ties import find_ties

MODEL_STEM, OPTIMIZER_STEM = "pytorch_model_fsdp", "optimizer"
MODEL_FOLDER = re.compile(rf"{MODEL_STEM}_(\d+)")
OPTIMIZER_FOLDER = re.compile(rf"{OPTIMIZER_STEM}_(\d+)")
_MODEL_WORDS = ("model", "module", "state_dict", "model_state_dict", "app.model")
_SCHEDULER_WORDS = ("scheduler", "lr_scheduler")


class DcpSource(ForeignSource):
    """A folder with DCP folders inside of it, or one DCP folder."""

    format: ClassVar[str] = "dcp"
    looks_for: ClassVar[str] = (
        "pytorch_model_fsdp_0/ or optimizer_0/ with .metadata (FSDP of accelerate), or .metadata with .distcp"
    )

    @classmethod
    def find(cls, path: Path) -> Path | None:
        """Return the outer folder if accelerate's names are found, else the DCP folder itself."""
        if is_dcp_folder(path):
            inner = MODEL_FOLDER.fullmatch(path.name) or OPTIMIZER_FOLDER.fullmatch(path.name)
            return path.parent if inner else path
        return path if path.is_dir() and _inner_folders(path) else None

    @classmethod
    def models_in(cls, found: Path) -> Models:
        """Return the numbers in the names of accelerate's folders: of models, or of optimizers that are alone."""
        for stem in (MODEL_STEM, OPTIMIZER_STEM) if not is_dcp_folder(found) else ():
            if models := {
                number: (f"{MODEL_STEM}_{number}", f"{OPTIMIZER_STEM}_{number}")
                for number, (name,) in numbered(found, rf"{stem}_(?P<n>\d+)").items()
                if is_dcp_folder(found / name)
            }:
                return models
        return {}

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None, model: int = 0) -> None:
        super().__init__(path, parameter_order)
        draft, parts = Draft(), Parts()
        models = self.models_in(path)
        folders = [path / name for name in models.get(model, ()) if is_dcp_folder(path / name)] or [path]
        draft.losses += _of_no_model(path, models)
        for folder in folders:
            opened = DcpFolder(folder)
            parts.add(opened)
            draft.world_size = max(draft.world_size or 0, _world_size(folder, opened, draft)) or None
        parts.into(draft, path, parameter_order, of_ddp=not models)
        if folders != [path]:
            add_run_files(draft, path, model, len(models))
        self.publish(draft)


def _inner_folders(path: Path) -> list[Path]:
    named = (p for p in path.iterdir() if MODEL_FOLDER.fullmatch(p.name) or OPTIMIZER_FOLDER.fullmatch(p.name))
    return sorted(p for p in named if is_dcp_folder(p))


def _of_no_model(path: Path, models: Models) -> list[str]:
    """Say which optimizers have no model here: a model has one, of its number."""
    others = numbered(path, rf"{OPTIMIZER_STEM}_(?P<n>\d+)").keys() - models.keys() if models else ()
    return [f"{OPTIMIZER_STEM}_{number}: an optimizer, there is no model of its number" for number in sorted(others)]


def _world_size(folder: Path, opened: DcpFolder, draft: Draft) -> int:
    """Return how many ranks wrote, by their files. A file that the metadata does not know is of an older save."""
    ranks = set(opened.ranks)
    for path in folder.glob("__*_*.distcp"):
        rank = path.name.removeprefix("__").split("_")[0]
        if path.stat().st_size == 0 and rank.isdecimal():
            ranks.add(int(rank))
        elif path.name not in opened.files:
            draft.oddities.append(
                f"{folder.name}/{path.name} is not part of the checkpoint; it may be left from an older one"
            )
    return max(ranks) + 1 if ranks else 0


@dataclass(slots=True)
class Parts:
    """The items of DCP folders, sorted by what they are."""

    model: dict[tuple[str | int, ...], dict[str, Readable]] = field(default_factory=dict)  # prefix -> name -> tensor
    state: dict[str | int, dict[str, Any]] = field(default_factory=dict)
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # flattened: parameter -> option -> value
    others: dict[KeyPath, Any] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)  # known since both names are the same bytes: alias -> owner
    scattered: set[str] = field(default_factory=set)  # names of tensors that are not in the model's order

    def add(self, folder: DcpFolder) -> None:
        """Sort the items of a folder."""
        for path, value in chain(folder.tensors(), folder.values()):
            if self._add_optimizer(path, value):
                continue
            if isinstance(value, Readable):
                prefix, name = _split_path(path)
                if self.model.setdefault(prefix, {}).setdefault(name, value) is not value:
                    raise CheckpointError(f"{folder.folder}: two tensors are called {name}")
            else:
                self.others[path] = value
        for (prefix, alias), (other, owner) in ((_split_path(a), _split_path(o)) for a, o in folder.aliases()):
            if prefix == other:
                self.ties[canonical(alias)] = canonical(owner)
        self.scattered.update(canonical(_split_path(path)[1]) for path in folder.scattered())

    def _add_optimizer(self, path: KeyPath, value: Any) -> bool:
        """Take the item if its path is one of an optimizer's."""
        for place, part in enumerate(path[:-2]):
            owner = path[place + 1]
            if part == "state":
                self.state.setdefault(owner, {})[".".join(map(str, path[place + 2 :]))] = value
                return True
            if part == "param_groups" and isinstance(owner, int):
                self.groups.setdefault(owner, {})[".".join(map(str, path[place + 2 :]))] = value
                return True
        if path[-1] == "param_groups" and isinstance(value, list) and all(isinstance(group, dict) for group in value):
            self.groups.update(enumerate(value))
            return True
        last, within = str(path[-1]), bool(path[:-1]) and path[-2] not in _MODEL_WORDS
        for word, target in (("state.", self.state), ("param_groups.", self.options)):
            if within and last.startswith(word) and last.count(".") > 1:
                name, key = last.removeprefix(word).rsplit(".", 1)
                target.setdefault(name, {})[key] = value  # type: ignore[attr-defined]
                return True
        return False

    def into(self, draft: Draft, where: Path, order: Sequence[str] | None = None, *, of_ddp: bool = True) -> None:
        """Put the parts into the draft under canonical names; `of_ddp`: DDP's mark may be in them."""
        groups = [self.groups[index] for index in sorted(self.groups)] or group_options(self.options)
        if any(isinstance(name, int) for group in groups for name in group.get("params", ())):
            # torch's flattening has made text of the numbers
            state = {int(name) if str(name).isdecimal() else name: values for name, values in self.state.items()}
            draft.model = self._model(draft, where, order or () if of_ddp else None)
            name_integer_keys(draft, {"state": state, "param_groups": groups}, self._orders(draft, order))
        else:
            draft.state = {canonical(str(name)): values for name, values in self.state.items()}
            draft.groups = [{**group, "params": _names(group)} for group in groups] or None
            draft.model = self._model(draft, where, order or draft.trained or () if of_ddp else None)
        add_adapter_names(draft)
        draft.ties = {**find_ties(draft.model, draft.trained), **self.ties}
        self._add_others(draft)

    def _model(self, draft: Draft, where: Path, known: Collection[str] | None) -> dict[str, Readable]:
        return canonical_keys(self._choose_model(draft), str(where), known)

    def _orders(self, draft: Draft, given: Sequence[str] | None) -> list[Order]:
        """Return the order of the parameters if it is known: given, or that of the tensors, if one rank listed all."""
        if given is not None:
            return [given_order(given)]
        mixed = [n for n in draft.model if n in self.scattered and not looks_like_buffer(n, draft.model[n].dtype)]
        return [] if mixed else [Order(tuple(draft.model), "the order of the model's tensors")]

    def _choose_model(self, draft: Draft) -> dict[str, Readable]:
        """Return the tensors under the prefix of the model; others have no place."""
        if not self.model:
            return {}
        ranked = sorted(self.model, key=lambda prefix: (_model_rank(prefix), -len(self.model[prefix])))
        for prefix in ranked[1:]:
            draft.losses.append(
                f"{counted(len(self.model[prefix]), 'tensor')} under {'.'.join(map(str, prefix)) or 'no name'!r}"
            )
        return self.model[ranked[0]]

    def _add_others(self, draft: Draft) -> None:
        for path, value in self.others.items():
            if path[0] in _SCHEDULER_WORDS:
                draft.scheduler = draft.scheduler or {}
                _put(draft.scheduler, path[1:], value)
            elif path[0] in _MODEL_WORDS:
                draft.losses.append(f"{'.'.join(map(str, path))}: state of a module that is no tensor")
            else:
                _put(draft.client_state, path, value)


def _split_path(path: KeyPath) -> tuple[KeyPath, str]:
    """Return where a model is and the name of a tensor in it: all that comes after a word for a model is the name."""
    words = [place for place, part in enumerate(path[:-1]) if part in _MODEL_WORDS]
    begin = words[-1] + 1 if words else len(path) - 1
    return path[:begin], ".".join(map(str, path[begin:]))


def _model_rank(prefix: KeyPath) -> int:
    words = [word for word in prefix if word in _MODEL_WORDS]
    return 0 if words and "ema" not in prefix else 1 if not prefix else 2


def _names(group: Mapping[str, Any]) -> list[str]:
    names = group.get("params", [])
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise CheckpointError("the parameters of an optimizer's group are no list of names")
    return [canonical(name) for name in names]


def _put(target: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Put a value at a path of nested dicts."""
    for part in path[:-1]:
        inner = target.setdefault(str(part), {})
        if not isinstance(inner, dict):
            raise CheckpointError(f"{'.'.join(map(str, path))}: lies within a value")
        target = inner
    if path:
        target[str(path[-1])] = value


def group_options(options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer whose options were flattened to one set a parameter: equal sets, one group."""
    groups: dict[str, dict[str, Any]] = {}
    for name, values in options.items():
        own = {key: values[key] for key in sorted(values) if key != "params"}
        groups.setdefault(repr(own), {**own, "params": []})["params"].append(name)
    return list(groups.values())


def add_adapter_names(draft: Draft) -> None:
    """Give adapter tensors their names within the PEFT model: those of the optimizer, else with `default` put in."""
    trained = draft.trained
    if trained is not None and (missing := [name for name in trained if name not in draft.model]):
        renames = names_with_adapter(draft.model, missing)
    elif trained is None and draft.model and all(is_adapter_name(name) for name in draft.model):
        renames = {name: with_adapter_name(name, None) for name in draft.model}
    else:
        return
    draft.model = {renames.get(name, name): reader for name, reader in draft.model.items()}
    if renames and all(name in renames.values() for name in draft.model):
        draft.oddities.append(ADAPTER_ALONE)
    left = [name for name in trained or () if name not in draft.model]
    if left and not draft.model:
        raise CheckpointError(f"the optimizer's parameters have no weights here: {shorten(left)}")

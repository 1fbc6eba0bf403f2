"""Views over a source: other names, fewer tensors, other dtypes. Nothing is read before it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from .foreign.adapters import adapter_only_names, is_adapter_name
from .source import BUFFER, PARAM, Description, Source, TensorInfo, TensorKey


class View(Source):
    """A source that shows another one's tensors under other keys. Closing it closes the other."""

    def __init__(self, base: Source, origins: Mapping[TensorKey, TensorKey], description: Description) -> None:
        super().__init__(base.path)
        self.base = base
        self.origins = dict(origins)
        self.description = description
        self.tensors = {key: replace(base.tensors[origin], key=key) for key, origin in origins.items()}

    @property
    def format(self) -> str:  # type: ignore[override]
        """Return the format of what is looked at."""
        return self.base.format

    @classmethod
    def find(cls, path: Any) -> None:
        """Find nothing: views are made, not opened."""
        return None

    def read(self, key: TensorKey, start_row: int = 0, stop_row: int | None = None) -> torch.Tensor:
        """Return these rows of the tensor behind the key."""
        return self.base.read(self.origins[key], start_row, stop_row)

    def read_run(self, key: TensorKey, start: int, stop: int) -> torch.Tensor:
        """Return these elements of the tensor behind the key."""
        return self.base.read_run(self.origins[key], start, stop)

    def read_run_into(self, key: TensorKey, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the tensor behind the key."""
        self.base.read_run_into(self.origins[key], start, target)

    def shards_of(self, key: TensorKey) -> int | None:
        """Return in how many pieces the tensor behind the key lies."""
        return self.base.shards_of(self.origins[key])

    def rank_state(self, rank: int) -> Mapping[str, Any]:
        """Return the other's."""
        return self.base.rank_state(rank)

    def verify_files(self) -> Iterator[tuple[str, str | None]]:
        """Check the other's."""
        return self.base.verify_files()

    def close(self) -> None:
        """Close the other."""
        self.base.close()


class Cast(View):
    """A view with other dtypes. A value that is read is rounded to nearest even, as `Tensor.to` does."""

    def __init__(self, base: Source, dtypes: Mapping[TensorKey, torch.dtype]) -> None:
        own = dict(base.description.own_dtypes)
        for key, dtype in dtypes.items():
            if key.kind == PARAM and own.get(key.name) == dtype:
                del own[key.name]
        super().__init__(base, {key: key for key in base.tensors}, replace(base.description, own_dtypes=own))
        self._dtypes = dict(dtypes)
        self.tensors = {
            key: TensorInfo(key, info.shape, self._dtypes.get(key, info.dtype)) for key, info in base.tensors.items()
        }

    def read(self, key: TensorKey, start_row: int = 0, stop_row: int | None = None) -> torch.Tensor:
        """Return these rows in the view's dtype."""
        return super().read(key, start_row, stop_row).to(self.tensors[key].dtype)

    def read_run(self, key: TensorKey, start: int, stop: int) -> torch.Tensor:
        """Return these elements in the view's dtype."""
        return super().read_run(key, start, stop).to(self.tensors[key].dtype)

    def read_run_into(self, key: TensorKey, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of these elements in the view's dtype."""
        same = self.base.tensors[key].dtype == self.tensors[key].dtype
        (View if same else Source).read_run_into(self, key, start, target)


def without_training(source: Source) -> View:
    """Return weights and buffers alone."""
    kept = {key: key for key in source.tensors if key.kind in (PARAM, BUFFER)}
    description = replace(
        source.description, param_groups=(), param_state={}, scheduler=None, scaler=None, client_state={}
    )
    return View(source, kept, description)


def has_local(source: Source) -> bool:
    """Tell whether there is state of an optimizer that only the layout of the save can read."""
    return any(key.is_local for key in source.tensors)


def without_optimizer(source: Source, why: str) -> View:
    """Return all but the optimizer's state and groups; `why` is noted as a loss."""
    kept = {key: key for key in source.tensors if not key.is_state and not key.is_local}
    losses = (*source.description.losses, f"the optimizer's state: {why}")
    return View(source, kept, replace(source.description, param_groups=(), param_state={}, losses=losses))


def only_adapters(source: Source) -> Source:
    """Return the adapter's parameters with their state: those with PEFT's names, else those that are not frozen."""
    names = {key.name for key in source.tensors if key.kind == PARAM}
    chosen = {name for name in names if adapter_only_names([name]) or is_adapter_name(name)}
    if not chosen and source.description.frozen:
        chosen = names - source.description.frozen
    if not chosen:
        raise ValueError(f"{source.path} has no adapter: no name is PEFT's, and it is not known what was frozen")
    return select(source, chosen.__contains__)


def by_patterns(include: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """Return the test for names: one of `include` (if any) fits and none of `exclude`; patterns are shell globs."""
    return lambda name: (
        (not include or any(fnmatchcase(name, pattern) for pattern in include))
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    )


def check_patterns(source: Source, patterns: Sequence[str]) -> None:
    """Raise ValueError for a pattern that fits no name: what it was to take or to leave out is called otherwise."""
    names = _names(source)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"the pattern {pattern!r} fits no name of {source.path}; it has to fit one whole, as {names[0]!r}"
            )


def _names(source: Source) -> list[str]:
    """Return all names of a checkpoint, of its tensors first."""
    described = source.description
    return [*dict.fromkeys([*(key.name for key in source.tensors), *described.ties, *described.extra_state])]


def select(source: Source, wanted: Callable[[str], bool]) -> View:
    """Return the tensors whose parameter or buffer is wanted. A wanted alias takes the place of an unwanted owner."""
    names = {name for key in source.tensors if wanted(name := key.name)}
    heirs: dict[str, str] = {}  # owner -> the alias that is the owner from now on
    ties = {}
    for alias, owner in source.description.ties.items():
        if wanted(alias) and owner not in names:
            heirs.setdefault(owner, alias)
        if wanted(alias):
            ties[alias] = owner
    ties = {alias: heirs.get(owner, owner) for alias, owner in ties.items() if heirs.get(owner) != alias}
    if not names and not heirs:
        raise ValueError(f"none of the tensors of {source.path} ({len(source.tensors)}) is left by these patterns")
    origins = {
        TensorKey(key.kind, heirs.get(key.name, key.name)): key
        for key in source.tensors
        if key.name in names or key.name in heirs
    }
    described = _rename_description(source.description, lambda name: heirs.get(name, name))
    kept = names | set(heirs.values())
    groups = [
        {**group, "params": [name for name in group["params"] if name in kept]} for group in described.param_groups
    ]
    return View(
        source,
        origins,
        replace(
            described,
            ties=ties,
            param_groups=tuple(groups),
            param_state={name: state for name, state in described.param_state.items() if name in kept},
            extra_state={name: state for name, state in described.extra_state.items() if wanted(name)},
            frozen=described.frozen & kept,
            own_dtypes={name: dtype for name, dtype in described.own_dtypes.items() if name in kept},
        ),
    )


def rename(source: Source, rules: Sequence[str]) -> View:
    """Return a view under other names. Each rule is "REGEX=REPLACEMENT", as re.sub takes them, applied in order."""
    parsed = [(rule, *_parse_rule(rule)) for rule in rules]
    idle = dict.fromkeys(rules)

    def renamed(name: str) -> str:
        for rule, pattern, replacement in parsed:
            name, times = pattern.subn(replacement, name)
            if times:
                idle.pop(rule, None)
        return name

    origins: dict[TensorKey, TensorKey] = {}
    for key in source.tensors:
        other = TensorKey(key.kind, renamed(key.name))
        if other in origins:
            raise ValueError(f"the rename rules give both {origins[other].name} and {key.name} the name {other.name}")
        origins[other] = key
    described = _rename_description(source.description, renamed)
    if idle:
        raise ValueError(f"the rename rule {next(iter(idle))!r} fits no name of {source.path}")
    return View(source, origins, described)


def _parse_rule(rule: str) -> tuple[re.Pattern[str], str]:
    pattern, separator, replacement = rule.partition("=")
    if not separator or not pattern:
        raise ValueError(f"the rename rule {rule!r} is not of the form REGEX=REPLACEMENT")
    try:
        return re.compile(pattern), replacement
    except re.error as error:
        raise ValueError(f"the rename rule {rule!r} is no regular expression: {error}") from error


def _rename_description(description: Description, name: Callable[[str], str]) -> Description:
    groups = [{**group, "params": [name(param) for param in group["params"]]} for group in description.param_groups]
    return replace(
        description,
        param_groups=tuple(groups),
        param_state={name(key): state for key, state in description.param_state.items()},
        extra_state={name(key): state for key, state in description.extra_state.items()},
        ties={name(alias): name(owner) for alias, owner in description.ties.items()},
        frozen=frozenset(map(name, description.frozen)),
        own_dtypes={name(key): dtype for key, dtype in description.own_dtypes.items()},
    )


def with_ties(source: Source, ties: Mapping[str, str]) -> View:
    """Return a view that knows these aliases; an alias that has a tensor of its own gives it up."""
    for alias, owner in ties.items():
        if TensorKey(PARAM, owner) not in source.tensors:
            raise ValueError(f"cannot tie {alias} to {owner}: there is no parameter of that name")
    kept = {key: key for key in source.tensors if key.name not in ties}
    return View(source, kept, replace(source.description, ties={**source.description.ties, **ties}))


def cast(source: Source, dtype: str | torch.dtype | None) -> Source:
    """Return the weights in another dtype: "own" is each parameter's in the model, None as stored.

    Only floating parameters change: buffers and the optimizer's state stay as they are.
    """
    if dtype is None:
        return source
    own = source.description.own_dtypes
    dtypes = {
        key: own.get(key.name, info.dtype) if dtype == "own" else parse_dtype(dtype)
        for key, info in source.tensors.items()
        if key.kind == PARAM and info.dtype.is_floating_point
    }
    return Cast(source, dtypes)


_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the floating dtype of a name such as "bfloat16" or "bf16"; raise ValueError for others."""
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, _SHORT_DTYPES.get(dtype, dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype {dtype!r} is not known: use float32, bfloat16, float16, float64 or own")
    return found

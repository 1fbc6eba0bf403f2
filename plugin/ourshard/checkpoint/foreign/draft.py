"""What a reader of a foreign format has found, and how it becomes the tensors and the description of a `Source`.

A reader fills a `Draft`; `ForeignSource.publish` checks that the parts fit each other, resolves tied names, and makes
the tables. So each rule (what is frozen, which step, what is a buffer, shapes of moments) is in one place for all
formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch

from ourshard.runtime.wording import counted, shorten

from ..source import BUFFER, PARAM, CheckpointError, Description, Source, TensorInfo, TensorKey
from .chunked import ChunkedTensor
from .names import looks_like_buffer
from .stored import Fillable, FlatTensor, Readable
from .ties import BLOCK, find_ties, is_copy, sampled_equal

_STEP_SAMPLES = 64  # opening a checkpoint does not read the step of every parameter
# State that every optimizer with such a key keeps in the shape of the parameter: another shape is one rank's slice.
_WHOLE_STATE = frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "sum"))


@dataclass(slots=True)
class Draft:
    """The parts of a checkpoint under canonical names. `None`: the format does not say."""

    model: dict[str, Readable] = field(default_factory=dict)  # parameters, buffers, and aliases with data of their own
    masters: dict[str, Readable] = field(default_factory=dict)  # what the optimizer updates, where it is not `model`
    state: dict[str, dict[str, Any]] = field(default_factory=dict)  # parameter -> state key -> Readable or plain value
    groups: list[dict[str, Any]] | None = None  # options by name; "params" lists parameter names
    own_dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of copies that the checkpoint does not hold
    buffers: frozenset[str] | None = None
    ties: dict[str, str] | None = None  # alias -> owner
    frozen: frozenset[str] | None = None
    step: int | None = None
    stage: int | None = None
    world_size: int | None = None
    scheduler: Any = None
    scaler: Any = None
    client_state: dict[str, Any] = field(default_factory=dict)
    adapter_config: Mapping[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    oddities: list[str] = field(default_factory=list)

    @property
    def trained(self) -> frozenset[str] | None:
        """Return the parameters that the optimizer knows; None if there is no optimizer."""
        if self.groups is None:
            return frozenset(self.state) or None
        return frozenset(name for group in self.groups for name in group.get("params", ()))


def _refusing_damage(opening: Callable[..., None]) -> Callable[..., None]:
    """Turn what odd content makes of a reader's assumptions (a list where a dict should be) into CheckpointError."""

    @wraps(opening)
    def guarded(self: ForeignSource, path: Path, *arguments: Any, **options: Any) -> None:
        try:
            opening(self, path, *arguments, **options)
        except CheckpointError:
            raise
        except (TypeError, AttributeError, LookupError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path}: has odd content: {type(error).__name__}: {error}") from error

    return guarded


class ForeignSource(Source):
    """A `Source` over readers of single tensors. Opening one raises nothing but CheckpointError and OSError."""

    takes_order = True

    def __init_subclass__(cls) -> None:
        """Guard the constructor of each reader."""
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = _refusing_damage(vars(cls)["__init__"])  # type: ignore[method-assign]

    def __init__(self, path: Path, parameter_order: Sequence[str] | None = None) -> None:
        """Open the checkpoint. `parameter_order`: names of the model's parameters, for optimizers that number them."""
        super().__init__(path)
        self.parameter_order = parameter_order
        self._readers: dict[TensorKey, Readable] = {}
        self._aliases: dict[str, Readable] = {}
        self._copies: dict[str, Readable] = {}  # the model's own, where masters are read

    def read(self, key: TensorKey, start_row: int = 0, stop_row: int | None = None) -> torch.Tensor:
        """Return rows of a tensor; see `Source.read`."""
        start, stop = self.tensors[key].rows_within(start_row, stop_row)
        try:
            return self._readers[key].read(start, stop)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{key}: cannot be read: {error}") from error

    def read_run(self, key: TensorKey, start: int, stop: int) -> torch.Tensor:
        """Return elements of the flattened tensor; see `Source.read_run`."""
        reader = self._readers.get(key)
        if isinstance(reader, FlatTensor) and 0 <= start <= stop <= self.tensors[key].numel:
            return reader.read_flat(start, stop)
        return super().read_run(key, start, stop)

    def read_run_into(self, key: TensorKey, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of the elements from `start` on; see `Source.read_run_into`."""
        reader = self._readers[key]
        try:
            if isinstance(reader, Fillable) and reader.fill(start, target):
                return
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{key}: cannot be read: {error}") from error
        super().read_run_into(key, start, target)

    def shards_of(self, key: TensorKey) -> int | None:
        """Return in how many pieces the tensor lies."""
        reader = self._readers[key]
        return reader.pieces if isinstance(reader, (FlatTensor, ChunkedTensor)) else 1

    def verify_files(self) -> Iterator[tuple[str, str | None]]:
        """Check each tensor with the checksums of its file, and what is there twice: aliases, and copies of masters."""
        for key in self.tensors:
            yield str(key), _problem(partial(self._is_readable, key), "")
        for alias, reader in self._aliases.items():
            owner = self.description.ties[alias]
            of_owner = self.weight_key(owner)
            assert of_owner is not None  # publish
            whole = self._copies.get(owner, self._readers[of_owner])
            yield alias, _problem(partial(is_copy, reader, whole), f"is tied to {owner} and has other values")
        for name, copy in self._copies.items():
            master = self._readers[TensorKey(PARAM, name)]
            yield (
                f"{name} (copy)",
                _problem(partial(is_copy, copy, master), "differs from its master, cast to its dtype"),
            )

    def _is_readable(self, key: TensorKey) -> bool:
        return all(True for _ in self.read_blocks(key, BLOCK))

    def publish(self, draft: Draft) -> None:
        """Make the tables out of a draft. Raises CheckpointError where its parts contradict each other."""
        ties = _resolve_ties(draft)
        trained = draft.trained
        self._aliases = {alias: draft.model.pop(alias) for alias in ties if alias in draft.model}
        _note_unequal_aliases(draft, ties, self._aliases)
        self._copies = {name: draft.model[name] for name in draft.masters if name in draft.model}
        readers, own_dtypes = _model_tensors(draft, trained, self.parameter_order or ())
        if not readers and draft.state:
            draft.oddities.append("an optimizer alone: no weights are in this checkpoint")
        state, plain = _state_tensors(draft, readers)
        self._readers = {**readers, **state}
        self.tensors = {key: TensorInfo(key, reader.shape, reader.dtype) for key, reader in self._readers.items()}
        params = [key.name for key in readers if key.kind == PARAM]
        held = {key.name for key in readers}
        if draft.frozen is not None:
            frozen = draft.frozen & frozenset(params)
        else:
            frozen = frozenset(name for name in params if name not in trained) if trained else frozenset()
        self.description = Description(
            world_size=draft.world_size,
            stage=draft.stage,
            step=_step_of(self, draft, plain),
            param_groups=tuple(draft.groups or ()),
            param_state=plain,
            ties={alias: owner for alias, owner in ties.items() if owner in held},
            frozen=frozen,
            own_dtypes=own_dtypes,
            scheduler=draft.scheduler,
            scaler=draft.scaler,
            client_state=draft.client_state,
            adapter_config=draft.adapter_config,
            versions=draft.versions,
            files=draft.files,
            losses=tuple(draft.losses),
            beside=tuple(draft.beside),
            oddities=tuple(draft.oddities),
        )


def _problem(check: Callable[[], bool], words: str) -> str | None:
    """Return what is wrong: `words` if the check fails, the error if the files are damaged."""
    try:
        return None if check() else words
    except CheckpointError as error:
        return str(error)


def _resolve_ties(draft: Draft) -> dict[str, str]:
    """Return alias -> owner with chains followed, and only where the owner has data."""
    ties = dict(draft.ties) if draft.ties is not None else find_ties(draft.model, draft.trained)
    resolved = {}
    for alias in ties:
        owner, steps = ties[alias], 0
        while owner in ties and steps <= len(ties):
            owner, steps = ties[owner], steps + 1
        if owner in ties or owner == alias:
            raise CheckpointError(f"the tied names {shorten(sorted(ties))} form a ring")
        if owner in draft.model or owner in draft.masters:
            resolved[alias] = owner
        elif alias in draft.model:
            draft.oddities.append(
                f"{alias} is tied to {owner}, which is not in this checkpoint; kept under its own name"
            )
    return resolved


def _note_unequal_aliases(draft: Draft, ties: Mapping[str, str], aliases: Mapping[str, Readable]) -> None:
    for alias, reader in aliases.items():
        owner = draft.model.get(ties[alias])
        if owner is not None and not sampled_equal(reader, owner):
            draft.oddities.append(
                f"{alias} is tied to {ties[alias]} but was written with other values; the owner's are taken"
            )


def _model_tensors(
    draft: Draft, trained: frozenset[str] | None, given: Collection[str]
) -> tuple[dict[TensorKey, Readable], dict[str, torch.dtype]]:
    """Return the readers of parameters and buffers in model order, and the dtype of copies that masters replace.

    given: names that are known to be of parameters.
    """
    known = (trained or frozenset()) | frozenset(given)
    readers: dict[TensorKey, Readable] = {}
    own_dtypes = {
        name: dtype
        for name, dtype in draft.own_dtypes.items()
        if name in draft.model and draft.model[name].dtype != dtype
    }
    for name, reader in draft.model.items():
        master = draft.masters.get(name)
        if master is not None and master.shape != reader.shape:
            raise CheckpointError(
                f"{name} has shape {reader.shape} in the model and {master.shape} in the optimizer's files"
            )
        if master is not None and master.dtype != reader.dtype:
            own_dtypes[name] = reader.dtype
        if draft.buffers is not None:
            buffer = name in draft.buffers
        else:
            buffer = name not in known and looks_like_buffer(name, reader.dtype)
        readers[TensorKey(BUFFER if buffer else PARAM, name)] = master or reader
    for name, master in draft.masters.items():
        if name not in draft.model:
            readers[TensorKey(PARAM, name)] = master
    return readers, own_dtypes


def _state_tensors(
    draft: Draft, readers: Mapping[TensorKey, Readable]
) -> tuple[dict[TensorKey, Readable], dict[str, dict[str, Any]]]:
    """Return the readers of optimizer state, and what of it is no tensor. State of odd shape is dropped, and said."""
    state: dict[TensorKey, Readable] = {}
    plain: dict[str, dict[str, Any]] = {}
    odd: Counter[str] = Counter()
    for name in (draft.trained or frozenset()) | draft.state.keys():
        if readers and TensorKey(PARAM, name) not in readers:
            raise CheckpointError(f"the optimizer has a parameter {name!r} that is not in the model")
    for name, values in draft.state.items():
        shape = readers[TensorKey(PARAM, name)].shape if readers else None
        for kind, value in values.items():
            if not isinstance(value, Readable):
                plain.setdefault(name, {})[kind] = value
            elif value.shape in ((), shape) or shape is None:
                state[TensorKey(kind, name)] = value
            elif kind in _WHOLE_STATE:
                raise CheckpointError(f"{name} has shape {shape}, its {kind} {value.shape}; one of them is not whole")
            else:
                odd[kind] += 1
    draft.losses += [
        f"{counted(count, 'tensor')} of optimizer state {kind!r}: neither of the parameter's shape nor a single number"
        for kind, count in odd.items()
    ]
    return state, plain


def _step_of(source: ForeignSource, draft: Draft, plain: Mapping[str, Mapping[str, Any]]) -> int | None:
    """Return the step that (a sample of) the optimizer's state agrees on, else what the format says elsewhere."""
    keys = source.keys_of("step")
    values = [source.read(key).item() for key in keys[:: len(keys) // _STEP_SAMPLES + 1]]
    values += [state["step"] for state in plain.values() if isinstance(state.get("step"), (int, float))]
    if any(not 0 <= value < 1 << 53 for value in values):
        raise CheckpointError(f"{source.path}: the optimizer's step is {min(values)} to {max(values)}")
    steps = Counter(int(value) for value in values)
    if len(steps) > 1:
        draft.oddities.append(f"parameters have taken different numbers of steps: {sorted(steps)}")
    if steps and draft.step is None:
        return steps.most_common(1)[0][0]
    if steps and draft.step not in steps:
        draft.oddities.append(
            f"the checkpoint is of step {draft.step}, its optimizer took {steps.most_common(1)[0][0]}"
        )
    return draft.step

"""What a source of settings says: a `ShardConfig`, where each value came from, and what belongs to others.

Only what was said is kept in `FlagResult.said`; defaults are not, so that two sources disagree only where both speak.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ourshard.config import ShardConfig, config_keys, plain_value
from ourshard.values import flatten, unflatten

RUN = "run."  # prefix of the dotted keys that end in `RunSettings`


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What the flags of FSDP and DeepSpeed say about a run, and ourshard leaves to Accelerate or the Trainer."""

    mixed_precision: str | None = None  # "no", "fp16" or "bf16", for Accelerate
    gradient_clipping: float | None = None  # largest norm; the Trainer's max_grad_norm
    gradient_accumulation_steps: int | None = None
    train_batch_size: int | None = None  # samples of one optimizer step over all ranks
    micro_batch_size: int | None = None  # samples of one forward on one rank
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # {"type": ..., "params": {...}}
    scheduler: Mapping[str, Any] = field(default_factory=dict)  # {"type": ..., "params": {...}}
    grad_scaler: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of torch's GradScaler

    def __post_init__(self) -> None:
        least = {"gradient_clipping": 0, "gradient_accumulation_steps": 1, "train_batch_size": 1, "micro_batch_size": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name}: {value!r} is too small; it must be {bound} or more.")

    @property
    def said(self) -> dict[str, Any]:
        """Return the settings that were said, by field name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, {})}


@dataclass(frozen=True)
class FlagResult:
    """The settings of one source, or of several that agree."""

    said: Mapping[str, Any] = field(default_factory=dict)  # dotted key -> plain value; `run.` keys too
    origins: Mapping[str, str] = field(default_factory=dict)  # dotted key -> where it came from, for each key of `said`
    notes: tuple[str, ...] = ()  # what has no meaning here, and why
    run: RunSettings = field(default_factory=RunSettings)

    @functools.cached_property
    def config(self) -> ShardConfig:
        """The config that was said, with defaults for the rest.

        It is built when asked for: one source alone may lack what another one adds (a path for `nvme`).

        Raises:
            ValueError: a value that can't be, or values that contradict each other, with the origin of each.
        """
        own = {key: value for key, value in self.said.items() if not key.startswith(RUN)}
        try:
            return ShardConfig.from_dict(unflatten(own))
        except ValueError as error:
            names = [key for key in own if key in str(error)]
            origins = "; ".join(f"{key} from {self.origins[key]}" for key in names)
            raise ValueError(f"{error} ({origins})" if origins else str(error)) from error

    def origin(self, key: str) -> str:
        """Say where the value of the dotted `key` comes from."""
        return self.origins.get(key, "default")


def build(said: Mapping[str, Any], origins: Mapping[str, str], notes: Iterable[str] = ()) -> FlagResult:
    """Build the result of `said`, a mapping of dotted keys; each value is checked on its own.

    Raises:
        ValueError: a key is unknown, or a value has a wrong type.
    """
    plain = {key: value if key.startswith(RUN) else plain_value(key, value) for key, value in said.items()}
    run = RunSettings(**unflatten({key[len(RUN) :]: value for key, value in plain.items() if key.startswith(RUN)}))
    return FlagResult(plain, {key: origins[key] for key in plain}, tuple(dict.fromkeys(notes)), run)


def from_values(values: Mapping[str, Any], source: str) -> FlagResult:
    """Read nested or dotted values of the native form; `source` names them in messages and origins.

    Raises:
        ValueError: an unknown key (the nearest name is given) or a value of a wrong type.
    """
    try:
        flat = {key: value for key, value in flatten(values).items() if not _is_empty_section(key, value)}
        return build(flat, dict.fromkeys(flat, source))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _is_empty_section(key: str, value: Any) -> bool:
    """Say whether `key` is a section that YAML left without content (`offload:`)."""
    return value is None and any(name.startswith(key + ".") for name in config_keys())


def merge(results: Iterable[FlagResult], *, complete: bool = True) -> FlagResult:
    """Join the results of several sources into one; `complete` says that no more will be added, and checks the config.

    Raises:
        ValueError: two sources give one key different values (the message names both), or the values can't go together.
    """
    said: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notes: list[str] = []
    for result in results:
        notes += result.notes
        for key, value in result.said.items():
            if key in said and said[key] != value:
                raise ValueError(disagreement(key, said[key], origins[key], value, result.origins[key]))
            said[key] = value
            origins.setdefault(key, result.origins[key])
    joined = build(said, origins, notes)
    if complete:
        joined.config  # noqa: B018 (checks the values together)
    return joined


def disagreement(key: str, one: Any, one_origin: str, other: Any, other_origin: str) -> str:
    """Return the message for two sources that give `key` different values."""
    return (
        f"{key.removeprefix(RUN)}: {one_origin} gives {one!r}, but {other_origin} gives {other!r}. "
        "Neither overrides the other: remove one of the two."
    )

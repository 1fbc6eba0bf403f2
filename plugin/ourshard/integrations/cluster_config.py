"""`distributed_type: OURSHARD` and `ourshard_config:` in the config files of `accelerate launch`.

Note [The section]
`ClusterConfig`, the dataclass that accelerate reads a config file into, is replaced by a subclass with one more field.
Its `process_config` turns the type into MULTI_GPU, which is accelerate's word for "start the processes with torchrun";
what the workers are is decided there, by the environment (`launcher.py`). `to_dict` gives the file's own words back,
so that `accelerate env` and `accelerate config update` show and write what was read.

The section is kept as a `UserDict`, not as a dict: the launcher copies each entry of a dict section over its own
arguments of that name (`debug`, `module`, ...), and takes anything else whole, as `args.ourshard_config`.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ourshard.flags import sources
from ourshard.flags.deepspeed import blocks_of
from ourshard.flags.files import load
from ourshard.flags.result import RUN, FlagResult, disagreement, merge
from ourshard.integrations.switch import SWITCH, ConfigError, flag, mentions_ourshard
from ourshard.values import is_number

NAME = "OURSHARD"
_file: ContextVar[str] = ContextVar("file", default="")  # the config file that is being read
# What a file may say beside the switch; the rest names an engine that ourshard does not stand on.
SHARDABLE = (
    NAME,
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_XPU",
    "MULTI_NPU",
    "MULTI_HPU",
    "MULTI_MLU",
    "FSDP",
    "DEEPSPEED",
)


class Section(UserDict[str, Any]):
    """The `ourshard_config` of a file that asks for ourshard, as written, and all it says about sharding."""

    def __init__(
        self,
        written: Mapping[str, Any] | None,
        yaml_type: str,
        result: FlagResult,
        blocks: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(written or {})
        self.blocks = blocks or {}  # DeepSpeed's of optimizer and scheduler
        self.written = written
        self.yaml_type = yaml_type
        self.result = result


def with_section(cluster_config: type) -> type:
    """Return a subclass of accelerate's `ClusterConfig` that reads and writes the section."""

    class ClusterConfig(cluster_config):  # type: ignore[misc,valid-type]
        ourshard_config: Any = None

        @staticmethod
        def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
            return cluster_config.process_config(_resolve(config_dict))  # type: ignore[attr-defined,no-any-return]

        def to_dict(self) -> dict[str, Any]:
            result: dict[str, Any] = super().to_dict()
            section = result.pop("ourshard_config", None)
            if isinstance(section, Section):
                result["distributed_type"] = section.yaml_type
                if section.written is not None:
                    result["ourshard_config"] = dict(section.written)
            return result

        @classmethod
        def from_yaml_file(cls, yaml_file: str | None = None) -> Any:
            with _reading(yaml_file):
                return super().from_yaml_file(yaml_file)  # type: ignore[misc]

        @classmethod
        def from_json_file(cls, json_file: str | None = None) -> Any:
            with _reading(json_file):
                return super().from_json_file(json_file)  # type: ignore[misc]

    ClusterConfig.__module__, ClusterConfig.__qualname__ = cluster_config.__module__, cluster_config.__qualname__
    return dataclasses.dataclass(ClusterConfig)


@contextmanager
def _reading(path: str | None) -> Iterator[None]:
    """Let `_resolve`, which is given values alone, name the file that they come from."""
    token = _file.set(str(path or ""))
    try:
        yield
    finally:
        _file.reset(token)


def check_file(path: str) -> None:
    """Read a file that asks for ourshard as it is to be read: accelerate's reader ends in tracebacks, or says nothing.

    Raises:
        ConfigError: it holds no keys and values, or gives one twice; one line.
    """
    if Path(path).is_file() and mentions_ourshard(path):
        try:
            load(path)
        except ValueError as error:
            raise ConfigError(" ".join(str(error).split())) from error


_COUNTS = ("num_processes", "num_machines", "machine_rank", "main_process_port")


def _check_counts(values: Mapping[str, Any]) -> None:
    for key in _COUNTS:
        value = values.get(key)
        if value is not None and not is_number(value, whole=True):
            raise ConfigError(f"{_where()}{key}: expected a whole number, got {value!r}.")


def _where() -> str:
    return f"{_file.get()}: " if _file.get() else ""


def _resolve(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config file in accelerate's words, with a `Section` if they ask for ourshard."""
    yaml_type = str(getattr(values.get("distributed_type"), "value", values.get("distributed_type", NAME)))
    if yaml_type != NAME and "ourshard_config" not in values and not flag(SWITCH):
        if get_close_matches(yaml_type.upper(), [NAME], cutoff=0.75):
            raise ConfigError(f"{_where()}distributed_type: {yaml_type} is not known. Did you mean {NAME}?")
        return values
    if yaml_type not in SHARDABLE:
        raise ConfigError(f"{_where()}distributed_type: {yaml_type} cannot be sharded by ourshard; use {NAME}.")
    _check_counts(values)
    written = values.get("ourshard_config")
    section = Section(written, yaml_type, read_sections(values), blocks_of(values.get("deepspeed_config") or {}))
    resolved = {**values, "distributed_type": "MULTI_GPU", "ourshard_config": section}
    if section.result.run.mixed_precision:
        resolved["mixed_precision"] = _mixed_precision(values.get("mixed_precision"), section.result)
    return resolved


def _mixed_precision(own: Any, result: FlagResult) -> str:
    """Return what the `bf16` or `fp16` block of DeepSpeed says, beside the file's own `mixed_precision`."""
    said = str(result.run.mixed_precision)
    if own not in (None, False, "", "no", said):  # YAML reads a bare `no` as false
        origin = result.origins[f"{RUN}mixed_precision"]
        raise ConfigError(disagreement("mixed_precision", own, _file.get() or "the config file", said, origin))
    return said


def read_sections(values: Mapping[str, Any]) -> FlagResult:
    """Read everything that a config file says about sharding, in our words and in those of FSDP and DeepSpeed.

    Raises:
        ConfigError: an unknown key, a value that cannot be, a key that the file gives twice, or two sections that
            disagree; one line.
    """
    try:
        if _file.get():
            load(_file.get())  # accelerate's reader has kept the last of two
        return merge([sources.read_sections(values, _file.get())])
    except ValueError as error:
        raise ConfigError(" ".join(str(error).split())) from error

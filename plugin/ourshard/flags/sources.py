"""All ways to say a setting, read into one form: YAML and JSON files, the environment, arguments, short text.

There is no precedence among sources: `resolve` joins them, and two that give one key different values are an error that
names both. Only what nobody said is a default.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ourshard.config import ShardConfig, config_keys
from ourshard.flags.deepspeed import DEEPSPEED, from_deepspeed
from ourshard.flags.files import from_json, load
from ourshard.flags.fsdp import FSDP, from_fsdp
from ourshard.flags.result import RUN, FlagResult, from_values, merge
from ourshard.values import flatten, nearest, unflatten

PREFIX = "OURSHARD_"
CONFIG_VARIABLE = "OURSHARD_CONFIG"  # JSON, the short form, or the path of a file
# JSON, dotted key -> [value, origin]: in whose words a launcher found what it wrote to CONFIG_VARIABLE.
ORIGINS_VARIABLE = "OURSHARD_CONFIG_FROM"
# Variables of this prefix that are read elsewhere; any other that is no key of the config is refused.
OTHER_VARIABLES = frozenset(
    {
        ORIGINS_VARIABLE,
        "OURSHARD_DISABLE",
        "OURSHARD_GRADIENT_CLIPPING",
        "OURSHARD_GRADIENT_ACCUMULATION_STEPS",
        "OURSHARD_GRAD_SCALER",
        "OURSHARD_DEEPSPEED_BLOCKS",
        "OURSHARD_FIXTURES",  # this one and the next by the tests
        "OURSHARD_WRITE_TRACES",
    }
)
SECTIONS = ("ourshard_config", "fsdp_config", "deepspeed_config")
_OTHER_SECTION = {"FSDP": "deepspeed_config", "DEEPSPEED": "fsdp_config"}  # a leftover in a file for that engine

_SUFFIXES = (".yaml", ".yml", ".json")


def resolve(given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> FlagResult:
    """Join everything that was said: `given` maps the name of a source to what it holds, in any form of `read`.

    Raises:
        ValueError: an unknown key, a wrong value, or two sources that disagree.
    """
    results = [read(value, source) for source, value in (given or {}).items()]
    return merge([*results, from_environment(environ)])


def read(value: Any, source: str) -> FlagResult:
    """Read a `FlagResult`, a `ShardConfig`, a mapping in any of the languages, a path, JSON or the short form.

    A `ShardConfig` says all of its keys, also those that it left at their defaults.

    Raises:
        ValueError: what `value` says can't be read; `source` stands in the message.
    """
    if value is None or value == "":
        return FlagResult()
    if isinstance(value, FlagResult):
        return value
    if isinstance(value, ShardConfig):
        return from_values(value.to_dict(), source)
    if isinstance(value, Mapping):
        return read_document(value, source)
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).suffix in _SUFFIXES):
        return read_document(load(value), str(value))
    if isinstance(value, str):
        text = value.strip()
        return read_document(_from_json(text, source), source) if text.startswith("{") else from_text(text, source)
    raise ValueError(f"{source}: {value!r} is no config; give a mapping, a path, or text such as 'stage=3'.")


def _from_json(text: str, source: str) -> dict[str, Any]:
    try:
        values = from_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: not JSON ({error}): {text[:100]!r}. Example: '{{\"stage\": 2}}'.") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    assert isinstance(values, dict)  # the text starts with a brace
    return values


def read_document(values: Mapping[str, Any], source: str) -> FlagResult:
    """Read a whole Accelerate config, or a bare section of it in whichever language knows most of its keys.

    Raises:
        ValueError: as `from_values`, `from_fsdp` and `from_deepspeed` do.
    """
    if "distributed_type" in values or any(name in values for name in SECTIONS):
        return read_sections(values, source)
    language = _language(values)
    if language == "fsdp":
        return from_fsdp(values, source)
    if language == "deepspeed":
        return from_deepspeed(values, source=source)
    return from_values(values, source)


def read_sections(values: Mapping[str, Any], source: str = "") -> FlagResult:
    """Read every section of an Accelerate config that says something about sharding.

    Raises:
        ValueError: as `read_document` does, or a section does not hold keys and values.
    """
    where = f"{source}: " if source else ""
    own = {key.partition(".")[0] for key in config_keys()}
    for key in values:  # those of Accelerate's own that are alike differ by more: fp8_config, fsdp_config
        meant = ["ourshard_config"] if key == "ourshard" else get_close_matches(str(key), SECTIONS, n=1, cutoff=0.88)
        if meant and key not in SECTIONS:
            raise ValueError(f"{where}{key}: there is no such section. Did you mean {meant[0]!r}?")
        if str(key).partition(".")[0] in own:
            raise ValueError(f"{where}{key}: it is a key of ourshard_config, and stands under it.")
    for name in (*SECTIONS, "parallelism_config"):
        if values.get(name) is not None and not isinstance(values[name], Mapping):
            raise ValueError(f"{where}{name}: expected keys and values, got {values[name]!r}.")
    results = [from_values(values.get("ourshard_config") or {}, f"{where}ourshard_config")]
    values, unread = _in_force(values)
    results.append(FlagResult(notes=unread))
    if values.get("fsdp_config") or values.get("parallelism_config"):
        parallelism = values.get("parallelism_config") or None
        results.append(from_fsdp(values.get("fsdp_config") or {}, f"{where}fsdp_config", parallelism))
    if values.get("deepspeed_config"):
        results.append(from_deepspeed(values["deepspeed_config"], source=f"{where}deepspeed_config"))
    return merge(results, complete=False)


def _in_force(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return `values` without the section that Accelerate leaves unread beside this `distributed_type`, and a note."""
    engine = str(getattr(values.get("distributed_type"), "value", values.get("distributed_type")))
    other = _OTHER_SECTION.get(engine, "")
    if not values.get(other):
        return values, ()
    left = {key: value for key, value in values.items() if key != other}
    return left, (f"{other}: not read, because distributed_type is {engine}.",)


def _language(values: Mapping[str, Any]) -> str:
    """Return the language that knows most of the top-level keys: native (in doubt), fsdp or deepspeed."""
    own = {key.partition(".")[0] for key in config_keys()}
    fsdp = set(FSDP.by_spelling) | {FSDP.prefix + key for key in FSDP.by_spelling}
    deepspeed = {key.partition(".")[0] for key in DEEPSPEED.by_spelling}
    known = {"native": own, "fsdp": fsdp, "deepspeed": deepspeed}
    tops = {str(key).partition(".")[0] for key in values}

    def fits(name: str) -> tuple[int, int]:  # a key that is misspelt counts where none is right
        return len(tops & known[name]), sum(bool(get_close_matches(top, known[name], n=1)) for top in tops)

    return max(known, key=fits)


def from_text(text: str, source: str) -> FlagResult:
    """Read the short form, `"stage=3,shard_size=node,wrap.classes=A,B"`: dotted keys; a list may go on after a comma.

    Raises:
        ValueError: a part without `=`, an unknown key, one that is there twice, or a wrong value.
    """
    values: dict[str, Any] = {}
    key = ""
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if equals:
            key = name.strip()
            if key in values:
                raise ValueError(f"{source}: {key!r} is there twice; leave one of them.")
            values[key] = _scalar(value.strip())
        elif key and isinstance(values[key], str):
            values[key] += f",{part}"
        else:
            raise ValueError(f"{source}: {part!r} has no '='; the short form is 'stage=3,offload.optimizer=cpu'.")
    return from_values(values, source)


def _scalar(text: str) -> str | None:
    return None if text.lower() in ("null", "~", "") else text


def from_environment(environ: Mapping[str, str] | None = None) -> FlagResult:
    """Read `OURSHARD_CONFIG` and single keys: `OURSHARD_STAGE=2`, `OURSHARD_OFFLOAD_OPTIMIZER=cpu`.

    Raises:
        ValueError: a variable with our prefix that is no key, a wrong value, or variables that disagree.
    """
    environ = os.environ if environ is None else environ
    names = variables()
    results = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        if name == CONFIG_VARIABLE:
            results.append(_with_origins(read(environ[name], CONFIG_VARIABLE), environ.get(ORIGINS_VARIABLE, "{}")))
        elif name in names:
            results.append(from_values({names[name]: _scalar(environ[name].strip())}, name))
        else:
            raise ValueError(f"Unknown variable {name} in the environment.{nearest(name, [CONFIG_VARIABLE, *names])}")
    return merge(results, complete=False)


def for_environment(result: FlagResult) -> dict[str, str]:
    """Return the variables that tell another process what was said and by whom; `from_environment` reads them."""
    said = {key: value for key, value in result.said.items() if not key.startswith(RUN)}
    origins = {key: [value, result.origins[key]] for key, value in said.items()}
    return {CONFIG_VARIABLE: json.dumps(unflatten(said)), ORIGINS_VARIABLE: json.dumps(origins)}


def _with_origins(result: FlagResult, told: str) -> FlagResult:
    """Put the origins that a launcher told in place of the variable's name, where the value is still the launcher's."""
    known = _from_json(told, ORIGINS_VARIABLE)
    still = [key for key, value in result.said.items() if key in known and known[key][0] == value]
    return dataclasses.replace(result, origins={**result.origins, **{key: known[key][1] for key in still}})


def variables() -> dict[str, str]:
    """Return the variable of each dotted key: `OURSHARD_OFFLOAD_OPTIMIZER` -> `offload.optimizer`."""
    return {PREFIX + key.upper().replace(".", "_"): key for key in config_keys()}


def explain(result: FlagResult) -> dict[str, tuple[Any, str]]:
    """Return every dotted key of the resolved config with its value and where it came from."""
    return {key: (value, result.origin(key)) for key, value in flatten(result.config.to_dict()).items()}

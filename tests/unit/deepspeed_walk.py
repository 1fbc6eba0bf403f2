"""Collect the keys that the installed DeepSpeed reads, for `deepspeed_keys.txt`; tests compare the two.

    python -m tests.unit.deepspeed_walk   # writes it

Top-level keys and those of blocks without a model of their own are found in the source of DeepSpeed's config, fields
of its pydantic models by walking them. A release that adds a model makes `models` fail until it has its place here.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "deepspeed_keys.txt"

# Where a config model stands in a ds_config.json. Those of inference and those inside of others have no place.
PLACES = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "CommsLoggerConfig": "comms_logger",
    "HybridEngineConfig": "hybrid_engine",
    "CompileConfig": "compile",
    "TPTrainingConfig": "tensor_parallel",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
}
ELSEWHERE = {
    "DeepSpeedMonitorConfig",  # made of the four monitors
    "DeepSpeedZeroOffloadParamConfig",  # these four are fields of DeepSpeedZeroConfig
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroLeafModuleConfig",
    "ZenFlowConfig",
    "TPConfig",  # a field of TPTrainingConfig
}
# Variables of DeepSpeed's config module that hold a part of the file, and the part.
_PARTS = {
    "param_dict": "",
    "param_dict.keys()": "",
    "self._param_dict": "",
    "param_dict[TORCH_AUTOCAST]": "torch_autocast.",
    "checkpoint_params": "checkpoint.",
    "data_types_params": "data_types.",
}


def keys_read_in(source: str, named: Any) -> set[str]:
    """Return the dotted keys that a module's code looks up in a config; `named` returns a constant by its name."""
    found: list[tuple[str, ast.expr]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_scalar_param":
            found += [(ast.unparse(node.args[0]), node.args[1])]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get") and node.args:
            found.append((ast.unparse(node.func).removesuffix(".get"), node.args[0]))
        elif isinstance(node, ast.Compare):
            found.append((ast.unparse(node.comparators[0]), node.left))
    keys = set()
    for part, expression in found:
        key = expression.value if isinstance(expression, ast.Constant) else named(ast.unparse(expression))
        if part in _PARTS and isinstance(key, str):
            keys.add(_PARTS[part] + key)
    return keys


def models() -> dict[str, Any]:
    """Return DeepSpeed's config models by their place in a ds_config.json."""
    import deepspeed.runtime.config  # noqa: F401 (defines them)
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    known = {cls.__name__: cls for cls in _below(DeepSpeedConfigModel) if ".inference." not in cls.__module__}
    assert set(known) == set(PLACES) | ELSEWHERE, set(known) ^ (set(PLACES) | ELSEWHERE)
    return {place: known[name] for name, place in PLACES.items()}


def _below(cls: type) -> Iterator[type]:
    for inner in cls.__subclasses__():
        yield inner
        yield from _below(inner)


def fields(model: Any, prefix: str) -> Iterator[str]:
    """Yield the dotted keys of a model, in each spelling, and those of the models inside of it."""
    for name, field in model.model_fields.items():
        for spelling in {name, field.alias or name}:
            kinds = (field.annotation, *typing.get_args(field.annotation))
            inner = [kind for kind in kinds if hasattr(kind, "model_fields")]
            if inner:
                yield from fields(inner[0], f"{prefix}.{spelling}")
            else:
                yield f"{prefix}.{spelling}"


def walk() -> list[str]:
    """Return every key that DeepSpeed reads, sorted."""
    from deepspeed.runtime import config

    found = keys_read_in(inspect.getsource(config), lambda name: getattr(config, name, None))
    assert len(found) > 40, found
    for place, model in models().items():
        found |= set(fields(model, place))
    return sorted(found)


if __name__ == "__main__":
    RECORDED.write_text("\n".join(walk()) + "\n")

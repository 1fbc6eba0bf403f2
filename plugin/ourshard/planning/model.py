"""The model of a plan: its structure on the meta device, and the batch that it is given. No weights are read."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ourshard.values import nearest


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank is given in one forward."""

    inputs: Mapping[str, Any]  # keyword arguments of the model; tensors on the meta device
    samples: int
    tokens: int  # of all samples; equal to `samples` where there is no sequence

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.inputs.values() if isinstance(value, torch.Tensor))


def load_model(source: str, options: Mapping[str, Any] | None = None) -> nn.Module:
    """Build the model that `source` names, on the meta device.

    `source` is a folder with a `config.json` of transformers, such a file, or `module:Class`, which is called with
    `options`. For a config, `options` replaces single values of it.

    Raises:
        ValueError: there is nothing of that name, or it does not build.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_config(path, options or {})
    if ":" in source:
        return _from_class(source, options or {})
    raise ValueError(
        f"model: {source!r} is neither a folder, a config.json, nor module:Class. A model of the Hub is not looked up "
        "there: download its config.json."
    )


def _from_config(path: Path, options: Mapping[str, Any]) -> nn.Module:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"model: {path} can't be read: {error}") from error
    try:
        import transformers
    except ImportError:
        raise ValueError("model: a config.json needs the package transformers: pip install transformers.") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError(f"model: {path} has no model_type; it is no config of transformers.")
    _check_words(path, values, options)
    values |= options
    with _saying(str(path), options):
        config = transformers.AutoConfig.for_model(**{key: value for key, value in values.items() if key != "dtype"})
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id or 0  # generation needs the right one, a plan any
    names = values.get("architectures") or []
    cls: Any = getattr(transformers, names[0], None) if names else transformers.AutoModelForCausalLM
    if cls is None:
        raise ValueError(f"model: transformers {transformers.__version__} has no class {names[0]!r}.")
    with _saying(str(path), options), torch.device("meta"):
        model: nn.Module = cls._from_config(config) if names else cls.from_config(config)
    return model


def _check_words(path: Path, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse a kind of model, and options, that transformers does not know; it takes any key for a config's."""
    import transformers

    kind = options.get("model_type", values["model_type"])
    if kind not in transformers.CONFIG_MAPPING:
        close = get_close_matches(str(kind), transformers.CONFIG_MAPPING, n=1)
        meant = f"Did you mean {close[0]!r}?" if close else "Another version may know it; or give module:Class."
        raise ValueError(f"model: {path}: transformers {transformers.__version__} has no model_type {kind!r}. {meant}")
    plain = transformers.CONFIG_MAPPING[kind]()
    for name in (name for name in options if name not in values and not hasattr(plain, name)):
        raise ValueError(f"--with: a config of {kind} has no {name!r}.{nearest(name, plain.to_dict())}")


def _from_class(source: str, options: Mapping[str, Any]) -> nn.Module:
    module_name, _, name = source.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"model: {module_name} can't be imported: {error}") from error
    cls = getattr(module, name, None)
    if cls is None:
        raise ValueError(f"model: {module_name} has no {name!r}.{nearest(name, dir(module))}")
    with _saying(source, options), torch.device("meta"):
        model = cls(**options)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: {source} gives {type(model).__name__}, which is no torch module.")
    return model


@contextmanager
def _saying(source: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn what a constructor of the user's or of transformers raises into one line."""
    try:
        yield
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "nothing"
        text = " ".join(str(error).split())
        raise ValueError(f"model: {source} can't be built with {given} (--with KEY=VALUE): {text}") from error


def make_batch(model: nn.Module, samples: int, length: int, given: Mapping[str, torch.Tensor] | None = None) -> Batch:
    """Return a batch that `model` takes: of `given` tensors, else of token ids or pixels with labels.

    Raises:
        ValueError: it is not known what the model takes.
    """
    if samples < 1 or length < 1:
        raise ValueError(f"--batch and --length must be 1 or more; got {samples} and {length}.")
    if given:
        tokens = max((value.shape[1] for value in given.values() if value.dim() == 2), default=1)
        return Batch(dict(given), samples, samples * tokens)
    main = getattr(model, "main_input_name", None)
    if main == "input_ids":
        ids = torch.zeros(samples, length, dtype=torch.long, device="meta")
        return Batch({"input_ids": ids, **_labels(model, ids)}, samples, samples * length)
    if main == "pixel_values":
        config: Any = model.config
        size, channels = int(config.image_size), int(getattr(config, "num_channels", 3))
        pixels = torch.zeros(samples, channels, size, size, device="meta")
        return Batch({"pixel_values": pixels, **_labels(model, pixels)}, samples, samples)
    raise ValueError(
        f"model: it is not known what {type(model).__name__} takes; give --input NAME=SHAPE:DTYPE for each argument, "
        "for example --input x=8x1024:float32."
    )


def _labels(model: nn.Module, main: torch.Tensor) -> dict[str, torch.Tensor]:
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration")):
        return {"labels": main}
    if name.endswith(("ForSequenceClassification", "ForImageClassification")):
        return {"labels": torch.zeros(main.shape[0], dtype=torch.long, device="meta")}
    return {}


def parse_input(text: str) -> tuple[str, torch.Tensor]:
    """Read `NAME=SHAPE:DTYPE`, as in `x=8x1024:float32`, into a name and a tensor on the meta device.

    Raises:
        ValueError: it has another form.
    """
    name, _, rest = text.partition("=")
    shape, _, dtype_name = rest.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    try:
        sizes = [int(part) for part in shape.split("x")]
    except ValueError:
        sizes = []
    if not name or not sizes or not isinstance(dtype, torch.dtype):
        raise ValueError(f"--input: {text!r} is not NAME=SHAPE:DTYPE, as in x=8x1024:float32.")
    return name, torch.zeros(sizes, dtype=dtype, device="meta")

"""The order of a model's parameters where a checkpoint has none: from a list, from config.json, from well-known
names.

safetensors files are sorted by name, so that the order in which a model defines its parameters is lost in them.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..source import CheckpointError
from .integer_keys import Order, given_order
from .runfiles import read_json

NAMES_FILE = "parameter_names.json"
_MAX_LAYERS = 1024
_MAX_EXPERTS = 4096

# Children of one module in the order in which Transformers, torch and PEFT define them. A module is ordered if some
# list has all of its children, and all lists that have them agree.
_SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("weight", "bias"),
    ("base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"),
    ("lora_A", "lora_B", "lora_E"),
    ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    ("vera_lambda_b", "vera_lambda_d"),
    ("boft_R", "boft_s"),
    ("randlora_lambda", "randlora_gamma"),
    ("base_model", "model", "transformer", "gpt_neox", "bert", "lm_head", "embed_out", "score", "classifier", "cls"),
    ("embed_tokens", "layers", "norm"),
    (
        "self_attn", "mlp",
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
    ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"),
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("wte", "wpe", "h", "ln_f"),
    ("ln_1", "attn", "ln_2", "mlp"),
    ("c_attn", "c_proj"),
    ("c_fc", "c_proj"),
    ("embed_in", "layers", "final_layer_norm"),
    ("input_layernorm", "post_attention_layernorm", "attention", "mlp"),
    ("query_key_value", "dense"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("embeddings", "encoder", "pooler"),
    ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm"),
    ("attention", "intermediate", "output"),
    ("self", "output"),
    ("query", "key", "value"),
    ("dense", "LayerNorm"),
)  # fmt: skip
# Encoder-decoder models and OPT define attention in this order, with the same names.
_SIBLINGS_BELOW_CODERS: tuple[tuple[str, ...], ...] = (("k_proj", "v_proj", "q_proj", "out_proj"),)


def orders(folder: Path, names: Sequence[str], given: Sequence[str] | None) -> Iterator[Order]:
    """Yield the orders that can be had for a model with these names, the most certain first."""
    if given is not None:
        yield given_order(given)
        return
    if (folder / NAMES_FILE).is_file():
        yield Order(_names_of_file(folder / NAMES_FILE), NAMES_FILE, of_parameters=True)
        return
    config = folder / "config.json"
    if config.is_file() and importlib.util.find_spec("transformers") is not None:
        built = order_by_config(read_json(config), names)
        if built is not None:
            yield built
            return
    known = order_by_names(names)
    if known is not None:
        yield Order(tuple(known), "the order in which modules of these names are defined")


def order_by_config(config: Mapping[str, Any], names: Sequence[str]) -> Order | None:
    """Return the order of the model that config.json names, built without memory; None if its names are others."""
    import transformers

    kinds = config.get("architectures")
    kind = getattr(transformers, str(kinds[0]), None) if isinstance(kinds, list) and kinds else None
    if kind is None or not hasattr(kind, "_from_config") or not _is_plausible(config, len(names)):
        return None
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = kind._from_config(kind.config_class.from_dict(dict(config)))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, ImportError):
        return None  # the config is not usable with this version of Transformers; other orders are tried
    defined = [name for name, _ in model.named_parameters()]
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)} | dict(model.named_buffers()).keys()
    if not set(names) <= known:
        return None
    return Order(tuple(defined), "config.json", of_parameters=True)


def _is_plausible(config: Mapping[str, Any], tensors: int) -> bool:
    """Tell whether the config asks for no more modules than the checkpoint has; a hostile one may ask for billions."""
    for key, value in config.items():
        if type(value) is int and (
            ("layer" in key and value > max(tensors, _MAX_LAYERS)) or ("expert" in key and value > _MAX_EXPERTS)
        ):
            return False
        if isinstance(value, Mapping) and not _is_plausible(value, tensors):
            return False
    return True


def _names_of_file(path: Path) -> tuple[str, ...]:
    try:
        names = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not readable as JSON: {error}") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: a list of names was expected")
    return tuple(names)


def order_by_names(names: Sequence[str]) -> list[str] | None:
    """Return the names in the order of definition, or None if a module has children whose order is not known."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for part in name.split("."):
            node = node.setdefault(part, {})
    try:
        return list(_walk(tree, ()))
    except _UnknownOrder:
        return None


class _UnknownOrder(Exception):
    """The order of a module's children is not known."""


def _walk(node: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    if not node:
        yield ".".join(path)
        return
    for child in _sorted(list(node), path):
        yield from _walk(node[child], (*path, child))


def _sorted(children: list[str], path: tuple[str, ...]) -> list[str]:
    if len(children) == 1:
        return children
    if all(child.isdecimal() for child in children):
        return sorted(children, key=int)
    lists = _SIBLINGS
    if any(part in ("encoder", "decoder") for part in path):
        lists = (*_SIBLINGS, *_SIBLINGS_BELOW_CODERS)
    found = {tuple(sorted(children, key=siblings.index)) for siblings in lists if set(children) <= set(siblings)}
    if len(found) != 1:
        raise _UnknownOrder
    return list(found.pop())

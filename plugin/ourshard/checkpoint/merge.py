"""Merge a LoRA adapter into the weights while they stream by, some rows at a time: lora.py has the formulas."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from .lora import Update, oriented, update_of
from .source import BUFFER, PARAM, CheckpointError, Source, TensorKey
from .view import View

_PREFIX = "base_model.model."
_NORM_BLOCK = 16 << 20
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>\w+?)(\.(?P<adapter>[^.]+))?(\.weight)?")
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_ORIGINAL = ".original_module."
_LORA_BIAS = re.compile(r".+\.lora_\w+?(\.[^.]+)?\.bias")
_TOKENS = ".trainable_tokens_delta"
# Options of PEFT with which a LoRA is no sum of matrices, and ways to begin one that change the base's own weights.
_NOT_LINEAR = {
    "lora_bias": "LoRA with a bias of its own",
    "trainable_token_indices": "LoRA with trained tokens",
    "alora_invocation_tokens": "aLoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "layer_replication": "LoRA with replicated layers",
    "arrow_config": "Arrow",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
}
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


class Merged(View):
    """The base model with an adapter merged in, under the base model's own names; weights only."""

    def __init__(
        self,
        base: Source,
        adapter: Source,
        origins: Mapping[str, TensorKey],
        updates: Mapping[str, Update],
        whole: Mapping[str, TensorKey],
    ) -> None:
        keys = {TensorKey(base_kind(base, origin), name): origin for name, origin in origins.items()}
        known = set(origins)
        description = replace(
            base.description,
            adapter_config=None,
            param_groups=(),
            param_state={},
            scheduler=None,
            scaler=None,
            frozen=frozenset(),
            ties={
                alias: owner
                for alias, owner in ((_plain(a), _plain(o)) for a, o in base.description.ties.items())
                if owner in known
            },
            own_dtypes={
                name: base.description.own_dtypes[origin.name]
                for name, origin in origins.items()
                if origin.name in base.description.own_dtypes
            },
            files={name: path for name, path in base.description.files.items() if name != "adapter_config.json"},
        )
        super().__init__(base, keys, description)
        self._adapter = adapter
        self._updates = dict(updates)
        self._lock = threading.Lock()
        self._known_norms: dict[TensorKey, torch.Tensor] = {}
        self._whole = dict(whole)  # name -> key of the adapter, of what it has in place of the base's

    def read(self, key: TensorKey, start_row: int = 0, stop_row: int | None = None) -> torch.Tensor:
        """Return these rows with the adapter's part added, computed in fp32 (or the weight's own, if wider)."""
        if key.name in self._whole:
            return self._adapter.read(self._whole[key.name], start_row, stop_row).to(self.tensors[key].dtype)
        rows = super().read(key, start_row, stop_row)
        update = self._updates.get(key.name)
        if update is None:
            return rows
        start, _ = self.tensors[key].rows_within(start_row, stop_row)
        summed = update.summed(self._adapter, rows, start)
        if update.magnitude is not None:
            norms = self._norms(key, update) if update.transposed else update.norms([summed])
            summed = update.stretched(self._adapter, summed, start, norms)
        return summed.to(rows.dtype)

    def _norms(self, key: TensorKey, update: Update) -> torch.Tensor:
        """Return the lengths of outputs of which each row has an element; they are computed once, from all rows."""
        with self._lock:
            if key not in self._known_norms:
                info = self.tensors[key]
                block = max(1, _NORM_BLOCK // max(1, info.row_nbytes))
                self._known_norms[key] = update.norms(
                    update.summed(self._adapter, View.read(self, key, start, min(info.rows, start + block)), start)
                    for start in range(0, info.rows, block)
                )
            return self._known_norms[key]

    def read_run(self, key: TensorKey, start: int, stop: int) -> torch.Tensor:
        """Return these elements of the merged tensor."""
        if self._is_changed(key):
            return Source.read_run(self, key, start, stop)
        return super().read_run(key, start, stop)

    def read_run_into(self, key: TensorKey, start: int, target: memoryview) -> None:
        """Fill `target` with the bytes of these elements of the merged tensor."""
        (Source if self._is_changed(key) else View).read_run_into(self, key, start, target)

    def _is_changed(self, key: TensorKey) -> bool:
        return key.name in self._updates or key.name in self._whole

    def close(self) -> None:
        """Close the base and the adapter."""
        super().close()
        self._adapter.close()


def base_kind(base: Source, key: TensorKey) -> str:
    """Return the kind that a key has in the base."""
    return BUFFER if TensorKey(BUFFER, key.name) in base.tensors else PARAM


def merge_adapter(source: Source, base: Source | None = None) -> Merged:
    """Return the merged model of a checkpoint that holds base and adapter, or of an adapter and the model `base`.

    Raises ValueError if there is no LoRA, no adapter_config.json, no base weight, or a kind that has no linear merge.
    """
    config = _config(source)
    names = {key.name: key for key in source.tensors if key.kind in (PARAM, BUFFER)}
    pairs, saved = _adapter_parts(source, names)
    weights = source if base is None else base
    origins = {
        _plain(key.name): key
        for key in weights.tensors
        if key.kind in (PARAM, BUFFER) and not _is_adapter(key.name) and _ORIGINAL not in key.name
    }
    updates = {}
    for module, parts in pairs.items():
        target = f"{_plain(module)}.weight"
        if target not in origins:
            raise ValueError(
                f"the base weight {target} of the adapter is not in {weights.path}; "
                "an adapter alone is merged with base=PATH (--base PATH) of its model"
            )
        updates[target] = update_of(module, _plain(module), parts, config)
    shapes = {target: weights.tensors[origins[target]].shape for target in updates}
    updates = oriented(source, updates, shapes, bool(config.get("fan_in_fan_out")))
    if base is None:
        return Merged(weights, source, {**origins, **saved}, updates, {})
    _refuse_changed_base(config)
    biases = {_plain(name): key for name, key in names.items() if not _is_adapter(name)}
    return Merged(weights, source, origins, updates, _fitting(source, weights, origins, {**saved, **biases}))


def _refuse_changed_base(config: Mapping[str, Any]) -> None:
    begun = str(config.get("init_lora_weights")).lower()
    if begun.startswith(_CHANGES_BASE):
        raise ValueError(
            f"the adapter was begun with init_lora_weights={begun}, which changes the weights of the base model; merge "
            "it with PEFT, or save it there with path_initial_model_for_weight_conversion"
        )


def _fitting(
    source: Source, base: Source, origins: Mapping[str, TensorKey], whole: Mapping[str, TensorKey]
) -> Mapping[str, TensorKey]:
    """Return what takes the place of the base's tensors; raise ValueError for what has none there."""
    for name, key in whole.items():
        if name not in origins:
            raise ValueError(f"{key.name} of the adapter has no place in {base.path}: there is no {name}")
        if source.tensors[key].shape != base.tensors[origins[name]].shape:
            raise CheckpointError(f"{key.name} of the adapter has another shape than {name} in {base.path}")
    return whole


def _config(source: Source) -> Mapping[str, Any]:
    config = source.description.adapter_config
    path = source.description.files.get("adapter_config.json")
    if config is None and path is not None:
        try:
            config = json.loads(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{path} is no JSON: {error}") from error
    kind = config.get("peft_type", "LORA") if isinstance(config, Mapping) else "LORA"
    if kind != "LORA":
        raise ValueError(f"{source.path} is an adapter of type {kind}: LoRA is merged here; merge it with PEFT")
    if not isinstance(config, Mapping) or "r" not in config or "lora_alpha" not in config:
        raise ValueError(
            f"{source.path} has no adapter_config.json with r and lora_alpha: the scale of the adapter is unknown"
        )
    for option, what in _NOT_LINEAR.items():
        if config.get(option):
            raise ValueError(f"{option} is set: {what} is no sum of matrices; merge it with PEFT")
    return config


def _is_adapter(name: str) -> bool:
    return bool(_LORA.fullmatch(name) or _SAVED.fullmatch(name))


def _adapter_parts(
    source: Source, names: Mapping[str, TensorKey]
) -> tuple[dict[str, dict[str, TensorKey]], dict[str, TensorKey]]:
    """Return module -> {"A", "B"} keys, and final name -> key of modules that were trained whole."""
    pairs: dict[str, dict[str, TensorKey]] = {}
    saved = {}
    adapters = set()
    for name, key in names.items():
        if _LORA_BIAS.fullmatch(name) or _TOKENS in name:
            raise ValueError(f"{name} is no part of a plain LoRA; merge it with PEFT")
        if match := _SAVED.fullmatch(name):
            saved[_plain(f"{match['module']}.{match['rest']}")] = key
            adapters.add(match["adapter"])
        elif match := _LORA.fullmatch(name):
            pairs.setdefault(match["module"], {})[match["part"]] = key
            adapters.add(match["adapter"])
    if not pairs:
        raise ValueError(f"{source.path} has no LoRA weights to merge")
    if len(adapters) > 1:
        raise ValueError(
            f"{source.path} has several adapters ({', '.join(map(str, sorted(adapters, key=str)))}): select one"
        )
    return pairs, saved


def _plain(name: str) -> str:
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".").replace(".original_module.", ".")

"""Every way to say a setting gives the same object, with its origin; sources that disagree are named both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ourshard.config import Accumulate, OffloadConfig, ShardConfig, Tier, config_keys, plain_value
from ourshard.flags import sources
from ourshard.flags.native import KEYS, dump
from ourshard.flags.result import from_values, merge
from ourshard.flags.sources import SECTIONS, for_environment, from_environment, from_text, read, resolve, variables
from ourshard.integrations.plugin import ShardPlugin
from ourshard.values import flatten, unflatten

from tests.commands import ROOT

SAID = {"stage": 3, "shard_size": 8, "wrap.classes": ["A", "B"], "offload.optimizer": "cpu", "ledger": True}
TEXT = "stage=3,shard_size=8,wrap.classes=A,B,offload.optimizer=cpu,ledger=true"


def _file(folder: Path, name: str, values: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values))
    return path


def test_every_source_gives_the_same_config(tmp_path: Path) -> None:
    nested = unflatten(SAID)
    whole = {"distributed_type": "OURSHARD", "num_processes": 8, "ourshard_config": nested}
    environment = {
        "OURSHARD_STAGE": "3",
        "OURSHARD_SHARD_SIZE": "8",
        "OURSHARD_WRAP_CLASSES": "A,B",
        "OURSHARD_OFFLOAD_OPTIMIZER": "CPU",
        "OURSHARD_LEDGER": "True",
        "PATH": "/bin",
    }
    results = [
        read(nested, "mapping"),
        read(SAID, "dotted"),
        read(TEXT, "short"),
        read(json.dumps(nested), "json"),
        read(_file(tmp_path, "bare.yaml", nested), "path"),
        read(str(_file(tmp_path, "bare.json", nested)), "path"),
        read(_file(tmp_path, "whole.yaml", whole), "path"),
        from_environment(environment),
        from_environment({"OURSHARD_CONFIG": TEXT}),
        from_environment({"OURSHARD_CONFIG": json.dumps(nested)}),
        from_environment({"OURSHARD_CONFIG": str(tmp_path / "whole.yaml")}),
    ]
    for result in results:
        assert dict(result.said) == SAID
        assert result.config == results[0].config
    assert merge(results).config == results[0].config


def test_each_value_knows_where_it_came_from(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.yaml", {"stage": 2})
    result = resolve({"--shard_config": path, "kwargs": {"ledger": True}}, {"OURSHARD_ACCUMULATE": "deferred"})
    assert result.origins == {"stage": str(path), "ledger": "kwargs", "accumulate": "OURSHARD_ACCUMULATE"}
    assert result.origin("timeout") == "default"


def test_h02_two_sources_that_disagree_are_named_both() -> None:
    with pytest.raises(ValueError, match=r"stage: kwargs gives 3, but OURSHARD_STAGE gives 2.*remove one"):
        resolve({"kwargs": {"stage": 3}}, {"OURSHARD_STAGE": "2"})
    with pytest.raises(ValueError, match=r"offload.optimizer: YAML gives 'cpu', but kwargs gives 'nvme'"):
        resolve(
            {"YAML": {"offload": {"optimizer": "cpu"}}, "kwargs": "offload.optimizer=nvme,offload.nvme_path=/a"}, {}
        )


def test_h02_a_launchers_word_keeps_its_origin_while_its_value_stands() -> None:
    said = from_values({"stage": 2, "ledger": True}, "stage2.yaml: ourshard_config")
    told = for_environment(said)
    assert from_environment(told) == said
    with pytest.raises(ValueError, match=r"stage: kwargs gives 3, but stage2.yaml: ourshard_config gives 2"):
        resolve({"kwargs": {"stage": 3}}, told)
    changed = from_environment({**told, "OURSHARD_CONFIG": '{"stage": 1, "ledger": true}'})
    assert changed.origins == {"stage": "OURSHARD_CONFIG", "ledger": "stage2.yaml: ourshard_config"}


def test_the_same_value_in_another_spelling_agrees() -> None:
    import torch

    given = {
        "YAML": {"shard_size": 8, "precision": {"param_dtype": "bfloat16"}, "wrap": {"classes": ["A", "B"]}},
        "kwargs": {"shard_size": "8", "precision": {"param_dtype": torch.bfloat16}, "wrap": {"classes": "A,B"}},
    }
    result = resolve(given, {"OURSHARD_PRECISION_PARAM_DTYPE": "bf16", "OURSHARD_SHARD_SIZE": " 8 "})
    assert result.said == {"shard_size": 8, "precision.param_dtype": "bfloat16", "wrap.classes": ["A", "B"]}


def test_what_one_source_lacks_another_may_add() -> None:
    result = resolve({"YAML": {"offload": {"nvme_path": "/disk"}}}, {"OURSHARD_OFFLOAD_OPTIMIZER": "nvme"})
    assert result.config.offload.nvme_path == "/disk"
    with pytest.raises(ValueError, match=r"nvme needs offload.nvme_path"):
        resolve({}, {"OURSHARD_OFFLOAD_OPTIMIZER": "nvme"})


def test_a_config_object_says_all_of_its_keys() -> None:
    assert set(read(ShardConfig(), "argument").said) == set(config_keys())
    with pytest.raises(ValueError, match=r"prefetch.forward: argument gives 1, but OURSHARD_PREFETCH_FORWARD gives 2"):
        resolve({"argument": ShardConfig()}, {"OURSHARD_PREFETCH_FORWARD": "2"})


def test_fsdp_deepspeed_and_native_sections_join_when_they_agree() -> None:
    document = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"},
        "ourshard_config": {"stage": 3, "ledger": True},
    }
    result = read(document, "a.yaml")
    assert (result.config.stage, result.config.ledger) == (3, True)
    document["ourshard_config"] = {"stage": 2}
    with pytest.raises(ValueError, match=r"a.yaml: ourshard_config gives 2, but a.yaml: fsdp_config: .* gives 3"):
        read(document, "a.yaml")


def test_a_section_that_accelerate_leaves_unread_says_nothing() -> None:
    """The leftover of another engine, as `accelerate config` keeps it in a file whose type was changed."""
    document = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"},
        "deepspeed_config": {"zero_stage": 2, "deepspeed_config_file": "path/that/is/gone.json"},
    }
    result = read(document, "a.yaml")
    assert result.config.stage == 3
    assert "deepspeed_config: not read, because distributed_type is FSDP." in result.notes
    with pytest.raises(ValueError, match=r"path/that/is/gone.json: no config could be read"):
        read({**document, "distributed_type": "DEEPSPEED"}, "a.yaml")


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_a_plugin_that_clips_to_no_norm_is_refused(norm: float) -> None:
    with pytest.raises(ValueError, match=r"gradient_clipping is .* above 0, or None"):
        ShardPlugin(gradient_clipping=norm)


def test_a_config_that_is_made_by_hand_is_the_one_of_a_file() -> None:
    values = {
        "stage": "2",
        "reshard_after_forward": "false",
        "accumulate": "deferred",
        "offload": {"optimizer": "cpu"},
        "communication": {"gradients": "int8"},
        "wrap": {"classes": "A,B"},
        "precision": {"param_dtype": torch.bfloat16},
        "timeout": "60",
    }
    made = ShardConfig(**values)
    assert made == ShardConfig.from_dict(values)
    assert made.accumulate is Accumulate.DEFERRED
    assert made.offload.optimizer is OffloadConfig(optimizer="cpu").optimizer is Tier.CPU  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"offload.optimizer: 'gpu' is not one of none, cpu, nvme"):
        OffloadConfig(optimizer="gpu")  # type: ignore[arg-type]


def test_sections_of_accelerates_own_are_left_to_it() -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    names = [name for name in ClusterConfig.__dataclass_fields__ if name not in SECTIONS]
    assert len(names) > 20
    assert read({"distributed_type": "OURSHARD", **{name: {} for name in names}}, "a.yaml").said == {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: resolve({"a": {"stge": 2}}, {}), r"a: Unknown key 'stge'.*'stage'"),
        (lambda: resolve({"a": {"offload": {"optimiser": "cpu"}}}, {}), r"'offload.optimiser'.*'offload.optimizer'"),
        (lambda: resolve({}, {"OURSHARD_STAG": "2"}), r"OURSHARD_STAG in the environment.*'OURSHARD_STAGE'"),
        (lambda: resolve({}, {"OURSHARD_STAGE": "two"}), r"OURSHARD_STAGE: stage: expected a whole number, got 'two'"),
        (lambda: resolve({}, {"OURSHARD_CONFIG": "{stage: 2"}), r"OURSHARD_CONFIG: not JSON"),
        (lambda: resolve({"a": "stage"}, {}), r"a: 'stage' has no '='"),
        (lambda: resolve({"a": "stage=3,stage=2"}, {}), r"a: 'stage' is there twice"),
        (lambda: resolve({"a": '{"stage": 3, "stage": 2}'}, {}), r"a: 'stage' is there twice"),
        (
            lambda: resolve({"a": {"offload.params": "cpu", "offload": {"params": "none"}}}, {}),
            r"a: offload.params: it is there twice, as 'cpu' and as 'none'",
        ),
        (lambda: resolve({"a": "stage=3,7"}, {}), r"a: stage: expected a whole number, got '3,7'"),
        (lambda: resolve({"a": "nowhere.yaml"}, {}), r"nowhere.yaml: no config could be read"),
        (lambda: resolve({"a": 7}, {}), r"a: 7 is no config"),
        (lambda: resolve({"a": {"wrap": {"policy": "clases"}}}, {}), r"wrap.policy: 'clases' is not one of"),
        (
            lambda: resolve({"a": {"offload": "cpu"}}, {}),
            r"a: offload: expected keys .* got 'cpu'. Its keys: optimizer,",
        ),
        (lambda: resolve({"a": {"ourshard_config": [1]}}, {}), r"a: ourshard_config: expected keys .* got \[1\]"),
        (lambda: resolve({"a": {"fsdp_config": "full"}}, {}), r"a: fsdp_config: expected keys and values, got 'full'"),
        (lambda: resolve({"a": {"deepspeed_config": 3}}, {}), r"a: deepspeed_config: expected keys and values, got 3"),
        (
            lambda: resolve({"a": {"persist_below": float("inf")}}, {}),
            r"a: persist_below: expected a whole number, got inf",
        ),
        (lambda: resolve({"a": {"timeout": float("nan")}}, {}), r"a: timeout: expected a number, got nan"),
        (lambda: resolve({"a": {"offload.nvme_path": b"/x"}}, {}), r"a: offload.nvme_path: expected text, got b'/x'"),
        (
            lambda: resolve({"a": {"zero_optimzation": {"stage": 3}}}, {}),
            r"'zero_optimzation.*'zero_optimization.stage'",
        ),
        (lambda: resolve({"a": {"stage": 5}}, {}), r"stage: 5 does not exist.*\(stage from a\)"),
        (
            lambda: resolve({"a": "offload.params=cpu"}, {"OURSHARD_STAGE": "2"}),
            r"offload.params from a.*OURSHARD_STAGE",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_source(bad: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bad()


def test_nothing_said_is_the_default() -> None:
    for empty in (None, "", {}, {"distributed_type": "OURSHARD"}, {"ourshard_config": None}, {"offload": None}):
        result = read(empty, "a")
        assert (result.config, dict(result.said)) == (ShardConfig(), {})


def test_null_is_said_in_every_form() -> None:
    for form in ({"shard_size": None}, "shard_size=null", '{"shard_size": null}'):
        assert read(form, "a").said == {"shard_size": None}


def test_each_key_has_one_variable_and_one_meaning() -> None:
    assert list(variables().values()) == list(config_keys()) == list(KEYS)
    assert len(set(variables())) == len(KEYS)


def test_no_variable_of_the_project_is_refused_by_the_environment_reader() -> None:
    known = {sources.CONFIG_VARIABLE, *sources.OTHER_VARIABLES, *variables()}
    files = [*ROOT.glob("plugin/**/*.py"), *ROOT.glob("trainer_callbacks/**/*.py")]
    found = {name for path in files for name in re.findall(r'"(OURSHARD_[A-Z_]+)"', path.read_text())}
    assert found
    assert found <= known, f"add to OTHER_VARIABLES in flags/sources.py: {sorted(found - known)}"


values_of = {
    "stage": st.sampled_from([0, 1, 2, 3]),
    "shard_size": st.sampled_from([None, "node", 4]),
    "persist_below": st.integers(0, 10**9),
    "wrap": st.sampled_from([{}, {"classes": ["A"]}, {"policy": "none"}, {"min_params": 5, "ignore": ["a.b", "c"]}]),
    "precision": st.sampled_from([{}, {"param_dtype": "bfloat16", "buffer_dtype": "float16"}]),
    "timeout": st.one_of(st.none(), st.floats(1, 1e6)),
    "checkpoint": st.sampled_from([{}, {"format": "full", "keep": 3, "save_dtype": "float16"}]),
    "offload": st.sampled_from([{}, {"optimizer": "nvme", "nvme_path": "/a b: #c", "optimizer_ratio": 0.25}]),
}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=values_of))
def test_a_config_survives_yaml_text_and_the_environment(values: dict[str, Any]) -> None:
    config = ShardConfig.from_dict(values)
    text = dump({"ourshard_config": config.to_dict()})
    assert ShardConfig.from_dict(yaml.safe_load(text)["ourshard_config"]) == config
    assert all("#" in line for line in text.splitlines())
    flat = flatten(config.to_dict())
    assert unflatten(flat) == config.to_dict()
    environment = {f"OURSHARD_{key.upper().replace('.', '_')}": _as_text(value) for key, value in flat.items()}
    assert from_environment(environment).config == config


def _as_text(value: Any) -> str:
    return "null" if value is None else ",".join(value) if isinstance(value, list) else str(value)


def test_plain_values_are_what_from_dict_takes_back() -> None:
    for key, value in flatten(ShardConfig().to_dict()).items():
        assert plain_value(key, value) == value
    assert from_values({"persist_below": "1e4"}, "a").config.persist_below == 10_000
    assert from_text("prefetch.forward=2", "a").config.prefetch.forward == 2

"""H02: what a user may mistype in a config, the environment or an argument is named, with what is meant or possible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ourshard
import pytest
from accelerate.commands.config import config_args
from ourshard import ShardConfig
from ourshard.flags.sources import read, read_document
from ourshard.integrations import switch
from ourshard.integrations.switch import ConfigError
from ourshard.trainer_callbacks import (
    ShardCheckpointCallback,
    ShardEMACallback,
    ShardMonitorCallback,
    ShardProfilerCallback,
    ShardSentinelCallback,
)
from torch import nn


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shard_size": 2.5}, "shard_size: expected a whole number, got 2.5"),
        ({"offload": "cpu"}, "offload: expected keys and values, got 'cpu'. Its keys: optimizer, params,"),
        ({"overlap_step": True}, r"'overlap_step' in the ourshard config\. Did you mean 'offload.overlap_step'\?"),
        ({"optimizer": "cpu"}, r"Did you mean 'offload.optimizer'\?"),
        ({"offload": {"keep_last": 4}}, r"'offload.keep_last' in the ourshard config\. Did you mean 'keep_last'\?"),
        ({"mixed_precision": "bf16"}, "'mixed_precision' .* It is Accelerate's: it stands beside ourshard_config"),
    ],
)
def test_a_wrong_value_of_the_config_is_named_with_what_can_be(values, message):
    with pytest.raises(ValueError, match=message):
        ShardConfig.from_dict(values)


def test_a_key_on_the_wrong_side_of_ourshard_config_is_named():
    with pytest.raises(ValueError, match="It is Accelerate's"):
        read("mixed_precision=bf16", "--set")
    with pytest.raises(ValueError, match=r"c.yaml: stage: it is a key of ourshard_config, and stands under it"):
        read_document({"distributed_type": "OURSHARD", "stage": 2}, "c.yaml")
    with pytest.raises(
        ValueError, match=r"c.yaml: ourshard: there is no such section. Did you mean 'ourshard_config'?"
    ):
        read_document({"distributed_type": "OURSHARD", "ourshard": {"stage": 2}}, "c.yaml")


@pytest.mark.parametrize(
    ("key", "refused", "listed"),
    [
        ("communication.gradients", "fp8", "none, int8, int4, auto"),
        ("communication.weights", "int4", "none, int8, fp8, auto"),
        ("offload.activations", "nvme", "none, cpu"),
    ],
)
def test_a_list_of_what_a_key_takes_has_nothing_that_it_refuses(key: str, refused: str, listed: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ValueError, match=f"{key}: 'fp16' is not one of {listed}\\."):
        ShardConfig.from_dict({section: {name: "fp16"}})
    with pytest.raises(ValueError, match=f"{key}: {refused} "):
        ShardConfig.from_dict({section: {name: refused}})


HEAD = "distributed_type: OURSHARD\nnum_processes: 2\n"
FILES = {
    "a tab": (f"{HEAD}ourshard_config:\n\tstage: 3\n", r"no config could be read: .*'\\t'.* at line 4, column 1"),
    "an anchor that is nowhere": (f"{HEAD}ourshard_config: *gone\n", "undefined alias 'gone' at line 3"),
    "a section in itself": (f"{HEAD}ourshard_config: &own\n  offload: *own\n", "a section holds itself, by an anchor"),
    "nothing for ourshard but a word": ("OURSHARD\n", "expected keys and values, got str"),
    "a list": ("- distributed_type: OURSHARD\n", "expected keys and values, got list"),
    "two documents": (f"{HEAD}---\n{HEAD}", "but found another document at line 3"),
    "a key twice": (f"{HEAD}num_processes: 3\n", r"'num_processes' is there twice \(lines 2 and 3\)"),
    "bytes of latin 1": (f"{HEAD}# caf\udce9\n", "'utf-8' codec can't decode byte 0xe9"),
    "a number in words": ("distributed_type: OURSHARD\nnum_processes: two\n", "num_processes: expected a whole number"),
    "too many levels": (
        f"{HEAD}ourshard_config: {{offload: {{optimizer: {{device: cpu}}}}}}\n",
        "ourshard_config: offload.optimizer: expected a value, got the key 'device' under it",
    ),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES.keys())
def test_a_file_that_cannot_be_read_is_named_in_one_line_by_the_launcher(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=f"c.yaml: .*{message}") as raised:
        config_args.load_config_from_file(str(path))
    assert "\n" not in str(raised.value)


def test_an_empty_file_is_named_where_ourshard_is_asked_for(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").touch()
    monkeypatch.setenv(switch.SWITCH, "true")
    with pytest.raises(ConfigError, match=r"c.yaml: expected keys and values, got nothing"):
        config_args.load_config_from_file(str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("said", ["OURSHRAD", "ourshard"])
def test_a_distributed_type_that_is_almost_ours_is_named(tmp_path: Path, said: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"distributed_type: {said}\nnum_processes: 2\n")
    with pytest.raises(ConfigError, match=f"distributed_type: {said} is not known. Did you mean OURSHARD?"):
        config_args.load_config_from_file(str(path))


def test_a_switch_that_says_neither_yes_nor_no_is_refused(monkeypatch):
    monkeypatch.setenv(switch.SWITCH, "ture")
    with pytest.raises(ValueError, match="ACCELERATE_USE_OURSHARD is 'ture' in the environment; write true or false"):
        switch.flag(switch.SWITCH)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ourshard.shard_model([nn.Linear(2, 2)]), "the model is a list; give one torch.nn.Module"),
        (
            lambda: ourshard.shard_model(nn.Linear(2, 2), "stage=2"),
            "config is 'stage=2'; give a ShardConfig, a mapping",
        ),
        (lambda: ourshard.shard_model(nn.Linear(2, 2), 3), "config is 3; give a ShardConfig"),
        (lambda: ourshard.gathered("lm_head").__enter__(), "gathered: 'l' is no parameter"),
        (lambda: ourshard.gathered(nn.Linear(2, 2).named_parameters()).__enter__(), "is no parameter; give a model"),
        (lambda: ShardMonitorCallback(peak_flops="989"), "peak_flops is '989'; give a number above 0"),
        (lambda: ShardCheckpointCallback(every_minutes="15"), "every_minutes is '15'; give a number above 0"),
        (lambda: ShardCheckpointCallback(every_minutes=float("nan")), "every_minutes is nan"),
        (lambda: ShardCheckpointCallback(keep=2.5), "keep is 2.5; give a whole number above 0"),
        (lambda: ShardProfilerCallback(wait="5"), "wait='5', .* whole numbers of steps"),
        (lambda: ShardSentinelCallback(every=1.5), "every=1.5, .* every and straggler_every are whole"),
        (lambda: ShardEMACallback(decay="0.99"), "decay is '0.99'; use a value between 0 and 1"),
        (lambda: ShardEMACallback(evaluate="no"), "evaluate is 'no'; use True or False"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

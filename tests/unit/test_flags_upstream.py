"""No key of Accelerate, transformers or DeepSpeed is forgotten: a new one fails here until it has a verdict.

DeepSpeed is not installed where the tests usually run; its keys are recorded.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from ourshard.config import config_keys
from ourshard.flags.deepspeed import DEEPSPEED
from ourshard.flags.fsdp import FSDP
from ourshard.flags.language import Flag, Language, Verdict
from ourshard.flags.parallelism import PARALLELISM
from ourshard.flags.result import RUN, RunSettings

from tests.commands import ROOT
from tests.unit import deepspeed_walk


def launch_arguments(title: str) -> list[str]:
    from accelerate.commands.launch import launch_command_parser

    groups = [group for group in launch_command_parser()._action_groups if group.title == title]
    assert groups, f"accelerate launch has no group {title!r} any more"
    return [action.dest for group in groups for action in group._group_actions]


@pytest.mark.parametrize(
    ("language", "title"),
    [
        (FSDP, "FSDP Arguments"),
        (DEEPSPEED, "DeepSpeed Arguments"),
        (PARALLELISM, "ParallelismConfig Arguments"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_launch_argument_has_a_verdict(language: Language, title: str) -> None:
    arguments = launch_arguments(title)
    assert len(arguments) >= 5
    for argument in arguments:
        language.find(argument)


def test_each_field_of_the_plugins_has_a_verdict() -> None:
    from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig

    plugins = ((FSDP, FullyShardedDataParallelPlugin), (DEEPSPEED, DeepSpeedPlugin), (PARALLELISM, ParallelismConfig))
    for language, plugin in plugins:
        for field in dataclasses.fields(plugin):
            if not field.name.startswith("_"):
                language.find(field.name)


def test_each_variable_that_accelerates_plugin_reads_has_a_verdict() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    source = inspect.getsource(FullyShardedDataParallelPlugin)
    names = set(re.findall(r'env_prefix \+ "([A-Z_]+)"', source)) | set(re.findall(r'"FSDP_([A-Z_]+)"', source))
    assert len(names) > 10
    for name in names:
        FSDP.find(name.lower())


def test_each_answer_of_accelerates_questionnaire_has_a_verdict() -> None:
    from accelerate.commands.config import cluster

    source = inspect.getsource(cluster)
    for section, language in (("fsdp_config", FSDP), ("deepspeed_config", DEEPSPEED)):
        keys = set(re.findall(rf'{section}\["([a-z0-9_]+)"\]', source))
        assert len(keys) > 8
        for key in keys:
            language.find(key)


def test_each_value_that_accelerate_offers_is_read() -> None:
    from accelerate.utils import constants

    for key, values in (
        ("sharding_strategy", constants.FSDP_SHARDING_STRATEGY),
        ("auto_wrap_policy", constants.FSDP_AUTO_WRAP_POLICY),
        ("backward_prefetch", constants.FSDP_BACKWARD_PREFETCH),
        ("state_dict_type", constants.FSDP2_STATE_DICT_TYPE),
    ):
        for value in values:
            FSDP.read({key: value}, "test")


def test_each_fsdp_key_of_the_trainer_has_a_verdict() -> None:
    from transformers import TrainingArguments

    documented = re.search(r"fsdp_config \(`str` or `dict`.*?> DeepSpeed", TrainingArguments.__doc__ or "", re.S)
    assert documented
    keys = set(re.findall(r"^\s+- ([a-z_0-9]+) \(`", documented.group(0), re.M))
    source = inspect.getsource(TrainingArguments)
    keys |= set(re.findall(r'(?<!xla_)fsdp_config(?:\.get\(|\.setdefault\(|\[)"([a-z_0-9]+)"', source))
    assert len(keys) > 14
    for key in keys:
        FSDP.find(key)


def test_each_key_that_the_trainer_fills_in_for_deepspeed_has_a_verdict() -> None:
    from transformers.integrations import deepspeed

    source = inspect.getsource(deepspeed.HfTrainerDeepSpeedConfig)
    keys = set(re.findall(r'fill_(?:match|only)\(\s*"([a-z0-9_.]+)"', source))
    assert len(keys) > 12
    for key in keys:
        DEEPSPEED.find(key)


# What DeepSpeed 0.19.8 reads, as `deepspeed_walk.py` found it; and what older versions and its documentation name, and
# its code looks up in ways that a walk does not see.
RECORDED = deepspeed_walk.RECORDED.read_text().split()
DOCUMENTED = (Path(__file__).parent / "deepspeed_documented.txt").read_text().split()


@pytest.mark.parametrize("keys", [RECORDED, DOCUMENTED], ids=["recorded", "documented"])
def test_each_key_of_deepspeed_has_a_verdict(keys: list[str]) -> None:
    assert len(keys) > 25
    for key in keys:
        assert DEEPSPEED.is_section(key) or DEEPSPEED.find(key).reason


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_the_record_of_deepspeeds_keys_is_what_the_installed_version_reads() -> None:
    new = set(deepspeed_walk.walk()) - set(RECORDED)
    assert not new, f"deepspeed_keys.txt lacks {sorted(new)}: python -m tests.unit.deepspeed_walk"


def test_targets_are_keys_that_exist() -> None:
    runs = {field.name for field in dataclasses.fields(RunSettings)}
    for flag in (*FSDP.flags, *PARALLELISM.flags, *DEEPSPEED.flags):
        if flag.verdict is Verdict.MAPPED:
            known = flag.target in config_keys() or flag.target.removeprefix(RUN).partition(".")[0] in runs
            assert known, flag.key


def test_mapped_keys_change_the_result_for_some_value() -> None:
    """A mapped key that sets nothing would be an option that is accepted and ignored."""
    for language in (FSDP, DEEPSPEED, PARALLELISM):
        for flag in language.flags:
            if flag.verdict is Verdict.MAPPED:
                assert any(
                    _says_something(language, flag, value, beside)
                    for value in _CANDIDATES
                    for beside in ({}, _BESIDE[language.name])
                ), flag.key


_CANDIDATES = (
    True,
    0,
    2,
    "cpu",
    "fp16",
    "AdamW",
    "FULL_SHARD",
    "BACKWARD_PRE",
    "FULL_STATE_DICT",
    "NO_WRAP",
    "/path",
    "sum",
)
_BESIDE: dict[str, dict[str, Any]] = {
    FSDP.name: {},
    PARALLELISM.name: {"dp_replicate_size": 2},
    DEEPSPEED.name: {
        "zero_optimization.offload_optimizer.device": "nvme",
        "zero_optimization.offload_param.device": "nvme",
        "torch_autocast.enabled": True,
    },
}


def _says_something(language: Language, flag: Flag, value: Any, beside: dict[str, Any]) -> bool:
    key = f"{flag.key}.lr" if flag.tree else flag.key
    others = {name: said for name, said in beside.items() if name != key}
    try:
        with_it = language.read({**others, key: value}, "test").said
    except ValueError:
        return False
    return with_it != language.read(others, "test").said


def test_the_page_of_flags_is_what_the_tables_say() -> None:
    spec = importlib.util.spec_from_file_location("generate_flags", ROOT / "docs" / "generate_flags.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = module.PAGE.read_text(encoding="utf-8")
    assert written == module.page(), "docs/flags.md is out of date: run `python docs/generate_flags.py`"
    for flag in (*FSDP.flags, *PARALLELISM.flags, *DEEPSPEED.flags):
        assert all(f"`{spelling}" in written for spelling in flag.spellings)

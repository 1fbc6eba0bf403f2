"""Config files that ask for ourshard: what the launcher makes of them, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import sys
import time
from argparse import Namespace
from pathlib import Path

import ourshard  # noqa: F401  # puts the hooks in place
import pytest
import torch
import yaml
from accelerate.commands.config import config_args
from ourshard.config import ShardConfig
from ourshard.flags.cli import app
from ourshard.integrations import launcher
from ourshard.integrations.plugin import ShardPlugin
from ourshard.integrations.switch import ACCUMULATION, BLOCKS, GRAD_SCALER, GRADIENT_CLIPPING, ConfigError
from typer.testing import CliRunner

from tests.commands import ROOT, clean_environment, free_port, launch, run_cli

WHO = """
import json, os
import torch.distributed as dist
from accelerate import Accelerator
accelerator = Accelerator()
names = ("RANK", "WORLD_SIZE", "OURSHARD_CONFIG", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
told = {name: os.environ.get(name) for name in names}
told |= {"processes": accelerator.num_processes, "type": accelerator.distributed_type.value}
told |= {"ours": getattr(accelerator, "is_ourshard", False), "backend": dist.get_backend()}
os.write(1, f"WHO{json.dumps(told)}\\n".encode())  # in one piece: the ranks share a pipe
"""


@pytest.fixture
def who(tmp_path: Path) -> Path:
    script = tmp_path / "who.py"
    script.write_text(WHO)
    return script


@pytest.fixture
def config_file(tmp_path: Path):
    """Write a YAML for two CPU processes with the given keys, and return its path."""

    def write(name: str = "config.yaml", **keys: object) -> Path:
        path = tmp_path / name
        values = {"distributed_type": "OURSHARD", "use_cpu": True, "num_processes": 2, **keys}
        path.write_text(json.dumps(values) if name.endswith("json") else yaml.safe_dump(values))
        return path

    return write


def workers(stdout: str) -> list[dict]:
    found = [json.loads(line.removeprefix("WHO")) for line in stdout.splitlines() if line.startswith("WHO")]
    return sorted(found, key=lambda told: int(told["RANK"]))


@pytest.mark.ranks
@pytest.mark.parametrize("processes", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 4))])
def test_use_cpu_runs_that_many_gloo_ranks(who, processes):
    told = workers(launch(who, processes=processes).stdout)
    assert [worker["processes"] for worker in told] == [processes] * processes
    assert {(worker["type"], worker["backend"], worker["ours"]) for worker in told} == {("MULTI_CPU", "gloo", True)}


@pytest.mark.ranks
def test_the_cpu_flag_starts_as_many_ranks_as_num_processes_says(who):
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--cpu", "--num_processes", "2"]
    told = workers(run_cli([*command, who], env={"ACCELERATE_USE_OURSHARD": "true"}).stdout)
    assert [(worker["processes"], worker["ours"]) for worker in told] == [(2, True), (2, True)]


@pytest.mark.slow  # test_recovery.py trains so
@pytest.mark.ranks
def test_torchrun_and_the_environment_are_enough(who):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", who]
    env = {"ACCELERATE_USE_OURSHARD": "1", "OURSHARD_CONFIG": '{"stage": 1}', "ACCELERATE_USE_CPU": "true"}
    assert [worker["ours"] for worker in workers(run_cli(command, env=env).stdout)] == [True, True]


@pytest.mark.parametrize("program", [["accelerate.commands.launch"], ["accelerate.commands.accelerate_cli", "launch"]])
def test_the_launcher_run_as_a_module_takes_deepspeeds_flags_over_by_the_switch(tmp_path, program):
    script = tmp_path / "told.py"
    script.write_text("import os; print(os.environ['OURSHARD_CONFIG'], os.environ.get('ACCELERATE_USE_DEEPSPEED'))")
    flags = ["--use_deepspeed", "--zero_stage", "1", "--num_processes", "1", "--num_machines", "1"]
    command = [sys.executable, "-m", *program, *flags, "--main_process_port", str(free_port()), script]
    assert run_cli(command, env={"ACCELERATE_USE_OURSHARD": "true"}).stdout == '{"stage": 1} None\n'


@pytest.mark.ranks
def test_the_launcher_run_as_a_module_takes_an_fsdp_file_over_by_the_switch(who, config_file):
    path = config_file(
        distributed_type="FSDP",
        fsdp_config={
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": False,
            "fsdp_offload_params": False,
            "fsdp_use_orig_params": True,
        },
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", path]
    command += ["--main_process_port", str(free_port()), who]
    result = run_cli(command, env={"ACCELERATE_USE_OURSHARD": "true"})
    assert result.stderr.count("fsdp_use_orig_params: no meaning here: Parameters always keep their identity") == 1
    told = workers(result.stdout)
    assert [(worker["processes"], worker["ours"], worker["ACCELERATE_USE_FSDP"]) for worker in told] == [
        (2, True, None)
    ] * 2
    config = ShardConfig.from_dict(json.loads(told[0]["OURSHARD_CONFIG"]))
    assert (config.stage, config.reshard_after_forward) == (3, False)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        pytest.param({"ourshard_config": {"stagee": 2}}, "Did you mean 'stage'?", marks=pytest.mark.slow),
        ({"ourshard_config": {"shard_size": 3}}, "shard_size: 3 does not divide the 2 processes"),
    ],
)
def test_a_bad_section_ends_the_launcher_with_one_line_before_any_process_starts(who, config_file, keys, line):
    result = launch(who, config=config_file(**keys), check=False)
    assert result.returncode == 1
    assert line in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert "WHO" not in result.stdout


def test_a_key_that_a_file_gives_twice_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: OURSHARD\nourshard_config:\n  stage: 2\n  stage: 3\n")
    with pytest.raises(ValueError, match=r"config.yaml: no config could be read: 'stage' is there twice"):
        config_args.load_config_from_file(str(path))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"ourshard_config": {"stage": 7}}, r"stage: 7 does not exist.*ourshard_config"),
        ({"ourshard_config": {"wrap": {"polcy": "auto"}}}, r"wrap\.policy"),
        ({"ourshard_config": "stage 3"}, "expected keys and values, got 'stage 3'"),
        ({"distributed_type": "XLA", "ourshard_config": {}}, "XLA cannot be sharded by ourshard"),
        ({"fsdp_config": {"fsdp_reshard": True}}, "Unknown FSDP key"),
        (
            {"mixed_precision": "bf16", "deepspeed_config": {"fp16": {"enabled": True}}},
            r"mixed_precision: .*config.yaml gives 'bf16', but .*fp16.enabled=True gives 'fp16'",
        ),
        (
            {"ourshard_config": {"stage": 1}, "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}},
            "Neither overrides",
        ),
    ],
)
def test_a_bad_section_is_a_value_error_of_one_line_to_callers(config_file, keys, line):
    with pytest.raises(ValueError, match=line) as caught:
        config_args.load_config_from_file(str(config_file(**keys)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("own", [None, "no", False, "bf16"])
def test_the_bf16_block_of_a_deepspeed_file_decides_where_the_config_does_not(config_file, own):
    """`accelerate config` writes `mixed_precision: 'no'` beside it."""
    keys = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"hf_ds_config": {"bf16": {"enabled": True}}}}
    path = config_file(**keys, ourshard_config={}, mixed_precision=own)
    assert config_args.load_config_from_file(str(path)).mixed_precision == "bf16"


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
@pytest.mark.parametrize("keys", [{}, {"ourshard_config": {"stage": 2, "wrap": {"classes": ["Block"]}}}])
def test_reading_and_writing_a_config_keeps_its_words(config_file, name, keys):
    path = config_file(name, **keys)
    before = yaml.safe_load(path.read_text())
    config = config_args.load_config_from_file(str(path))
    assert config.distributed_type.value == "MULTI_GPU"
    write = config.to_json_file if name.endswith("json") else config.to_yaml_file
    write(str(path))
    after = yaml.safe_load(path.read_text())
    assert {key: after.get(key) for key in before} == before
    assert ("ourshard_config" in after) == ("ourshard_config" in before)


def test_a_file_without_ourshard_is_read_as_ever(config_file):
    config = config_args.load_config_from_file(
        str(config_file(distributed_type="MULTI_GPU", fsdp_config={"fsdp_version": 2}))
    )
    assert config.ourshard_config is None
    assert "ourshard_config" not in config.to_dict()


@pytest.mark.slow
def test_accelerate_env_and_config_update_take_our_file(config_file):
    path = config_file(ourshard_config={"stage": 2})
    accelerate = Path(sys.executable).with_name("accelerate")
    shown = run_cli([accelerate, "env", "--config_file", path]).stdout
    assert "distributed_type: OURSHARD" in shown
    assert "ourshard_config: {'stage': 2}" in shown
    run_cli([accelerate, "config", "update", "--config_file", path])
    assert yaml.safe_load(path.read_text())["ourshard_config"] == {"stage": 2}


def take_defaults(command: list[str]) -> str:
    """Run a command on a terminal and press return whenever it is silent; return what it printed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, {**clean_environment(), "TERM": "xterm"})
    said, end = b"", time.monotonic() + 100
    with contextlib.suppress(OSError):  # the terminal is gone once the command has ended
        while time.monotonic() < end:
            if select.select([terminal], [], [], 1.0)[0]:
                said += os.read(terminal, 4096)
            else:
                os.write(terminal, b"\r")
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, said
    return said.decode(errors="replace")


@pytest.mark.slow
def test_the_questions_of_accelerate_config_are_asked_as_ever(tmp_path):
    path = tmp_path / "answers.yaml"
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    assert "configuration saved" in take_defaults([accelerate, "config", "--config_file", str(path)])
    assert yaml.safe_load(path.read_text())["distributed_type"] == "NO"
    assert "ourshard" not in path.read_text()


def arguments(**changes: object) -> Namespace:
    """The arguments of `accelerate launch` that our half reads."""
    values = {"use_fsdp": False, "use_deepspeed": False, "cpu": False, "use_cpu": True, "num_processes": 2}
    values |= {"ourshard_config": None, "nondefault": set()}
    return Namespace(**{**values, **changes})


def test_a_launch_without_ourshard_gets_no_variable_of_ours(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_OURSHARD", raising=False)
    assert launcher.prepare_multi_gpu_env(lambda args: {"A": "1"}, arguments()) == {"A": "1"}


@pytest.mark.parametrize(
    ("restarts", "backend", "standalone"), [(0, "static", None), (2, "static", True), (2, "c10d", None)]
)
def test_ranks_that_may_be_started_anew_get_a_store_for_each_start(monkeypatch, restarts, backend, standalone):
    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    args = arguments(max_restarts=restarts, rdzv_backend=backend, num_machines=1)
    launcher.prepare_multi_gpu_env(lambda args: {}, args)
    assert getattr(args, "standalone", None) == standalone


def test_restarts_over_a_static_rendezvous_of_several_machines_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    args = arguments(max_restarts=1, rdzv_backend="static", num_machines=2)
    with pytest.raises(ValueError, match="max_restarts: 1 needs rdzv_backend: c10d"):
        launcher.prepare_multi_gpu_env(lambda args: {}, args)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU here")
def test_a_config_for_gpus_on_a_machine_without_any_is_warned_of(monkeypatch, caplog, on_cpu):
    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    launcher.prepare_multi_gpu_env(lambda args: {}, arguments(use_cpu=on_cpu, cpu=False))
    assert ("use_cpu is false and this machine has no GPU" in caplog.text) is not on_cpu


def test_a_launch_of_no_rank_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    with pytest.raises(ConfigError, match="num_processes: 0 starts no rank"):
        launcher.prepare_multi_gpu_env(lambda args: {}, arguments(num_processes=0))


def test_fsdp_flags_count_as_given_and_not_with_their_defaults(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    monkeypatch.delenv("OURSHARD_CONFIG", raising=False)
    args = arguments(
        use_fsdp=True,
        fsdp_reshard_after_forward="false",
        fsdp_sharding_strategy="FULL_SHARD",  # a default that argparse filled in
        nondefault={"use_fsdp", "fsdp_reshard_after_forward"},
    )
    env = launcher.prepare_multi_gpu_env(lambda args: {"ACCELERATE_USE_FSDP": "true"}, args)
    assert "ACCELERATE_USE_FSDP" not in env
    assert json.loads(env["OURSHARD_CONFIG"]) == {"stage": 3, "reshard_after_forward": False}


def test_deepspeeds_flags_and_the_file_they_name_count_where_ourshard_takes_over(monkeypatch, tmp_path):
    from accelerate.commands import launch as command

    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    monkeypatch.delenv("OURSHARD_CONFIG", raising=False)
    monkeypatch.setattr(command, "default_config_file", str(tmp_path / "none.yaml"))
    started: list[dict] = []
    monkeypatch.setattr(command, "multi_gpu_launcher", lambda args: started.append(command.prepare_multi_gpu_env(args)))
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))

    def told(*flags: str) -> dict:
        words = ["--use_deepspeed", "--num_processes", "2", "--num_machines", "1", *flags, "train.py"]
        command.launch_command(command.launch_command_parser().parse_args(words))
        return started[-1]

    env = told("--deepspeed_config_file", str(path), "--gradient_clipping", "0.5")
    assert json.loads(env["OURSHARD_CONFIG"]) == {"stage": 3}
    assert (env["ACCELERATE_MIXED_PRECISION"], env[GRADIENT_CLIPPING]) == ("bf16", "0.5")
    assert json.loads(told("--offload_optimizer_device", "cpu")["OURSHARD_CONFIG"]) == {
        "stage": 2,  # accelerate's default
        "offload": {"optimizer": "cpu"},
    }
    for flags, message in (
        (("--deepspeed_config_file", str(path), "--mixed_precision", "fp16"), "--mixed_precision gives 'fp16', but"),
        (("--deepspeed_config_file", str(path), "--zero_stage", "2"), "zero_stage=2 gives 2, but .*ds.json.* gives 3"),
        (("--fsdp_version", "2"), "--fsdp_version is FSDP's and would do nothing here"),
    ):
        with pytest.raises(ConfigError, match=message):
            told(*flags)


def test_flags_that_accelerate_keeps_for_deepspeed_count_or_are_refused(monkeypatch):
    from transformers import TrainingArguments

    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    monkeypatch.delenv("OURSHARD_CONFIG", raising=False)
    given = {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    env = launcher.prepare_multi_gpu_env(lambda args: {}, arguments(**given, nondefault=set(given)))
    assert (env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"], env[GRADIENT_CLIPPING]) == ("4", "0.5")
    monkeypatch.setenv(ACCUMULATION, env[ACCUMULATION])  # the Trainer goes by its own arguments alone
    TrainingArguments(gradient_accumulation_steps=4, use_cpu=True)
    with pytest.raises(ValueError, match=r"accelerate launch was given 4, .* but the training arguments say 2"):
        TrainingArguments(gradient_accumulation_steps=2, use_cpu=True)
    for name, engine in (("zero_stage", "DeepSpeed's"), ("fsdp_offload_params", "FSDP's")):
        with pytest.raises(ConfigError, match=f"--{name} is {engine} and would do nothing here"):
            launcher.prepare_multi_gpu_env(lambda args: {}, arguments(**{name: "2"}, nondefault={name}))


@pytest.mark.parametrize(
    ("keys", "variable"),
    [
        ({"distributed_type": "OURSHARD"}, None),
        ({"distributed_type": "FSDP", "ourshard_config": {}}, None),
        ({"distributed_type": "FSDP"}, "true"),
    ],
)
def test_each_switch_runs_a_file_of_fsdp_with_its_section_as_it_was(monkeypatch, config_file, keys, variable):
    monkeypatch.delenv("OURSHARD_CONFIG", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_OURSHARD", raising=False)
    if variable:
        monkeypatch.setenv("ACCELERATE_USE_OURSHARD", variable)
    path = config_file(**keys, fsdp_config={"fsdp_version": 2, "fsdp_reshard_after_forward": False})
    config = config_args.load_config_from_file(str(path))
    env = launcher.prepare_multi_gpu_env(lambda args: {}, arguments(ourshard_config=config.ourshard_config))
    assert env["ACCELERATE_USE_OURSHARD"] == "true"
    assert json.loads(env["OURSHARD_CONFIG"]) == {"stage": 3, "reshard_after_forward": False}


def test_a_deepspeed_file_hands_over_what_its_engine_would_have_done(monkeypatch, config_file):
    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    monkeypatch.delenv("OURSHARD_CONFIG", raising=False)
    deepspeed = {"zero_stage": 2, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "zero3_init_flag": False}
    path = config_file(distributed_type="DEEPSPEED", deepspeed_config=deepspeed)
    config = config_args.load_config_from_file(str(path))
    env = launcher.prepare_multi_gpu_env(lambda args: {}, arguments(ourshard_config=config.ourshard_config))
    assert json.loads(env["OURSHARD_CONFIG"])["stage"] == 2
    assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert env["OURSHARD_GRADIENT_CLIPPING"] == "0.5"
    assert config.to_dict()["distributed_type"] == "DEEPSPEED"


def test_a_deepspeed_file_hands_over_its_blocks_as_written_and_its_loss_scale(monkeypatch, config_file, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_OURSHARD", "true")
    monkeypatch.delenv("OURSHARD_CONFIG", raising=False)
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    scale = {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500}
    written = tmp_path / "ds.json"
    written.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": scale, "optimizer": optimizer}))
    path = config_file(distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": str(written)})
    section = config_args.load_config_from_file(str(path)).ourshard_config
    flags = {"use_deepspeed": True, "deepspeed_config_file": str(written), "nondefault": {"deepspeed_config_file"}}
    for given in ({"ourshard_config": section}, flags):
        env = launcher.prepare_multi_gpu_env(lambda args: {}, arguments(**given))
        assert json.loads(env[BLOCKS]) == {"optimizer": optimizer}
        assert json.loads(env[GRAD_SCALER]) == {"init_scale": 4096.0, "growth_interval": 500}


@pytest.mark.parametrize(("name", "value"), [("OURSHARD_CONFIG", '{"stage": 3}'), ("OURSHARD_STAGE", "3")])
def test_h02_a_file_and_the_environment_that_disagree_are_refused_by_name(monkeypatch, config_file, name, value):
    path = config_file(ourshard_config={"stage": 2})
    config = config_args.load_config_from_file(str(path))
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{path}: ourshard_config gives 2, but {name} gives 3"):
        launcher.prepare_multi_gpu_env(lambda args: {}, arguments(ourshard_config=config.ourshard_config))


def test_h02_a_worker_names_the_file_that_its_launcher_read(monkeypatch, config_file):
    path = config_file(ourshard_config={"stage": 2})
    section = config_args.load_config_from_file(str(path)).ourshard_config
    monkeypatch.setenv("OURSHARD_PREFETCH_FORWARD", "2")
    for name, value in launcher.prepare_multi_gpu_env(lambda args: {}, arguments(ourshard_config=section)).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"the ShardPlugin gives 3, but {path}: ourshard_config gives 2"):
        ShardPlugin({"stage": 3, "prefetch": {"forward": 2}}).check_environment()
    assert ShardPlugin().config == ShardConfig.from_dict({"stage": 2, "prefetch": {"forward": 2}})
    shown = CliRunner().invoke(app, ["show", "--json"], env={"RANK": "0"})
    config = json.loads(shown.stdout)["config"]
    assert config["stage"] == {"value": 2, "from": f"{path}: ourshard_config"}
    assert config["prefetch.forward"] == {"value": 2, "from": "OURSHARD_PREFETCH_FORWARD"}


def test_the_shipped_config_is_read_and_every_line_has_a_comment():
    path = ROOT / "accelerate_configs" / "ourshard.yaml"
    section = config_args.load_config_from_file(str(path)).ourshard_config
    assert section.result.config == ShardConfig(stage=3)
    assert [line for line in path.read_text().splitlines() if line.strip() and "#" not in line] == []

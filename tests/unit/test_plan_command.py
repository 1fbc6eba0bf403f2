"""`ourshard plan` as a command: what it prints, draws and writes, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from ourshard.flags.files import load
from ourshard.flags.sources import read_document
from ourshard.planning.cli import app
from ourshard.planning.quantities import parse_rate, parse_size, parse_time
from typer import BadParameter
from typer.testing import CliRunner


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_the_command_prints_a_table_a_picture_and_a_config_that_is_read_back(llama: Path, tmp_path: Path) -> None:
    output, picture, curve = tmp_path / "plan.yaml", tmp_path / "memory.png", tmp_path / "curve.png"
    arguments = [str(llama), "--gpus", "16", "--nodes", "2", "--length", "32", "-o", str(output)]
    result = CliRunner().invoke(app, [*arguments, "--plot", str(picture), "--scaling", str(curve)])
    assert result.exit_code == 0, result.output
    assert "* the cheapest that fits: " in result.output
    assert "MiB" in result.output.splitlines()[1]  # of so small a model GiB would all be 0.0
    assert picture.read_bytes()[:4] == curve.read_bytes()[:4] == b"\x89PNG"
    values = load(output)
    assert (values["distributed_type"], values["num_processes"], values["num_machines"]) == ("OURSHARD", 16, 2)
    assert "--main_process_ip" in result.output  # which a plan can't know
    chosen = result.output.partition("cheapest that fits: ")[2].splitlines()[0]
    assert f"stage {read_document(values, 'plan').config.stage}" in chosen


def test_where_nothing_fits_the_host_is_tried(llama: Path, tmp_path: Path) -> None:
    output, workload = tmp_path / "plan.yaml", [str(llama), "--gpus", "1", "--length", "8", "--with", "hidden_size=512"]
    plan, every = (json.loads(CliRunner().invoke(app, [*workload, "--json", *more]).stdout) for more in ([], ["--all"]))
    least = min(row["memory"]["peak"] for row in plan["rows"])
    assert every["rows"][: len(plan["rows"])] == plan["rows"]
    assert {row["config"]["offload"]["optimizer"] for row in every["rows"]} == {"none", "cpu"}
    arguments = [*workload, "--memory", str(0.9 * least / 2**30), "-o", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "MiB of memory on the host of each node" in result.output
    assert read_document(load(output), "plan").config.offload.optimizer.value == "cpu"
    more = ["--overwrite", "--set", "offload.optimizer=cpu,offload.params=cpu"]
    fixed = CliRunner().invoke(app, [*arguments, *more])
    assert fixed.exit_code == 0, fixed.output
    assert "stage 1" not in fixed.output  # nothing is added to what was asked for
    assert read_document(load(output), "plan").config.offload.params.value == "cpu"  # where the first was written


def test_all_ways_are_compared_where_that_is_asked(llama: Path) -> None:
    arguments = [str(llama), "--gpus", "4", "--length", "8", "--json", "--with", "num_hidden_layers=1"]
    more = ([], ["--all"], ["--all", "--set", "offload.nvme_path=/data"])
    told = [json.loads(CliRunner().invoke(app, [*arguments, *each]).stdout)["rows"] for each in more]
    sizes = [{row["config"]["shard_size"] for row in rows} for rows in told]
    places = [{row["config"]["offload"]["optimizer"] for row in rows} for rows in told]
    assert sizes == [{None}, {None, 2}, {None, 2}]
    assert places == [{"none"}, {"none", "cpu"}, {"none", "cpu", "nvme"}]


def test_the_command_prints_json_and_fails_where_nothing_fits(llama: Path) -> None:
    arguments = [str(llama), "--length", "32", "--json", "--with", "num_hidden_layers=2"]
    values = json.loads(CliRunner().invoke(app, arguments).stdout)
    row = values["rows"][0]
    assert row["memory"]["peak"] >= row["memory"]["at_rest"] > 0
    assert row["seconds"]["best"] <= row["seconds"]["step"] * 1.001 <= row["seconds"]["worst"] * 1.002
    assert math.isclose(row["tokens_per_second"], 8 * 32 / row["seconds"]["step"])
    result = CliRunner().invoke(app, [str(llama), "--memory", "0.001", "--length", "32"])
    assert result.exit_code == 1
    assert "None fits" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h10"], "Did you mean 'h100'"),
        (["--memory", "inf"], "'--memory': 'inf' is not a number above 0 of GiB"),
        (["--kernel-start", "0us"], "'--kernel-start': '0us' is not a number above 0 of us"),
        (["--with", "num_hidden_layer=2"], "no 'num_hidden_layer'. Did you mean 'num_hidden_layers'?"),
        (["--with", "model_type=lama"], "has no model_type 'lama'. Did you mean 'llama'?"),
        (["--set", "stage=2,reshard_after_forward=false"], "none of the configurations"),
        (["--gpus", "1", "--length", "8", "-o", "config.json/plan.yaml"], "File exists"),
        (["--plot", "memory.jpgg"], "--plot: memory.jpgg has none of the endings"),
        (["-o", "plan.json"], "plan.json: what is written is YAML, with a comment on each line"),
        (["-o", "config.json"], "config.json is already there; give another name, or --overwrite."),
    ],
)
def test_a_plan_that_can_not_be_made_ends_with_2_and_says_why(
    llama: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(llama)
    result = CliRunner().invoke(app, [str(llama), *arguments])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_size, "80", 80.0),
        (parse_size, "80GiB", 80.0),
        (parse_size, "512 MiB", 0.5),
        (parse_size, "85.899345920GB", 80.0),
        (parse_rate, "50", 50.0),
        (parse_rate, "400Gbit/s", 50.0),
        (parse_rate, "400Gb/s", 50.0),
        (parse_time, "3e1us", 30.0),
    ],
)
def test_a_quantity_may_carry_its_unit(parse: Any, text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "many", "80 apples", "1.2.3", "nan", "0", "-1", "1e999", "GiB"])
def test_a_quantity_in_another_unit_is_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(
        BadParameter, match=r"is not a number above 0 of GiB, alone or with one of GiB, MiB, TiB, GB, MB"
    ):
        parse_size(text)

"""`ourshard convert`, `inspect` and `verify`, as a user runs them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard import cli
from ourshard.checkpoint.inspection import inspect
from ourshard.checkpoint.source import BUFFER, PARAM, TensorKey, detect
from ourshard.checkpoint.verification import check_config, verify
from safetensors.torch import load_file, save_file

from tests.checkpoint.making import FIXTURES, State, make_state, save
from tests.checkpoint.truth import needs_fixtures

HF = FIXTURES / "hf_single_llama_fp32"


def run(*arguments: object) -> int:
    """Run the command line in this process; return its exit code."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(argument) for argument in arguments])
    code = stopped.value.code
    return code if isinstance(code, int) else int(code is not None)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save(tmp_path / "ours", make_state(), 3)
    return tmp_path / "ours"


def test_help_lists_the_commands_and_loads_neither_torch_nor_a_command() -> None:
    program = "import sys; from ourshard import cli\ntry: cli.main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.endswith("False\n")
    for name in cli.COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", ["convert", "inspect", "verify"])
def test_help_of_a_command_has_examples_and_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, "--help") == 0
    shown = capsys.readouterr().out
    assert f"ourshard {name} " in shown
    assert "Exit codes" in shown


def test_every_writer_is_named_in_the_help_of_convert(capsys: pytest.CaptureFixture[str]) -> None:
    from ourshard.checkpoint.registry import writer_names

    run("convert", "--help")
    shown = capsys.readouterr().out
    for name in writer_names():
        assert name in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["convert", "{ours}", "{tmp}/out", "--to", "safetensors"], 0, "Not in the result"),
        (["convert", "{ours}", "{tmp}/out", "--to", "safetensors", "--dry-run"], 0, "would hold"),
        (["convert", "{ours}", "{tmp}/out", "--to", "gguf"], 2, "known: "),
        (["convert", "{ours}", "{ours}", "--to", "torch"], 2, "in place"),
        (["convert", "{tmp}/nothing", "{tmp}/out", "--to", "torch"], 2, "does not exist"),
        (["convert", "{ours}", "{tmp}/out", "--to", "torch", "--tie", "a"], 2, "ALIAS=OWNER"),
        (["convert", "{ours}", "{tmp}/out"], 2, "--to"),
        (["convert", "{bad}", "{tmp}/out", "--to", "torch"], 1, "is cut off"),
        (["inspect", "{ours}"], 0, "embed.weight"),
        (["inspect", "{ours}", "--no-tensors"], 0, "world size"),
        (["inspect", "{tmp}/nothing"], 2, "does not exist"),
        (["inspect", "{bad}"], 1, "embed.weight"),
        (["verify", "{ours}"], 0, "no faults"),
        (["verify", "{bad}"], 1, "is cut off"),
        (["verify", "{ours}", "--against", "{ours}"], 0, "compared"),
        (["verify", "{ours}", "--against", "{other}"], 1, "differ, by up to"),
        (["verify", "{ours}", "--against", "{other}", "--tolerance", "100"], 0, "no faults"),
        (["verify", "{ours}", "--tolerance", "-1"], 2, "0 or more"),
        (["verify", "{ours}", "--against", "{ours}", "--tolerance", "nan"], 2, "0 or more"),  # nothing differs by more
        (["verify", "{ours}", "--against-model", "1"], 2, "--against, which is not given"),
        (["nonsense"], 2, "No such command"),
        (["--version"], 0, "ourshard "),
    ],
)
def test_exit_codes_and_messages(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, arguments: list[str], code: int, message: str
) -> None:
    save(tmp_path / "other", make_state(1), 1)
    save(tmp_path / "bad", make_state(), 1)
    shard = next((tmp_path / "bad").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    places = {"ours": ours, "tmp": tmp_path, "bad": tmp_path / "bad", "other": tmp_path / "other"}
    assert run(*[argument.format(**places) for argument in arguments]) == code
    shown = capsys.readouterr()
    assert message in shown.out + shown.err
    assert "Traceback" not in shown.err


def test_inspect_says_what_is_there_and_reads_no_tensor(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shard in ours.rglob("*.safetensors"):
        data = shard.read_bytes()
        shard.write_bytes(b"\xff" * len(data))  # a read would be refused or nonsense
    assert run("inspect", ours, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["world_size"], found["stage"], found["step"]) == ("ourshard", 3, 3, 3)
    assert found["ties"] == {"head.tied": "embed.weight"}
    assert found["frozen"] == ["block.empty"]
    assert found["own_dtypes"] == {"bfloat16": 1}
    assert [group["params"] for group in found["param_groups"]] == [2, 4]
    assert set(found["also"]) == {"scheduler", "scaler", "client_state"}
    kinds = {kind["kind"]: kind["tensors"] for kind in found["kinds"]}
    assert kinds == {"param": 7, "buffer": 3, "exp_avg": 6, "exp_avg_sq": 6, "step": 6}
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows["embed.weight"]["shape"] == [37, 5]
    assert set(rows["embed.weight"]["state"]) == {"exp_avg", "exp_avg_sq", "step"}
    assert rows["embed.weight"]["shards"] >= 1


def test_inspect_counts_bytes_and_elements(ours: Path) -> None:
    with detect(ours) as source:
        found = inspect(source)
    state = make_state()
    params = [tensor for key, tensor in state.items() if key.kind == PARAM]
    kind = next(kind for kind in found.kinds if kind.kind == PARAM)
    assert kind.numel == sum(tensor.numel() for tensor in params)
    assert kind.nbytes == sum(tensor.nbytes for tensor in params)
    assert found.bytes_on_disk == sum(path.stat().st_size for path in ours.rglob("*") if path.is_file())


def changed(state: State, key: TensorKey, index: int, value: float) -> State:
    tensor = state[key].clone()
    tensor.view(-1)[index] = value
    return {**state, key: tensor}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", [PARAM, "exp_avg_sq"])
def test_nan_and_infinity_are_counted_by_tensor(tmp_path: Path, kind: str, value: float) -> None:
    key = TensorKey(kind, "embed.weight")
    save(tmp_path / "c", changed(make_state(), key, 7, value), 2)
    with detect(tmp_path / "c") as source:
        found = verify(source)
        assert [finding.subject for finding in found.findings if finding.ok is False] == [str(key)]
        assert ("1 NaN, 0 infinite" if value != value else "0 NaN, 1 infinite") in found.findings[-1].text  # noqa: PLR0124
        assert verify(source, values=False).ok


def test_a_comparison_names_each_tensor_that_differs_is_missing_or_has_another_shape(tmp_path: Path) -> None:
    state = make_state()
    key = TensorKey("exp_avg", "embed.weight")
    save(tmp_path / "a", state, 2)
    other = changed(state, key, 3, state[key].view(-1)[3].item() + 0.5)
    del other[TensorKey(PARAM, "block.gain")]
    other[TensorKey(PARAM, "block.new")] = torch.zeros(3)
    other[TensorKey(PARAM, "block.norm.weight")] = torch.zeros(6)
    other[TensorKey(PARAM, "head.weight")] = state[TensorKey(PARAM, "head.weight")].double()
    save(tmp_path / "b", other, 3)
    with detect(tmp_path / "a") as one, detect(tmp_path / "b") as two:
        found = {finding.subject: finding.text for finding in verify(one, against=two).findings if finding.ok is False}
        assert found.keys() == {
            "embed.weight (exp_avg)", "block.gain", "block.new", "block.norm.weight", "head.weight",
        }  # fmt: skip
        assert "1 of 185 differ, by up to 0.5" in found["embed.weight (exp_avg)"]
        assert f"is in {tmp_path / 'a'} only" in found["block.gain"]
        assert "shape (5,), in the other (6,)" in found["block.norm.weight"]
        assert "give a tolerance" in found["head.weight"]
        assert verify(one, against=one).ok
        loose = {f.subject for f in verify(one, against=two, tolerance=0.6).findings if f.ok is False}
        assert loose == {"block.gain", "block.new", "block.norm.weight"}


def test_a_comparison_at_tolerance_zero_sees_a_sign_of_zero(tmp_path: Path) -> None:
    key = TensorKey(PARAM, "w")
    save(tmp_path / "a", {key: torch.tensor([0.0, 1.0])}, 1)
    save(tmp_path / "b", {key: torch.tensor([-0.0, 1.0])}, 1)
    with detect(tmp_path / "a") as one, detect(tmp_path / "b") as two:
        assert not verify(one, against=two).ok
        assert verify(one, against=two, tolerance=1e-9).ok


def test_formats_that_lack_kinds_are_compared_in_what_they_share(ours: Path, tmp_path: Path) -> None:
    run("convert", ours, tmp_path / "hf", "--to", "safetensors", "--quiet")
    with detect(tmp_path / "hf") as one, detect(ours) as two:
        found = verify(one, against=two, config=False)
    assert found.ok
    assert found.compared == sum(key.kind in (PARAM, BUFFER) for key in make_state())
    assert {finding.subject for finding in found.findings} == {"exp_avg", "exp_avg_sq", "step"}


@needs_fixtures
def test_shapes_are_compared_with_the_model_that_config_names(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with detect(HF) as source:
        assert check_config(source) == []
    tensors = load_file(HF / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(10)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.extra"] = torch.zeros(1)
    (tmp_path / "bad").mkdir()
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    (tmp_path / "bad" / "config.json").write_bytes((HF / "config.json").read_bytes())
    with detect(tmp_path / "bad") as source:
        found = {finding.subject: finding for finding in check_config(source)}
    assert found["model.norm.weight"].ok is False
    assert "config.json means (9,)" in found["model.norm.weight"].text
    assert found["model.layers.1.mlp.up_proj.weight"].ok is False
    assert found["model.layers.2.extra"].ok is None
    assert len(found) == 3


def test_a_config_that_no_installed_class_fits_is_a_note(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    for config in ({"architectures": ["Strange"]}, {}, {"architectures": ["os"]}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with detect(tmp_path) as source:
            findings: Any = check_config(source)
        assert [finding.ok for finding in findings] == [None]


def test_verify_as_json_names_the_file(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = next((ours / "optimizer" / "exp_avg").glob("shard-00002*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert run("verify", ours, "--json", "--no-config") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert [finding["subject"] for finding in found["findings"]] == [f"optimizer/exp_avg/{shard.name}"]


def test_ctrl_c_stops_a_conversion_within_seconds_and_the_same_command_goes_on(tmp_path: Path) -> None:
    tensors = {f"layer.{index}": torch.full((1 << 16,), float(index)) for index in range(32)}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    command = [
        "convert",
        str(tmp_path / "in"),
        str(tmp_path / "out"),
        "--to",
        "safetensors",
        "--max-shard-size",
        "300KB",
    ]
    blocked = textwrap.dedent(
        """
        import itertools, os, signal, sys, threading
        from ourshard import cli
        from ourshard.checkpoint.huggingface import SafetensorsSource
        came, reads, read = threading.Event(), itertools.count(1), SafetensorsSource.read_run_into
        def interrupt(*_):
            came.set()
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, interrupt)  # a shell's background job would ignore it
        def reading(self, *arguments):
            if next(reads) > 6:  # what is begun before the signal ends after it, however slow the machine
                os.write(1, b"wait\\n")
                came.wait()
            return read(self, *arguments)
        SafetensorsSource.read_run_into = reading
        cli.main(sys.argv[1:])
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", blocked, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "wait\n"
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped" in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "out").exists()
    finished = {path.name for path in (tmp_path / ".out.converting").glob("*.safetensors")}
    assert 1 <= len(finished) < 32
    assert run(*command, "--quiet") == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 32
    assert not list(tmp_path.glob(".out*"))


def test_a_folder_above_checkpoints_names_them_the_newest_first(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    above = ours.parent / "run"
    for number in (9, 10, 100):
        shutil.copytree(ours, above / f"checkpoint-{number}")
    shutil.rmtree(ours)
    (above / "runs").mkdir()
    assert run("inspect", above) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert told.endswith("run is no checkpoint, but holds some; name one of them: "
                         "checkpoint-100, checkpoint-10, checkpoint-9.")  # fmt: skip
    assert run("inspect", above.parent) == 1  # as accelerate's `checkpoints/checkpoint_0` from the project
    assert "name one of them: run/checkpoint-100, run/checkpoint-10" in capsys.readouterr().err


def test_so_many_ranks_that_their_files_are_next_to_empty_are_refused(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("convert", ours, tmp_path / "new", "--to", "ourshard", "--world-size", 99_999, "--dry-run") == 2
    assert "world_size is 99999: each of so many ranks would get" in capsys.readouterr().err
    assert run("convert", ours, tmp_path / "new", "--to", "ourshard", "--world-size", 1024, "--dry-run") == 0


def test_inspect_shows_what_a_checkpoint_with_a_missing_file_holds_and_fails(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", ours) == 0
    next(ours.glob("*00002*.safetensors")).unlink()
    capsys.readouterr()
    assert run("inspect", ours, "--no-tensors") == 1
    shown = capsys.readouterr().out
    assert "Damaged:" in shown
    assert "safetensors is missing" in shown
    assert "exp_avg" in shown

"""Conversions: what is chosen, what is refused, that they go on after a stop, and that memory stays in its bounds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from ourshard.checkpoint import conversion
from ourshard.checkpoint.conversion import convert, parse_size
from ourshard.checkpoint.registry import writer_names
from ourshard.checkpoint.sharded import ShardedSource
from ourshard.checkpoint.source import BUFFER, PARAM, CheckpointError, TensorKey, detect
from safetensors.torch import load_file, save_file

from tests.checkpoint.crashing import CrashIO, Killed
from tests.checkpoint.making import FIXTURES, assert_holds, assert_same, describe, make_state, save
from tests.checkpoint.truth import needs_fixtures


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save(tmp_path / "ours", make_state(), 3)
    return tmp_path / "ours"


@pytest.mark.parametrize("world_size", [None, 1, 2, 5])
def test_our_format_is_cut_anew_for_any_world_with_all_that_it_holds(
    ours: Path, tmp_path: Path, world_size: Any
) -> None:
    report = convert(ours, tmp_path / "out", to="ourshard", world_size=world_size)
    assert report.losses == ()
    with detect(tmp_path / "out") as source:
        assert_holds(source, make_state())
        assert [problem for _, problem in source.verify_files() if problem] == []
        for name in ("param_groups", "param_state", "ties", "frozen", "own_dtypes", "scheduler", "scaler", "step"):
            assert getattr(source.description, name) == getattr(describe(3), name), name
        assert source.description.world_size == world_size or world_size is None
        assert bool(source.rank_state(0)) == (world_size is None), "random states belong to ranks of the same world"
        assert "config.json" in source.description.files


def test_state_is_cut_where_its_parameter_is(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "out", to="ourshard", world_size=4)
    with ShardedSource(tmp_path / "out") as source:
        for key in source.keys_of("exp_avg"):
            if not source.tensors[key].shape:
                continue  # a number: it is in the manifest
            cuts = [
                [(piece.start, piece.stop) for piece in source._pieces[k]] for k in (key, TensorKey(PARAM, key.name))
            ]
            assert cuts[0] == cuts[1]


def test_weights_only_leaves_training_out(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "out", to="ourshard", weights_only=True)
    with detect(tmp_path / "out") as source:
        assert {key.kind for key in source.tensors} == {PARAM, BUFFER}
        assert source.description.param_groups == ()
        assert source.description.scheduler is None


def test_what_the_format_cannot_hold_is_said_before_and_after(ours: Path, tmp_path: Path) -> None:
    dry = convert(ours, tmp_path / "out", to="safetensors", dry_run=True)
    assert not list(tmp_path.glob("*out*"))
    wet = convert(ours, tmp_path / "out", to="safetensors")
    assert dry.losses == wet.losses
    for what in ("6 tensors of kind 'exp_avg'", "parameter groups", "scheduler", "scaler", "client state", "no tensor"):
        assert any(what in loss for loss in wet.losses), what
    assert not any("ourshard" in loss for loss in wet.losses)


def test_include_and_exclude_choose_by_name_with_state_groups_and_ties(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "out", to="ourshard", include=["block.*", "head.*"], exclude=["*.norm.*"])
    with detect(tmp_path / "out") as source:
        names = {key.name for key in source.tensors}
        assert "block.norm.weight" not in names
        assert "embed.weight" not in names
        assert TensorKey("exp_avg", "head.weight") in source.tensors
        assert_same(
            source.read(TensorKey(PARAM, "head.tied")), make_state()[TensorKey(PARAM, "embed.weight")], "the heir"
        )
        assert source.description.ties == {}
        listed = [name for group in source.description.param_groups for name in group["params"]]
        assert set(listed) == {key.name for key in source.tensors if key.kind == "exp_avg"}
    with pytest.raises(ValueError, match="none of the"):
        convert(ours, tmp_path / "none", to="ourshard", exclude=["*"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["block.*", "nothing.*"]}, r"the pattern 'nothing\.\*' fits no name .*one whole, as '"),
        ({"exclude": ["embed"]}, "the pattern 'embed' fits no name"),
        ({"rename": ["^block=layer", "^blocks=layers"]}, r"the rename rule '\^blocks=layers' fits no name"),
    ],
)
def test_patterns_and_rules_that_fit_no_name_are_refused(
    ours: Path, tmp_path: Path, options: dict[str, list[str]], message: str
) -> None:
    """What was to be left out was in the result, under a name that was misspelt."""
    with pytest.raises(ValueError, match=message):
        convert(ours, tmp_path / "out", to="ourshard", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_rename_rules_apply_in_order_to_tensors_state_groups_and_ties(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "out", to="ourshard", rename=["^block=layer", r"^layer\.(\w+)\.weight$=\1.w"])
    with detect(tmp_path / "out") as source:
        assert_same(
            source.read(TensorKey("exp_avg", "norm.w")), make_state()[TensorKey("exp_avg", "block.norm.weight")], ""
        )
        assert "norm.w" in [name for group in source.description.param_groups for name in group["params"]]
        assert source.description.frozen == {"layer.empty"}
        assert "layer.gain" in source.description.param_state
    with pytest.raises(ValueError, match=r"give both .* and .* the name"):
        convert(ours, tmp_path / "clash", to="ourshard", rename=["^.*$=one"])
    for rule in ("no separator", "(=x", "=x"):
        with pytest.raises(ValueError, match="rename rule"):
            convert(ours, tmp_path / "bad", to="ourshard", rename=[rule])


def test_dtype_casts_weights_and_leaves_buffers_and_moments(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "bf16", to="ourshard", dtype="bf16")
    convert(ours, tmp_path / "own", to="ourshard", dtype="own")
    state = make_state()
    with detect(tmp_path / "bf16") as source:
        for key, tensor in state.items():
            expected = tensor.to(torch.bfloat16) if key.kind == PARAM else tensor
            assert_same(source.read(key), expected, str(key))
    with detect(tmp_path / "own") as source:
        for key, tensor in state.items():
            own = key == TensorKey(PARAM, "embed.weight")
            assert_same(source.read(key), tensor.to(torch.bfloat16) if own else tensor, str(key))
        assert source.description.own_dtypes == {}
    with pytest.raises(ValueError, match="dtype 'int8' is not known"):
        convert(ours, tmp_path / "bad", to="ourshard", dtype="int8")


def test_ties_that_no_file_names_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"embed": torch.ones(3), "head": torch.ones(3)}, tmp_path / "in" / "model.safetensors")
    convert(tmp_path / "in", tmp_path / "out", to="safetensors", ties={"head": "embed"})
    assert list(load_file(tmp_path / "out" / "model.safetensors")) == ["embed"]
    with detect(tmp_path / "out") as source:
        assert source.description.ties == {"head": "embed"}
    with pytest.raises(ValueError, match="no parameter of that name"):
        convert(tmp_path / "in", tmp_path / "bad", to="safetensors", ties={"head": "body"})


def test_a_checkpoint_is_never_converted_in_place_or_over_another(ours: Path, tmp_path: Path) -> None:
    for dst in (ours, ours / "inside", tmp_path):
        with pytest.raises(ValueError, match="not converted in place"):
            convert(ours, dst, to="safetensors", overwrite=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="overwrite"):
        convert(ours, tmp_path / "out", to="safetensors")
    assert (tmp_path / "out" / "mine.txt").read_text() == "precious"


@pytest.mark.parametrize("to", sorted({*writer_names()} - {"peft"}))
def test_a_conversion_replaces_checkpoints_and_nothing_else(ours: Path, tmp_path: Path, to: str) -> None:
    out = tmp_path / "out"
    for _ in range(2):  # a checkpoint of each format gives way
        convert(ours, out, to=to, overwrite=True)
    (out / "mine.txt").write_text("precious")
    runs = tmp_path / "runs"
    shutil.copytree(ours, runs / "checkpoint-5")  # a folder of checkpoints is none
    for folder in (out, runs):
        before = sorted(folder.rglob("*"))
        with pytest.raises(
            FileExistsError, match=r"is no checkpoint and is not replaced by one: it has '(mine|checkp)"
        ):
            convert(ours, folder, to="safetensors", overwrite=True)
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "gguf"}, "cannot write format 'gguf'; known: .*ourshard"),
        ({"to": "ourshard", "max_shard_size": "5GB"}, "max_shard_size has no meaning"),
        ({"to": "safetensors", "world_size": 2}, "world_size has no meaning"),
        ({"to": "torch", "world_size": 2}, "world_size has no meaning"),
        ({"to": "ourshard", "world_size": 0}, "world_size is 0"),
        ({"to": "ourshard", "workers": 0}, "workers is 0"),
        ({"to": "ourshard", "memory": "10MB"}, "is too little: this process needs"),
        ({"to": "ourshard", "memory": "lots"}, "is no size"),
        ({"to": "ourshard", "base": "x"}, "give merge_adapter"),
        ({"to": "ourshard", "merge_adapter": True, "adapters_only": True}, "exclude each other"),
        ({"to": "ourshard", "adapters_only": True, "exclude": ["*"]}, "none of the"),
    ],
)
def test_options_that_cannot_work_are_refused_and_nothing_is_written(
    ours: Path, tmp_path: Path, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(ours, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("5GB", "2GiB", "1.5MiB", "10", 7, "3 kb", "1T")] == [
        5 * 10**9, 2 << 30, 3 << 19, 10, 7, 3000, 10**12,
    ]  # fmt: skip


def test_too_little_room_on_the_disk_is_said_before_anything_is_written(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = conversion.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(OSError, match="left, the result needs"):
        convert(ours, tmp_path / "out", to="ourshard")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


class CountingIO(CrashIO):
    """Notes the files that were begun and those that were flushed."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(stop_at)
        self.created: list[Path] = []
        self.flushed: list[Path] = []

    def create(self, path: Path) -> BinaryIO:
        self.created.append(path)
        return super().create(path)

    def flush(self, file: BinaryIO) -> None:
        super().flush(file)
        self.flushed.append(Path(file.name))


@pytest.mark.parametrize(
    ("to", "options"),
    [("ourshard", {"world_size": 3}), ("safetensors", {"max_shard_size": 300}), ("torch", {"max_shard_size": 300})],
)
def test_a_stopped_conversion_shows_nothing_and_goes_on_where_it_was(tmp_path: Path, to: str, options: Any) -> None:
    save(tmp_path / "ours", make_state(), 1)
    whole = CountingIO()
    convert(tmp_path / "ours", tmp_path / "whole", to=to, io=whole, workers=1, **options)
    expected = contents(tmp_path / "whole")
    for stop_at in range(1, len(whole.log) + 1, 1 + len(whole.log) // 30):
        dst = tmp_path / f"out-{stop_at}"
        stopped = CountingIO(stop_at)
        with pytest.raises(Killed):
            convert(tmp_path / "ours", dst, to=to, io=stopped, workers=1, **options)
        again = CountingIO()
        if not dst.exists():  # else it was stopped after the last rename
            convert(tmp_path / "ours", dst, to=to, io=again, workers=1, **options)
            assert not set(stopped.flushed[:-1]) & set(again.created), "a finished file was written again"
            assert not [path for path in tmp_path.iterdir() if path.name.startswith(f".out-{stop_at}.")]
        assert contents(dst) == expected


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files; the time in a manifest is taken out."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "ourshard.json":
                data = re.sub(rb'"digest": "\w+"|"saved_at":"[^"]*"', b"", data)
            found[str(path.relative_to(folder))] = data
    return found


def test_another_conversion_does_not_go_on_from_the_files_of_a_stopped_one(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        convert(ours, tmp_path / "out", to="ourshard", dtype="bf16", world_size=2, io=CrashIO(40))
    leftover = next(tmp_path.glob(".out.converting"))
    (leftover / "stale.txt").write_text("stale")
    convert(ours, tmp_path / "out", to="ourshard", world_size=2)
    with detect(tmp_path / "out") as source:
        assert_holds(source, make_state())
    assert not (tmp_path / "out" / "stale.txt").exists()
    assert not leftover.exists()


@pytest.mark.parametrize("to", ["ourshard", "safetensors", "torch"])
def test_workers_and_small_blocks_give_the_same_bytes(ours: Path, tmp_path: Path, to: str, monkeypatch: Any) -> None:
    convert(ours, tmp_path / "one", to=to, workers=1)
    monkeypatch.setattr(conversion, "_budget", lambda memory: 3 * 4096)
    convert(ours, tmp_path / "many", to=to, workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_an_error_in_a_worker_is_raised_and_nothing_appears(ours: Path, tmp_path: Path) -> None:
    shard = next((ours / "optimizer" / "exp_avg").glob("shard-00002*"))
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="shard-00002"):
        convert(ours, tmp_path / "out", to="ourshard", workers=3)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


@needs_fixtures
@pytest.mark.parametrize("to", ["ourshard", "safetensors", "torch"])
def test_source_files_are_never_touched(tmp_path: Path, to: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in (FIXTURES / "hf_single_llama_fp32").iterdir()}
    convert(FIXTURES / "hf_single_llama_fp32", tmp_path / "out", to=to)
    assert {path: path.stat().st_mtime_ns for path in (FIXTURES / "hf_single_llama_fp32").iterdir()} == before


MEMORY = """
import sys, threading, time, psutil, torch
from ourshard.checkpoint.conversion import convert
process, peak, done = psutil.Process(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
for to, options in eval(sys.argv[4]).items():
    convert(sys.argv[1], sys.argv[2] + to, to=to, memory=int(sys.argv[3]), **options)
    print(to, peak)
done = True
thread.join()
"""


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of 282 MB: four tensors of 64 MB, a hundred of 256 kB."""
    folder = tmp_path / "large"
    folder.mkdir()
    tensors = {f"layer.{index}.weight": torch.full((2048, 8192), float(index)) for index in range(4)}
    tensors |= {f"layer.{index}.small": torch.full((64, 1024), float(index)) for index in range(100)}
    save_file(tensors, folder / "model.safetensors")
    yield folder
    shutil.rmtree(tmp_path)


OPTIONS: dict[str, Any] = {
    "ourshard": {"world_size": 4},
    "safetensors": {"dtype": "bf16"},
    "torch": {"max_shard_size": "100MB"},
}


def test_memory_stays_within_the_budget(large: Path, tmp_path: Path) -> None:
    """Within 400 MiB, of which the interpreter and torch take more than half."""
    memory = 400 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(large), str(tmp_path / "to-"), str(memory), repr(OPTIONS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        to, peak = line.split()
        assert int(peak) <= memory, f"{to}: {int(peak) >> 20} MiB"
        with detect(tmp_path / f"to-{to}") as source:
            assert source.read(TensorKey(PARAM, "layer.3.weight"), 100, 101).eq(3).all()
            assert len(source.tensors) == 104
    assert done.stdout.count("\n") == len(OPTIONS)

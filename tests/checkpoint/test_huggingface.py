"""Weights of Hugging Face, in and out."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.safetensors_file import lay_out, read_header
from ourshard.checkpoint.source import BUFFER, PARAM, CheckpointError, TensorKey, detect
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.checkpoint.making import FIXTURES, assert_same, make_state, save
from tests.checkpoint.truth import assert_is_truth, needs_fixtures, truth_of

SINGLE, SHARDED = "hf_single_llama_fp32", "hf_sharded_llama_bf16"


@needs_fixtures
@pytest.mark.parametrize("name", [SINGLE, SHARDED])
def test_the_fixtures_are_read_as_they_were(name: str) -> None:
    with detect(FIXTURES / name) as source:
        assert source.format == "safetensors"
        assert assert_is_truth(source, truth_of(name)) == 20
        assert source.description.ties == truth_of(name).tied


def test_from_pretrained_of_a_checkpoint_by_rows_says_what_makes_a_model_of_it(tmp_path: Path) -> None:
    """A11: transformers alone says that a file is missing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save(tmp_path / "checkpoint-5" / "ourshard", make_state(), 1)
    LlamaConfig().save_pretrained(tmp_path / "checkpoint-5")
    with pytest.raises(OSError, match=r"checkpoint by rows.*ourshard convert .*checkpoint-5 DIR --to safetensors"):
        LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-5")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError) as error:
        LlamaForCausalLM.from_pretrained(tmp_path / "empty")
    assert "by rows" not in str(error.value)


@needs_fixtures
@pytest.mark.parametrize("max_shard_size", [None, 3000])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_from_pretrained_loads_what_was_converted_from_our_format(
    tmp_path: Path, max_shard_size: Any, dtype: Any
) -> None:
    """CASES A03, A11: the folder is usable as it is, and config.json names the dtype that the files have."""
    transformers = pytest.importorskip("transformers")
    convert(FIXTURES / SINGLE, tmp_path / "ours", to="ourshard", world_size=3)
    convert(tmp_path / "ours", tmp_path / "hf", to="safetensors", max_shard_size=max_shard_size, dtype=dtype)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (max_shard_size is not None)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == (dtype or "float32")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype="auto", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    for name, tensor in load_file(FIXTURES / SINGLE / "model.safetensors").items():
        expected = tensor.to(torch.bfloat16) if dtype else tensor
        assert_same(model.state_dict()[name].contiguous(), expected, name)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (tmp_path / "hf" / "generation_config.json").read_bytes() == (
        FIXTURES / SINGLE / "generation_config.json"
    ).read_bytes()


def test_kinds_ties_and_frozen_names_survive_a_stay_in_safetensors(tmp_path: Path) -> None:
    state = {key: tensor for key, tensor in make_state().items() if key.kind in (PARAM, BUFFER)}
    save(tmp_path / "ours", state, 2)
    convert(tmp_path / "ours", tmp_path / "hf", to="safetensors", max_shard_size=300)
    with detect(tmp_path / "ours") as ours, detect(tmp_path / "hf") as theirs:
        assert set(theirs.tensors) == set(ours.tensors)
        assert theirs.description.ties == ours.description.ties
        assert theirs.description.frozen == ours.description.frozen
        for key, tensor in state.items():
            assert_same(theirs.read(key), tensor, str(key))


def test_each_tied_tensor_is_stored_once_and_files_stay_below_their_size(tmp_path: Path) -> None:
    save(tmp_path / "ours", make_state(), 2)
    convert(tmp_path / "ours", tmp_path / "hf", to="safetensors", max_shard_size=500)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert "head.tied" not in index["weight_map"]
    held: dict[str, str] = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            names = list(file.keys())
            assert len(names) == 1 or sum(file.get_tensor(name).nbytes for name in names) <= 500
            held.update(dict.fromkeys(names, path.name))
    assert held == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for k, t in make_state().items() if k.kind in (PARAM, BUFFER)
    )


def test_a_dtype_that_a_config_inside_has_is_set_too(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"w": torch.zeros(3)}, tmp_path / "in" / "model.safetensors")
    config = {"dtype": "float32", "text_config": {"dtype": "float32"}, "vision_config": {"torch_dtype": "float32"}}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "optimizer.pt.log").write_text("no companion")
    convert(tmp_path / "in", tmp_path / "out", to="safetensors", dtype="bf16")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found == {
        "dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "vision_config": {"torch_dtype": "bfloat16"},
    }  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_every_dtype_of_safetensors_is_written_as_the_library_reads_it(tmp_path: Path) -> None:
    from ourshard.checkpoint.safetensors_file import DTYPES

    tensors = {name: torch.zeros(3, 2).to(dtype) for name, dtype in DTYPES.items()}
    layout = lay_out([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()], {"format": "pt"})
    (tmp_path / "x.safetensors").write_bytes(layout.head + bytes(layout.nbytes - len(layout.head)))
    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert_same(tensor, tensors[name], name)
    assert [entry.name for entry in read_header(tmp_path / "x.safetensors").entries] == [e.name for e in layout.entries]


def header(change: Any, twice: bool = False) -> bytes:
    """Return a file of one tensor whose header was tampered with; `twice`: the same entry is in it two times."""
    table = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    text = json.dumps(change(table)).encode()
    text = text[:-1] + b"," + text[1:] if twice else text
    return struct.pack("<Q", len(text)) + text + bytes(16)


BAD_FILES = {
    "empty": b"",
    "shorter than a length": b"\0\0\0",
    "a header longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "a header that is no JSON": struct.pack("<Q", 2) + b"{]",
    "a header that is a list": struct.pack("<Q", 2) + b"[]",
    "a header that is nested": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "an unknown dtype": header(lambda t: {"w": {**t["w"], "dtype": "X1"}}),
    "a negative length": header(lambda t: {"w": {**t["w"], "shape": [-2, -2]}}),
    "an absurd shape": header(lambda t: {"w": {**t["w"], "shape": [1 << 40, 1 << 40]}}),
    "offsets outside": header(lambda t: {"w": {**t["w"], "data_offsets": [0, 1 << 50], "shape": [1 << 48]}}),
    "offsets backwards": header(lambda t: {"w": {**t["w"], "data_offsets": [16, 0]}}),
    "a gap": header(lambda t: {"w": {**t["w"], "data_offsets": [0, 8], "shape": [2]}}),
    "an overlap": header(lambda t: {**t, "v": t["w"]}),
    "a name twice": header(lambda t: t, twice=True),
    "a length that is no number": header(lambda t: {"w": {**t["w"], "shape": [float("nan")]}}),
    "no offsets": header(lambda t: {"w": {"dtype": "F32", "shape": [2, 2]}}),
    "metadata that is no text": header(lambda t: {**t, "__metadata__": {"a": [1]}}),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_malformed_file_is_refused_with_its_name(tmp_path: Path, what: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(BAD_FILES[what])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        detect(tmp_path)


@pytest.mark.parametrize(
    "target", ["../outside.safetensors", "/tmp/outside.safetensors", "a/../../x.safetensors", "x.bin", 3]
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, target: Any) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "outside.safetensors")
    (tmp_path / "in").mkdir()
    index = {"weight_map": {"w": target}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        detect(tmp_path / "in")


@needs_fixtures
def test_a_missing_file_is_named_with_and_without_an_index(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / SHARDED, tmp_path / "in"))
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        detect(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing"):
        detect(folder)


def test_several_models_in_a_folder_are_not_mixed(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"v": torch.zeros(3)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"several models: one\.safetensors, two\.safetensors"):
        detect(tmp_path)
    with detect(tmp_path / "two.safetensors") as source:
        assert list(source.tensors) == [TensorKey(PARAM, "v")]

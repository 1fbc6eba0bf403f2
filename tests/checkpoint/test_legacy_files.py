"""Files of torch.save in the format from before torch 1.6: read as torch reads them, refused where they are damaged."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.foreign.torchfile import TorchFile
from ourshard.checkpoint.source import BUFFER, PARAM, CheckpointError, TensorKey, detect

from tests.checkpoint.foreign import same


def state_dict() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(5, 7)
    return {
        "weight": weight,
        "tied": weight,
        "turned": weight.t(),
        "rows": weight[1:3],
        "half": torch.randn(3).half(),
        "brain": torch.randn(2, 2, 2).bfloat16(),
        "steps": torch.arange(4),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(2.0),
    }


def save_legacy(value: Any, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("wrapped", [False, True])
def test_every_tensor_is_that_of_torch_load(tmp_path: Path, wrapped: bool) -> None:
    state = state_dict()
    save_legacy({"model": state, "epoch": 3} if wrapped else state, tmp_path / "in" / "pytorch_model.bin")
    convert(tmp_path / "in", tmp_path / "out", to="ourshard")
    with detect(tmp_path / "in") as source, detect(tmp_path / "out") as converted:
        assert source.format == "torch"
        assert source.description.ties == {"tied": "weight"}
        for name, tensor in state.items():
            key = next((k for k in source.tensors if k.name == name), None)
            assert (key is None) == (name == "tied")
            assert key is None or same(source.read(key), tensor.contiguous())
            assert key is None or same(converted.read(key), tensor.contiguous())
        assert TensorKey(BUFFER, "steps") in source.tensors
        assert same(source.read(TensorKey(PARAM, "turned"), 2, 5), state["turned"][2:5].contiguous())
        assert ("epoch" in " ".join(source.description.losses)) == wrapped


@pytest.mark.parametrize("zipped", [False, True])
def test_a_conjugate_or_a_negative_is_no_tie_and_is_read_as_it_shows(zipped: bool, tmp_path: Path) -> None:
    """torch.save stores the tensor that is viewed, and notes the view beside it."""
    wave, plain = torch.randn(3, 4, dtype=torch.complex64), torch.randn(5)
    state = {
        "wave": wave,
        "conj": wave.conj(),
        "turned": wave.t().conj(),
        "plain": plain,
        "neg": torch._neg_view(plain),
    }
    (tmp_path / "in").mkdir()
    torch.save(state, tmp_path / "in" / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    convert(tmp_path / "in", tmp_path / "out", to="ourshard")
    with detect(tmp_path / "in") as source, detect(tmp_path / "out") as converted:
        assert not source.description.ties
        for name, tensor in state.items():
            expected = tensor.resolve_conj().resolve_neg().contiguous()
            assert same(source.read(TensorKey(PARAM, name)), expected), name
            assert same(converted.read(TensorKey(PARAM, name)), expected), name
            assert same(source.read(TensorKey(PARAM, name), 1, 3), expected[1:3].contiguous()), name


def test_a_numbered_optimizer_in_the_old_format_is_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_legacy(model.state_dict(), tmp_path / "in" / "pytorch_model.bin")
    save_legacy(optimizer.state_dict(), tmp_path / "in" / "optimizer.bin")
    with detect(tmp_path / "in") as source:
        for name, parameter in model.named_parameters():
            assert same(source.read(TensorKey("exp_avg", name)), optimizer.state[parameter]["exp_avg"])


def altered(*pickles: Any, tail: bytes = b"") -> bytes:
    out = io.BytesIO()
    for value in pickles:
        pickle.dump(value, out, protocol=2)
    return out.getvalue() + tail


MACHINE = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
MAGIC = 0x1950A86A20F9469CFC6C


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (altered({"x": 1}), "is a bare pickle"),
        (altered(MAGIC, 1000), "unknown version"),
        (altered(MAGIC, 1001, {**MACHINE, "little_endian": False}), "big-endian"),
        (altered(MAGIC, 1001, MACHINE, {"x": 1}, ["0"]), "list of storages is damaged"),
        (altered(MAGIC, 1001, MACHINE, {"x": 1}, [["0"]]), "damaged"),
        (altered(MAGIC, 1001, MACHINE, {"x": 1}, [], tail=b"more"), "4 bytes follow the last storage"),
        (altered(MAGIC, 1001), "ends early"),
    ],
)
def test_what_torch_would_not_have_written_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "file.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        TorchFile(tmp_path / "file.bin").load()


def test_cut_off_and_lying_storages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    save_legacy({"x": torch.arange(6.0)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        TorchFile(path)
    path.write_bytes(data[:-32] + (7).to_bytes(8, "little") + data[-24:])
    with pytest.raises(CheckpointError, match=r"storage \d+ is damaged"):
        TorchFile(path)


def test_a_hostile_object_is_refused_and_nothing_is_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    save_legacy({"x": torch.zeros(2), "y": Hostile()}, tmp_path / "file.bin")
    with pytest.raises(CheckpointError, match="not on the list of classes"):
        TorchFile(tmp_path / "file.bin")
    assert not (tmp_path / "executed").exists()

"""Pickles of others run nothing: what is not on the list is refused by name, whatever it is wrapped in."""

from __future__ import annotations

import builtins
import collections
import os
import pickle
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.foreign.classes import ALLOWED
from ourshard.checkpoint.foreign.plaindata import read_plain
from ourshard.checkpoint.foreign.torchfile import TorchFile
from ourshard.checkpoint.foreign.unpickle import unpickle
from ourshard.checkpoint.source import CheckpointError, detect

from tests.checkpoint.foreign import made_folder


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def hostile(marker: Path) -> dict[str, Any]:
    """Return objects whose unpickling would make the file `marker`."""
    touch = f"open({str(marker)!r}, 'w').close()"
    return {
        "os.system": Calls(os.system, f"touch {marker}"),
        "subprocess": Calls(subprocess.call, ["touch", str(marker)]),
        "builtins.eval": Calls(builtins.eval, f"__import__('os').system('touch {marker}')"),
        "builtins.exec": Calls(builtins.exec, touch),
        "getattr": Calls(getattr, Calls(builtins.__import__, "os"), "system"),
        "torch.load": Calls(torch.load, str(marker)),
        "nested": [{"deep": (Calls(dict, [("x", Calls(os.system, f"touch {marker}"))]),)}],
        "in OrderedDict": Calls(collections.OrderedDict, [("x", Calls(os.system, f"touch {marker}"))]),
        "as the dtype": Calls(torch._utils._rebuild_parameter, Calls(os.system, f"touch {marker}"), True, None),
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("what", hostile(Path("x")))
def test_a_hostile_pickle_is_refused_and_nothing_is_executed(what: str, protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    data = pickle.dumps(hostile(marker)[what], protocol=protocol)
    with pytest.raises(CheckpointError, match=r"not on the list|no known class"):
        unpickle(data, "the file", ALLOWED)
    assert not marker.exists()


def _places() -> list[tuple[str, str]]:
    return [
        ("fsdp2_sharded", "pytorch_model_fsdp_0/.metadata"),
        ("fsdp2_sharded", "optimizer_0/.metadata"),
        ("fsdp2_sharded", "scheduler.bin"),
        ("dcp_metadata_of_each_rank", "__1.metadata"),
        ("fsdp1_full", "pytorch_model_fsdp.bin"),
        ("fsdp1_full", "optimizer.bin"),
        ("fsdp2_rank", "optimizer_0_rank1.bin"),
        ("ddp", "optimizer.bin"),
        ("ds_z2", "global_step3/mp_rank_00_model_states.pt"),
        ("ds_z2", "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("ds_z3", "global_step3/zero_pp_rank_2_mp_rank_00_model_states.pt"),
        ("ds_universal_z2", "global_step3_universal/zero/emb.weight/fp32.pt"),
        ("ds_universal_z2", "global_step3_universal/zero/optimizer_state.pt"),
    ]


@pytest.mark.parametrize(("name", "file"), _places())
def test_a_hostile_file_anywhere_in_a_checkpoint_stops_the_conversion(name: str, file: str, tmp_path: Path) -> None:
    folder, marker = tmp_path / "checkpoint", tmp_path / "executed"
    shutil.copytree(made_folder() / name, folder)
    attack = Calls(os.system, f"touch {marker}")
    target = folder / file
    assert target.is_file()
    if file.endswith(".metadata"):
        target.write_bytes(pickle.dumps({"state_dict_metadata": attack}))
    else:
        torch.save({"module": attack, "optimizer_state_dict": attack, "state": {}, "param_groups": []}, target)
    with pytest.raises(CheckpointError, match=r"system.*not on the list"):
        convert(folder, tmp_path / "result", to="safetensors")
    assert not marker.exists()
    assert not (tmp_path / "result").exists()


def test_what_is_on_the_list_comes_as_plain_data_and_lazy_tensors(tmp_path: Path) -> None:
    value = {
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "ordered": collections.OrderedDict(a=1, b=[None, True, 2.5, "text", b"bytes"]),
        "number": 2**70,
        "set": {1, 2},
        "tensor": torch.arange(6.0).reshape(2, 3),
        "path": tmp_path,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(value, tmp_path / "file.pt")
    read = read_plain(tmp_path / "file.pt")
    assert torch.equal(read.pop("tensor"), value.pop("tensor"))
    assert torch.equal(read.pop("parameter"), value.pop("parameter"))
    assert read.pop("path") == str(value.pop("path"))
    assert read == value


BOMBS = {
    "a memo index of 2**31": b"\x80\x02]r\xff\xff\xff\x7fj\xff\xff\xff\x7f.",
    "an integer of a gigabyte": b"\x80\x02\x8b\xff\xff\xff\x3f.",
    "text of 2**63 bytes": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "bytes of 2**40": b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00.",
    "a key of nested tuples": b"\x80\x02}" + b"K\x01" + b"2\x86" * 64 + b"K\x01s.",
    "an extension code": b"\x80\x02\x82\x01.",
    "the old text protocol": b"cos\nsystem\n(S'true'\ntR.",
    "no end": b"\x80\x02]",
    "nothing": b"",
    "no mark": b"\x80\x02t.",
    "a pop from nothing": b"\x80\x020.",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_pickle_that_would_eat_memory_or_time_is_refused_at_once(what: str) -> None:
    data = BOMBS[what]
    if what == "a memo index of 2**31":
        assert unpickle(data, "the file", ALLOWED) == []  # an index costs nothing here, however large
        return
    with pytest.raises(CheckpointError, match="the file"):
        unpickle(data, "the file", ALLOWED)


def test_one_list_named_a_billion_times_is_refused(tmp_path: Path) -> None:
    value: Any = []
    for _ in range(60):
        value = [value, value]
    torch.save(value, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"nested too deep|repeated too often"):
        read_plain(tmp_path / "file.pt")
    ring: list[Any] = []
    ring.append(ring)
    torch.save(ring, tmp_path / "ring.pt")
    with pytest.raises(CheckpointError, match="nested too deep"):
        read_plain(tmp_path / "ring.pt")


def test_a_tensor_may_not_claim_more_than_its_storage(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1).expand(1 << 40)}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="claims a shape"):
        TorchFile(tmp_path / "file.pt").load()


def rewritten(path: Path, change: Any) -> None:
    """Write the archive anew, with each entry passed through `change(info, data)`."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in entries:
            change(archive, info, data)


def _compress(archive: zipfile.ZipFile, info: zipfile.ZipInfo, data: bytes) -> None:
    archive.writestr(info.filename, data, zipfile.ZIP_DEFLATED)


def _traverse(archive: zipfile.ZipFile, info: zipfile.ZipInfo, data: bytes) -> None:
    archive.writestr(info.filename.replace("/", "/../", 1), data)


def _double(archive: zipfile.ZipFile, info: zipfile.ZipInfo, data: bytes) -> None:
    archive.writestr(info.filename, data)
    archive.writestr(info.filename, data)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("change", "words"), [(_compress, "compressed"), (_traverse, "odd name"), (_double, "two entries")]
)
def test_an_archive_that_torch_never_writes_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1000)}, tmp_path / "file.pt")
    rewritten(tmp_path / "file.pt", change)
    with pytest.raises(CheckpointError, match=words):
        TorchFile(tmp_path / "file.pt").load()


def test_foreign_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "bare.pt").write_bytes(pickle.dumps({"x": 1}, protocol=4))
    with pytest.raises(CheckpointError, match="is a bare pickle"):
        TorchFile(tmp_path / "bare.pt")
    with tarfile.open(tmp_path / "tar.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    with pytest.raises(CheckpointError, match=r"tar format of torch before 0\.1\.10"):
        TorchFile(tmp_path / "tar.pt")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(CheckpointError, match="is empty"):
        TorchFile(tmp_path / "empty.pt")
    (tmp_path / "text.pt").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(CheckpointError, match="not written by torch"):
        TorchFile(tmp_path / "text.pt")


def test_a_stored_bit_that_flipped_is_noticed(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(1000.0)}, tmp_path / "file.pt")
    data = bytearray((tmp_path / "file.pt").read_bytes())
    place = data.find(torch.arange(500.0, 510.0).numpy().tobytes())
    data[place] ^= 1
    (tmp_path / "file.pt").write_bytes(data)
    file = TorchFile(tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="checksum"):
        file.stored(file.load()["x"]).read(0, 1)
    assert torch.load(tmp_path / "file.pt")["x"][500] != 500.0  # torch itself loads it without a word


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.arange(5.0)}, tmp_path / "file.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(read_plain(tmp_path / "file.pt")["x"], torch.arange(5.0))


def test_a_path_out_of_the_folder_in_dcp_metadata_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(made_folder() / "dcp_flattened", folder)
    path = folder / ".metadata"
    name = b"__0_0.distcp"
    for other in (b"../../x.dist", b"/etc/passwd."):
        data = (made_folder() / "dcp_flattened" / ".metadata").read_bytes()
        assert name in data
        path.write_bytes(data.replace(name, other))
        with pytest.raises(CheckpointError, match="not a name inside"):
            detect(folder)


def test_a_tag_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    shutil.copytree(made_folder() / "ds_z2", tmp_path / "checkpoint")
    shutil.move(tmp_path / "checkpoint" / "global_step3", tmp_path / "elsewhere")
    for tag in (b"../elsewhere", b"\xff\xfe" * 100, b"a\0b", b"/etc", b".."):
        (tmp_path / "checkpoint" / "latest").write_bytes(tag)
        with pytest.raises(CheckpointError, match="no checkpoint of a known format"):
            detect(tmp_path / "checkpoint")


def test_pickle_and_ours_agree_on_every_instruction_that_is_read() -> None:
    value = [None, True, False, 0, 255, 65535, -1, 1 << 40, -(1 << 40), 1.5, "a", "é" * 300, b"x", b"y" * 300, (), (1,)]
    value += [(1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1], {}, {"k": {1: 2}}, {1, 2}, [[]] * 3, bytearray(b"z")]
    first = {set: 4, bytearray: 5}  # the protocol that has an instruction for it; before, it names the class
    for protocol in (2, 3, 4, 5):
        part = [item for item in value if first.get(type(item), 2) <= protocol]
        assert unpickle(pickle.dumps(part, protocol), "the file", ALLOWED) == part

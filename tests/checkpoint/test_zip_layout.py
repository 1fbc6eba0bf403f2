"""Zip archives laid out by hand: what zipfile and torch read of them, also beyond 4 GiB and 65,535 entries."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.source import PARAM, TensorInfo, TensorKey
from ourshard.checkpoint.torch_archive import Archive
from ourshard.checkpoint.zip_layout import directory, lay_out, local_header

from tests.checkpoint.making import make_state, save


def test_zipfile_reads_and_checks_what_was_laid_out() -> None:
    contents = {"a/data.pkl": b"x" * 7, "a/data/0": bytes(range(256)) * 5, "a/data/1": b"", "a/version": b"3\n"}
    slots = lay_out((name, len(data)) for name, data in contents.items())
    crcs = [zlib.crc32(data) for data in contents.values()]
    frames = zip(slots, crcs, contents.values(), strict=True)
    text = b"".join(local_header(slot, crc) + data for slot, crc, data in frames) + directory(slots, crcs)
    with zipfile.ZipFile(io.BytesIO(text)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == contents
    assert all(slot.begin % 64 == 0 for slot in slots)


def test_more_than_65535_entries_are_all_in_the_directory() -> None:
    slots = lay_out((f"a/data/{number}", 0) for number in range(70_000))
    text = b"".join(local_header(slot, 0) for slot in slots) + directory(slots, [0] * len(slots))
    with zipfile.ZipFile(io.BytesIO(text)) as archive:
        assert len(archive.namelist()) == 70_000
        assert archive.infolist()[-1].header_offset == slots[-1].header


def test_torch_maps_storages_longer_than_4_gib_and_what_follows_them(tmp_path: Path) -> None:
    source = torch.arange(6, dtype=torch.float32)
    infos = {
        TensorKey(PARAM, "large"): TensorInfo(TensorKey(PARAM, "large"), (5, 1 << 28), torch.float32),
        TensorKey(PARAM, "after"): TensorInfo(TensorKey(PARAM, "after"), (6,), torch.float32),
    }

    class Sized:
        tensors = infos

    archive = Archive(Sized())  # type: ignore[arg-type]
    plan = archive.plan("sparse", {key.name: archive.tensor(key) for key in infos})
    path = tmp_path / "sparse.bin"
    with open(path, "wb") as file:  # the large storage is a hole
        for slot, content in zip(plan.slots, plan.contents, strict=True):
            data = content if isinstance(content, bytes) else source.numpy().tobytes() if slot.nbytes == 24 else b""
            file.seek(slot.header)
            file.write(local_header(slot, zlib.crc32(data)) + data)
        file.seek(plan.end)
        file.write(directory(plan.slots, [0] * len(plan.slots)))
    assert path.stat().st_size == plan.nbytes > 5 << 30
    found = torch.load(path, mmap=True, weights_only=True)
    assert found["large"].shape == (5, 1 << 28)
    assert found["large"][4, 17] == 0
    assert torch.equal(found["after"], source)


def test_large_and_small_archives_of_a_file_hold_the_checksums_of_their_bytes(tmp_path: Path) -> None:
    state = make_state()
    state[TensorKey(PARAM, "wide")] = torch.randn(700, 1024)  # more than a block
    save(tmp_path / "ours", state, 2)
    convert(tmp_path / "ours", tmp_path / "out", to="torch", workers=3)
    with zipfile.ZipFile(tmp_path / "out" / "pytorch_model.bin") as archive:
        assert archive.testzip() is None
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(found["wide"], state[TensorKey(PARAM, "wide")])

"""Runs of elements and boxes: what a rank holds, and what a file of safetensors can say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ourshard.checkpoint.pieces import FilePool, Piece, box_of, gaps_of, read_run, run_of
from ourshard.checkpoint.source import PARAM, CheckpointError, TensorInfo, TensorKey

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_run_that_is_a_box_comes_back_from_its_box(shape: Any, data: Any) -> None:
    starts = tuple(data.draw(st.integers(0, max(0, length - 1))) for length in shape)
    sizes = tuple(data.draw(st.integers(0, length - start)) for length, start in zip(shape, starts, strict=True))
    try:
        start, stop = run_of(shape, starts, sizes)
    except ValueError:
        return  # checked below: a box that is no run
    assert stop - start == math.prod(sizes)
    if start < stop:
        elements = torch.arange(math.prod(shape)).reshape(shape)
        for dim, (first, length) in enumerate(zip(starts, sizes, strict=True)):
            elements = elements.narrow(dim, first, length)
        assert elements.reshape(-1).tolist() == list(range(start, stop))
        again = box_of(shape, start, stop)
        assert run_of(shape, *again) == (start, stop)


@given(SHAPES, st.data())
def test_a_box_that_is_no_run_is_refused(shape: Any, data: Any) -> None:
    numel = math.prod(shape)
    starts = tuple(data.draw(st.integers(0, max(0, length - 1))) for length in shape)
    sizes = tuple(
        data.draw(st.integers(1, max(1, length - start))) for length, start in zip(shape, starts, strict=True)
    )
    if numel == 0:
        return
    elements = torch.arange(numel).reshape(shape)
    for dim, (first, length) in enumerate(zip(starts, sizes, strict=True)):
        elements = elements.narrow(dim, first, length)
    flat = elements.reshape(-1).tolist()
    consecutive = flat == list(range(flat[0], flat[0] + len(flat)))
    try:
        run = run_of(shape, starts, sizes)
    except ValueError:
        assert not consecutive
    else:
        assert run == (flat[0], flat[-1] + 1)


@pytest.mark.parametrize(("starts", "sizes"), [((0,), (2,)), ((0, 0), (4, 2)), ((-1, 0), (1, 2)), ((0, 1), (2, 2))])
def test_a_box_outside_of_its_tensor_is_refused(starts: Any, sizes: Any) -> None:
    with pytest.raises(ValueError, match="no run of elements"):
        run_of((3, 2), starts, sizes)


def test_only_the_bytes_of_the_elements_asked_for_are_read(tmp_path: Path) -> None:
    values = torch.arange(24, dtype=torch.int32)
    (tmp_path / "a").write_bytes(values[:10].numpy().tobytes())
    (tmp_path / "b").write_bytes(values[10:].numpy().tobytes())
    info = TensorInfo(TensorKey(PARAM, "w"), (6, 4), torch.int32)
    pieces = [Piece("a", 0, 10, 0, 40), Piece("b", 10, 24, 0, 56)]
    reads: list[tuple[str, int, int]] = []

    class Watched(FilePool):
        def read_into(self, name: str, begin: int, target: memoryview) -> None:
            reads.append((name, begin, target.nbytes))
            super().read_into(name, begin, target)

    pool = Watched(tmp_path)
    assert read_run(pool, info, pieces, 8, 13).tolist() == [8, 9, 10, 11, 12]
    assert reads == [("a", 32, 8), ("b", 0, 12)]
    pool.close()


def test_a_missing_piece_is_named_by_its_rows_before_memory_is_taken(tmp_path: Path) -> None:
    info = TensorInfo(TensorKey(PARAM, "w"), (1 << 40, 4), torch.float64)
    pieces = [Piece("a", 0, 8, 0, 64)]
    assert gaps_of(info, pieces) == [(8, 1 << 42)]
    with pytest.raises(CheckpointError, match=r"w: rows 2:1099511627776 are in no file"):
        read_run(FilePool(tmp_path), info, pieces, 0, info.numel)


def test_a_file_that_is_too_short_is_named_with_the_rows(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(60))
    info = TensorInfo(TensorKey(PARAM, "w"), (8, 2), torch.float32)
    pool = FilePool(tmp_path)
    with pytest.raises(CheckpointError, match=r"w: rows 0:8 cannot be read: .*a is cut off"):
        read_run(pool, info, [Piece("a", 0, 16, 0, 64)], 0, 16)
    pool.close()
    pool = FilePool(tmp_path, {"a": 64})
    with pytest.raises(CheckpointError, match="it has 60 bytes, written were 64"):
        read_run(pool, info, [Piece("a", 0, 16, 0, 64)], 0, 2)


def test_rows_beyond_four_gib_are_written_and_read_in_their_place(tmp_path: Path) -> None:
    """The file has a hole: nothing but its ends is on the disk."""
    from ourshard.checkpoint.io import DISK
    from ourshard.checkpoint.safetensors_file import lay_out
    from ourshard.checkpoint.source import detect

    rows = (5 << 30) // 8
    layout = lay_out([("w", torch.int64, (rows, 1))], {"format": "pt"})
    with DISK.create(tmp_path / "model.safetensors") as file:
        DISK.write(file, [layout.head])
    last = torch.arange(3) + 7
    with DISK.open(tmp_path / "model.safetensors") as file:
        DISK.write_at(file, layout.nbytes - 24, [last.numpy().tobytes()])
    with detect(tmp_path) as source:
        (key,) = source.tensors
        assert source.read_run(key, rows - 4, rows).tolist() == [0, 7, 8, 9]
        assert source.read(key, rows - 2).reshape(-1).tolist() == [8, 9]

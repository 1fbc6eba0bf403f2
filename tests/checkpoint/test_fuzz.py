"""Mutated files of our format, of Hugging Face and of torch.save: a clear error or data, no hang, no write outside.

The formats of FSDP and DeepSpeed are treated so in test_foreign_damage.py.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.inspection import inspect
from ourshard.checkpoint.manifest import NAME, seal, unseal
from ourshard.checkpoint.source import PARAM, CheckpointError, detect
from ourshard.checkpoint.verification import verify

from tests.checkpoint.making import make_state, save

ODD_NUMBERS = (-1, 0, 1, 2**31, 2**63, 10**30, 1.5, float("nan"), True, None)
ODD_TEXTS = ("", "..", "../../x", "/tmp/x", "a\0b", "F32", "x" * 5000)
ODD_VALUES: tuple[Any, ...] = (*ODD_NUMBERS, *ODD_TEXTS, [], {}, [[]])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a small checkpoint of each format."""
    root = tmp_path_factory.mktemp("corpus")
    save(root / "ourshard", make_state(), 2)
    convert(root / "ourshard", root / "safetensors", to="safetensors", max_shard_size=400)
    convert(root / "ourshard", root / "torch", to="torch", max_shard_size=400)
    (root / "legacy").mkdir()
    weights = {key.name: tensor for key, tensor in make_state().items() if key.kind == PARAM}
    torch.save(weights, root / "legacy" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return {name: root / name for name in ("ourshard", "safetensors", "torch", "legacy")}


def flip(data: bytes, chosen: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chosen.choice((1, 1, 4, 32))):
        # Headers are at the beginning, directories of archives at the end.
        place = chosen.choice(
            (
                chosen.randrange(len(data)),
                chosen.randrange(min(len(data), 300)),
                -1 - chosen.randrange(min(len(data), 300)),
            )
        )
        changed[place] = chosen.randrange(256)
    return bytes(changed)


def cut(data: bytes, chosen: random.Random) -> bytes:
    return data[: chosen.randrange(len(data))]


def grow(data: bytes, chosen: random.Random) -> bytes:
    place = chosen.randrange(len(data))
    return data[:place] + chosen.randbytes(chosen.randrange(1, 64)) + data[place:]


def repeat(data: bytes, chosen: random.Random) -> bytes:
    start, stop = sorted(chosen.randrange(len(data)) for _ in range(2))
    return data[:stop] + data[start:]


def odd_header(data: bytes, chosen: random.Random) -> bytes:
    """Change one value of a safetensors header, of a sealed manifest, or of any JSON, and make the rest fit again."""
    size = int.from_bytes(data[:8], "little")
    if 8 + size <= len(data):
        text = json.dumps(change(json.loads(data[8 : 8 + size]), chosen)).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]
    if data.startswith(b'{"digest"'):
        return seal(change(unseal(data, Path("x")), chosen))
    if data.startswith(b"{"):
        return json.dumps(change(json.loads(data), chosen)).encode()
    return flip(data, chosen)


def change(value: Any, chosen: random.Random) -> Any:
    """Put an odd value somewhere, or take something away."""
    if isinstance(value, dict) and value:
        return change_table(value, chosen)
    if isinstance(value, list) and value:
        return change_list(value, chosen)
    if isinstance(value, int) and chosen.random() < 0.5:
        return value + chosen.choice((-1, 1, 8, 1 << 40))
    return chosen.choice(ODD_VALUES)


def change_table(value: dict[str, Any], chosen: random.Random) -> dict[str, Any]:
    key, action = chosen.choice(list(value)), chosen.random()
    if action < 0.1:
        return {k: v for k, v in value.items() if k != key}
    if action < 0.2:
        return {chosen.choice(("../x", "", "embed.weight", "$")) if k == key else k: v for k, v in value.items()}
    return {k: change(v, chosen) if k == key else v for k, v in value.items()}


def change_list(value: list[Any], chosen: random.Random) -> list[Any]:
    place, action = chosen.randrange(len(value)), chosen.random()
    if action < 0.1:
        return value[:place] + value[place + 1 :]
    if action < 0.2:
        return [*value, value[place]]
    return [change(v, chosen) if index == place else v for index, v in enumerate(value)]


# What a user sees as one line and an exit code; anything else is a crash.
ALLOWED = (ValueError, FileNotFoundError, IsADirectoryError)
MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip,
    cut,
    grow,
    repeat,
    odd_header,
    odd_header,
    odd_header,
)


def attack(folder: Path, chosen: random.Random) -> str:
    """Damage one file, or take one away, or put a link in its place; return what was done."""
    victim = chosen.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    action = chosen.random()
    if action < 0.04:
        victim.unlink()
        return f"{victim.name} removed"
    if action < 0.08:
        victim.unlink()
        victim.mkdir()
        return f"{victim.name} became a folder"
    if action < 0.12:
        other = chosen.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        data = other.read_bytes()
        victim.write_bytes(data)
        return f"{victim.name} became a copy of {other.name}"
    mutation = chosen.choice(MUTATIONS)
    victim.write_bytes(mutation(victim.read_bytes(), chosen))
    return f"{mutation.__name__} on {victim.name}"


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def run_cases(corpus: dict[str, Path], tmp_path: Path, name: str, seeds: range) -> int:
    """Attack a checkpoint once for each seed, and try all that reads one; return how many were refused."""
    refused = 0
    for seed in seeds:
        chosen = random.Random(seed)
        source, out = tmp_path / "in" / "checkpoint", tmp_path / "out" / "result"
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(corpus[name], source)
        out.parent.mkdir()
        what = attack(source, chosen)
        before = tree(tmp_path / "in") | set(tmp_path.iterdir())
        outcome = try_all(source, out, chosen.choice(("ourshard", "safetensors", "torch")))
        assert outcome is None or isinstance(outcome, ALLOWED), f"seed {seed}: {what}: {outcome!r}"
        assert outcome is None or len(str(outcome)) > 10, f"seed {seed}: {what}: {outcome!r} says nothing"
        refused += outcome is not None
        if outcome is None and name == "ourshard" and what.split()[0] in ("flip", "cut", "grow", "repeat"):
            assert contents_equal(corpus[name], source), f"seed {seed}: {what} passed all checks"
        after = tree(tmp_path / "in") | set(tmp_path.iterdir())
        assert after == before, f"seed {seed}: {what} wrote {after - before}"
        assert {path.name for path in out.parent.iterdir()} <= {
            "result",
            ".result.converting",
            ".result.converting.journal",
        }
    return refused


def try_all(source: Path, out: Path, to: str) -> BaseException | None:
    """Inspect, verify and convert a checkpoint; return what was raised, or what verify found wrong."""
    try:
        with detect(source) as opened:
            inspect(opened)
            found = verify(opened, config=False)
        convert(source, out, to=to, workers=1)
    except Exception as error:
        return error
    return None if found.ok else CheckpointError(next(f.text for f in found.findings if f.ok is False))


def contents_equal(one: Path, other: Path) -> bool:
    """A mutation may put a byte in place of itself."""
    return all(
        path.read_bytes() == (other / path.relative_to(one)).read_bytes() for path in one.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("name", ["ourshard", "safetensors", "torch", "legacy"])
def test_a_hundred_mutated_files_of_each_format(corpus: dict[str, Path], tmp_path: Path, name: str) -> None:
    assert run_cases(corpus, tmp_path, name, range(100)) > 50
    assert NAME in {path.name for path in corpus["ourshard"].iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ourshard", "safetensors", "torch", "legacy"])
def test_two_thousand_mutated_files(corpus: dict[str, Path], tmp_path: Path, name: str) -> None:
    assert run_cases(corpus, tmp_path, name, range(1000, 1700)) > 350

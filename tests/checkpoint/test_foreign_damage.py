"""Truncated and altered checkpoints of others: a clear error or the right data, no crash, no hang, nothing silent where
the format has a checksum."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.foreign.torchfile import TorchFile
from ourshard.checkpoint.source import CheckpointError, Source, detect

from tests.checkpoint.foreign import made_folder, made_names, same
from tests.fixtures.net import Norm

SECONDS = 120  # for one damaged checkpoint, of the second or so that it takes; the first of them imports transformers
# Files whose bytes are under checksums of torch.save; what is damaged in others may not be told from what is meant.
NOT_TRAINED = (
    "head.weight",
    "frozen.weight",
    "frozen.bias",
    *(f"norm.{name}" for name in dict(Norm(1).named_buffers())),
)
CHECKED = (".pt", ".bin", ".distcp")


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Raise AssertionError in the block if it takes longer."""

    def stop(*_: object) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, torch.Tensor]]:
    """Return what each undamaged checkpoint holds."""
    found = {}
    for name in made_names():
        with detect(made_folder() / name) as source:
            found[name] = {str(key): source.read(key) for key in source.tensors}
    return found


def outcome(folder: Path) -> dict[str, torch.Tensor] | str:
    """Return all tensors, or the error's text. Any other exception is a bug and passes."""
    try:
        with no_longer_than(SECONDS), detect(folder) as source:
            return {str(key): source.read(key) for key in source.tensors}
    except CheckpointError as error:
        return str(error)


def copied(name: str, tmp_path: Path) -> Path:
    """Return a copy that may be damaged."""
    folder = tmp_path / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made_folder() / name, folder)
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "random_states" not in path.name)


@pytest.mark.parametrize("name", made_names())
def test_every_cut_off_file_is_refused(name: str, tmp_path: Path) -> None:
    """But for copies in universal checkpoints that are not read: of what is not trained, from 16 bit."""
    folder = copied(name, tmp_path)
    for path in files(folder):
        not_read = path.name in ("config.json", "latest", "latest_universal") or path.parent.name in NOT_TRAINED
        if not_read or path.stat().st_size == 0:
            continue
        data = path.read_bytes()
        for keep in (0, 1, len(data) // 3, len(data) - 1):
            path.write_bytes(data[:keep])
            assert isinstance(outcome(folder), str), f"{path} cut to {keep} of {len(data)} bytes"
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("fsdp2_sharded", "pytorch_model_fsdp_0/__1_0.distcp", "__1_0.distcp is missing"),
        ("fsdp2_sharded", "pytorch_model_fsdp_0/.metadata", "saving did not finish"),
        ("dcp_metadata_of_each_rank", "__0.metadata", "__0.metadata is missing"),
        ("fsdp2_rank", "pytorch_model_fsdp_0_rank1.bin", "rank 1 is missing"),
        ("fsdp2_rank", "optimizer_0_rank2.bin", "3 files of the model and 2 of the optimizer"),
        ("fsdp1_rank", "pytorch_model_fsdp_0_rank1.bin", "piece is missing"),
        ("hf_shards", "shard-00001-model-00001-of-00001.safetensors", "shard-00001 is missing"),
        ("ds_z2", "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "rank 1 are missing"),
        ("ds_z2", "global_step3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", "for 3 ranks"),
        ("ds_z3", "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt", "rank 1 are missing"),
        ("ds_universal_z2", "global_step3_universal/zero/emb.weight/fp32.pt", "fp32.pt of emb.weight is missing"),
    ],
)
def test_a_lost_file_is_named(name: str, file: str, words: str, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    (folder / file).unlink()
    result = outcome(folder)
    assert isinstance(result, str)
    assert words in result


def damage(data: bytearray, chosen: random.Random) -> None:
    """Change a byte, a run of bytes, or cut and double a part."""
    place = chosen.randrange(len(data))
    kind = chosen.randrange(5)
    if kind == 0:
        data[place] ^= 1 << chosen.randrange(8)
    elif kind == 1:
        data[place] = chosen.choice((0, 1, 0x7F, 0x80, 0xFF))
    elif kind == 2:
        data[place : place + 8] = chosen.randbytes(8)
    elif kind == 3:
        del data[place : place + chosen.randrange(1, 64)]
    else:
        data[place:place] = data[max(0, place - 32) : place]


def check_damaged(chosen: random.Random, tmp_path: Path, whole: dict[str, dict[str, torch.Tensor]], count: int) -> None:
    """Damage so many files, one at a time."""
    names, folders = made_names(), {}
    for _ in range(count):
        name = chosen.choice(names)
        folder = folders.setdefault(name, copied(name, tmp_path) if name not in folders else None)
        path = chosen.choice([path for path in files(folder) if path.stat().st_size])
        original = path.read_bytes()
        data = bytearray(original)
        damage(data, chosen)
        path.write_bytes(data)
        result = outcome(folder)
        path.write_bytes(original)
        if isinstance(result, dict) and path.suffix in CHECKED and data != original:
            for key, tensor in result.items():
                assert key in whole[name], f"{path}: {key} has appeared"
                assert same(tensor, whole[name][key]), f"{path}: {key} is silently wrong"


def test_hundreds_of_damaged_files_give_an_error_or_the_right_data(
    tmp_path: Path, whole: dict[str, dict[str, torch.Tensor]]
) -> None:
    check_damaged(random.Random(0), tmp_path, whole, 300)


@pytest.mark.slow
def test_thousands_of_damaged_files_give_an_error_or_the_right_data(
    tmp_path: Path, whole: dict[str, dict[str, torch.Tensor]]
) -> None:
    check_damaged(random.Random(1), tmp_path, whole, 2000)


ODD: tuple[Any, ...] = (None, -1, 2**62, "x", [], {}, (), [None], {"x": 1}, 1.5, torch.float16, torch.Size([3]))


def altered(value: Any, chosen: random.Random) -> Any:
    """Return the value with something of another kind put at a random place in it."""
    if isinstance(value, dict) and value and chosen.random() < 0.9:
        key = chosen.choice(list(value))
        return {**value, key: altered(value[key], chosen)}
    if isinstance(value, (list, tuple)) and value and chosen.random() < 0.9:
        place = chosen.randrange(len(value))
        kind = list if isinstance(value, list) else tuple  # torch.Size takes nothing but integers
        return kind((*value[:place], altered(value[place], chosen), *value[place + 1 :]))
    return chosen.choice(ODD)


ALTERED = (
    ("fsdp1_full", "pytorch_model_fsdp.bin"),
    ("fsdp1_full", "optimizer.bin"),
    ("fsdp1_full", "scheduler.bin"),
    ("ddp", "optimizer.bin"),
    ("ds_z0", "global_step3/mp_rank_00_model_states.pt"),
    ("ds_z2", "global_step3/mp_rank_00_model_states.pt"),
    ("ds_z3", "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ("ds_universal_z2", "global_step3_universal/zero/emb.weight/fp32.pt"),
    ("ds_universal_z2", "global_step3_universal/mp_rank_00_model_states.pt"),
)


@pytest.mark.parametrize(("name", "file"), ALTERED)
def test_whole_files_with_odd_content_give_a_clear_error_or_are_read(name: str, file: str, tmp_path: Path) -> None:
    """No checksum tells here: the file is as it was saved, and its values are of other kinds than a reader expects."""
    folder = copied(name, tmp_path)
    content = torch.load(folder / file, weights_only=True)
    chosen = random.Random(0)
    for _ in range(30):
        torch.save(altered(content, chosen), folder / file)
        outcome(folder)


def test_a_slice_of_one_rank_where_the_whole_should_be_is_refused(tmp_path: Path) -> None:
    """Older accelerate wrote rank 0's slice of each adapter as if it were whole, and nothing told (CASES A15)."""
    folder = copied("fsdp2_full", tmp_path)
    model = torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True)
    model["back.weight"] = model["back.weight"][:3].clone()
    torch.save(model, folder / "pytorch_model_fsdp.bin")
    result = outcome(folder)
    assert isinstance(result, str)
    assert "back.weight" in result
    assert "not whole" in result


def test_a_stale_file_of_an_older_save_is_told(tmp_path: Path) -> None:
    folder = copied("fsdp2_sharded", tmp_path)
    inner = folder / "pytorch_model_fsdp_0"
    shutil.copy(inner / "__0_0.distcp", inner / "__7_0.distcp")
    with detect(folder) as source:
        assert any("__7_0.distcp" in oddity for oddity in source.description.oddities)
        assert source.description.world_size == 3


def verify(source: Source) -> list[str]:
    return [f"{file}: {problem}" for file, problem in source.verify_files() if problem]


@pytest.mark.parametrize("name", made_names())
def test_verify_finds_nothing_in_a_checkpoint_as_it_was_written(name: str) -> None:
    with detect(made_folder() / name) as source:
        problems = verify(source)
    if name == "ds_universal_z2":  # DeepSpeed's own tool widens the alias from 16 bit where there is one
        problems = [problem for problem in problems if not problem.startswith("head.weight")]
    assert not problems


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    folder = copied("fsdp2_full", tmp_path)
    path = folder / "pytorch_model_fsdp.bin"
    file = TorchFile(path)
    content = file.stored(file.load()["emb.weight"]).content
    data = bytearray(path.read_bytes())
    data[content.start + content.nbytes - 1] ^= 4
    path.write_bytes(data)
    with detect(folder) as source:
        assert any("emb.weight" in problem and "checksum" in problem for problem in verify(source))


def test_verify_finds_a_16_bit_copy_that_is_not_its_master(tmp_path: Path) -> None:
    folder = copied("ds_z2", tmp_path)
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    content["module"]["back.weight"] += 1
    torch.save(content, path)
    with detect(folder) as source:
        problems = verify(source)
    assert any(problem.startswith("back.weight (copy)") and "master" in problem for problem in problems)


def test_an_alias_with_other_values_is_told_and_its_owner_is_taken(tmp_path: Path) -> None:
    folder = copied("ds_z0", tmp_path)
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    content["module"]["head.weight"] = content["module"]["head.weight"] + 1
    torch.save({**content, "shared_params": {"head.weight": "emb.weight"}}, path)
    with detect(folder) as source:
        assert any("head.weight is tied to emb.weight but" in oddity for oddity in source.description.oddities)
        assert any(problem.startswith("head.weight") for problem in verify(source))


Refused = Callable[[Path], None]


def _pipeline(folder: Path) -> None:
    (folder / "global_step3" / "layer_00-model_states.pt").touch()


def _tensor_parallel(folder: Path) -> None:
    (folder / "global_step3" / "mp_rank_01_model_states.pt").touch()


def _experts(folder: Path) -> None:
    (folder / "global_step3" / "layer_0_expert_1_mp_rank_00_model_states.pt").touch()


@pytest.mark.parametrize(
    ("prepare", "words"),
    [(_pipeline, "pipeline"), (_tensor_parallel, "tensor parallelism"), (_experts, "mixture of experts")],
)
def test_parallelism_that_is_not_read_is_refused_by_name(prepare: Refused, words: str, tmp_path: Path) -> None:
    folder = copied("ds_z2", tmp_path)
    prepare(folder)
    result = outcome(folder)
    assert isinstance(result, str)
    assert words in result

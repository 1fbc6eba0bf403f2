"""Whole files written by all ranks at once (CASES A09, A12): nothing is gathered, and each byte is in its place."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from ourshard.checkpoint.io import Buffer, DiskIO
from safetensors.torch import load_file

from tests.integrations.test_saving import Tied

pytestmark = pytest.mark.ranks

WHOLE = {"stage": 3, "persist_below": 40}


def tied(config: dict[str, Any]) -> Any:
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin(config))
    torch.manual_seed(3)
    return accelerator, accelerator.prepare(Tied())


def count_gathers() -> list[str]:
    """Note each gather of whole masters from now on."""
    from ourshard.runtime.lane import Lane

    seen: list[str] = []
    gather = Lane.gather_master

    def noting(lane: Lane) -> torch.Tensor:
        seen.append(lane.unit.label)
        return gather(lane)

    Lane.gather_master = noting  # type: ignore[method-assign]
    return seen


def save_in_pieces(folder: str, dtype: str | None, stage: int) -> list[str]:
    """Save in files of at most 8 kB over files of an earlier save; load them as accelerate does."""
    from accelerate import load_checkpoint_in_model
    from ourshard.runtime.lane import Lane

    accelerator, model = tied({**WHOLE, "stage": stage, "checkpoint": {"save_dtype": dtype}})
    gather = Lane.gather_master
    gathers = count_gathers()
    try:
        accelerator.save_model(model, folder)
        accelerator.save_model(model, folder, max_shard_size="8KB")
        accelerator.wait_for_everyone()  # of a model that is whole everywhere, rank 0 alone writes
    finally:
        Lane.gather_master = gather  # type: ignore[method-assign]
    again = Tied().to(getattr(torch, dtype or "float32"))
    load_checkpoint_in_model(again, f"{folder}/model.safetensors.index.json", strict=False)
    torch.manual_seed(3)
    for name, value in Tied().to(getattr(torch, dtype or "float32")).state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    return gathers


@pytest.mark.parametrize(("dtype", "stage"), [(None, 3), ("bfloat16", 3), (None, 1), (None, 0)])
def test_accelerates_files_are_written_in_place_by_all_ranks(
    ranks: Any, tmp_path: Path, dtype: str | None, stage: int
) -> None:
    assert ranks(2)(save_in_pieces, str(tmp_path), dtype, stage) == [[], []]
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    assert names == {"model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    torch.manual_seed(3)
    expected = Tied().state_dict()
    for name, value in load_file(tmp_path / "model.safetensors").items():
        own = expected[name] if name == "kept" or dtype is None else expected[name].bfloat16()  # a buffer keeps its own
        assert torch.equal(value, own), name
    assert not list(tmp_path.glob(".*"))


class OneFails(DiskIO):
    """A disk that is full for one rank."""

    def write_at(self, file: BinaryIO, position: int, buffers: Sequence[Buffer]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def fail_or_fall_back(folder: str, what: str) -> str:
    import torch.distributed as dist
    from ourshard.checkpoint import whole

    accelerator, model = tied(WHOLE)
    whole.VISIBLE_WITHIN = 0.1
    if what == "not shared":
        seen = whole._see
        whole._see = lambda paths: dist.get_rank() == 0  # type: ignore[assignment]
        accelerator.save_model(model, folder)
        whole._see = seen
        accelerator.wait_for_everyone()
        return ""
    (fill,) = (whole._fill,)
    if dist.get_rank() == 1:
        whole._fill = lambda *args: fill(*args[:-1], OneFails())  # type: ignore[assignment]
    with pytest.raises((OSError, ValueError)) as error:
        accelerator.save_model(model, folder)
    whole._fill = fill
    return str(error.value)


@pytest.mark.parametrize("what", ["not shared", "full"])
def test_a_folder_that_others_do_not_see_is_gathered_and_a_full_disk_leaves_the_files_before(
    ranks: Any, tmp_path: Path, what: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"before")
    told = ranks(2)(fail_or_fall_back, str(tmp_path), what)
    if what == "full":
        assert all("No space left on device" in error for error in told)
        assert (tmp_path / "model.safetensors").read_bytes() == b"before"
    else:
        torch.manual_seed(3)
        expected = Tied().state_dict()
        for name, value in load_file(tmp_path / "model.safetensors").items():
            assert torch.equal(value, expected[name]), name
    assert not list(tmp_path.glob(".*"))


def pretrained(kind: str, folder: str, shard: bool) -> list[str]:
    import ourshard
    from ourshard.runtime.lane import Lane
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {
        "vocab_size": 101,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    if kind == "mixtral":
        model: Any = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=3))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    gather, gathers = Lane.gather_master, []
    if shard:
        ourshard.shard_model(model, WHOLE)
        gathers = count_gathers()
    try:
        model.save_pretrained(folder, max_shard_size="10KB")
    finally:
        Lane.gather_master = gather  # type: ignore[method-assign]
    return gathers


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_transformers_files_are_those_of_a_model_that_is_not_sharded(ranks: Any, tmp_path: Path, kind: str) -> None:
    """Mixtral's experts are one tensor in the model and many in the file: there whole values are gathered."""
    pretrained(kind, str(tmp_path / "alone"), shard=False)
    for gathers in ranks(2)(pretrained, kind, str(tmp_path / "ours"), True):
        assert bool(gathers) == (kind == "mixtral")
    files = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == files
    assert len(files) > 4
    for name in files:
        if name.endswith(".safetensors"):
            ours, alone = load_file(tmp_path / "ours" / name), load_file(tmp_path / "alone" / name)
            assert ours.keys() == alone.keys()
            assert all(torch.equal(ours[key], value) for key, value in alone.items())
        else:
            assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes(), name


def save_on_rank_0(folder: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Train a step, as the weights come to all ranks after it; save on one; return the weights."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from ourshard import ShardPlugin

    accelerator = Accelerator(ourshard_plugin=ShardPlugin({"stage": 1, "persist_below": 40}))
    model = Tied().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.arange(12)).float().square().mean())
    optimizer.step()
    alone = {}
    if dist.get_rank() == 0:
        accelerator.save_model(model, folder)
        alone = accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()
    together = accelerator.get_state_dict(model)
    assert all(torch.equal(value, together[name]) for name, value in alone.items())
    return together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rank_0_alone_saves_a_model_that_it_has_whole(ranks: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """CASES A08: of stage 2 and below, an export under `is_main_process` just works, with masters in fp32 too."""
    expected = ranks(2)(save_on_rank_0, str(tmp_path), dtype)[0]
    saved = load_file(tmp_path / "model.safetensors")
    assert expected.keys() - saved.keys() == {"head.weight"}
    assert all(torch.equal(value, expected[name]) for name, value in saved.items())
    assert saved["body.weight"].dtype == dtype


def save_parts(config: dict[str, Any], folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Save a module of a model that was prepared, and a module around one; return what is gathered of each."""
    from torch import nn

    accelerator, model = tied(config)
    around = nn.ModuleDict({"inner": model, "other": nn.Linear(3, 2)})
    found = {}
    for name, part in (("body", model.body), ("around", around)):
        found[name] = accelerator.get_state_dict(part)
        accelerator.save_model(part, f"{folder}/{name}")
    accelerator.wait_for_everyone()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_a_part_of_a_model_and_a_module_around_one_are_saved_whole(ranks: Any, tmp_path: Path, stage: int) -> None:
    """CASES A01, A12: at stage 0 the file of a part had one tensor."""
    torch.manual_seed(3)
    whole = Tied()
    for found in ranks(2)(save_parts, {**WHOLE, "stage": stage}, str(tmp_path)):
        assert found["body"].keys() == whole.body.state_dict().keys()
        for name, value in whole.state_dict().items():
            assert torch.equal(found["around"][f"inner.{name}"], value)
    saved = {name: load_file(tmp_path / name / "model.safetensors") for name in found}
    assert saved["body"].keys() == found["body"].keys()
    assert found["around"].keys() - saved["around"].keys() == {"inner.head.weight"}
    for name, tensors in saved.items():
        assert all(torch.equal(value, found[name][key]) for key, value in tensors.items())


def save_ties(config: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    """Save a whole state dict by hand, and a whole checkpoint, both with safetensors; load the latter."""
    from ourshard import full_state_dict

    accelerator, model = tied({**config, "checkpoint": {"format": "full"}})
    for name, state in (("by hand", accelerator.get_state_dict(model)), ("ours", full_state_dict(model))):
        accelerator.save(state, f"{folder}/{name}.safetensors", safe_serialization=True)
    accelerator.save_state(f"{folder}/checkpoint")
    with torch.no_grad():
        model.embed.weight.zero_()
    accelerator.load_state(f"{folder}/checkpoint")
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("stage", range(4))
def test_ties_are_in_a_file_once_as_those_of_a_plain_model(ranks: Any, tmp_path: Path, stage: int) -> None:
    """CASES A12: accelerate's own save knows a state dict by its class, and safetensors refuses ties in any other."""
    torch.manual_seed(3)
    whole = Tied().state_dict()
    for found in ranks(2)(save_ties, {**WHOLE, "stage": stage}, str(tmp_path)):
        assert all(torch.equal(found[name], value) for name, value in whole.items())
    for name in ("by hand", "ours", "checkpoint/model"):
        saved = load_file(tmp_path / f"{name}.safetensors")
        assert whole.keys() - saved.keys() == {"head.weight"}
        assert all(torch.equal(value, whole[key]) for key, value in saved.items())

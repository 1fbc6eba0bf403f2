"""Checkpoints that other frameworks wrote are read bit for bit, by name, from the outer folder or the inner one."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ourshard.checkpoint.source import PARAM, CheckpointError, Source, TensorKey, detect

from tests.checkpoint.foreign import (
    Case,
    LiveRun,
    assert_equals_truth,
    load_truth,
    made_case,
    made_folder,
    made_names,
    same,
    shared_cases,
)

# The gathered truth of this run has one list for the sub-groups of two groups.
NO_GROUPS = frozenset({"ds_z3_gpt2_w4_bf16_subgroups"})
TIED_BY_NO_FILE = frozenset(
    {
        "accel_ddp_llama_w2_fp32", "fsdp2_hfstorage_llama_w2_fp32", "hf_peft_adapter_fp32", "hf_shards",
        "trainer_ddp_lora_w2_fp32", "trainer_fsdp2_sharded_lora_w2_bf16mix",
    }
)  # fmt: skip


def assert_describes(source: Source, truth: LiveRun, name: str) -> None:
    """Assert what the description says: step, ties, groups, frozen names."""
    description = source.description
    has_state = any(key.is_state for key in source.tensors)
    if has_state:
        assert description.step == int(truth.metadata["step"])
    if name not in TIED_BY_NO_FILE:
        assert description.ties == truth.metadata["tied"]
    if has_state and truth.groups and name not in NO_GROUPS:
        assert [set(group["params"]) for group in description.param_groups] == truth.groups
    if has_state and "frozen" in truth.metadata:
        held = {key.name for key in source.tensors if key.kind == "param"}
        assert description.frozen == set(truth.metadata["frozen"]) & held
    if "lr" in truth.metadata:
        assert [group["lr"] for group in description.param_groups] == truth.metadata["lr"]


@pytest.mark.parametrize("case", shared_cases())
def test_shared_fixtures_are_read_as_the_live_run_was(case: Case) -> None:
    with detect(case.inner()) as source:
        truth = load_truth(case.truth)
        assert_equals_truth(source, truth)
        assert_describes(source, truth, case.name)


@pytest.mark.parametrize("name", made_names())
def test_made_fixtures_are_read_as_the_live_run_was(name: str) -> None:
    case = made_case(name)
    with detect(case.folder) as source:
        truth = load_truth(case.truth)
        assert_equals_truth(source, truth)
        assert_describes(source, truth, name)


@pytest.mark.parametrize("name", made_names())
def test_any_rows_and_any_run_are_those_of_the_whole_tensor(name: str) -> None:
    chosen = random.Random(0)
    with detect(made_case(name).folder) as source:
        for key, info in source.tensors.items():
            whole = source.read(key)
            start = chosen.randint(0, info.rows)
            stop = chosen.randint(start, info.rows) if info.shape else 1
            start = start if info.shape else 0
            rows = source.read(key, start, stop)
            assert same(rows, whole[start:stop] if info.shape else whole), str(key)
            assert rows.is_contiguous()
            assert rows.untyped_storage().nbytes() == rows.nbytes  # it owns no more than was asked for
            first = chosen.randint(0, info.numel)
            last = chosen.randint(first, info.numel)
            assert same(source.read_run(key, first, last), whole.reshape(-1)[first:last]), str(key)


INNER = (
    ("ds_z2", "global_step3"),
    ("ds_universal_z3", "global_step3_universal"),
    ("fsdp2_sharded", "pytorch_model_fsdp_0"),
    ("fsdp2_sharded", "optimizer_0"),
    ("fsdp1_full", "pytorch_model_fsdp.bin"),
    ("fsdp2_rank", "pytorch_model_fsdp_0_rank1.bin"),
    ("ddp", "optimizer.bin"),
)


@pytest.mark.parametrize(("name", "inner"), INNER)
def test_an_inner_folder_or_file_stands_for_its_checkpoint(name: str, inner: str) -> None:
    folder = made_folder() / name
    with detect(folder) as outer, detect(folder / inner) as found:
        assert type(found) is type(outer)
        assert found.tensors == outer.tensors
        assert repr(found.description) == repr(outer.description)  # tensors in it have no plain ==


def test_a_lost_pointer_does_no_harm_unless_there_is_a_choice(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made_folder() / "ds_z2", folder)
    (folder / "latest").unlink()
    with detect(folder) as source:
        assert source.format == "deepspeed"
    shutil.copytree(folder / "global_step3", folder / "global_step6")
    with pytest.raises(CheckpointError, match="name one: global_step3, global_step6"):
        detect(folder)
    (folder / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match="name one"):
        detect(folder)
    with detect(folder / "global_step6") as source:
        assert source.description.step == 3


def test_detection_is_pure_and_says_what_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing to load")
    with pytest.raises(CheckpointError) as error:
        detect(tmp_path)
    for words in ("latest", "pytorch_model_fsdp_0/", "optimizer.pt", "adapter_config.json", "shard-00001"):
        assert words in str(error.value)
    with pytest.raises(FileNotFoundError):
        detect(tmp_path / "nowhere")


def test_client_state_and_scheduler_of_deepspeed_are_carried() -> None:
    with detect(made_folder() / "ds_z2") as source:
        client = source.description.client_state
        assert client["note"] == "client"
        assert client["seen"] == [1, 2, 3]
        assert torch.equal(client["place"], torch.arange(3))
        assert source.description.scheduler["last_epoch"] == 3
        assert source.description.world_size == 3
        assert source.description.stage == 2
        assert source.description.versions["deepspeed"]


def test_16_bit_copies_are_told_and_masters_are_read() -> None:
    with detect(made_folder() / "ds_z3") as source:
        assert source.description.own_dtypes["emb.weight"] is torch.bfloat16
        assert source.tensors[next(key for key in source.tensors if key.name == "emb.weight")].dtype is torch.float32
        frozen = next(info for key, info in source.tensors.items() if key.name == "frozen.weight")
        assert frozen.dtype is torch.bfloat16  # there is no wider copy, and none is claimed


def test_what_the_files_do_not_hold_is_said(tmp_path: Path) -> None:
    with detect(made_folder() / "ds_z3_exclude_frozen") as source:
        assert any("frozen" in loss and "left out" in loss for loss in source.description.losses)
    with detect(made_folder() / "ds_z2_elastic") as source:
        assert any("elastic" in loss for loss in source.description.losses)
    shutil.copytree(made_folder() / "fsdp2_full", tmp_path / "full")
    for name in ("random_states_0.pkl", "sampler.bin", "custom_checkpoint_0.pkl"):
        (tmp_path / "full" / name).touch()
    with detect(tmp_path / "full") as source:
        said = " ".join(source.description.beside)
        assert all(words in said for words in ("random states", "positions in the data", "register_for_checkpointing"))


def test_a_model_in_hand_names_numbered_parameters_without_a_guess(tmp_path: Path) -> None:
    names = ["model.embed_tokens.weight"]
    with detect(made_folder() / "ddp") as source:
        known = [name for group in source.description.param_groups for name in group["params"]]
        names = sorted(known, key=lambda name: (name != names[0], name))
        expected = source.description.param_groups
    with detect(made_folder() / "ddp", parameter_order=names) as wrong:
        assert not wrong.description.param_groups  # the order does not fit the shapes: no names, and it is said
        assert any("order" in loss for loss in wrong.description.losses)
    order = _order_of_llama()
    with detect(made_folder() / "ddp", parameter_order=order) as right:
        assert [set(group["params"]) for group in right.description.param_groups] == [
            set(group["params"]) for group in expected
        ]
        assert any("the model" in oddity for oddity in right.description.oddities)


def _order_of_llama() -> list[str]:
    layer = "model.layers.{}."
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    layers = [f"{layer.format(index)}{part}.weight" for index in range(2) for part in parts]
    return ["model.embed_tokens.weight", *layers, "model.norm.weight"]


def test_a_dcp_folder_of_plain_state_dicts_is_read_with_numbered_optimizer_and_nested_names(tmp_path: Path) -> None:
    parts = {"encoder": torch.nn.Linear(3, 4), "decoder": torch.nn.Linear(4, 2)}
    named = {f"{part}.{name}": tensor for part, module in parts.items() for name, tensor in module.named_parameters()}
    optimizer = torch.optim.AdamW([{"params": [p]} for p in named.values()], lr=0.1)
    parts["decoder"](parts["encoder"](torch.ones(1, 3))).sum().backward()
    optimizer.step()
    nested = {
        "model": {part: module.state_dict() for part, module in parts.items()},
        "optimizer": optimizer.state_dict(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(nested, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with detect(tmp_path / "dcp") as source:
        for name, tensor in named.items():
            assert same(source.read(TensorKey(PARAM, name)), tensor.detach())
            assert same(source.read(TensorKey("exp_avg_sq", name)), optimizer.state[tensor]["exp_avg_sq"])
        assert [group["params"] for group in source.description.param_groups] == [[name] for name in named]


def test_a_file_without_a_tensor_of_a_model_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "best": 0.5}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds no state_dict of a model: no tensor in best, epoch"):
        detect(tmp_path)


def test_a_numbered_optimizer_of_an_adapter_leaves_out_the_base_that_has_the_same_shapes(tmp_path: Path) -> None:
    """The base is frozen, and so is the copy that stands beside a module that is trained whole."""
    base, head = "base_model.model.q_proj.", "base_model.model.head."
    frozen = {f"{base}base_layer.weight": (4, 4), f"{head}original_module.weight": (3, 4)}
    names = (f"{base}lora_A.default.weight", f"{base}lora_B.default.weight", f"{head}modules_to_save.default.weight")
    trained = {
        name: torch.nn.Parameter(torch.randn(shape))
        for name, shape in zip(names, ((2, 4), (4, 2), (3, 4)), strict=True)
    }
    optimizer = torch.optim.AdamW(trained.values())
    for parameter in trained.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.save(
        {**{name: torch.zeros(shape) for name, shape in frozen.items()}, **trained}, tmp_path / "pytorch_model.bin"
    )
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    with detect(tmp_path) as source:
        for name, parameter in trained.items():
            assert same(source.read(TensorKey("exp_avg", name)), optimizer.state[parameter]["exp_avg"]), name
        assert source.description.frozen == set(frozen)

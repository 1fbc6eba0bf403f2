"""A LoRA merged while it streams gives what PEFT's own merge gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ourshard.checkpoint.conversion import convert
from ourshard.checkpoint.foreign.adapters import adapter_only_names, names_with_adapter, with_adapter_name
from ourshard.checkpoint.source import PARAM, CheckpointError, TensorKey, detect
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn

from tests.checkpoint.making import save

peft = pytest.importorskip("peft")


class Net(nn.Module):
    """A linear layer, an embedding, and one of GPT-2's transposed layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 7)
        self.head = nn.Linear(7, 5, bias=False)
        self.conv = Conv1D(4, 5)
        self.wave = nn.Conv1d(2, 3, 3)
        self.picture = nn.Conv2d(3, 4, (3, 2), bias=False)
        self.point = nn.Conv2d(2, 5, 1)
        self.grouped = nn.Conv2d(4, 6, 3, groups=2)


def make_peft(**options: Any) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    """Return a PEFT model with random adapters, its weights, and its config."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=8, lora_dropout=0.0, **options)
    model = peft.get_peft_model(Net(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    plain = json.loads(json.dumps(model.peft_config["default"].to_dict(), default=sorted))
    return model, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, plain


def save_ours(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    from dataclasses import replace

    from ourshard.checkpoint.source import Description

    state = {TensorKey(PARAM, name): tensor for name, tensor in weights.items()}
    save(folder, state, 2, description=replace(Description(world_size=2), adapter_config=config))


CASES: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["body", "head"]},
    "rslora": {"target_modules": ["body"], "use_rslora": True},
    "embedding": {"target_modules": ["embed"]},
    "transposed": {"target_modules": ["conv"], "fan_in_fan_out": True},
    "patterns": {"target_modules": ["body", "head"], "rank_pattern": {"head": 2}, "alpha_pattern": {"^body": 5}},
    "convolutions": {"target_modules": ["wave", "picture", "point"]},
    "dora": {"target_modules": ["body", "head"], "use_dora": True},
    "dora, transposed": {"target_modules": ["conv"], "fan_in_fan_out": True, "use_dora": True},
    "dora, embedding": {"target_modules": ["embed"], "use_dora": True, "use_rslora": True},
    "dora, convolutions": {"target_modules": ["wave", "picture", "point"], "use_dora": True},
    "a module trained whole": {"target_modules": ["body"], "modules_to_save": ["head"]},
}


@pytest.mark.parametrize("case", CASES)
def test_the_merged_weights_are_those_of_peft(tmp_path: Path, case: str) -> None:
    model, weights, config = make_peft(**CASES[case])
    save_ours(tmp_path / "ours", weights, config)
    convert(tmp_path / "ours", tmp_path / "out", to="safetensors", merge_adapter=True)
    expected = model.merge_and_unload().state_dict()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
        if name.split(".")[0] not in CASES[case]["target_modules"] or name.endswith("bias"):
            assert torch.equal(found[name], tensor)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_alone_is_merged_into_the_base_it_is_given(tmp_path: Path, dtype: torch.dtype) -> None:
    model, _, _ = make_peft(target_modules=["body", "head"])
    model = model.to(dtype)
    model.save_pretrained(tmp_path / "adapter")
    base = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if "lora_" not in name
    }
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors")
    convert(tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_adapter=True, base=tmp_path / "base")
    expected = model.merge_and_unload().state_dict()
    found = load_file(tmp_path / "out" / "model.safetensors")
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    with pytest.raises(ValueError, match=r"base weight body\.weight of the adapter is not in .* base=PATH"):
        convert(tmp_path / "adapter", tmp_path / "bad", to="safetensors", merge_adapter=True)


LORA_BIAS = pytest.param(
    {"bias": "lora_only"},
    marks=pytest.mark.skipif(
        Version(peft.__version__) < Version("0.21"),
        reason="older ones leave the bias of a wrapped layer out of the file",
    ),
)


@pytest.mark.parametrize("options", [{"bias": "all"}, LORA_BIAS, {"modules_to_save": ["head"]}])
def test_what_an_adapter_trained_whole_takes_the_place_of_the_bases(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Net()
    (tmp_path / "base").mkdir()
    save_file(
        {name: tensor.clone() for name, tensor in net.state_dict().items()}, tmp_path / "base" / "model.safetensors"
    )
    model = peft.get_peft_model(net, peft.LoraConfig(r=3, target_modules=["body"], **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter")
    convert(tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_adapter=True, base=tmp_path / "base")
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = model.merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights=pissa_niter_4, which changes the",
        ),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"trainable_token_indices": {"embed": [1]}}, "LoRA with trained tokens"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"peft_type": "VERA"}, "an adapter of type VERA"),
    ],
)
def test_an_adapter_that_is_more_than_a_sum_of_matrices_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    model, _, _ = make_peft(target_modules=["body"])
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    (tmp_path / "base").mkdir()
    save_file({"body.weight": torch.zeros(7, 6)}, tmp_path / "base" / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "adapter", tmp_path / "out", to="safetensors", merge_adapter=True, base=tmp_path / "base")


def test_blocks_of_rows_give_the_same_as_the_whole(tmp_path: Path) -> None:
    _, weights, config = make_peft(target_modules=["body", "conv"], fan_in_fan_out=False, use_dora=True)
    save_ours(tmp_path / "ours", weights, config)
    from ourshard.checkpoint.merge import merge_adapter

    with merge_adapter(detect(tmp_path / "ours")) as merged:
        for name in ("body.weight", "conv.weight"):
            key = TensorKey(PARAM, name)
            whole = merged.read(key)
            rows = torch.cat([merged.read(key, row, row + 1) for row in range(whole.shape[0])])
            torch.testing.assert_close(rows, whole, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(merged.read_run(key, 5, 20), whole.reshape(-1)[5:20], rtol=1e-6, atol=1e-6)


def test_layers_that_are_stored_both_ways_are_told_apart_by_shape_and_a_square_one_is_refused(tmp_path: Path) -> None:
    model, weights, config = make_peft(target_modules=["body", "conv"])
    save_ours(tmp_path / "ours", weights, config)
    convert(tmp_path / "ours", tmp_path / "out", to="safetensors", merge_adapter=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
    square = {**weights, "base_model.model.square.weight": torch.zeros(4, 4)}
    square |= {f"base_model.model.square.lora_{part}.default.weight": torch.zeros(3, 4) for part in "A"}
    square |= {f"base_model.model.square.lora_{part}.default.weight": torch.zeros(4, 3) for part in "B"}
    save_ours(tmp_path / "square", square, config)
    with pytest.raises(ValueError, match=r"square\.weight is square"):
        convert(tmp_path / "square", tmp_path / "bad", to="safetensors", merge_adapter=True)


def test_what_has_no_linear_merge_is_refused(tmp_path: Path) -> None:
    _, weights, config = make_peft(target_modules=["body"], use_dora=True)
    save_ours(tmp_path / "dora", weights, {**config, "use_dora": False})
    with pytest.raises(ValueError, match="no plain LoRA"):
        convert(tmp_path / "dora", tmp_path / "out", to="safetensors", merge_adapter=True)
    name = "base_model.model.body.lora_magnitude_vector.default.weight"
    save_ours(tmp_path / "short", {**weights, name: torch.zeros(3)}, config)
    with pytest.raises(CheckpointError, match="7 outputs, its DoRA 3 lengths"):
        convert(tmp_path / "short", tmp_path / "out", to="safetensors", merge_adapter=True)
    _, weights, config = make_peft(target_modules=["grouped"], rank_pattern={"grouped": 4})
    save_ours(tmp_path / "grouped", weights, config)
    with pytest.raises(ValueError, match=r"grouped\.weight is a convolution in groups"):
        convert(tmp_path / "grouped", tmp_path / "out", to="safetensors", merge_adapter=True)
    _, weights, config = make_peft(target_modules=["body"])
    save_ours(tmp_path / "no-config", weights, {})
    with pytest.raises(ValueError, match=r"no adapter_config\.json with r and lora_alpha"):
        convert(tmp_path / "no-config", tmp_path / "out", to="safetensors", merge_adapter=True)
    save_ours(tmp_path / "plain", {"w": torch.zeros(3)}, config)
    with pytest.raises(ValueError, match="no LoRA weights"):
        convert(tmp_path / "plain", tmp_path / "out", to="safetensors", merge_adapter=True)
    name = "base_model.model.body.lora_A.default.weight"
    save_ours(tmp_path / "misfit", {**weights, name: torch.zeros(3, 9)}, config)
    with pytest.raises(CheckpointError, match="do not fit"):
        convert(tmp_path / "misfit", tmp_path / "out", to="safetensors", merge_adapter=True)


def test_adapters_only_takes_the_adapter_with_its_state(tmp_path: Path) -> None:
    _, weights, config = make_peft(target_modules=["body"], modules_to_save=["head"])
    save_ours(tmp_path / "ours", weights, config)
    convert(tmp_path / "ours", tmp_path / "out", to="ourshard", adapters_only=True)
    with detect(tmp_path / "out") as source:
        names = {key.name for key in source.tensors}
    assert names == {name for name in weights if ".lora_" in name or ".modules_to_save." in name}
    save_ours(tmp_path / "plain", {"w": torch.zeros(3)}, config)
    with pytest.raises(ValueError, match="has no adapter"):
        convert(tmp_path / "plain", tmp_path / "bad", to="ourshard", adapters_only=True)


def test_an_adapter_from_our_format_loads_in_peft(tmp_path: Path) -> None:
    """CASES A15: the adapter alone, under the names and with the config that PEFT expects."""
    model, weights, config = make_peft(target_modules=["body", "embed"], modules_to_save=["head"])
    save_ours(tmp_path / "ours", weights, config)
    report = convert(tmp_path / "ours", tmp_path / "out", to="peft")
    assert any("weights of the base model" in loss for loss in report.losses)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name for name in theirs if "base_layer" not in name} == set(ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    torch.manual_seed(1)
    loaded = peft.PeftModel.from_pretrained(Net(), tmp_path / "out").state_dict()
    for name in weights:
        if ".lora_" in name or ".modules_to_save." in name:
            assert torch.equal(loaded[name], weights[name]), name
    save_ours(tmp_path / "no-config", weights, {})
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        convert(tmp_path / "no-config", tmp_path / "bad", to="peft")


def adapter_configs() -> dict[str, Any]:
    body = {"target_modules": ["body"]}
    return {
        "lora": peft.LoraConfig(r=2, **body),
        "dora": peft.LoraConfig(r=2, target_modules=["body", "embed", "wave"], use_dora=True),
        "tokens": peft.LoraConfig(r=2, trainable_token_indices={"embed": [1, 3]}, **body),
        "a module trained whole": peft.LoraConfig(r=2, modules_to_save=["head"], **body),
        "adalora": peft.AdaLoraConfig(total_step=9, **body),
        "ia3": peft.IA3Config(feedforward_modules=[], **body),
        "loha": peft.LoHaConfig(**body),
        "lokr": peft.LoKrConfig(**body),
        "boft": peft.BOFTConfig(boft_block_size=1, **body),
        "hra": peft.HRAConfig(**body),
        "norm": peft.LNTuningConfig(**body),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", adapter_configs())
def test_names_in_files_of_peft_and_in_its_models_are_told_from_each_other(kind: str) -> None:
    config = adapter_configs()[kind]
    model = peft.get_peft_model(Net(), config)
    live = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    files = {name for name in peft.get_peft_model_state_dict(model) if "base_layer" not in name}
    assert {with_adapter_name(name, config.to_dict()) for name in files} == live
    assert set(adapter_only_names(live).values()) == files
    assert names_with_adapter(files, live) == {short: full for full, short in adapter_only_names(live).items()}


def test_of_several_adapters_one_has_to_be_chosen(tmp_path: Path) -> None:
    _, weights, config = make_peft(target_modules=["body"])
    both = {**weights, **{name.replace(".default.", ".other."): tensor for name, tensor in weights.items()}}
    save_ours(tmp_path / "ours", both, config)
    for options in ({"to": "peft"}, {"to": "safetensors", "merge_adapter": True}):
        with pytest.raises(ValueError, match="several"):
            convert(tmp_path / "ours", tmp_path / "out", **options)  # type: ignore[arg-type]
    convert(tmp_path / "ours", tmp_path / "out", to="peft", exclude=["*.default.*"])
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert set(found) == {name.replace(".default", "") for name in weights if ".lora_" in name}

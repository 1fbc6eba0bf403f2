"""`from_pretrained` and `init_context` under ourshard: stock values on every rank, and each rank's rows read once.

Cases E01, E02, E05 and X05 of CASES.md.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.trainer_runs import logged

pytestmark = pytest.mark.ranks

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 199}


def builders() -> dict[str, Callable[[], Any]]:
    """Return what makes each model, by the name of its folder."""
    import transformers as t

    def llama(**more: Any) -> Any:
        return t.LlamaForCausalLM(t.LlamaConfig(**SMALL, intermediate_size=77, **more))

    return {
        "llama": llama,
        "tied": lambda: llama(tie_word_embeddings=True),
        "bf16": lambda: llama().to(torch.bfloat16),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, num_local_experts=4)
        ),
        "bert": lambda: t.BertModel(t.BertConfig(**SMALL, intermediate_size=64)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=199, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        ),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=199, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
        "wav2vec2": lambda: t.Wav2Vec2ForCTC(
            t.Wav2Vec2Config(
                **{**SMALL, "vocab_size": 32},
                intermediate_size=64,
                conv_dim=(32, 32),
                conv_stride=(5, 2),
                conv_kernel=(10, 3),
                num_feat_extract_layers=2,
                num_conv_pos_embeddings=16,
                num_conv_pos_embedding_groups=4,
            )
        ),
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints: each model as one file, llama also as many, and tied as a pickle."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(7)
    for name, build in builders().items():
        model = build()
        model.save_pretrained(folder / name)
        if name == "llama":
            model.save_pretrained(folder / "index", max_shard_size="20KB")
            (folder / "index" / "model.safetensors.index.json").stat()
        if name == "tied":
            model.config.save_pretrained(folder / "pickle")
            torch.save(model.state_dict(), folder / "pickle" / "pytorch_model.bin")
    return folder


def with_adapters(model: Any, **options: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options))


def resized(model: Any) -> Any:
    model.resize_token_embeddings(207)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "": lambda model: model,
    "lora": with_adapters,
    "dora": lambda model: with_adapters(model, use_dora=True),
    "resized": resized,
    "cast": lambda model: model.to(torch.bfloat16),
    "copied": copy.deepcopy,
}


@dataclass(frozen=True)
class Load:
    """A checkpoint, the class that loads it, and what is done to the model before it is sharded."""

    folder: str
    cls: str
    options: dict[str, Any] = field(default_factory=dict)
    change: str = ""
    in_memory: int = 0  # parameters that are not lazy when the model is sharded


LOADS = {
    "single file": Load("llama", "LlamaForCausalLM"),
    "index": Load("index", "AutoModelForCausalLM"),
    "tied": Load("tied", "LlamaForCausalLM"),
    "pickle": Load("pickle", "LlamaForCausalLM", in_memory=1),  # both names of the tie are compared
    "bf16 as it is": Load("bf16", "LlamaForCausalLM"),
    "bf16 as fp32": Load("bf16", "LlamaForCausalLM", {"dtype": torch.float32}),
    "fp32 as bf16": Load("llama", "LlamaForCausalLM", {"dtype": torch.bfloat16}),
    "new head": Load("llama", "LlamaForSequenceClassification", {"num_labels": 3}, in_memory=1),
    "unexpected and missing": Load("bert", "BertForTokenClassification", {"num_labels": 7}, in_memory=2),
    "fused experts": Load("mixtral", "MixtralForCausalLM"),
    "shared embeddings": Load("t5", "T5ForConditionalGeneration"),
    "transposed weights": Load("gpt2", "GPT2LMHeadModel"),
    "weight norm": Load("wav2vec2", "Wav2Vec2ForCTC", in_memory=2),
    "lora": Load("llama", "LlamaForCausalLM", change="lora", in_memory=8),
    "dora": Load("llama", "LlamaForCausalLM", change="dora", in_memory=16),
    "resized": Load("llama", "LlamaForCausalLM", change="resized", in_memory=2),
    "cast": Load("llama", "LlamaForCausalLM", change="cast"),
    "copied": Load("llama", "LlamaForCausalLM", change="copied"),
}


def load(what: Load, folder: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(3)
    model = getattr(transformers, what.cls).from_pretrained(f"{folder}/{what.folder}", **what.options)
    return CHANGES[what.change](model)


@dataclass
class Loaded:
    """What a rank found."""

    different: list[str]
    in_memory: int
    read_by_rows: int  # bytes, in `shard_model`
    nbytes: int  # of all files' tensors that the model has


def load_sharded(folder: str, stage: int) -> dict[str, Loaded]:
    import ourshard
    from ourshard.runtime.lazy import LazyTensor
    from ourshard.runtime.source import bytes_read

    found = {}
    for name, what in LOADS.items():
        ourshard.disable()
        stock = load(what, folder)
        drawn = torch.rand(2)
        ourshard.enable({"stage": stage, "persist_below": 50})
        model = load(what, folder)
        assert torch.equal(torch.rand(2), drawn), f"{name}: loading moved the random numbers"
        lazy = [isinstance(parameter, LazyTensor) for parameter in model.parameters()]
        before = bytes_read()
        ourshard.shard_model(model, {"stage": stage, "persist_below": 50})
        read = bytes_read() - before
        state, wanted = ourshard.full_state_dict(model), stock.state_dict()
        different = [key for key in wanted if key not in state or not same(state[key], wanted[key])]
        different += [key for key in state if key not in wanted]
        theirs = dict(stock.named_buffers())
        different += [key for key, value in model.named_buffers() if not same(value, theirs[key])]
        found[name] = Loaded(different, lazy.count(False), read, nbytes_in_file(what, stock))
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def nbytes_in_file(what: Load, model: Any) -> int:
    itemsize = 2 if what.folder == "bf16" else 4
    return sum(p.numel() for p in model.parameters()) * itemsize


@pytest.mark.parametrize("world", [2, 3])
def test_every_kind_of_checkpoint_loads_as_in_one_process_and_each_rank_reads_its_rows(ranks, checkpoints, world):
    results = ranks(world)(load_sharded, str(checkpoints), 3, timeout=200)
    for name, what in LOADS.items():
        told = [result[name] for result in results]
        assert [loaded.different for loaded in told] == [[]] * world, name
        assert [loaded.in_memory for loaded in told] == [what.in_memory] * world, name
        if not what.in_memory:  # all ranks read the file once between them, and small parameters each
            share = told[0].nbytes / world
            assert all(loaded.read_by_rows < share * 1.1 + 1500 for loaded in told), (name, told)


def test_stages_that_keep_parameters_whole_load_the_same(ranks, checkpoints):
    for stage in (0, 2):
        for result in ranks(2)(load_sharded, str(checkpoints), stage, timeout=200):
            assert {name: loaded.different for name, loaded in result.items()} == {key: [] for key in LOADS}


def what_is_said(folder: str) -> dict[str, Any]:
    """Return, by case, the number of lazy parameters and what was logged while loading."""
    import ourshard
    from ourshard.runtime.lazy import LazyTensor
    from transformers import LlamaForCausalLM

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ourshard").addHandler(handler)
    found = {}
    cases = {
        "off": (None, {}),
        "refused by the config": ({"low_memory_loading": False}, {}),
        "a place was given": ({}, {"device_map": {"": torch.device("meta")}}),
        "on": ({}, {}),
    }
    for name, (config, options) in cases.items():
        said.clear()
        ourshard.disable()
        if config is not None:
            ourshard.enable(config)
        model = LlamaForCausalLM.from_pretrained(f"{folder}/llama", **options)
        found[name] = (sum(isinstance(p, LazyTensor) for p in model.parameters()), list(said))
    logging.getLogger("ourshard").removeHandler(handler)
    return found


def test_loading_stays_stock_where_it_was_not_asked_for_and_says_why_where_it_cannot_be_lazy(ranks, checkpoints):
    for rank, told in enumerate(ranks(2)(what_is_said, str(checkpoints))):
        assert told["off"] == (0, [])
        assert told["refused by the config"] == (0, [])
        assert told["on"] == (21, [])
        count, messages = told["a place was given"]
        assert count == 0
        assert len(messages) == (rank == 0)
        assert rank or "device_map was given; leave it out" in messages[0]


def init_sharded(names: list[str]) -> dict[str, list[str]]:
    """Return which parameters of random models differ from those that are made without the context."""
    import ourshard

    found = {}
    for name in names:
        torch.manual_seed(11)
        stock = builders()[name]()
        drawn = torch.rand(2)
        torch.manual_seed(11)
        with ourshard.init_context():
            model = builders()[name]()
        assert torch.equal(torch.rand(2), drawn), f"{name}: the context moved the random numbers"
        ourshard.shard_model(model, {"persist_below": 50})
        state = ourshard.full_state_dict(model)
        found[name] = [key for key, value in stock.state_dict().items() if not same(state[key], value)]
    return found


def test_random_models_made_in_the_init_context_are_those_of_one_process(ranks):
    names = [name for name in builders() if name != "bf16"]  # `.to` in the context is `test_lazy.py`'s
    assert ranks(2)(init_sharded, names) == [{name: [] for name in names}] * 2


class Recurrent(torch.nn.Module):
    """Has a layer that keeps weak references to its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.LSTM(24, 30)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows)[0]


def recurrent(lazy: bool) -> None:
    """Shard a recurrent layer whose values are nowhere yet, or on rank 0 alone, beside a plain one."""
    import ourshard
    import torch.distributed as dist

    plain = Recurrent()
    with ourshard.init_context() if lazy else torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Recurrent()
    ourshard.shard_model(model, {"persist_below": 0})
    rows = torch.ones(3, 2, 24)
    for each in (plain, model):
        each(rows).pow(2).mean().backward()
    torch.testing.assert_close(model(rows), plain(rows))
    torch.testing.assert_close(
        ourshard.clip_grad_norm_(model, 1.0), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    )


@pytest.mark.parametrize("lazy", [True, False], ids=["drawn later", "on rank 0 alone"])
def test_weak_references_to_weights_without_values_stay_right(ranks, lazy):
    ranks(2)(recurrent, lazy)


class Rotating(torch.nn.Module):
    """Has a buffer that is in no file and a constant that is no buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(40, 40)
        self.register_buffer("frequencies", scale * torch.arange(8.0), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows) * self.frequencies.sum()


def buffers_on(scale: float, constant: bool) -> Any:
    """Shard a model that the other ranks made on the meta device."""
    import ourshard
    import torch.distributed as dist

    first = dist.get_rank() == 0
    with torch.device("cpu" if first else "meta"):
        model = Rotating(scale)
    if constant:
        model.table = torch.ones(3, device="cpu" if first else "meta")
    try:
        ourshard.shard_model(model)
    except ValueError as error:
        return str(error)
    return model.frequencies


def test_buffers_that_are_in_no_file_are_those_of_the_first_rank(ranks):
    for buffer in ranks(2)(buffers_on, 0.5, False):
        assert torch.equal(buffer, 0.5 * torch.arange(8.0))


def test_a_tensor_that_is_no_buffer_and_has_no_values_is_named(ranks):
    for told in ranks(2)(buffers_on, 0.5, True):
        assert "'.table' is on the meta device and is not a registered buffer" in told


def quantized_otherwise(folder: str, method: str, dequantize: bool) -> tuple[list[str], str]:
    """Load and prepare a model of a quantizer that transformers is told of; return what is logged and raised."""
    import ourshard
    from transformers import LlamaForCausalLM
    from transformers.quantizers import HfQuantizer, auto, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Config(QuantizationConfigMixin):
        def __init__(self, **options: Any) -> None:
            self.quant_method, self.dequantize = method, dequantize

    class Quantizer(HfQuantizer):
        is_trainable = True

        def is_serializable(self, *args: Any, **options: Any) -> bool:
            return True

        def _process_model_before_weight_loading(self, model: Any, **options: Any) -> Any:
            return model

        _process_model_after_weight_loading = _process_model_before_weight_loading

    register_quantization_config(method)(Config)
    register_quantizer(method)(Quantizer)
    ourshard.enable({"stage": 3})
    try:
        with logged(logging.WARNING) as said:
            model = LlamaForCausalLM.from_pretrained(f"{folder}/llama", quantization_config=Config())
        ourshard.shard_model(model, {"stage": 3})
    except ValueError as error:
        return said, str(error)
    finally:
        del auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method], auto.AUTO_QUANTIZER_MAPPING[method]
    return said, ""


def test_a_model_quantized_as_nobody_tried_on_shards_is_named_before_it_is_read_and_refused(ranks, checkpoints):
    for rank, (said, error) in enumerate(ranks(2)(quantized_otherwise, str(checkpoints), "ours", False)):
        assert [text.split(":")[0] for text in said if "quantized by 'ours'" in text] == ["from_pretrained"][rank:]
        assert "'LlamaForCausalLM' can't be sharded: its weights are quantized by 'ours'" in error
        assert "load it with dequantize=True" in error
    assert [error for _, error in ranks(2)(quantized_otherwise, str(checkpoints), "theirs", True)] == ["", ""]

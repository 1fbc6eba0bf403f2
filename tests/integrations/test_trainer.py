"""What a Trainer does on ranks, sharded, against the same in one process on the joined batches.

Cases C01, C06, A01, B01, B05, B06, D02, F05 of CASES.md.
"""

from __future__ import annotations

import functools
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch.utils.data import Subset

from tests.integrations.trainer_runs import EVAL_ROWS, SETTINGS, Case, Run, Tokens, llama, on_rank, run

pytestmark = pytest.mark.ranks

EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}

CASES: dict[str, Case] = {
    "plain": Case(arguments=EVALUATES, after=("predict", "save")),
    "accumulation": Case(arguments={"gradient_accumulation_steps": 3, **EVALUATES}),
    "label smoothing": Case(arguments={"label_smoothing_factor": 0.1}),
    "group by length": Case(arguments={"train_sampling_strategy": "group_by_length"}),
    "checkpointing": Case(arguments=CHECKPOINTED),
    "reentrant checkpointing": Case(arguments=REENTRANT),
    "compile": Case(arguments={"torch_compile": True, "torch_compile_backend": "eager"}, after=("save",)),
    "evaluate first, train twice": Case(before="evaluate", after=("train",)),
    "tied": Case(config={"tie_word_embeddings": True}, after=("save",)),
    "no clipping": Case(arguments={"max_grad_norm": 0.0}),
    "hard clipping": Case(arguments={"max_grad_norm": 0.1}),
    "best model": Case(arguments={**BEST, "load_best_model_at_end": True}),
    "best model alone": Case(arguments={**BEST, "load_best_model_at_end": True, "save_only_model": True}),
    "full evaluation in bf16": Case(arguments={"bf16_full_eval": True, **EVALUATES}),
    "sgd": Case(arguments={"optim": "sgd"}),
    "adagrad": Case(arguments={"optim": "adagrad"}),
    "adafactor": Case(arguments={"optim": "adafactor", **BEST}),
    "lora": Case(peft="lora", arguments=EVALUATES, after=("save",)),
    "dora": Case(peft="dora", after=("save",)),
    "modules to save": Case(peft="head", after=("save",)),
    "ia3": Case(peft="ia3", after=("save",)),
    "prompt tuning": Case(peft="prompt", after=("save",)),
    "best lora": Case(peft="lora", arguments={**BEST, "load_best_model_at_end": True}),
}
if Version(version("transformers")) < Version("5.10"):
    del CASES["label smoothing"]  # that Trainer's smoother divides by each rank's own tokens, whatever shards
SHARD = {"persist_below": 50}


def run_all(names: list[str], folder: str, shard: dict[str, Any] | None) -> dict[str, Run]:
    return {name: on_rank(CASES[name], f"{folder}/{name}", shard) for name in names}


@functools.cache
def expected(name: str, folder: Path) -> Run:
    return run(CASES[name], folder / "reference" / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


def assert_same(results: list[Run], wanted: Run, name: str) -> None:
    for found in results:
        for column in ("loss", "grad_norm"):
            apart = np.abs(np.subtract(found.column(column), wanted.column(column)))
            assert apart.max() < 1e-5, (name, column, apart)
        assert found.column("eval_accuracy") == pytest.approx(wanted.column("eval_accuracy")), name
        assert found.column("eval_loss") == pytest.approx(wanted.column("eval_loss"), abs=1e-5), name
        assert set(found.state) == set(wanted.state), name
        apart = {key: (found.state[key] - value).abs().max().item() for key, value in wanted.state.items()}
        assert max(apart.values()) < 1e-5, (name, max(apart, key=apart.__getitem__), max(apart.values()))
        for what, value in wanted.results.items():
            if what == "predict":
                assert found.results[what].shape[0] == EVAL_ROWS
                assert np.abs(found.results[what] - value).max() < 1e-5, name
            elif what in ("save", "train"):
                assert found.results[what] == value, name


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
def test_a_trainer_on_two_ranks_is_one_process_on_the_joined_batches(ranks, folder, stage):
    results = ranks(2)(run_all, list(CASES), str(folder / str(stage)), {**SHARD, "stage": stage}, timeout=280)
    for name in CASES:
        assert_same([result[name] for result in results], expected(name, folder), name)


def saved(folder: str, world: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    from safetensors import safe_open

    found = {}
    with safe_open(folder, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            found[key] = (file.get_slice(key).get_dtype(), tuple(file.get_slice(key).get_shape()))
    return found


@pytest.mark.parametrize("name", ["plain", "tied", "compile", "lora", "modules to save", "prompt tuning"])
def test_what_is_saved_is_what_one_process_saves(ranks, folder, name):
    """The same names and shapes, adapters alone where there are adapters, and a tied tensor once."""
    expected(name, folder)
    ranks(2)(run_all, [name], str(folder / "saved"), {**SHARD, "stage": 3})
    file = "adapter_model.safetensors" if CASES[name].peft else "model.safetensors"
    told = saved(str(folder / "saved" / name / file), 2)
    assert told == saved(str(folder / "reference" / name / file), 1)
    assert told


def generated(shard: dict[str, Any] | None, folder: str) -> list[int]:
    return on_rank(Case(after=("generate",)), folder, shard).results["generate"]


def test_ranks_that_generate_for_different_times_do_not_wait_for_ever(ranks, folder):
    """Each rank generates what a rank of stock DDP generates: 4 tokens on the first, 7 on the second."""
    stock = ranks(2)(generated, None, str(folder / "stock"))
    assert [len(tokens) for tokens in stock] == [4, 7]
    for stage in (0, 3):
        assert ranks(2)(generated, {**SHARD, "stage": stage}, str(folder / f"generated{stage}")) == stock


def losses_of_ddp(shard: dict[str, Any] | None, folder: str, arguments: dict[str, Any]) -> dict[str, list[float]]:
    found = on_rank(Case(arguments=arguments), folder, shard)
    return {name: found.column(name) for name in ("loss", "grad_norm")}


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
        {"neftune_noise_alpha": 5.0},
        {"bf16": True},
    ],
    ids=["means of ranks", "neftune", "bf16"],
)
def test_what_depends_on_the_ranks_is_as_under_stock_ddp(ranks, folder, arguments):
    """Where the joined batch gives another result by design, the measure is DDP on as many ranks."""
    stock = ranks(2)(losses_of_ddp, None, str(folder / "ddp"), arguments)
    ours = ranks(2)(losses_of_ddp, {**SHARD, "stage": 3}, str(folder / "ours"), arguments)
    tolerance = 2e-2 if arguments.get("bf16") else 1e-5
    for mine, theirs in zip(ours, stock, strict=True):
        for name, values in theirs.items():
            assert np.allclose(mine[name], values, atol=tolerance), (name, mine[name], values)


def too_large_at_first(folder: str, shard: dict[str, Any] | None) -> tuple[int, list[float]]:
    """Let every forward with more than one row of a rank fail as a full GPU does."""
    from tests.integrations import trainer_runs

    build = trainer_runs.llama

    def small(**changes: Any) -> Any:
        model = build(**changes)
        original = model.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if model.training and len(kwargs["input_ids"]) > 1:
                raise RuntimeError("CUDA out of memory.")
            return original(*args, **kwargs)

        model.forward = forward
        return model

    trainer_runs.llama = small
    try:
        found = on_rank(Case(arguments={"auto_find_batch_size": True}, batch=4), folder, shard)
    finally:
        trainer_runs.llama = build
    return len(found.logs), found.column("loss")


def test_auto_find_batch_size_trains_after_a_forward_that_failed(ranks, folder):
    ours = ranks(2)(too_large_at_first, str(folder / "auto"), {**SHARD, "stage": 3})
    wanted = run(Case(batch=2), folder / "reference" / "auto").column("loss")
    for _, losses in ours:
        assert np.allclose(losses, wanted, atol=1e-5)


def rank_zero_alone(folder: str) -> str:
    """Save on the first rank alone, while the second goes on."""
    import ourshard
    import torch.distributed as dist

    from tests.integrations.trainer_runs import llama, quiet

    quiet()
    model = ourshard.shard_model(llama(), {"stage": 3})
    tokens = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=tokens)
    try:
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        else:
            model(input_ids=tokens)
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_a_save_on_one_rank_alone_is_an_error_that_names_both_sides(ranks, folder):
    ended = ranks(2, fresh=True)(rank_zero_alone, str(folder / "alone"))
    assert "rank 0: save_pretrained" in ended.values[0]
    assert "rank 1: " in ended.values[0]


class Flagged(torch.nn.Module):
    """Takes a flag beside its rows, as CLIP takes `return_loss`, and no count of items."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = llama()

    def forward(self, flag: bool, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        assert flag
        out = self.llama(input_ids=input_ids, labels=input_ids)
        return {"loss": out.loss, "logits": out.logits}


def evaluates_with_a_flag(folder: str, shard: dict[str, Any] | None) -> list[float]:
    """Return losses of sets of 11, 9 and 3 rows: a rank has one row of its own in the last batch, or none."""
    from transformers import default_data_collator

    from tests.integrations.client_runs import trainer_of

    collate = {"data_collator": lambda rows: {"flag": True, **default_data_collator(rows)}}
    trainer = trainer_of(Case(), folder, shard, Flagged(), **collate)
    return [trainer.evaluate(Tokens(rows, seed=rows))["eval_loss"] for rows in (11, 9, 3)]


def test_the_loss_of_an_uneven_last_batch_is_over_its_own_rows(ranks, tmp_path):
    wanted = evaluates_with_a_flag(str(tmp_path / "one"), None)
    for found in ranks(2)(evaluates_with_a_flag, str(tmp_path / "two"), {**SHARD, "stage": 3}):
        assert np.abs(np.subtract(found, wanted)).max() < 1e-5


def evaluates_otherwise(folder: str, shard: dict[str, Any] | None) -> list[float]:
    """Return losses of 11 and 3 rows: of a `compute_loss` of one's own, and beside generated tokens.

    In one process the latter, which `Seq2SeqTrainer` weighs by batches, are put together by rows.
    """
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, default_data_collator

    from tests.integrations.client_runs import Sentences, t5, trainer_of, world

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    trainer = trainer_of(Case(), folder, shard, of=Own)
    found = [trainer.evaluate(Tokens(rows, seed=rows))["eval_loss"] for rows in (11, 3)]
    rows = {"per_device_eval_batch_size": 4 // world(), "predict_with_generate": True, "generation_max_length": 9}
    for smoothing in (0.0, 0.1):
        args = Seq2SeqTrainingArguments(folder, label_smoothing_factor=smoothing, **{**SETTINGS, **rows})
        model = t5()
        shift = model.prepare_decoder_input_ids_from_labels

        def collate(rows: list[Any], shift: Any = shift) -> dict[str, Any]:
            batch = default_data_collator(rows)
            return {**batch, "decoder_input_ids": shift(batch["labels"])}  # a label smoother takes the labels out

        trainer = Seq2SeqTrainer(model=model, args=args, eval_dataset=Sentences(11, 1), data_collator=collate)
        size = 4 if shard is None else 11
        parts = [range(start, min(start + size, 11)) for start in range(0, 11, size)]
        losses = [trainer.evaluate(Subset(trainer.eval_dataset, part))["eval_loss"] * len(part) for part in parts]
        found.append(sum(losses) / 11)
    return found


def test_losses_that_the_trainer_does_not_compute_itself_are_those_of_one_process_too(ranks, tmp_path):
    wanted = evaluates_otherwise(str(tmp_path / "one"), None)
    for found in ranks(2)(evaluates_otherwise, str(tmp_path / "two"), {**SHARD, "stage": 3}):
        assert np.abs(np.subtract(found, wanted)).max() < 1e-5


def saves_as_before(folder: str, peft: str | None) -> bool:
    """Save with the `save_model` of transformers 5.3, which calls `_save` on the ranks that write alone."""
    from ourshard.integrations import trainer as whole
    from safetensors.torch import load_file

    from tests.integrations.client_runs import trainer_of
    from tests.integrations.trainer_runs import whole_state

    def before(trainer: Any, output_dir: str, _internal_call: bool) -> None:
        if trainer.args.should_save:
            trainer._save(output_dir)

    trainer = trainer_of(Case(steps=1, peft=peft), folder, {**SHARD, "stage": 3})
    trainer.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole.seams, "saves_on_writers_alone", lambda cls: True)
        whole.save_model(before, trainer, folder)
    trainer.accelerator.wait_for_everyone()
    state = whole_state(trainer.model)
    kind, ending = ("adapter_model", ".default.weight") if peft else ("model", ".weight")
    saved = load_file(f"{folder}/{kind}.safetensors")
    return all(torch.equal(value, state[name.replace(".weight", ending)]) for name, value in saved.items())


@pytest.mark.parametrize("peft", [None, "lora"])
def test_a_version_that_saves_on_one_rank_alone_gets_what_the_others_hold(ranks, tmp_path, peft):
    assert ranks(2)(saves_as_before, str(tmp_path), peft) == [True, True]


def test_a_version_that_saves_on_one_rank_alone_is_seen_in_its_source(tmp_path, monkeypatch):
    from ourshard.integrations import transformers_seams as seams
    from packaging.version import parse
    from transformers import Seq2SeqTrainer, __version__

    assert seams.saves_on_writers_alone(Seq2SeqTrainer) == (parse(__version__) < parse("5.4"))
    source = """
        class Trainer:
            __module__ = "transformers.trainer"

            def save_model(self):
                if False:
                    pass
                elif self.args.should_save:
                    self._save()
    """
    (tmp_path / "before.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    import before

    assert seams.saves_on_writers_alone(before.Trainer)

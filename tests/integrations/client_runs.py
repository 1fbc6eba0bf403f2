"""What clients of a Trainer or of an Accelerator do beyond plain training: each function runs alone, or on every rank.

All return plain values, which are the same in one process and on ranks on the same joined batches.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.integrations.trainer_runs import (
    EVAL_ROWS,
    LENGTH,
    ROWS,
    SETTINGS,
    VOCAB,
    Case,
    Tokens,
    adapted,
    arguments,
    enable,
    llama,
    quiet,
    whole_state,
)

Shard = dict[str, Any] | None
BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


class Sentences(torch.utils.data.Dataset):
    """Rows of random tokens, each with labels of its own: a class, or the row's end reversed."""

    def __init__(self, rows: int, seed: int, classes: int = 0) -> None:
        self.tokens = torch.randint(2, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.classes = classes

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.tokens[index]
        if self.classes:
            return {"input_ids": row, "labels": index % self.classes}
        labels = row.flip(0)[:7].clone()
        labels[1 + index % 6 :] = -100
        return {"input_ids": row, "labels": labels}


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def trainer_of(case: Case, folder: str, shard: Shard, model: Any = None, of: Any = None, **more: Any) -> Any:
    from transformers import Trainer

    quiet()
    enable(shard)
    data = {"train_dataset": Tokens(ROWS), "eval_dataset": Tokens(EVAL_ROWS, seed=1), **more}
    if "model_init" not in data:
        data["model"] = model or adapted(llama(), case.peft)
    return (of or Trainer)(args=arguments(case, Path(folder), world()), **data)


def column(trainer: Any, *names: str) -> list[Any]:
    return [tuple(log[name] for name in names) for log in trainer.state.log_history if names[0] in log]


# ---- models whose loss is a mean of the batch they see -----------------------------------------------------


def classifier(folder: str, shard: Shard) -> dict[str, Any]:
    """BERT ignores num_items_in_batch; with accumulation its loss is that of the larger batch."""
    from transformers import BertConfig, BertForSequenceClassification

    found = {}
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    for name, accumulation, options in (("whole", 1, {}), ("accumulated", 2, {}), ("compiled", 1, compiled)):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(vocab_size=VOCAB, num_labels=3, **sizes, **none))
        more = {"gradient_accumulation_steps": accumulation, "learning_rate": 1e-3, **options}
        case = Case(batch=8 // accumulation, steps=3, arguments=more)
        trainer = trainer_of(case, folder, shard, model, train_dataset=Sentences(24, 0, classes=3))
        trainer.train()
        found[name] = column(trainer, "loss", "grad_norm")
    return found


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 2, "d_kv": 16, "dropout_rate": 0.0}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes, **special))


def summarizer(folder: str, shard: Shard) -> dict[str, Any]:
    """T5 ignores it too; rows have labels of all lengths. Metrics are of generated tokens, over uneven batches."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    quiet()
    enable(shard)
    model = t5()
    generating = {"predict_with_generate": True, "generation_max_length": 9, "eval_strategy": "steps", "eval_steps": 2}
    rows = {"per_device_train_batch_size": 4 // world(), "per_device_eval_batch_size": 4 // world()}
    settings = {**SETTINGS, **generating, **rows, "max_steps": 3, "learning_rate": 1e-3}
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(folder, **settings),
        train_dataset=Sentences(24, 0),
        eval_dataset=Sentences(11, 1),
        compute_metrics=lambda told: {"sum": float(told.predictions.clip(0).sum()), "rows": len(told.label_ids)},
    )
    trainer.train()
    told = trainer.predict(Sentences(5, 2), num_beams=2, max_length=8).predictions
    return {"loss": column(trainer, "loss"), "metrics": column(trainer, "eval_sum", "eval_rows"), "told": told.tolist()}


def losses_of_ones_own(folder: str, shard: Shard) -> dict[str, Any]:
    """A `compute_loss_func` may divide by the count, or take the mean of its batch."""

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, mean: bool = False) -> torch.Tensor:
        lost = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return lost / ((labels[:, 1:] != -100).sum() if mean else num_items_in_batch)

    found = {}
    for name, function in (("count", loss), ("mean", functools.partial(loss, mean=True))):
        trainer = trainer_of(Case(arguments={"label_names": ["labels"]}), folder, shard, compute_loss_func=function)
        trainer.train()
        found[name] = [*column(trainer, "loss", "grad_norm"), (trainer.evaluate()["eval_loss"], 0.0)]
    return found


# ---- the Trainer's own ways --------------------------------------------------------------------------------


def stops_early(folder: str, shard: Shard, **more: Any) -> dict[str, Any]:
    from transformers import EarlyStoppingCallback

    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    case = Case(steps=8, peft=more.pop("peft", None), arguments={**BEST, **best, **more})
    trainer = trainer_of(case, folder, shard, callbacks=[EarlyStoppingCallback(2)])
    trainer.train()
    return {
        "steps": trainer.state.global_step,
        "best": trainer.state.best_global_step,
        "state": whole_state(trainer.model),
    }


def evaluates_in_pieces(folder: str, shard: Shard) -> dict[str, Any]:
    """`eval_do_concat_batches=False`: metrics get a list of batches."""

    def metrics(told: Any) -> dict[str, float]:
        return {"rows": sum(map(len, told.label_ids)), "sum": float(sum(batch.sum() for batch in told.predictions))}

    options = {"eval_do_concat_batches": False, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_of(Case(arguments=options), folder, shard, compute_metrics=metrics)
    trainer.train()
    return {"metrics": column(trainer, "eval_rows", "eval_sum")}


def new_llama() -> Any:
    """Return a model; unlike `llama` it has no parameter that a trial would be given to."""
    return llama()


def begins_anew(folder: str, shard: Shard) -> dict[str, Any]:
    """With `model_init`, as in a search of hyper-parameters, each `train` has a new model."""
    trainer = trainer_of(Case(), folder, shard, model_init=new_llama)
    found = {}
    for rate in (1e-2, 3e-3):
        trainer.args.learning_rate = rate
        trainer.train()
        found[str(rate)] = column(trainer, "loss", "grad_norm")
    return found


def steps_by_roots(folder: str, shard: Shard) -> dict[str, Any]:
    trainer = trainer_of(Case(arguments={"optim": "rmsprop", "learning_rate": 1e-4}), folder, shard)
    trainer.train()
    return {"loss": column(trainer, "loss", "grad_norm"), "state": whole_state(trainer.model)}


def generates_while_training(folder: str, shard: Shard) -> dict[str, Any]:
    from transformers import TrainerCallback

    found = []

    class Generates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            model.eval()
            with torch.no_grad():
                prompt = Tokens(2, seed=3).tokens[:1, :4]
                found.append(model.generate(input_ids=prompt, max_new_tokens=3, do_sample=False)[0].tolist())
            model.train()
            shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            found.append([shapes["model.embed_tokens.weight"], sum(p.numel() for p in model.parameters())])

    trainer = trainer_of(Case(), folder, shard, callbacks=[Generates()])
    trainer.train()
    return {"found": found, "loss": column(trainer, "loss")}


# ---- several models ----------------------------------------------------------------------------------------


def learns_from_a_teacher(folder: str, shard: Shard) -> dict[str, Any]:
    from transformers import Trainer

    quiet()
    enable(shard)
    teacher = llama(num_hidden_layers=3)

    class Distils(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            inputs.pop("labels")
            with torch.no_grad():
                wanted = self.teacher(**inputs).logits.softmax(-1)
            return F.kl_div(model(**inputs).logits.log_softmax(-1), wanted, reduction="batchmean") / LENGTH

    args = arguments(Case(arguments={"learning_rate": 1e-3}), Path(folder), world())
    trainer = Distils(model=llama(), args=args, train_dataset=Tokens(ROWS))
    trainer.teacher = trainer.accelerator.prepare_model(teacher, evaluation_mode=True).eval()
    trainer.train()
    return {"loss": column(trainer, "loss"), "state": whole_state(trainer.model)}


def plays_against_itself(folder: str, shard: Shard) -> dict[str, Any]:
    """A GAN: two models, each with an optimizer, one loss through both."""
    from accelerate import Accelerator

    quiet()
    enable(shard)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    maker = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16))
    judge = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in (maker, judge)]
    maker, judge, makes, judges = accelerator.prepare(maker, judge, *optimizers)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        noise, real = (torch.randn(8, size, generator=generator) for size in (8, 16))
        mine = slice(accelerator.process_index * 8 // world(), (accelerator.process_index + 1) * 8 // world())
        made, yes, no = maker(noise[mine]), torch.ones(8 // world(), 1), torch.zeros(8 // world(), 1)
        loss = F.binary_cross_entropy_with_logits(judge(real[mine]), yes)
        loss = loss + F.binary_cross_entropy_with_logits(judge(made.detach()), no)
        for optimizer in (judges, makes):
            if optimizer is makes:
                loss = F.binary_cross_entropy_with_logits(judge(made), yes)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "maker": whole_state(maker), "judge": whole_state(judge)}


def is_rewarded(folder: str, shard: Shard) -> dict[str, Any]:
    """A policy that generates, its frozen copy, and a reward model."""
    from accelerate import Accelerator

    quiet()
    enable(shard)
    accelerator = Accelerator(cpu=True)
    policy = llama()
    reference = copy.deepcopy(policy).requires_grad_(False)
    reward = llama(num_hidden_layers=1)
    policy, optimizer = accelerator.prepare(policy, torch.optim.AdamW(policy.parameters(), 1e-3))
    reference, reward = (accelerator.prepare_model(model, evaluation_mode=True) for model in (reference, reward))
    losses, rows = [], 4 // world()
    for step in range(3):
        start = 4 * step + accelerator.process_index * rows
        prompts = Tokens(16).tokens[start : start + rows, :6]
        with torch.no_grad():
            tokens = policy.generate(input_ids=prompts, max_new_tokens=4, do_sample=False)
            frozen, score = (
                reference(input_ids=tokens).logits.log_softmax(-1),
                reward(input_ids=tokens).logits.mean((1, 2)),
            )
        mine = policy(input_ids=tokens).logits.log_softmax(-1)
        apart = (mine.exp() * (mine - frozen)).sum(-1).mean(1)
        loss = (0.1 * apart - score * mine.gather(-1, tokens[..., None]).mean((1, 2))).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {"losses": losses, "state": whole_state(policy)}


# ---- adapters ----------------------------------------------------------------------------------------------


def merges(folder: str, shard: Shard) -> dict[str, Any]:
    """`merge_and_unload` after training, and what is saved of it."""
    import ourshard
    from transformers import LlamaForCausalLM

    trainer = trainer_of(Case(peft="lora"), folder, shard)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    with ourshard.gathered(model, writeback=True) if shard else contextlib.nullcontext():
        merged = model.merge_and_unload()
    merged.save_pretrained(f"{folder}/merged", is_main_process=trainer.args.process_index == 0)
    trainer.accelerator.wait_for_everyone()
    saved = LlamaForCausalLM.from_pretrained(f"{folder}/merged").state_dict()
    return {"state": whole_state(merged), "saved": saved}


RUNS = {
    run.__name__: run
    for run in (
        classifier,
        summarizer,
        losses_of_ones_own,
        stops_early,
        evaluates_in_pieces,
        begins_anew,
        steps_by_roots,
        generates_while_training,
        learns_from_a_teacher,
        plays_against_itself,
        is_rewarded,
        merges,
    )
}


def run_all(folder: str, shard: Shard) -> dict[str, dict[str, Any]]:
    return {name: run(f"{folder}/{name}", shard) for name, run in RUNS.items()}


def apart(found: Any, wanted: Any) -> float:
    """Return the largest difference of two values of the same form; infinity where the forms differ."""
    if isinstance(wanted, torch.Tensor):
        return (found - wanted).abs().max().item() if found.shape == wanted.shape else math.inf
    if isinstance(wanted, dict):
        same = set(found) == set(wanted)
        return max((apart(found[key], value) for key, value in wanted.items()), default=0.0) if same else math.inf
    if isinstance(wanted, (list, tuple)):
        pairs = zip(found, wanted, strict=False)
        return max((apart(a, b) for a, b in pairs), default=0.0) if len(found) == len(wanted) else math.inf
    return abs(found - wanted)

"""Train adapters over bases that bitsandbytes quantized, sharded under a Trainer and in one process, on GPUs.

    torchrun --nproc_per_node 2 tests/gpu/quantized.py [WORD ...]

Every rank trains the reference by itself on the joined batch, in a plain loop. A case is right if losses and adapters
are close to it, the frozen bytes are what they were, what is saved is what was trained, and opens over a new base. Of
cases with another optimizer, the checkpoint of the third step is resumed as well: its state has the bits that were
saved, and losses are those of the run that went on; saved by rows and loaded, the last state has its bits, too. With
words, only cases that have one of them (`nf4`, `int8`, `optim`) are run. Without a GPU it runs on the CPU.
Prints one line a case; exits with 1 if any is off.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ourshard
import peft
import torch
import torch.distributed as dist
import transformers
from parity import on_all_ranks, tell
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SAVED_AT = 3
STEPS, ROWS, LENGTH, VOCAB, LR = 5, 4, 32, 301, 1e-3
ON_GPU = torch.cuda.is_available()
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {**FOUR, "bnb_4bit_compute_dtype": torch.float32},
    "nf4 bf16": {**FOUR, "bnb_4bit_compute_dtype": torch.bfloat16},
    "nf4 in bf16": {**FOUR, "bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
}
# Of losses, and of adapters by the distance they went. Rows of int8 are rounded, by inputs that differ in the last bit.
TOLERANCE = {"nf4": (1e-5, 1e-3)}
COARSE = (2e-2, 0.2)


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is sharded."""

    kind: str
    shard: dict[str, Any]
    reentrant: bool | None = None  # of activation checkpointing; None: none
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        how = {None: "", True: ", reentrant checkpoints", False: ", checkpoints"}[self.reentrant]
        return f"{self.kind} {self.shard}{how} {self.arguments or ''}"


class Rows(torch.utils.data.Dataset):
    """The rows of all steps, in order."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, VOCAB, (STEPS * ROWS, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class InOrder(Trainer):
    """Takes the rows as they come."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def save_base(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).save_pretrained(folder)


def base(kind: str, folder: Path, reentrant: bool | None) -> Any:
    half = {"dtype": torch.float32 if kind == "nf4" else torch.bfloat16}
    config = BitsAndBytesConfig(**KINDS[kind])
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=config, **half)
    return peft.prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=reentrant is not None,
        gradient_checkpointing_kwargs={"use_reentrant": bool(reentrant)},
    )


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def quantized(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the frozen bytes."""
    import bitsandbytes

    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    parts = {name: part for name, part in model.named_modules() if isinstance(part, kinds)}
    return {name: part.weight.detach().view(torch.uint8).clone() for name, part in parts.items()}


def adapters(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().cpu().clone() for name, value in state.items() if "lora_" in name}


@dataclass
class Reference:
    """What one process gets of the joined batches."""

    losses: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    logits: torch.Tensor


def autocast(kind: str) -> Any:
    return torch.autocast("cuda" if ON_GPU else "cpu", torch.bfloat16, enabled=kind != "nf4")


def logits_of(model: Any, kind: str) -> torch.Tensor:
    tokens = Rows().tokens[:2].to(next(model.parameters()).device)
    with torch.no_grad(), autocast(kind):
        return model.eval()(input_ids=tokens).logits.float().cpu()


def reference(kind: str, folder: Path) -> Reference:
    ourshard.disable()
    model = adapted(base(kind, folder, None)).train()
    before, frozen = adapters(model.state_dict()), quantized(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, eps=1e-6, weight_decay=0.0)
    losses = []
    for tokens in Rows().tokens.split(ROWS):
        ids = tokens.to(trained[0].device)
        with autocast(kind):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Reference(losses, before, adapters(model.state_dict()), frozen, logits_of(model, kind))


State = list[dict[str, Any]]


def state_of(optimizer: Any) -> State:
    """Return copies of what an optimizer keeps, on the host, in the order of its groups."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state.get(parameter, {}) for parameter in stepped]
    return [{k: v.cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()} for state in states]


def is_same(one: State, other: State) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else bool(a == b)

    same = [a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a) for a, b in zip(one, other, strict=True)]
    return all(same)


class KeepsState(transformers.TrainerCallback):
    """Copies the optimizer's state when a checkpoint was saved, and when training begins."""

    def __init__(self) -> None:
        self.saved: State = []
        self.begun: State = []

    def on_save(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step == SAVED_AT:
            self.saved = state_of(optimizer.optimizer)

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.begun = state_of(optimizer.optimizer)


def comes_back_by_rows(trainer: Any, folder: Path) -> bool:
    """Save model and optimizer by rows and load them over a state of zeros."""
    optimizer = trainer.optimizer.optimizer
    wanted = state_of(optimizer)
    ourshard.save(trainer.model, optimizer, folder, replace=True)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    ourshard.load(trainer.model, optimizer, folder)
    return is_same(wanted, state_of(optimizer))


def look_at_resuming(case: Case, folder: Path, trainer: Any, kept: KeepsState) -> tuple[bool, str]:
    """Resume the checkpoint in the middle, and return whether that is the run that went on."""
    eight = any(v.dtype == torch.uint8 for s in kept.saved for v in s.values() if isinstance(v, torch.Tensor))
    by_rows = comes_back_by_rows(trainer, folder / "rows")
    again = KeepsState()
    other = trained(case, folder, folder / "again", again, resume=str(folder / "out" / f"checkpoint-{SAVED_AT}"))
    same = is_same(kept.saved, again.begun)
    losses = [[log["loss"] for log in each.state.log_history if "loss" in log] for each in (trainer, other)]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    good = same and by_rows and apart < 1e-5 and eight == ("8bit" in case.arguments["optim"])
    text = f", resumed losses {apart:.1e}{'' if same else ', STATE CHANGED'}{'' if by_rows else ', ROWS CHANGED'}"
    return good, f"{text}{', 8 bits' if eight else ''}"


def trained(case: Case, folder: Path, out: Path, kept: KeepsState | None = None, resume: str | None = None) -> Any:
    ourshard.enable({"persist_below": 100, **case.shard})
    args = TrainingArguments(
        str(out),
        per_device_train_batch_size=ROWS // dist.get_world_size(),
        **{"max_steps": STEPS, "learning_rate": LR, "adam_epsilon": 1e-6, "lr_scheduler_type": "constant"},
        **{"logging_steps": 1, "report_to": [], "disable_tqdm": True},
        **{"bf16": case.kind != "nf4", "use_cpu": not ON_GPU, "optim": "adamw_torch", **case.arguments},
        **({"save_strategy": "steps", "save_steps": SAVED_AT} if kept else {"save_strategy": "no"}),
    )
    model = adapted(base(case.kind, folder, case.reentrant))
    trainer = InOrder(model=model, args=args, train_dataset=Rows(), callbacks=[kept] if kept else None)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    return trainer


def look(case: Case, folder: Path, wanted: Reference) -> tuple[bool, str]:
    """Train, and return whether all is right, with what was measured."""
    out = folder / "out"
    other = bool(case.arguments)  # steps of 8 bits are near to those of AdamW, and no more
    kept = KeepsState() if other else None
    trainer = trained(case, folder, out, kept)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    with ourshard.gathered(trainer.model):
        frozen = quantized(trainer.model)
    state = adapters(ourshard.full_state_dict(trainer.model))
    unchanged = all(torch.equal(frozen[name], value) for name, value in wanted.frozen.items())
    saved = load_file(out / "adapter_model.safetensors")
    whole = len(saved) == len(state)
    whole &= all(torch.equal(saved[name.replace(".default", "")].float(), value) for name, value in state.items())
    ourshard.disable()
    opened = logits_of(peft.PeftModel.from_pretrained(base(case.kind, folder, None), out), case.kind)
    apart = max(abs(a - b) for a, b in zip(losses, wanted.losses, strict=True))
    went = sum((wanted.after[name] - value).norm() for name, value in wanted.before.items())
    off = sum((state[name] - value).norm() for name, value in wanted.after.items()) / went
    shown = (opened - wanted.logits).abs().max().item()
    most_loss, most_off = TOLERANCE.get(case.kind, COARSE)
    good = unchanged and whole and (other or (apart < most_loss and off < most_off and shown < 10 * most_loss))
    text = f"losses {apart:.1e}, adapters {off:.1e} of their way, opened {shown:.1e}"
    text += f"{'' if unchanged else ', BYTES CHANGED'}{'' if whole else ', SAVED WRONGLY'}"
    if kept is not None:
        resumed, told = look_at_resuming(case, folder, trainer, kept)
        return good and resumed, text + told
    return good, text


def cases() -> Iterator[Case]:
    for kind in KINDS:
        for stage in (3, 2, 1):
            yield Case(kind, {"stage": stage})
    for kind in ("nf4 bf16", "int8"):
        for stage in (3, 1):
            for reentrant in (True, False):
                yield Case(kind, {"stage": stage}, reentrant)
    yield Case("nf4 bf16", {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}})
    for optim in ("adamw_bnb_8bit", "paged_adamw_32bit", "paged_adamw_8bit"):
        for stage in (3, 1):
            yield Case("nf4 bf16", {"stage": stage}, arguments={"optim": optim})


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rank = int(os.environ["LOCAL_RANK"])
    if ON_GPU:
        torch.cuda.set_device(rank)
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    dist.init_process_group("cuda:nccl,cpu:gloo" if ON_GPU else "gloo")
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
    bad, wanted = 0, dict[str, Reference]()
    with tempfile.TemporaryDirectory() as made:
        shared = [made]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        save_base(folder)  # transformers writes on rank 0 alone
        dist.barrier()
        for case in cases():
            if sys.argv[1:] and not any(word in str(case) for word in sys.argv[1:]):
                continue
            if case.kind not in wanted:
                wanted[case.kind] = reference(case.kind, folder)
            try:
                good, text = look(case, folder, wanted[case.kind])
            except ValueError as error:  # a refusal, on all ranks
                good, text = False, f"refused: {error}"
            good = on_all_ranks(good, device)
            bad += not good
            tell(good, str(case), text)
        dist.barrier()
    dist.destroy_process_group()
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()

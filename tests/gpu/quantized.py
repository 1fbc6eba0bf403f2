"""Train adapters over bases that bitsandbytes quantized, sharded under a Trainer and in one process, on GPUs.

    torchrun --nproc_per_node 2 tests/gpu/quantized.py [WORD ...]

Every rank trains the reference by itself on the joined batch, in a plain loop. A case is right if losses and adapters
are close to it, the frozen bytes are what they were, what is saved is what was trained, and opens over a new base. With
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


def trained(case: Case, folder: Path, out: Path) -> Any:
    ourshard.enable({"persist_below": 100, **case.shard})
    args = TrainingArguments(
        str(out),
        per_device_train_batch_size=ROWS // dist.get_world_size(),
        **{"max_steps": STEPS, "learning_rate": LR, "adam_epsilon": 1e-6, "lr_scheduler_type": "constant"},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True},
        **{"bf16": case.kind != "nf4", "use_cpu": not ON_GPU, "optim": "adamw_torch", **case.arguments},
    )
    model = adapted(base(case.kind, folder, case.reentrant))
    trainer = InOrder(model=model, args=args, train_dataset=Rows())
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    return trainer


def look(case: Case, folder: Path, wanted: Reference) -> tuple[bool, str]:
    """Train, and return whether all is right, with what was measured."""
    out = folder / "out"
    trainer = trained(case, folder, out)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    with ourshard.gathered(trainer.model):
        frozen = quantized(trainer.model)
    state = adapters(ourshard.full_state_dict(trainer.model))
    kept = all(torch.equal(frozen[name], value) for name, value in wanted.frozen.items())
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
    other = bool(case.arguments)  # steps of 8 bits are near to those of AdamW, and no more
    good = kept and whole and (other or (apart < most_loss and off < most_off and shown < 10 * most_loss))
    text = f"losses {apart:.1e}, adapters {off:.1e} of their way, opened {shown:.1e}"
    return good, f"{text}{'' if kept else ', BYTES CHANGED'}{'' if whole else ', SAVED WRONGLY'}"


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

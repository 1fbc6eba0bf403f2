"""Train a small Llama on bytes of Python source code, with a plain Accelerate loop.

    accelerate launch --config_file accelerate_configs/ourshard.yaml examples/train_clm.py

The text is the standard library of the running Python. The output folder gets the model, which
`AutoModelForCausalLM.from_pretrained` opens, and the loss curve as `loss.png`.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset, disable_progress_bars, load_dataset
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

END = 256  # the token after each file; tokens 0 to 255 are bytes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("out/train_clm"))
    parser.add_argument("--max_steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=4, help="sequences in a micro-batch of one process")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--sequence_length", type=int, default=192, help="bytes")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--max_files", type=int, help="read only the first files")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def read_source_code(sequence_length: int, max_files: int | None) -> Dataset:
    """Return rows of `input_ids`: the standard library's files, joined in order and cut to `sequence_length` bytes."""
    disable_progress_bars()
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.rglob("*.py")) if not {"site-packages", "test", "tests"} & set(path.parts)]
    names = [str(path) for path in files if path.stat().st_size][:max_files]
    texts = load_dataset("text", data_files=names, sample_by="document", encoding_errors="replace", split="train")

    def to_rows(batch: dict[str, list[str]]) -> dict[str, np.ndarray]:
        tokens = np.concatenate([[*text.encode(), END] for text in batch["text"]])
        whole = len(tokens) // sequence_length * sequence_length
        return {"input_ids": tokens[:whole].reshape(-1, sequence_length)}

    return texts.map(to_rows, batched=True, batch_size=100, remove_columns="text").with_format("torch")


def unigram_entropy(rows: Dataset) -> float:
    """Return the loss, in nats a byte, of a model that knows only how frequent each byte is."""
    counts = np.bincount(rows.with_format("numpy")["input_ids"][:].ravel())
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def build_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 132, "intermediate_size": 365, "num_hidden_layers": 4, "num_attention_heads": 6}
    special = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END}
    return LlamaForCausalLM(LlamaConfig(vocab_size=END + 1, tie_word_embeddings=True, **sizes, **special))


def train(
    accelerator: Accelerator, loader: DataLoader, args: argparse.Namespace
) -> tuple[torch.nn.Module, list[float]]:
    """Return the prepared model and the mean loss of each optimizer step, in nats a byte."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    steps = args.max_steps * accelerator.num_processes  # accelerate steps a scheduler once for each process
    scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    model.train()
    losses: list[float] = []
    tokens, total = 0, torch.zeros(2, device=accelerator.device)  # total: sum of losses, number of micro-batches
    bar = tqdm(total=args.max_steps, disable=not accelerator.is_main_process, unit="step", mininterval=1)
    began, on_gpu = time.perf_counter(), accelerator.device.type == "cuda"
    while len(losses) < args.max_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch, labels=batch["input_ids"]).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            tokens += batch["input_ids"].numel() * accelerator.num_processes
            total += torch.stack([loss.detach(), torch.ones_like(loss)])
            if accelerator.sync_gradients:
                summed, count = accelerator.reduce(total, reduction="sum").tolist()
                losses.append(summed / count)
                total.zero_()
                speed = tokens / (time.perf_counter() - began)
                memory = torch.cuda.max_memory_allocated() if on_gpu else psutil.Process().memory_info().rss
                text = f"loss {losses[-1]:.2f}, {speed:,.0f} tokens/s, {memory / 2**20:,.0f} MiB"
                bar.set_postfix_str(text, refresh=False)
                bar.update()
            if len(losses) == args.max_steps:
                break
    return accelerator.unwrap_model(model), losses


def draw(losses: list[float], unigram: float, path: Path) -> None:
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1)
    axes.axhline(unigram, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel="nats a byte", ylim=(0, None), title="Loss; dashed: a model of byte frequencies")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def write_on(folder: Path, prompt: bytes = b"def ", length: int = 160) -> str:
    """Load the saved model and let it go on from `prompt`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = torch.tensor([list(prompt)])
    output = model.generate(inputs, max_new_tokens=length, do_sample=True, top_k=5)
    return bytes(token for token in output[0].tolist() if token < END).decode(errors="replace")


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    with accelerator.main_process_first():  # the others read what the first one cached
        rows = read_source_code(args.sequence_length, args.max_files)
    generator = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(rows, batch_size=args.batch_size, shuffle=True, drop_last=True, generator=generator)
    model, losses = train(accelerator, loader, args)
    last, unigram = np.mean(losses[-50:]), unigram_entropy(rows)
    accelerator.print(f"Loss: {last:.2f} nats a byte; a model of byte frequencies has {unigram:.2f}.")
    accelerator.save_model(model, args.output_dir)
    if accelerator.is_main_process:
        model.config.save_pretrained(args.output_dir)
        model.generation_config.save_pretrained(args.output_dir)
        draw(losses, unigram, args.output_dir / "loss.png")
        print(f"Saved to {args.output_dir}. The saved model writes:\n{write_on(args.output_dir)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

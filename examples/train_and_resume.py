"""Train, stop, and go on with another number of processes: the loss goes on as if nothing had happened.

    accelerate launch --config_file accelerate_configs/ourshard.yaml examples/train_and_resume.py --max_steps 40
    accelerate launch --config_file accelerate_configs/ourshard.yaml --num_processes 1 \\
        examples/train_and_resume.py --max_steps 80 --resume

A batch is the same samples in the same order on any number of processes, which divide it. Model, optimizer, schedule
and the place in the data come from the newest checkpoint. The output folder gets `loss.png` with all runs so far.
"""

import argparse
import sysconfig
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

LENGTH = 192  # bytes of a row
LAST_STEP = 400  # where the schedule ends, whatever a single run does


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("out/train_and_resume"))
    parser.add_argument("--max_steps", type=int, default=40, help="the step to stop after, counted from the first run")
    parser.add_argument("--save_every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a step over all processes")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of output_dir")
    args = parser.parse_args()
    if not args.resume and (args.output_dir / "checkpoints").is_dir():
        parser.error(f"{args.output_dir} has checkpoints: go on from them with --resume, or give another --output_dir.")
    return args


class Progress:
    """Where training stands; registered, so that each checkpoint has it."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []  # of each step: the number of processes, nats a byte

    @property
    def step(self) -> int:
        return len(self.losses)

    def state_dict(self) -> dict[str, list[tuple[int, float]]]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, list[tuple[int, float]]]) -> None:
        self.losses = list(state["losses"])


def read_rows() -> list[dict[str, torch.Tensor]]:
    """Return the modules at the top of the standard library as rows of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    return [{"input_ids": row, "labels": row} for row in rows]


def build_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 132, "intermediate_size": 365, "num_hidden_layers": 4, "num_attention_heads": 6}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **sizes))


def batches(loader: DataLoader, first: int, accelerator: Accelerator):
    """Yield batches from number `first` on, epoch after epoch."""
    epoch, inside = divmod(first, len(loader))
    while True:
        loader.set_epoch(epoch)  # each epoch has an order of its own
        yield from accelerator.skip_first_batches(loader, inside) if inside else loader
        epoch, inside = epoch + 1, 0


def draw(losses: list[tuple[int, float]], path: Path) -> None:
    """Draw the loss, in another color for each number of processes."""
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(7, 4))
    starts = [index for index, (world, _) in enumerate(losses) if index == 0 or losses[index - 1][0] != world]
    for start, end in zip(starts, [*starts[1:], len(losses)], strict=True):
        world, color = losses[start][0], f"C{losses[start][0] - 1}"
        steps = range(max(start, 1), end + 1)  # from the last point of the run before
        label = f"{world} process{'es' if world > 1 else ''}, from step {start + 1}"
        axes.plot(steps, [losses[step - 1][1] for step in steps], color=color, linewidth=1, label=label)
        if start:
            axes.axvline(start + 0.5, color=color, linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel="nats a byte", ylim=(0, None), title="One training, several runs")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    args = parse_args()
    naming = ProjectConfiguration(str(args.output_dir), automatic_checkpoint_naming=True, total_limit=2)
    dividing = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=dividing, project_config=naming, step_scheduler_with_optimizer=False)
    set_seed(7)
    loader = DataLoader(read_rows(), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, LAST_STEP // 20, LAST_STEP)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume:
        accelerator.load_state()  # the newest
        accelerator.project_configuration.iteration = progress.step // args.save_every  # so is the next one's number
        before, now = progress.losses[-1][0], accelerator.num_processes
        accelerator.print(f"Going on after step {progress.step}; processes now: {now}, in the steps before: {before}.")

    model.train()
    for batch in batches(loader, progress.step, accelerator):
        if progress.step >= args.max_steps:
            break
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.losses.append((accelerator.num_processes, accelerator.reduce(loss.detach(), "mean").item()))
        if progress.step % args.save_every == 0 or progress.step == args.max_steps:
            accelerator.save_state()
            accelerator.print(f"step {progress.step}: loss {progress.losses[-1][1]:.3f}, saved")
    if accelerator.is_main_process:
        draw(progress.losses, args.output_dir / "loss.png")
        model.config.save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()

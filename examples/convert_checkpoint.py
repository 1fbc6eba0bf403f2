"""Turn a checkpoint of training into the formats of other tools, check each against it, and let the model write.

    accelerate launch --config_file accelerate_configs/ourshard.yaml examples/train_and_resume.py     # makes one
    python examples/convert_checkpoint.py

It needs one process, no GPU, and not the code of the model. On the command line the same is done by
`ourshard convert SRC DST --to FORMAT` and `ourshard verify DST --against SRC`.
"""

import argparse
import shutil
from pathlib import Path

import torch
from ourshard.checkpoint import convert, detect, verify
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

# The format, options of `convert`, and the largest difference of two elements that is no error.
RESULTS = {
    "for from_pretrained, in bf16": ("safetensors", {"dtype": "bfloat16", "weights_only": True}, 0.02),
    "for FSDP2, to resume": ("dcp", {}, 0.0),
    "for DeepSpeed, to resume": ("deepspeed-universal", {}, 0.0),
    "for torch.load": ("torch", {}, 0.0),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=Path, default=Path("out/train_and_resume"), help="its output folder")
    parser.add_argument("--output_dir", type=Path, default=Path("out/convert_checkpoint"))
    args = parser.parse_args()
    if not (args.training / "checkpoints").is_dir():
        parser.error(f"{args.training} has no checkpoints; make one with examples/train_and_resume.py.")
    return args


def newest(folder: Path) -> Path:
    """Return the checkpoint with the highest number."""
    return max(folder.glob("checkpoint_*"), key=lambda path: int(path.name.rpartition("_")[2]))


def convert_all(checkpoint: Path, output: Path) -> Table:
    """Write each of `RESULTS` and check its values against the checkpoint's."""
    table = Table("what", "format", "files", "MB", "seconds", "as in the checkpoint", "not taken along", box=None)
    source = detect(checkpoint)
    for what, (to, options, tolerance) in RESULTS.items():
        report = convert(checkpoint, output / to, to=to, overwrite=True, **options)
        check = verify(detect(output / to), against=source, tolerance=tolerance)
        files = sum(path.is_file() for path in (output / to).rglob("*"))
        wrong = [finding.text for finding in check.findings if finding.ok is False]
        equal = f"{check.compared} tensors, {'exactly' if tolerance == 0 else f'within {tolerance}'}"
        row = (files, f"{report.nbytes / 1e6:.1f}", f"{report.seconds:.1f}", "; ".join(wrong) or equal)
        table.add_row(what, to, *map(str, row), "; ".join(report.losses) or "nothing")
    return table


def write_on(folder: Path, prompt: bytes = b"def ", length: int = 100) -> str:
    """Load the model with transformers alone and let it go on from `prompt`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    output = model.generate(torch.tensor([[*prompt]]), max_new_tokens=length, do_sample=True, top_k=5)
    return bytes(output[0].tolist()).decode(errors="replace")


def main() -> None:
    args = parse_args()
    checkpoint = newest(args.training / "checkpoints")
    told = detect(checkpoint).description
    print(f"{checkpoint}: stage {told.stage}, {told.step} steps, world size {told.world_size}.")
    Console(width=160).print(convert_all(checkpoint, args.output_dir))
    model = args.output_dir / "safetensors"
    shutil.copy(args.training / "config.json", model)
    print(f"The model in {model} writes:\n{write_on(model)}")


if __name__ == "__main__":
    main()

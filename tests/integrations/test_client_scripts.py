"""Scripts that follow the examples of transformers, nothing of ours in them, by `accelerate launch` on two ranks.

The measure is the same script in one process on the joined batches; for `run_mlm`, whose masks each rank draws for
itself, it is DDP on as many ranks.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.commands import free_port, launch, run_cli
from tests.integrations import script_data
from tests.integrations.client_runs import apart
from tests.integrations.trainer_runs import enable, quiet

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parent / "scripts"
BATCH = 4  # rows of a step over all ranks
COMMON = [
    *("--max_steps", "4", "--logging_steps", "1", "--learning_rate", "1e-3", "--report_to", "none"),
    *("--use_cpu", "true", "--disable_tqdm", "true"),
    *("--do_train", "--do_eval", "--eval_strategy", "steps", "--eval_steps", "2"),
]
MORE: dict[str, list[str]] = {
    "run_clm": ["--save_strategy", "steps", "--save_steps", "2", "--gradient_accumulation_steps", "2"],
    "run_mlm": ["--line_by_line", "--save_strategy", "no"],
    "run_glue": ["--do_predict", "--save_strategy", "no"],
    "run_summarization": [
        *("--do_predict", "--predict_with_generate", "--source_prefix", "in short: ", "--num_beams", "2"),
        *("--save_strategy", "no", "--label_smoothing_factor", "0.1"),
    ],
}
NUMBERS = ("loss", "grad_norm", "eval_accuracy", "eval_f1", "eval_rouge1", "eval_gen_len", "eval_loss")
# DDP counts rows that fill up the last batch of an evaluation, and the loss of `predict_with_generate` is as there.
WITHOUT_EVAL_LOSS = ("run_mlm", "run_summarization")


class Job:
    """One script with its model and its data."""

    def __init__(self, script: str, folder: Path) -> None:
        self.script, self.folder = SCRIPTS / f"{script}.py", folder
        script_data.save_model(script, folder / "model")
        given = ["--model_name_or_path", str(folder / "model"), *script_data.save_files(script, folder)]
        self.given = [*given, *COMMON, *MORE[script]]

    def arguments(self, out: str, ranks: int) -> list[str]:
        rows = str(BATCH // ranks)
        sizes = ["--per_device_train_batch_size", rows, "--per_device_eval_batch_size", rows]
        return [*self.given, *sizes, "--output_dir", str(self.folder / out)]

    def env(self, out: str) -> dict[str, str]:
        """Give each run a cache of data of its own, so that no run is spared the work."""
        return {"HF_DATASETS_CACHE": str(self.folder / f"cache-{out}")}

    def alone(self, out: str = "one") -> dict[str, Any]:
        """Run in this process, which has imported all that a script needs."""
        import datasets

        quiet()
        enable(None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(self.script), *self.arguments(out, 1)])
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", self.folder / f"cache-{out}")
            patch.syspath_prepend(SCRIPTS)
            runpy.run_path(str(self.script), run_name="__main__")
        return self.told(out)

    def on_ranks(self, out: str = "two") -> dict[str, Any]:
        said = launch(self.script, *self.arguments(out, 2), env=self.env(out))
        assert "ourshard: stage 3 over" in said.stderr, said.stderr
        return self.told(out)

    def under_ddp(self, out: str = "ddp") -> dict[str, Any]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
        command = [*torchrun, "--master_port", str(free_port()), self.script, *self.arguments(out, 2)]
        run_cli(command, env={**self.env(out), "ACCELERATE_USE_CPU": "true"})
        return self.told(out)

    def told(self, out: str) -> dict[str, Any]:
        """Return what the run wrote: logged numbers, metrics, predictions, weights."""
        folder = self.folder / out
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        results = json.loads((folder / "eval_results.json").read_text())
        names = NUMBERS[:-1] if self.script.stem in WITHOUT_EVAL_LOSS else NUMBERS
        return {
            "history": [[(name, log[name]) for name in names if name in log] for log in history],
            "results": {name: results[name] for name in names if name in results},
            "weights": _trained(load_file(folder / "model.safetensors")),
            "files": {path.name: path.read_text() for path in folder.glob("*predict*.txt")},
        }


def _trained(weights: dict[str, Any]) -> dict[str, Any]:
    """Leave out the biases of keys: attention does not depend on them, so rounding alone moves them."""
    return {name: weight for name, weight in weights.items() if not name.endswith("key.bias")}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["files"] == wanted["files"]
    for kind in ("history", "results", "weights"):
        assert _apart(found[kind], wanted[kind]) < 1e-5, (kind, found[kind], wanted[kind])


def _apart(found: Any, wanted: Any) -> float:
    if isinstance(wanted, list):  # of a log: its names must be the same, its numbers close
        assert [[name for name, _ in log] for log in found] == [[name for name, _ in log] for log in wanted]
        return max(apart(dict(a), dict(b)) for a, b in zip(found, wanted, strict=True))
    return apart(found, wanted)


def test_a_script_that_classifies_texts_trains_evaluates_and_predicts_as_in_one_process(tmp_path):
    job = Job("run_glue", tmp_path)
    wanted = job.alone()
    assert len(wanted["files"]["predict_results.txt"].splitlines()) == 12
    assert_same(job.on_ranks(), wanted)


@pytest.mark.slow
def test_a_script_that_trains_a_language_model_does_so_and_resumes_as_in_one_process(tmp_path):
    job = Job("run_clm", tmp_path)
    wanted = job.alone()
    assert_same(job.on_ranks(), wanted)
    shutil.rmtree(tmp_path / "two" / "checkpoint-4")
    (tmp_path / "two" / "model.safetensors").unlink()
    assert_same(job.on_ranks(), wanted)  # from checkpoint-2, which the script finds by itself


@pytest.mark.slow
def test_a_script_that_summarizes_generates_the_tokens_of_one_process(tmp_path):
    job = Job("run_summarization", tmp_path)
    wanted = job.alone()
    assert len(wanted["files"]["generated_predictions.txt"].split("\n")) == 11
    assert_same(job.on_ranks(), wanted)


@pytest.mark.slow
def test_a_script_that_masks_words_trains_as_under_ddp(tmp_path):
    job = Job("run_mlm", tmp_path)
    assert_same(job.on_ranks(), job.under_ddp())

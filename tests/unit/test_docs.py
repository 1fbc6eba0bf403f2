"""What the pages say exists: configs that are read, files, notes, links, and code that runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import sys
import textwrap
from pathlib import Path

import ourshard
import pytest
import typer
import yaml
from ourshard.cli import COMMANDS
from ourshard.config import ShardConfig

from tests.commands import ROOT, run_cli

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for folder in ("plugin", "trainer_callbacks") for path in sorted((ROOT / folder).rglob("*.py"))]


def _blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language; "" is a block without one."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, name, text in found if name == language]


def _with_section() -> list[tuple[str, str]]:
    return [(page.name, block) for page in PAGES for block in _blocks(page, "yaml") if "ourshard_config:" in block]


@pytest.mark.parametrize(("page", "block"), _with_section())
def test_every_config_on_a_page_is_one_that_is_read(page, block):
    ShardConfig.from_dict(yaml.safe_load(block)["ourshard_config"])


def test_the_design_lists_every_key_with_its_default():
    (block,) = [block for page, block in _with_section() if page == "design.md"]
    assert yaml.safe_load(block)["ourshard_config"] == ShardConfig().to_dict()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page):
    named = re.findall(r"`(?:\.\./)?([\w./]+\.(?:py|yaml))`", page.read_text())
    here = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.[py][ya]*") if ".venv" not in path.parts]
    assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in here)] == []


def test_notes_that_are_cited_are_in_the_source_and_in_the_file_that_is_said():
    """In a page, in the source, and in a test: `Note [Name]`, or `Note [Name] in file.py`."""
    homes = {
        name: path
        for path in SOURCES
        for name in re.findall(r'^ *(?:""")?Note \[([^\]]+)\](?=\n|:)', path.read_text(), re.M)
    }
    wrong = []
    for path in [*PAGES, *SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]:
        text = " ".join(re.sub(r"^\s*#", "", path.read_text(), flags=re.M).split())
        for name, file in re.findall(r"Notes? \[([A-Z][^\]]+)\](?: in `?([\w/]+\.py))?", text):
            if name != "Name" and not str(homes.get(name, "")).endswith(file or ".py"):
                wrong.append(f"{path.relative_to(ROOT)}: Note [{name}] in {file or 'no file'}")
    assert wrong == []


def test_every_name_of_the_package_is_in_the_reference():
    """By its module and name, or among the members of its module."""
    page = (ROOT / "docs" / "reference.md").read_text()
    entries = re.findall(r"^::: ([\w.]+)\n(?:    options:\n      members: \[(.*)\]\n)?", page, flags=re.M)
    told = {name for place, members in entries for name in (members.split(", ") if members else [place.split(".")[-1]])}
    callbacks = importlib.import_module("ourshard.trainer_callbacks").__all__
    checkpoint = importlib.import_module("ourshard.checkpoint").__all__
    assert {*ourshard.__all__, *callbacks, *checkpoint} - {"__version__"} - told == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_lead_to_a_heading(page):
    links = re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text())
    pages = [(target, anchor, page.parent / (target or page.name)) for target, anchor in links]
    missing = [f"{target}#{anchor}" for target, anchor, led in pages if anchor not in _anchors(led)]
    assert missing == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w-]", "", heading.strip().lower().replace(" ", "-")) for heading in headings}


def test_every_page_is_in_the_sites_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    in_site = set(re.findall(r"[\w-]+\.md", text[text.index("\nnav:") :]))
    pages = {page.name for page in PAGES if page.parent == ROOT / "docs"}
    assert in_site == pages


def test_the_page_of_commands_is_what_they_say():
    module = runpy.run_path(str(ROOT / "docs" / "generate_commands.py"))
    written = module["PAGE"].read_text()
    assert written == module["page"](), "docs/commands.md is out of date: run `python docs/generate_commands.py`"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: make docs")
def test_the_site_builds_without_a_warning(tmp_path):
    run_cli([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"])
    assert "shard_model" in (tmp_path / "site" / "reference.html").read_text()


def _run(folder: str, *lines: str) -> None:
    """Run lines of Python as a script in a folder does."""
    os.chdir(folder)
    try:
        exec("\n".join(lines), {"__name__": "__main__"})
    finally:
        os.chdir(ROOT)


@pytest.mark.ranks
def test_the_code_of_the_readme_runs(ranks, tmp_path):
    blocks = _blocks(ROOT / "README.md", "python")
    assert blocks
    ranks(1)(_run, str(tmp_path), *blocks, "assert accelerator.is_ourshard")


@pytest.mark.ranks
def test_the_code_of_the_trainers_page_runs(ranks, tmp_path):
    (block,) = _blocks(ROOT / "docs" / "trainer.md", "python")
    check = "import ourshard\nassert ourshard.engine_of(trainer.model) is not None"
    ranks(1)(_run, str(tmp_path), block, check)
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


AROUND_CALLBACKS = """
import ourshard
from transformers import Trainer
def train(block):
    names = dict(globals(), model=LlamaForCausalLM(config), args=args, data=Counting())
    exec(block, names)
    assert ourshard.engine_of(names["trainer"].model) or names["trainer"].train()
    assert ourshard.engine_of(names["trainer"].model)
"""


@pytest.mark.ranks
def test_the_code_of_the_pages_on_callbacks_and_concepts_runs(ranks, tmp_path):
    (trainer,) = _blocks(ROOT / "docs" / "trainer.md", "python")
    begin = trainer[: trainer.index("trainer = ")].replace("LlamaForCausalLM(\n", "(config :=\n")
    blocks = _blocks(ROOT / "docs" / "callbacks.md", "python")
    assert len(blocks) == 5
    (whole,) = _blocks(ROOT / "docs" / "concepts.md", "python")
    runs = [f"train({block!r})" for block in [*blocks, f"{blocks[0]}trainer.train()\n{whole}"]]
    ranks(1)(_run, str(tmp_path), begin, AROUND_CALLBACKS, *runs)
    assert (tmp_path / "averaged" / "model.safetensors").is_file()
    assert list((tmp_path / "run" / "sharded").glob("checkpoint-*"))


LORA = """
from peft import LoraConfig, get_peft_model
from types import SimpleNamespace
args, training, train = SimpleNamespace(base="out/train_clm"), args, Counting()
test = train
"""
RESUMED = """
import shutil, ourshard
saving = ShardTrainingArguments("run", ourshard={"stage": 3}, max_steps=2, save_steps=2, report_to="none")
trainer = Trainer(AutoModelForCausalLM.from_pretrained("out/train_clm"), saving, train_dataset=Counting())
trainer.train()
shutil.move("run/checkpoint-2", "checkpoint-500")
"""
LOOP = """
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
shutil.rmtree("checkpoint-500")
names = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True)
accelerator, net = Accelerator(project_config=names), torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
ourshard.asked_to_end()
os.kill(os.getpid(), signal.SIGTERM)
place, steps = SimpleNamespace(step=0), 2
"""


@pytest.mark.ranks
def test_the_code_of_the_tutorials_and_of_the_pages_on_checkpoints_and_recovery_runs(ranks, tmp_path):
    docs = ROOT / "docs"
    pages = ("trainer", "tutorial-first-model", "tutorial-lora", "checkpoints")
    trainer, opened, lora, loads = (block for page in pages for block in _blocks(docs / f"{page}.md", "python"))
    of_accelerator, of_trainer, of_ours = loads.splitlines()
    first, loop = _blocks(docs / "recovery.md", "python")
    saved = 'shutil.move("checkpoints/checkpoint_0", "checkpoint-500")'
    lines = [trainer, 'trainer.save_model("out/train_clm")', opened, LORA, lora, RESUMED, of_trainer]
    forget = "from ourshard.integrations import stopping; stopping.finish()"  # the signal: this process goes on
    lines += ["import os, signal", LOOP, first, loop, forget, saved, of_accelerator, of_ours]
    ranks(1)(_run, str(tmp_path), *lines)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "checkpoint-500").is_dir()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_is_python_and_what_it_imports_is_there(page):
    for block in _blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ourshard"):
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ourshard":
                assert node.attr in {*ourshard.__all__, "planning", "trainer_callbacks"}


def _commands(page: Path) -> list[list[str]]:
    """Return the commands in the blocks of a page, in words, without what stands before the program's name."""
    text = "\n".join(
        [*_blocks(page, ""), *_blocks(page, "bash"), *re.findall(r"(?<=\n\n)    (\S.*)$", page.read_text(), re.M)]
    )
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found = [re.search(r"(?:^|[A-Z]\w*=\S+ )(ourshard|accelerate launch|python) (.*)", line) for line in lines]
    return [[match[1], *shlex.split(match[2], comments=True)] for match in found if match]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_are_understood(page):
    for program, *words in _commands(page):
        if program == "ourshard":
            known = _options_of(words)
            assert [word for word in words if word.startswith("-") and word not in known] == [], words
            continue
        files = [word for word in words if re.fullmatch(r"(examples|accelerate_configs|docs|benchmarks)/.*\.\w+", word)]
        assert [name for name in files if not (ROOT / name).exists()] == [], words
        script = next((word for word in words if word.startswith("examples/")), None)
        if script is not None:
            given = {word for word in words[words.index(script) + 1 :] if word.startswith("--")}
            source = (ROOT / script).read_text()
            assert [word for word in given if word not in source and word[2:] not in source] == [], words


def _options_of(words: list[str]) -> set[str]:
    """Return the options that the command takes which `words` begin with."""
    module, app = COMMANDS[words[0]].app.split(":")
    command = typer.main.get_command(getattr(importlib.import_module(module), app))
    command = getattr(command, "commands", {}).get(words[1] if words[1:] else "", command)
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def _texts() -> list[str]:
    """Return every text in the source, with an ellipsis for each hole of an f-string or a log message."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]|%\.\df|%g", "…", node.value))
    return found


def test_each_message_of_the_troubleshooting_page_is_still_in_the_source():
    messages = re.findall(r"^> `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.MULTILINE)
    assert len(messages) > 25
    texts = _texts()
    patterns = [re.compile(".+?".join(re.escape(part) for part in message.split("…"))) for message in messages]
    assert [pattern.pattern for pattern in patterns if not any(map(pattern.search, texts))] == []

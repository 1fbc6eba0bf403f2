"""What the pages say exists: configs that are read, files, notes, links, and code that runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from ourshard.config import ShardConfig

from tests.commands import ROOT, run_cli

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for folder in ("plugin", "trainer_callbacks") for path in sorted((ROOT / folder).rglob("*.py"))]


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_notes_that_pages_cite_are_in_the_source(page):
    cited = set(re.findall(r"Notes? \[([^\]]+)\]", " ".join(page.read_text().split())))
    source = "\n".join(path.read_text() for path in SOURCES)
    assert [note for note in sorted(cited - {"Name"}) if f"Note [{note}]" not in source] == []


def test_the_code_of_the_readme_runs():
    blocks = _blocks(ROOT / "README.md", "python")
    assert blocks
    check = "from accelerate import Accelerator\nassert accelerator.is_ourshard"
    run_cli([sys.executable, "-c", "\n".join([*blocks, check])], env={"ACCELERATE_USE_CPU": "true"})


def test_the_code_of_the_trainers_page_runs(tmp_path):
    (block,) = _blocks(ROOT / "docs" / "trainer.md", "python")
    check = "import ourshard\nassert ourshard.engine_of(trainer.model) is not None"
    run_cli([sys.executable, "-c", f"{block}\n{check}"], env={"ACCELERATE_USE_CPU": "true"}, cwd=tmp_path)
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()

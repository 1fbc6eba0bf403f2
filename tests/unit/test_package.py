"""What an installation has, where the folder of the sources is not beside it: packages, and types for type checkers."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator

import pytest

from tests.commands import ROOT

FOLDERS = {"ourshard": "plugin/ourshard", "ourshard.trainer_callbacks": "trainer_callbacks"}
LAZY = {**FOLDERS, "ourshard.checkpoint": "plugin/ourshard/checkpoint"}  # their names are loaded on first use


def listed(key: str) -> list[str]:
    """Return a list of pyproject.toml."""
    (text,) = re.findall(rf"^{key} = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(), flags=re.M | re.S)
    return ast.literal_eval(text)


def test_every_package_is_in_the_wheel():
    """An editable installation would not miss one."""
    found = [
        ".".join([package, *file.parent.relative_to(ROOT / folder).parts])
        for package, folder in FOLDERS.items()
        for file in (ROOT / folder).rglob("__init__.py")
    ]
    assert sorted(listed("packages")) == sorted(found)


@pytest.mark.parametrize(("package", "folder"), LAZY.items())
def test_type_checkers_see_the_names_that_are_loaded_on_first_use(package, folder):
    stub = ast.parse((ROOT / folder / "__init__.pyi").read_text())
    told = {name.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names}
    module = importlib.import_module(package)
    loaded = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    assert told.keys() == loaded.keys()
    for name, value in loaded.items():
        assert value is getattr(importlib.import_module(str(told[name])), name)


def test_what_is_required_is_what_is_imported():
    """Extras apart: what imports them says so, where they are missing."""
    required = {re.split(r"[><=]", text)[0] for text in listed("dependencies")}
    required = {"yaml" if name == "pyyaml" else name for name in required}
    files = [ROOT / "plugin" / "_ourshard_autoload.py"]
    files += [file for folder in FOLDERS.values() for file in (ROOT / folder).rglob("*.py")]
    imported = {top for file in files for top in _tops(ast.parse(file.read_text()))}
    ours = {"ourshard", "_ourshard_autoload"}
    optional = {"transformers", "peft", "matplotlib", "triton", "typing_extensions"}  # the last one for type checkers
    assert imported - sys.stdlib_module_names - ours - optional == required


SCRIPTS = [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_a_script_imports_of_the_package_is_there(script):
    """Few of the benchmarks are run by tests."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ourshard"):
            names = [name.name for name in node.names]
            module = importlib.import_module(str(node.module))
            assert [name for name in names if not hasattr(module, name) and not _is_module(node.module, name)] == []


def _is_module(package: str | None, name: str) -> bool:
    return importlib.util.find_spec(f"{package}.{name}") is not None


def _tops(tree: ast.AST) -> Iterator[str]:
    """Yield the packages that a module imports from, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]


def test_stubs_and_the_mark_of_typed_packages_are_in_the_wheel():
    text = (ROOT / "pyproject.toml").read_text()
    for package, folder in LAZY.items():
        patterns = re.findall(rf'^"?{re.escape(package)}"? = (\[".*"\])$', text, flags=re.M)[-1]
        files = {path.name for pattern in ast.literal_eval(patterns) for path in (ROOT / folder).glob(pattern)}
        assert "__init__.pyi" in files, package
    assert (ROOT / "plugin" / "ourshard" / "py.typed").is_file()

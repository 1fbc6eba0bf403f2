"""Imports point downward only, each module can be imported first, and `import ourshard` does not import torch."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import ROOT, clean_environment

SOURCES = {"ourshard": ROOT / "plugin" / "ourshard", "ourshard.trainer_callbacks": ROOT / "trainer_callbacks"}

# A module belongs to the longest prefix that matches it, and may import its own layer and the ones listed.
_CONFIG = ("ourshard.config", "ourshard.values")
_LAYOUT = (*_CONFIG, "ourshard.runtime.layout", "ourshard.runtime.lane_search", "ourshard.runtime.boxes")
_RUNTIME = (*_LAYOUT, "ourshard.runtime")
_BELOW_INTEGRATIONS = (*_RUNTIME, "ourshard.offload", "ourshard.checkpoint", "ourshard.flags", "ourshard.planning")
LAYERS: dict[str, tuple[str, ...]] = {
    "ourshard": (),  # the package itself loads names on first use, by text
    "ourshard.values": (),
    "ourshard.config": ("ourshard.values",),
    "ourshard.runtime.layout": _LAYOUT,
    "ourshard.runtime.lane_search": _LAYOUT,
    "ourshard.runtime.boxes": _LAYOUT,
    "ourshard.runtime": _RUNTIME,
    "ourshard.offload": _RUNTIME,
    "ourshard.checkpoint": _RUNTIME,
    "ourshard.flags": _RUNTIME,
    "ourshard.planning": (*_RUNTIME, "ourshard.flags"),  # it reads and writes configs
    "ourshard.integrations": _BELOW_INTEGRATIONS,
    "ourshard.doctor": (*_BELOW_INTEGRATIONS, "ourshard.integrations"),
    "ourshard.cli": (*_BELOW_INTEGRATIONS, "ourshard.integrations", "ourshard.doctor"),
    "ourshard.__main__": ("ourshard.cli",),
    "ourshard.trainer_callbacks": (*_BELOW_INTEGRATIONS, "ourshard.integrations"),
}
# These are read by launchers and by planners of other machines' jobs: the standard library is all they need.
PURE = (
    "ourshard.values",
    "ourshard.config",
    "ourshard.runtime.layout",
    "ourshard.runtime.lane_search",
    "ourshard.runtime.boxes",
)
# Imported on first use on a CUDA device, where torch brings Triton; a CPU build of torch does not.
NEED_TRITON = ("ourshard.runtime.codec_triton", "ourshard.runtime.codec_kernels")
# The engine stands on torch.distributed alone.
OTHER_ENGINES = ("torch.distributed.fsdp", "torch.distributed._composable", "deepspeed", "fairscale")


@dataclass(frozen=True)
class Import:
    """One imported name, absolute (a `from` import adds the name to its module)."""

    module: str
    line: int
    at_module_level: bool


def _imports(path: Path, package: str) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, at_module_level: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, at_module_level) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            found.extend(Import(f"{base}.{alias.name}", node.lineno, at_module_level) for alias in node.names)
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, at_module_level and not inside)

    visit(ast.parse(path.read_text(), str(path)), True)
    return found


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


def _matches(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def _layer(module: str) -> str:
    return max((layer for layer in LAYERS if _matches(module, (layer,))), key=len)


def _upward(module: str, imports: list[Import]) -> Iterator[str]:
    layer = _layer(module)
    for found in imports:
        if not _matches(found.module, ("ourshard",)) or found.module == "ourshard.__version__":
            continue
        target = _layer(found.module)
        if target != layer and target not in LAYERS[layer]:
            yield f"{module}, line {found.line}: {layer} may not import {found.module} ({target})"


def _package(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def test_no_module_imports_upward():
    assert [
        text for module, path in _modules() for text in _upward(module, _imports(path, _package(module, path)))
    ] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ourshard.runtime.layout", "from ourshard.runtime.mesh import Mesh"),
        ("ourshard.runtime.layout", "from ourshard.runtime import mesh"),
        ("ourshard.runtime.layout", "from .mesh import Mesh"),
        ("ourshard.runtime.mesh", "def late():\n    import ourshard.integrations"),
        ("ourshard.checkpoint.source", "import ourshard.offload.host"),
        ("ourshard.offload", "from ourshard import ShardConfig"),
        ("ourshard.config", "import ourshard.runtime.layout"),
        ("ourshard.integrations.accelerate", "from ourshard.cli import main"),
        ("ourshard.trainer_callbacks.memory", "from ourshard import cli"),
    ],
)
def test_an_upward_import_is_seen_however_it_is_written(module, source, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(_upward(module, _imports(path, module.rpartition(".")[0] or module)))


def test_config_and_layout_need_only_the_standard_library():
    outside = []
    for module, path in _modules():
        if module in PURE:
            tops = {found.module.partition(".")[0] for found in _imports(path, _package(module, path))}
            outside += [f"{module}: {top}" for top in tops if top != "ourshard" and top not in sys.stdlib_module_names]
    assert outside == []


def test_nothing_imports_another_engine():
    """Inside `runtime` and `offload` not even within a function; elsewhere not on import."""
    found = []
    engine_folders = [SOURCES["ourshard"] / name for name in ("runtime", "offload")]
    for path in _repository_files():
        engine = any(path.is_relative_to(folder) for folder in engine_folders)
        for item in _imports(path, ""):
            if _matches(item.module, OTHER_ENGINES) and (engine or item.at_module_level):
                found.append(f"{path.relative_to(ROOT)}, line {item.line}: {item.module}")
    assert found == []


def _repository_files() -> Iterator[Path]:
    for top in ("plugin", "trainer_callbacks", "examples", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if not path.is_relative_to(ROOT / "tests" / "fixtures"):
                yield path


_IMPORT_EACH_ALONE = """
import importlib, sys, traceback
import torch, accelerate, transformers  # once; what is measured below is the order inside the package
failed = []
for name in sys.argv[1:]:
    for loaded in [key for key in sys.modules if key == "ourshard" or key.startswith("ourshard.")]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":  # it comes with torch's builds for GPUs only
            failed.append(name + "\\n" + traceback.format_exc())
    except BaseException:
        failed.append(name + "\\n" + traceback.format_exc())
sys.exit("\\n".join(failed) or 0)
"""


def _python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**clean_environment(), "OURSHARD_DISABLE": "1"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)


@pytest.mark.slow
def test_each_module_can_be_imported_first():
    missing = () if importlib.util.find_spec("triton") else NEED_TRITON
    result = _python(_IMPORT_EACH_ALONE, *(module for module, _ in _modules() if module not in missing))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["ourshard", "ourshard.config", "_ourshard_autoload"])
def test_launchers_can_read_a_config_without_torch(module):
    result = _python(f"import sys, {module}; sys.exit(', '.join({{'torch', 'accelerate'}} & set(sys.modules)) or 0)")
    assert result.returncode == 0, f"import {module} also imports {result.stderr}"

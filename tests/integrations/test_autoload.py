"""The hooks are in place whichever package is imported first, leave no trace, and cost next to nothing."""

from __future__ import annotations

import sys

import pytest

from tests.commands import run_cli

HOOKED = "from accelerate import Accelerator; hooked = hasattr(Accelerator.__new__, '_ourshard')"
WITHOUT_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def python(*lines: str, env: dict[str, str] | None = None, flags: tuple[str, ...] = ()) -> str:
    """Run lines of Python in a process of their own and return what they printed."""
    return run_cli([sys.executable, *flags, "-c", "\n".join(lines)], env=env, timeout=60).stdout.strip()


@pytest.mark.parametrize(
    "first",
    [
        "import torch",
        "import accelerate",  # accelerate is what imports torch: its modules are half made when the hooks come
        "import accelerate.utils",
        "import transformers",
        "import ourshard",
    ],
)
def test_the_accelerator_is_hooked_whatever_is_imported_first(first):
    assert python(first, HOOKED, "print(hooked)") == "True"


def test_an_isolated_interpreter_is_hooked_too():
    assert python(HOOKED, "print(hooked)", flags=("-I",)) == "True"


def test_hooked_modules_show_no_trace_of_the_hook():
    lines = [
        "import accelerate, inspect, sys",
        "import accelerate.commands.config.config_args",
        "names = ['accelerate.utils.launch', 'accelerate.accelerator', 'accelerate.commands.config.config_args']",
        "for module in map(sys.modules.get, names):",
        "    assert type(module.__loader__).__name__ == 'SourceFileLoader', module.__loader__",
        "    assert module.__spec__.loader is module.__loader__",
        "    assert type(module.__spec__).__module__ == '_frozen_importlib', type(module.__spec__)",
        "    assert inspect.getsource(module)",
        "print('clean')",
    ]
    assert python(*lines) == "clean"


def test_ourshard_disable_turns_all_off():
    lines = ("import torch, ourshard, sys", HOOKED, "print(hooked, 'ourshard.integrations' in sys.modules)")
    assert python(*lines, env={"OURSHARD_DISABLE": "1", "ACCELERATE_USE_OURSHARD": "true"}) == "False False"


def test_without_autoload_an_import_of_ourshard_is_enough():
    assert python("import torch", HOOKED, "print(hooked)", env=WITHOUT_AUTOLOAD) == "False"
    assert python("import torch, accelerate, ourshard", HOOKED, "print(hooked)", env=WITHOUT_AUTOLOAD) == "True"


def test_a_hook_that_fails_warns_and_leaves_the_import_alone():
    lines = [
        "import _ourshard_autoload as autoload, warnings",
        "autoload.HOOKS['accelerate.accelerator'] = 'no_such_function'",
        "with warnings.catch_warnings(record=True) as caught:",
        "    warnings.simplefilter('always')",
        "    from accelerate import Accelerator",
        "mine = [str(w.message) for w in caught if 'ourshard' in str(w.message)]",
        "print(len(mine), 'accelerate.accelerator' in mine[0], Accelerator().num_processes)",
    ]
    assert python(*lines) == "1 True 1"


def test_a_module_whose_import_fails_is_not_hooked_half_made(tmp_path):
    (tmp_path / "halting.py").write_text("import _ourshard_autoload\n_ourshard_autoload.install()\nraise OSError\n")
    lines = [
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})",
        "import _ourshard_autoload as autoload",
        "autoload.HOOKS['halting'] = 'accelerator_class'",
        "try: import halting",
        "except OSError: print('raised', 'halting' in sys.modules)",
    ]
    assert python(*lines) == "raised False"


def test_the_entry_point_costs_import_torch_less_than_5_ms():
    lines = [
        "import importlib.metadata, sys, time, warnings, typing",
        "began = time.perf_counter()",
        "import _ourshard_autoload",
        "_ourshard_autoload.install()",
        "print(1000 * (time.perf_counter() - began))",
    ]
    assert min(float(python(*lines)) for _ in range(3)) < 5.0


def test_a_process_that_does_not_use_ourshard_imports_nothing_of_the_engine():
    lines = (
        "import torch",
        HOOKED,
        "Accelerator()",
        "import sys",
        "print([m for m in sys.modules if 'ourshard.runtime' in m])",
    )
    assert python(*lines) == "[]"

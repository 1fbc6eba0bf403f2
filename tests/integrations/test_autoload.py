"""The hooks are in place whichever package is imported first, leave no trace, and cost next to nothing."""

from __future__ import annotations

import sys
from argparse import Namespace

import pytest
from ourshard.integrations import launcher, switch

from tests.commands import run_cli

HOOKED = "from accelerate import Accelerator; hooked = hasattr(Accelerator.__new__, '_ourshard')"
WITHOUT_AUTOLOAD = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def python(*lines: str, env: dict[str, str] | None = None, flags: tuple[str, ...] = ()) -> str:
    """Run lines of Python in a process of their own and return what they printed."""
    return run_cli([sys.executable, *flags, "-c", "\n".join(lines)], env=env, timeout=60).stdout.strip()


@pytest.mark.parametrize(
    ("first", "flags"),
    [
        ("import torch", ()),
        ("import accelerate", ("-I",)),  # it imports torch: its modules are half made when the hooks come
        ("import accelerate.utils", ()),
        ("import transformers", ()),
        ("import ourshard", ()),
    ],
)
def test_the_accelerator_is_hooked_whatever_is_imported_first_and_nothing_of_the_engine_is_imported(first, flags):
    lines = [first, HOOKED, "Accelerator()", "import sys"]
    lines += ["print(hooked, [name for name in sys.modules if 'ourshard.runtime' in name])"]
    assert python(*lines, flags=flags) == "True []"


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
    assert python(*lines[:2], "print(hooked)", env={"OURSHARD_DISABLE": "y"}) == "False"  # a word of accelerate's


def test_ourshard_disable_that_says_neither_yes_nor_no_is_refused_where_ourshard_is_asked_for(monkeypatch):
    monkeypatch.setenv("OURSHARD_DISABLE", "ja")
    assert not switch.asked_for({})
    monkeypatch.setenv(switch.SWITCH, "true")
    with pytest.raises(ValueError, match="OURSHARD_DISABLE is 'ja' in the environment; write true or false"):
        switch.asked_for({})
    launch = Namespace(use_fsdp=False, use_deepspeed=False)
    with pytest.raises(ValueError, match="OURSHARD_DISABLE is 'ja'"):
        launcher.prepare_multi_gpu_env(lambda _: {}, launch)


def test_without_autoload_an_import_of_ourshard_is_enough():
    lines = ("import torch, accelerate", HOOKED, "print(hooked)", "import ourshard", HOOKED, "print(hooked)")
    assert python(*lines, env=WITHOUT_AUTOLOAD) == "False\nTrue"


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


def test_the_entry_point_imports_nothing_that_torch_has_not_imported():
    """It runs in each process that imports torch; what it costs there is what it imports."""
    lines = [
        "import importlib.metadata, sys, typing, warnings",
        "before = set(sys.modules)",
        "import _ourshard_autoload",
        "_ourshard_autoload.install()",
        "print(sorted(set(sys.modules) - before))",
    ]
    assert python(*lines) == "['_ourshard_autoload']"

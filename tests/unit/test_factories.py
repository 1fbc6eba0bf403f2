"""Tensors that ourshard makes name their device: the default of a script, `torch.set_default_device`, is not for them.

With a default of "cuda" messages between ranks on the host would be made on the GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

PLUGIN = Path(__file__).resolve().parents[2] / "plugin"
MAKERS = {function.__name__ for function in _device_constructors()}


def makers_without_a_device(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in MAKERS:
            continue
        named = {keyword.arg for keyword in node.keywords} & {"device", None}
        if ast.unparse(node.func.value) == "torch" and not named:
            yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_what_makes_a_tensor_names_its_device():
    assert {"empty", "tensor", "as_tensor", "zeros", "randn"} <= MAKERS
    found = [text for path in sorted(PLUGIN.rglob("*.py")) for text in makers_without_a_device(path)]
    assert not found, "\n".join(found)

"""How messages put amounts: one of a thing is not "1 things"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from ourshard.runtime.wording import counted

PLUGIN = Path(__file__).resolve().parents[2] / "plugin"
# What a message may count, and there may be one of.
WORDS = "rank unit lane thread core GPU node machine process file tensor parameter group fault replica shard"


@pytest.mark.parametrize(
    ("number", "word", "text"),
    [(1, "rank", "1 rank"), (0, "rank", "0 ranks"), (16384, "GPU", "16,384 GPUs"), (2, "process", "2 processes")],
)
def test_a_number_has_its_word_in_the_right_number(number, word, text):
    assert counted(number, word) == text


def test_messages_leave_the_plural_to_the_function_for_it():
    after = re.compile(rf"^ ({'|'.join(WORDS.split())})e?s\b")
    found = []
    for path in sorted(PLUGIN.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                for value, text in zip(node.values, node.values[1:], strict=False):
                    if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                        match = after.match(str(text.value))
                        found += [f"{path.name}:{node.lineno}: {match[0]}"] if match else []
    assert not found, "\n".join(found)

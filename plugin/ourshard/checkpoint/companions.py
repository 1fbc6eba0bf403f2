"""The small files that make a folder of weights usable: config, tokenizer, processor, model code."""

from __future__ import annotations

import re
from pathlib import Path

FOR_MODEL = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|.*\.(model|tiktoken|jinja)|(pre|video_pre|image_)?processor_config\.json"
    r"|preprocessor_config\.json|adapter_config\.json|README\.md"
    r"|(modeling|configuration|tokenization|processing)_\w+\.py"
)
FOR_TRAINING = re.compile(r"trainer_state\.json")
MAX_NBYTES = 256 << 20


def companions(folder: Path) -> dict[str, Path]:
    """Return name -> path of the files beside the weights."""
    found = {}
    for path in sorted(folder.iterdir()):
        wanted = FOR_MODEL.fullmatch(path.name) or FOR_TRAINING.fullmatch(path.name)
        if wanted and path.is_file() and path.stat().st_size <= MAX_NBYTES:
            found[path.name] = path
    return found


def is_for_model(name: str) -> bool:
    """Tell whether a file goes with the weights alone."""
    return FOR_MODEL.fullmatch(name) is not None

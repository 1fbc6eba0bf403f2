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
_OF_STATE = re.compile(
    r".*\.(safetensors|bin)(\.index\.json)?|.*\.(pt|pth|pkl|distcp)|\.metadata|latest(_universal)?|ourshard\..*\.?json"
    r"|(ourshard|pytorch_model|pytorch_model_fsdp|optimizer)(_\d+)?|global_step\d+(_universal)?|zero|zero_to_fp32\.py"
    r"|extra|ranks|parts"
)
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


def strangers(folder: Path) -> list[str]:
    """List what a folder holds and no checkpoint does; all of it, if nothing there is of weights or state."""
    names = sorted(path.name for path in folder.iterdir())
    if not any(_OF_STATE.fullmatch(name) for name in names):
        return names
    known = (_OF_STATE, FOR_MODEL, FOR_TRAINING)
    return [name for name in names if not any(each.fullmatch(name) for each in known)]

"""What the scripts beside share: the first rows of a data set, and metrics, which the examples take from `evaluate`."""

from __future__ import annotations

import numpy as np


def first(rows, most: int | None):
    """Return at most `most` rows; all for None."""
    return rows if most is None else rows.select(range(min(most, len(rows))))


def best(logits, labels):
    """Return the likeliest token of each place, so that no logits are gathered."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def next_token_accuracy(told) -> dict[str, float]:
    labels, found = told.label_ids[:, 1:], told.predictions[:, :-1]
    return {"accuracy": float((labels == found).mean())}


def masked_accuracy(told) -> dict[str, float]:
    masked = told.label_ids != -100
    return {"accuracy": float((told.label_ids == told.predictions)[masked].mean())}


def class_scores(told) -> dict[str, float]:
    """Return accuracy and the mean F1 of the classes."""
    found = np.argmax(told.predictions, axis=1)
    f1 = []
    for each in np.unique(told.label_ids):
        right = np.sum((found == each) & (told.label_ids == each))
        f1.append(2 * right / max(1, np.sum(found == each) + np.sum(told.label_ids == each)))
    return {"accuracy": float((found == told.label_ids).mean()), "f1": float(np.mean(f1))}


def shared_words(texts: list[str], wanted: list[str]) -> float:
    """Return the mean F1 of the sets of words of two lists of texts, as ROUGE-1 measures it."""
    scores = []
    for text, target in zip(texts, wanted, strict=True):
        mine, theirs = set(text.split()), set(target.split())
        scores.append(2 * len(mine & theirs) / max(1, len(mine) + len(theirs)))
    return float(np.mean(scores))

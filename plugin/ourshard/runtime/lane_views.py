"""Views of whole gradients: where the parameters of a lane lie in a flat buffer."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Views(NamedTuple):
    """Views of a flat buffer: of each parameter, with its shape, and of what is between them."""

    parameters: list[torch.Tensor]
    gaps: list[torch.Tensor]


Spans = tuple[tuple[int, int, tuple[int, ...]], ...]  # offset, elements and shape of each parameter, in order


class Pattern:
    """How a flat buffer is cut into parameters. Made by `pattern_of`, so that lanes which are alike have the same one.

    One call makes all views of a buffer; on the host that is a third of one slice and view a parameter.
    """

    __slots__ = ("_empty", "_gaps", "_like", "_places")

    def __init__(self, numel: int, spans: Spans) -> None:
        like: list[torch.Tensor] = []  # a meta tensor for each parameter and each gap, in the order of offsets
        places: list[int] = []  # of the parameters among them
        end = 0
        for offset, length, shape in spans:
            if offset > end:
                like.append(torch.empty(offset - end, device="meta"))
            places.append(len(like))
            like.append(torch.empty(shape, device="meta"))
            end = offset + length
        if numel > end:
            like.append(torch.empty(numel - end, device="meta"))
        self._like, self._places = like, places
        self._gaps = sorted(set(range(len(like))) - set(places))
        # The shapes of parameters without elements would be lost.
        self._empty = [(number, *span) for number, span in enumerate(spans) if not span[1]]

    def views_of(self, buffer: torch.Tensor) -> Views:
        pieces = torch._C._nn.unflatten_dense_tensors(buffer, self._like)
        views = [pieces[place] for place in self._places]
        for number, offset, length, shape in self._empty:
            views[number] = buffer[offset : offset + length].view(shape)
        return Views(views, [pieces[place] for place in self._gaps])


@functools.lru_cache(maxsize=1024)
def pattern_of(numel: int, spans: Spans) -> Pattern:
    """Return the pattern of a flat buffer of `numel` elements; the same object for the same arguments."""
    return Pattern(numel, spans)

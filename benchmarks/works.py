"""The works of the peer benchmark: models, batches, and what a step of them costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Work:
    """One model with one batch per GPU. `checkpoint`: every layer's activations are recomputed in backward."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    batch: int
    seq: int
    checkpoint: bool = False
    compile: bool = False
    vocab: int = 32_000

    def build(self) -> Any:
        """Return the model with random weights on the current device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(  # type: ignore[call-arg]  # the last by **kwargs
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.seq,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
        return LlamaForCausalLM(config)

    @property
    def parameters(self) -> int:
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden

    @property
    def flops(self) -> float:
        """Model FLOPs of one step on one GPU: 6 per parameter and token without the input embedding, plus attention."""
        tokens = self.batch * self.seq
        dense = 6 * (self.parameters - self.vocab * self.hidden) * tokens
        return dense + 6 * self.layers * self.hidden * self.seq * tokens


_1B = Work("llama-1b", layers=18, hidden=2048, heads=32, kv_heads=8, ffn=8192, batch=4, seq=2048)
_4B = replace(_1B, name="llama-4b-checkpointed", layers=19, hidden=4096, ffn=14336, checkpoint=True)
_SMALL = Work("small-48", layers=48, hidden=512, heads=8, kv_heads=4, ffn=2048, batch=4, seq=512)

WORKS = {
    work.name: work
    for work in (
        _1B,
        replace(_1B, name="llama-1b-checkpointed", batch=16, checkpoint=True),
        _4B,
        replace(_1B, name="llama-1b-host", batch=1, seq=512),
        _SMALL,
        replace(_1B, name="llama-1b-compiled", compile=True),
        Work("tiny", layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, batch=2, seq=32, vocab=97),
    )
}


def work_named(name: str) -> Work:
    """Return a work by name: one of `WORKS`, or `llama-4b-checkpointed` with other layers as `llama-4096-x30`.

    Raises `ValueError` where there is none.
    """
    prefix, _, layers = name.partition("-x")
    if prefix == "llama-4096" and layers.isdecimal():
        return replace(_4B, name=name, layers=int(layers))
    if name not in WORKS:
        raise ValueError(f"--work: {name!r} is not llama-4096-x<layers>, or one of {', '.join(sorted(WORKS))}.")
    return WORKS[name]

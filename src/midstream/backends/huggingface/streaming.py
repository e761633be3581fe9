"""A sequence as it grows, in pieces of text that are not taken back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from midstream.core.stream import Chunk
from midstream.core.text import Settled, decoder

from .choosing import Growing
from .decoding import DecodeLoop
from .forward import fresh_positions


def chunks_of(
    grown: Sequence[list[Growing]], loop: DecodeLoop, inputs: dict[str, Any] | None, tokenizer: Any
) -> Iterator[Chunk]:
    """One chunk per token of the one sequence in `grown`."""
    one, text = grown[0][0], Settled(decoder(tokenizer), loop.params)
    with fresh_positions(loop.model):
        batch = loop.begin(grown, inputs)
        while not one.ended:
            loop.advance(batch)
            if one.error is not None:
                raise one.error
            yield Chunk((one.token_ids[-1],), text.grow(one.token_ids, one.finish_reason if one.ended else None))

"""A sequence as it grows, in pieces of text that are not taken back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from midstream.core.stream import Chunk

from .decoding import DecodeLoop, Growing
from .forward import fresh_positions
from .generating import Decode, decoder, text_of


def chunks_of(
    grown: Sequence[list[Growing]], loop: DecodeLoop, inputs: dict[str, Any] | None, tokenizer: Any
) -> Iterator[Chunk]:
    """One chunk per token of the one sequence in `grown`."""
    one, text = grown[0][0], Settled(decoder(tokenizer), loop)
    with fresh_positions(loop.model):
        batch = loop.begin(grown, inputs)
        while not one.ended:
            loop.advance(batch)
            if one.error is not None:
                raise one.error
            yield Chunk((one.token_ids[-1],), text.grow(one))


class Settled:
    """The text of a sequence so far as no later token can change it."""

    def __init__(self, decode: Decode | None, loop: DecodeLoop) -> None:
        self._decode = decode
        self._params = loop.params
        self._given = ""

    def grow(self, one: Growing) -> str:
        """What of the text has become certain with the last token."""
        if self._decode is None:
            return ""
        if one.ended:
            whole = text_of(one, self._params, self._decode)
        else:
            whole = self._decode(one.token_ids)
            # the last character may be a part of one that more tokens complete
            whole = whole[: len(whole) - _held_back(whole, self._params.stop)] if not whole.endswith("\ufffd") else ""
        if not whole.startswith(self._given):
            return ""  # a tokenizer that rewrites its text: all of it comes at the end
        new, self._given = whole[len(self._given) :], max(whole, self._given, key=len)
        return new


def _held_back(text: str, stop: Sequence[str]) -> int:
    """How many last characters may be the beginning of a stop string.

    >>> _held_back("and so on. EN", ["END"]), _held_back("and", ["END"])
    (2, 0)
    """
    longest = max(map(len, stop), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(word.startswith(text[-size:]) for word in stop):
            return size
    return 0

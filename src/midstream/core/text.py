"""The text of generated ids: where it ends, and how much of it no later token can change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .generation import FinishReason, GenerationParams

Decode = Callable[[Sequence[int]], str]
"""Ids → text without special tokens."""


def decoder(tokenizer: Any) -> Decode | None:
    """Ids → text without special tokens."""
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def token_texts(tokenizer: Any) -> Callable[[Sequence[int]], list[str]] | None:
    """Ids → the text of each alone, special tokens shown."""
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.batch_decode([[token] for token in ids])


def text_of(
    token_ids: Sequence[int], finish_reason: FinishReason | None, params: GenerationParams, decode: Decode
) -> str:
    """The text of a sequence, which ends before the stop string that ended it."""
    text = decode(token_ids)
    ended_by_text = finish_reason == "stop" and token_ids[-1] not in params.stop_token_ids
    return cut_at_stop(text, params.stop) if ended_by_text else text


def completes(before: str, now: str, stop: Sequence[str]) -> bool:
    """Whether what came between two texts of a sequence completed a stop string."""
    return any(now.count(word) > before.count(word) for word in stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text`, which ended at a stop string, up to where that begins; earlier ones did not end it.

    >>> cut_at_stop("one. two. three", [" two", "three"])
    'one. two. '
    """
    return text[: max((text.rfind(word) for word in stop if word in text), default=len(text))]


class Settled:
    """The text of a sequence so far as no later token can change it."""

    def __init__(self, decode: Decode | None, params: GenerationParams) -> None:
        self._decode = decode
        self._params = params
        self._given = ""

    def grow(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> str:
        """What of the text has become certain with the last tokens; finish_reason None: more will come."""
        if self._decode is None:
            return ""
        if finish_reason is not None:
            whole = text_of(token_ids, finish_reason, self._params, self._decode)
        else:
            whole = self._decode(token_ids)
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

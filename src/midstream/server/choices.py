"""One choice of a completion as it grows, in OpenAI's words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from midstream.backends.serving import Ended, Grown, ServedRequest
from midstream.core.generation import TokenLogprob
from midstream.core.text import Settled, completes, decoder, text_of

Name = Callable[[int], str]
"""A token's id → its text, or `token_id:<id>`."""


class Choice:
    """index: its place in the answer. known: what of its text is certain, and was given."""

    def __init__(self, index: int, request: ServedRequest, tokenizer: Any, *, by_id: bool) -> None:
        self.index, self.request = index, request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.ended: Ended | None = None
        self._decode = decoder(tokenizer)
        self._settled = Settled(self._decode, request.params)
        self.name: Name = _namer(tokenizer, by_id)
        self._before = ""
        self.offset = 0
        """Characters of the tokens whose log-probabilities were sent."""

    def note(self, event: Grown | Ended) -> None:
        """More of it, whose text is asked for at the end."""
        if isinstance(event, Ended):
            self.ended = event
        else:
            self.token_ids += event.token_ids
            self.logprobs += event.logprobs or ()

    def grow(self, event: Grown | Ended) -> str:
        """More of it; the text that has become certain."""
        self.note(event)
        if self._decode is None:
            return ""
        if self.ended is not None:
            return self._settled.grow(self.token_ids, self.ended.finish_reason)
        if self.request.params.stop:
            before, self._before = self._before, self._decode(self.token_ids)
            if completes(before, self._before, self.request.params.stop):
                return ""  # it may be the end: the next event says
        return self._settled.grow(self.token_ids, None)

    @property
    def text(self) -> str:
        """All of it, once it has ended."""
        if self._decode is None or self.ended is None:
            return ""
        return text_of(self.token_ids, self.ended.finish_reason, self.request.params, self._decode)

    @property
    def finish_reason(self) -> str | None:
        """`stop` or `length`; None while it grows."""
        if self.ended is None:
            return None
        return "length" if self.ended.finish_reason == "length" else "stop"

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the id to stop at that ended it, as vLLM says it; None for the end of the text."""
        if self.ended is None or self.ended.finish_reason != "stop":
            return None
        if self.token_ids[-1] in self.request.params.stop_token_ids:
            return self.token_ids[-1]
        whole = self._decode(self.token_ids) if self._decode is not None else ""
        found = [one for one in self.request.params.stop if one in whole]
        return max(found, key=whole.rfind, default=None)

    def prompt_logprobs(self) -> list[Any] | None:
        """Of the prompt's tokens, in vLLM's form: token id → log-probability and rank (null: below those asked for)."""
        found = None if self.ended is None else self.ended.prompt_logprobs
        if found is None:
            return None
        return [None if one is None else {str(token): of for token, of in _ranked(one, self.name)} for one in found]


def _ranked(one: TokenLogprob, name: Name) -> list[tuple[int, dict[str, Any]]]:
    ranks = {token: rank + 1 for rank, (token, _) in enumerate(one.top)}
    every = {**dict(one.top), one.token_id: one.logprob}
    return [
        (token, {"logprob": logprob, "rank": ranks.get(token), "decoded_token": name(token)})
        for token, logprob in every.items()
    ]


def _namer(tokenizer: Any, by_id: bool) -> Name:
    if by_id or tokenizer is None:
        return lambda token: f"token_id:{token}"
    return lambda token: tokenizer.decode([token])


def plain_logprobs(found: Sequence[TokenLogprob | None], name: Name, offset: int) -> dict[str, Any]:
    """Log-probabilities as a completion has them; a prompt's first token has none. offset: of the text before them.

    >>> plain_logprobs([TokenLogprob(5, -0.5, ((5, -0.5), (7, -1.0)))], "<{}>".format, 0)["top_logprobs"]
    [{'<5>': -0.5, '<7>': -1.0}]
    """
    tokens = ["" if one is None else name(one.token_id) for one in found]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else one.logprob for one in found],
        "top_logprobs": [None if one is None else _top(one, name) for one in found],
        "text_offset": offsets,
    }


def _top(one: TokenLogprob, name: Name) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token_id, one.logprob)):
        found.setdefault(name(token), logprob)  # several ids may have one text: the likeliest stays
    return found


def chat_logprobs(found: Sequence[TokenLogprob], name: Name) -> dict[str, Any]:
    """The same as a chat has them."""

    def plain(token: int, logprob: float) -> dict[str, Any]:
        text = name(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**plain(one.token_id, one.logprob), "top_logprobs": [plain(token, of) for token, of in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}

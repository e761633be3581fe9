"""Answers: completions and chats in OpenAI's form, whole or in the events of a stream, and what is added to them."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from midstream.backends.serving import Ended
from midstream.backends.vllm.requests import KEY
from midstream.core.generation import TokenLogprob
from midstream.formats.activations import Activations, receipt_plain
from midstream.formats.wire import tensor_form, tensor_frame

from .asking import Ask
from .bodies import ChatBody, CompletionBody
from .choices import Choice, chat_logprobs, plain_logprobs

DONE: Final = "data: [DONE]\n\n"
_PIECE: Final = 3 << 18
"""Bytes that are encoded at a time: a multiple of three, so that the pieces of base64 join."""


class Answers:
    """In the form of one request."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self._kind = "chat.completion" if ask.chat else "text_completion"
        self._id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{ask.id}"
        self._begun: set[int] = set()

    def head(self, kind: str | None = None) -> dict[str, Any]:
        """What every part of an answer begins with."""
        ask = self.ask
        return {"id": self._id, "object": kind or self._kind, "created": ask.created, "model": ask.served.name}

    # --- in one piece

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer, but for what was captured."""
        body = {**self.head(), "choices": [self._choice(one) for one in choices], "usage": self.usage(choices)}
        if self.ask.chat and self.ask.body.return_token_ids:
            body["prompt_token_ids"] = list(choices[0].request.prompt.token_ids)
        return body | self.added(choices)

    def _choice(self, one: Choice) -> dict[str, Any]:
        body = self.ask.body
        found: dict[str, Any] = {"index": one.index}
        if isinstance(body, ChatBody):
            found["message"] = {"role": "assistant", "content": one.text, "refusal": None}
            found["logprobs"] = chat_logprobs(one.logprobs, one.name) if body.logprobs else None
        else:
            assert isinstance(body, CompletionBody)
            shown = self._prompt_text(one) if body.echo else ""
            found["text"] = shown + one.text
            found["logprobs"] = None if body.logprobs is None else self._logprobs(one, echoed=body.echo)
        ends = {"finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
        found |= {**ends, "prompt_logprobs": one.prompt_logprobs() if body.prompt_logprobs is not None else None}
        if body.return_token_ids:
            found["token_ids"] = list(one.token_ids)
            if not self.ask.chat:
                found["prompt_token_ids"] = list(one.request.prompt.token_ids)
        return found

    def _prompt_text(self, one: Choice) -> str:
        prompt, tokenizer = one.request.prompt, self.ask.served.engine.tokenizer
        if prompt.text is not None or tokenizer is None:
            return prompt.text or ""
        return tokenizer.decode(list(prompt.token_ids))

    def _logprobs(self, one: Choice, *, echoed: bool) -> dict[str, Any]:
        prompt = one.ended.prompt_logprobs if echoed and one.ended is not None else None
        return plain_logprobs([*(prompt or ()), *one.logprobs], one.name, 0)

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Tokens: each prompt once, and all that was said."""
        said = sum(len(one.token_ids) for one in choices)
        cached = sum(one.ended.cached for one in choices[:: self.ask.n] if one.ended is not None)
        prompt = self.ask.prompt_tokens
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said, **details}

    def added(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """What was done, for a request that asked for something of ours."""
        if self.ask.asked is None:
            return {}
        (one,) = choices[:1]
        ended = one.ended
        assert ended is not None, "it has ended"
        return {KEY: said_of(ended, self.ask.served.engine.facts.model_fingerprint)}

    # --- in pieces

    def chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> str:
        """One event."""
        kind = "chat.completion.chunk" if self.ask.chat else "text_completion"
        usage: dict[str, Any] = {"usage": None} if self.include_usage and "usage" not in more else {}
        return event({**self.head(kind), "choices": choices, **usage, **more})

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        options = self.ask.body.stream_options
        return options is not None and options.include_usage

    def begin(self, choices: Sequence[Choice]) -> Iterator[str]:
        """What comes before the first token."""
        body = self.ask.body
        if isinstance(body, ChatBody):
            for one in choices:
                delta = {"role": "assistant", "content": ""}
                yield self.chunk([{"index": one.index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def piece(self, one: Choice, text: str, token_ids: Sequence[int], found: Sequence[TokenLogprob]) -> str | None:
        """The event of some tokens, or of the end of a choice; None: there is nothing to say yet."""
        body = self.ask.body
        first = one.index not in self._begun
        if not (text or one.ended or (token_ids and (body.return_token_ids or found))):
            return None
        self._begun.add(one.index)
        said: dict[str, Any] = {"index": one.index}
        if isinstance(body, ChatBody):
            said["delta"] = {"content": text} if text or not one.ended else {}
            said["logprobs"] = chat_logprobs(found, one.name) if body.logprobs and found else None
        else:
            assert isinstance(body, CompletionBody)
            said["text"] = (self._prompt_text(one) if body.echo and first else "") + text
            said["logprobs"] = None
            if body.logprobs is not None and found:
                said["logprobs"] = plain_logprobs(found, one.name, one.offset)
                one.offset += sum(len(one.name(of.token_id)) for of in found)
        said |= {"finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
        if body.return_token_ids:
            said["token_ids"] = list(token_ids)
            if first:
                said["prompt_token_ids"] = list(one.request.prompt.token_ids)
        if one.ended is not None and body.prompt_logprobs is not None:
            said["prompt_logprobs"] = one.prompt_logprobs()
        return self.chunk([said])


def said_of(ended: Ended, fingerprint: str) -> dict[str, Any]:
    """What was done to a sequence, as our clients read it."""
    steering = [receipt_plain(one) for one in ended.steering]
    # each sequence decides for itself: nothing of what gates decided goes from one to the next
    return {"model_fingerprint": fingerprint, "cached": ended.cached, "steering": steering, "decided": {}}


def event(body: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


# --- activations


@dataclass(frozen=True, eq=False)
class Inline:
    """Activations in an answer: their JSON with a mark in the place of each tensor's data, and the data."""

    plain: dict[str, Any]
    frames: Mapping[str, bytes]

    @classmethod
    def of(cls, found: Activations, *, residual: bool) -> Inline:
        """Compressed, for an answer that carries them; takes a while: for a thread."""
        frames: dict[str, bytes] = {}

        def form(tensor: Tensor) -> dict[str, Any]:
            mark = secrets.token_hex(16)
            frames[mark] = tensor_frame(tensor)
            return {"data": mark, **tensor_form(tensor)}

        return cls(found.residual(form=form) if residual else found.plain(form=form), frames)

    def pieces(self, text: str) -> Iterator[bytes]:
        """A JSON text that holds `plain`, with the data in its places, a little at a time."""
        for mark, frame in self.frames.items():
            before, text = text.split(mark)
            yield before.encode()
            for start in range(0, len(frame), _PIECE):
                yield base64.b64encode(frame[start : start + _PIECE])
        yield text.encode()

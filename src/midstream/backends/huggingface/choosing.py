"""The next token of sequences that share a pass, each with parameters of its own, and where each of them ends."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from midstream.core.errors import EngineError, MidstreamError
from midstream.core.generation import FinishReason, GenerationParams, TokenLogprob
from midstream.core.text import completes

from .batching import Ids
from .sampling import likeliest, penalised, pick_tokens
from .shaping import Shaping

Key = TypeVar("Key", bound=Hashable)


@dataclass(eq=False)
class Growing:
    """One choice of one prompt while it grows. request: its index in the recorder and the steerer."""

    request: int
    prompt: Ids
    seed: int | None
    shaping: Shaping = field(default_factory=Shaping)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    error: MidstreamError | None = None

    @property
    def ended(self) -> bool:
        """Whether no further token comes."""
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True)
class Stopping:
    """When a sequence ends: `stop` before `eos` before `length`."""

    params: GenerationParams
    eos: frozenset[int]
    decode: Callable[[Sequence[int]], str] | None

    def reason(self, one: Growing, scores: Tensor) -> FinishReason | None:
        """Why a sequence that has just got its last token, of `scores` `[vocabulary]`, ends; None when it goes on."""
        params, token_ids, last = self.params, one.token_ids, one.token_ids[-1]
        if len(token_ids) >= params.min_tokens:
            if last in params.stop_token_ids or self._at_stop_string(token_ids):
                return "stop"
            if one.shaping.criteria and one.shaping.ended([*one.prompt, *token_ids], scores):
                return "stop"
            if last in self.eos and not params.ignore_eos:
                return "eos"
        return "length" if len(token_ids) >= params.max_tokens else None

    def _at_stop_string(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token completed a stop string; one that came before min_tokens was passed over."""
        if not self.params.stop or self.decode is None:
            return False
        # a character takes at most 4 byte tokens: the end of the text is enough to look at
        window = token_ids[-4 * max(map(len, self.params.stop)) - 4 :]
        return completes(self.decode(window[:-1]), self.decode(window), self.params.stop)

    def forbidden(self, generated: int) -> list[int]:
        """Ids that may not come yet, while there are fewer than min_tokens."""
        if generated >= self.params.min_tokens:
            return []
        return sorted({*self.params.stop_token_ids, *(() if self.params.ignore_eos else self.eos)})


@dataclass(frozen=True, eq=False)
class Way:
    """How one sequence gets its tokens."""

    stopping: Stopping
    generator: torch.Generator | None = None

    @property
    def params(self) -> GenerationParams:
        """Its parameters."""
        return self.stopping.params

    @property
    def draws(self) -> Hashable:
        """Equal for sequences whose tokens one call may draw; None where the likeliest is taken."""
        params = self.params
        if params.greedy or params.temperature == 0 or (params.is_greedy and self.generator is None):
            return None
        return params.is_greedy, params.temperature, params.top_k, params.top_p


def choose(live: Sequence[Growing], ways: Sequence[Way], logits: Tensor) -> None:
    """Give each live sequence its next token, of `logits` `[sequences, vocabulary]`, and say why it ends, if it does.

    One that cannot get any has its `error`, and the others are whole.
    """
    scores = _shaped(live, ways, logits.float())
    tokens = _drawn(live, ways, scores)
    for count, rows in _alike([way.params.logprobs for way in ways]).items():
        if count is not None:
            found = likeliest(_some(logits, rows).float().log_softmax(-1), [tokens[row] for row in rows], count)
            for row, logprob in zip(rows, found, strict=True):
                live[row].logprobs.append(logprob)
    for row, (one, way) in enumerate(zip(live, ways, strict=True)):
        if one.error is None:
            one.token_ids.append(tokens[row])
            one.shaping.accept(tokens[row])
            one.finish_reason = way.stopping.reason(one, scores[row])


def _shaped(live: Sequence[Growing], ways: Sequence[Way], scores: Tensor) -> Tensor:
    """Scores after each sequence's min_tokens, penalty, processors and grammar; without a token left it fails alone."""
    plain = scores
    for row, (one, way) in enumerate(zip(live, ways, strict=True)):
        forbidden = way.stopping.forbidden(len(one.token_ids))
        forbidden = [token for token in forbidden if token < scores.shape[1]]  # a config may name ids that are no more
        penalty = way.params.repetition_penalty
        if not (forbidden or penalty is not None or one.shaping.shapes):
            continue
        if scores is plain:
            scores = scores.clone()
        own, context = scores[row], [*one.prompt, *one.token_ids]
        if forbidden:
            own[forbidden] = -torch.inf
        if penalty is not None:
            own = penalised(own[None], penalty, [context])[0]
        if one.shaping.shapes:
            try:
                own = one.shaping.scores(context, own)
            except MidstreamError as error:
                one.error = error
        scores[row] = own
    return scores


def _drawn(live: Sequence[Growing], ways: Sequence[Way], scores: Tensor) -> list[int]:
    """The token of each row of scores."""
    tokens = [0] * len(live)
    for key, rows in _alike([way.draws for way in ways]).items():
        own = _some(scores, rows)
        if key is None:
            found = own.argmax(-1).tolist()
        else:
            for place in (~own.amax(-1).isfinite()).nonzero()[:, 0].tolist():  # nothing can be drawn from these
                one = live[rows[place]]
                one.error = one.error or EngineError("its logits are not finite: it was steered too far, or overflowed")
                own = own.index_fill(0, torch.tensor([place], device=own.device), 0.0)
            found = pick_tokens(own, ways[rows[0]].params, [ways[row].generator for row in rows])
        for row, token in zip(rows, found, strict=True):
            tokens[row] = token
    return tokens


def _alike(keys: Sequence[Key]) -> dict[Key, list[int]]:
    """Key → the places that have it."""
    found: dict[Key, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


def _some(values: Tensor, rows: list[int]) -> Tensor:
    """Some rows, ascending; `values` itself where they are all."""
    return values if len(rows) == len(values) else values[rows]

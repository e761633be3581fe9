"""The decode loop: prompts padded on the left, one cache, rows leave as they finish, taps record as they go.

A loop of our own over transformers' cache, not `model.generate`: that fills what a caller left unset from the model's
generation_config, keeps finished rows in the batch, and has one seed for all. Its continuous batching gives flat rows
too, but takes over the model's attention and its sampling settings for all requests at once; a server may want it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from midstream.core.errors import MidstreamError, spec_error
from midstream.core.generation import FinishReason, GenerationParams, TokenLogprob, eos_ids
from midstream.taps.locate import TapMap
from midstream.taps.passes import Passes
from midstream.taps.step import Run, step_of

from .batching import Ids
from .forward import Done, cache_argument, fresh_positions, input_device, moved, new_cache
from .sampling import generator_for, likeliest, penalised, pick_tokens
from .shaping import Shaping

DECODE_BUDGET = 8192
"""Padded prompt tokens of one decode batch, which has DECODE_ROWS rows at most."""
DECODE_ROWS = 64
LOGIT_BUDGET = 1024
"""Padded prompt tokens of one batch where the logits of all of them are kept: 200 MB at 49,152 tokens."""


@dataclass
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

    def reason(self, one: Growing, scores: torch.Tensor) -> FinishReason | None:
        """Why a sequence that has just got its last token, of `scores` `[vocabulary]`, ends; None when it goes on."""
        params, token_ids, last = self.params, one.token_ids, one.token_ids[-1]
        if len(token_ids) >= params.min_tokens:
            if last in params.stop_token_ids or self._at_stop_string(token_ids):
                return "stop"
            if one.shaping.ended([*one.prompt, *token_ids], scores):
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
        before, now = self.decode(window[:-1]), self.decode(window)
        return any(now.count(text) > before.count(text) for text in self.params.stop)

    def forbidden(self, generated: int) -> list[int]:
        """Ids that may not come yet, while there are fewer than min_tokens."""
        if generated >= self.params.min_tokens:
            return []
        return sorted({*self.params.stop_token_ids, *(() if self.params.ignore_eos else self.eos)})


def decode_batches(
    prompts: Mapping[int, Ids], n: int, padded: bool, budget: int = DECODE_BUDGET, rows: int = DECODE_ROWS
) -> list[list[int]]:
    """Prompts that decode together: of similar length (of one length, unless `padded`), under the budget."""
    order = sorted(prompts, key=lambda index: (-len(prompts[index]), index))
    batches: list[list[int]] = []
    while order:
        width = len(prompts[order[0]])
        room = max(1, min(budget // width, rows // n))
        if not padded:
            room = min(room, sum(len(prompts[index]) == width for index in order))
        batches.append(order[:room])
        order = order[room:]
    return batches


@dataclass
class DecodeBatch:
    """Sequences that decode together. logits: of their next token, `[sequences, vocabulary]`; None: not run yet."""

    live: list[Growing]
    generators: dict[int, Any]
    cache: Any
    mask: torch.Tensor
    logits: torch.Tensor | None
    inputs: dict[str, Any] | None


class DecodeLoop:
    """Decodes batches of sequences on one model, each shaped and steered in its own way."""

    def __init__(self, taps: TapMap, passes: Passes, params: GenerationParams, stopping: Stopping, done: Done) -> None:
        self.model: Any = taps.anatomy.model
        model = self.model
        self.passes = passes
        self.done = done
        self.params = params
        self.stopping = stopping
        self.device = input_device(model)
        self.padded = taps.pads_left  # else prompts of one length decode together, unpadded
        names = inspect.signature(model.forward).parameters
        self._takes = {name: name in names for name in ("position_ids", "logits_to_keep")}
        self._cache_name = cache_argument(model)
        if self._cache_name is None or new_cache(model) is None:
            raise spec_error(
                "E_UNKNOWN_KIND",
                "max_tokens",
                f"{model.config.model_type}'s cache cannot be decoded here: capture prompts alone, or use "
                "extra={'use_cache': True}, the model's own generate",
            )

    def run(self, prompts: Sequence[Sequence[Growing]], inputs: dict[str, Any] | None = None) -> None:
        """Fill in `token_ids` and `finish_reason` of `prompts`, each the list of its choices.

        inputs: a multimodal prompt's tensors; then there is one prompt, and the wrapper finds positions itself.
        """
        with fresh_positions(self.model):
            batch = self.begin(prompts, inputs)
            while self.advance(batch):
                pass

    def begin(self, prompts: Sequence[Sequence[Growing]], inputs: dict[str, Any] | None = None) -> DecodeBatch:
        """Run the prompts; nothing is sampled yet. Inside `fresh_positions`, as `advance`."""
        n = len(prompts[0])
        first = [choices[0] for choices in prompts]
        width = max(len(one.prompt) for one in first)
        ids = torch.zeros((len(first), width), dtype=torch.long)
        mask = torch.zeros((len(first), width), dtype=torch.long)
        for row, one in enumerate(first):
            ids[row, width - len(one.prompt) :] = torch.tensor(one.prompt)
            mask[row, width - len(one.prompt) :] = 1
        runs = [
            Run(one.request, row * width + width - len(one.prompt), 0, one.prompt, len(one.prompt))
            for row, one in enumerate(first)
        ]
        cache = new_cache(self.model)
        every = self.params.prompt_logprobs is not None
        logits = self._forward(runs, ids, mask, cache, inputs, every=every)
        if every:
            self._note_prompts(prompts, logits)
        logits = logits[:, -1]
        self.done(sum(len(one.prompt) for one in first))
        if n > 1:  # all choices go on from the one prefill
            cache.batch_repeat_interleave(n)
            logits, mask = logits.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)
        live = [choice for choices in prompts for choice in choices]
        generators = {id(one): generator_for(one.seed, logits.device) for one in live}
        return DecodeBatch(live, generators, cache, mask, logits, None if inputs is None else {})

    def advance(self, batch: DecodeBatch) -> bool:
        """One more token for each sequence that is live; False when none of them goes on."""
        logits = self._next_logits(batch) if batch.logits is None else batch.logits
        keep = self._sample(batch.live, logits, batch.generators)
        batch.logits = None
        if len(keep) < len(batch.live):
            batch.live = [batch.live[row] for row in keep]
            if keep:
                batch.cache.batch_select_indices(torch.tensor(keep, device=logits.device))
            batch.mask = batch.mask[keep]
        return bool(keep)

    def _next_logits(self, batch: DecodeBatch) -> torch.Tensor:
        """Run the last token of each live sequence; logits `[sequences, vocabulary]`."""
        live = batch.live
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones((len(live), 1))], dim=1)
        ids = torch.tensor([[one.token_ids[-1]] for one in live])
        runs = [
            Run(one.request, row, len(one.prompt) + len(one.token_ids) - 1, one.token_ids[-1:], len(one.prompt))
            for row, one in enumerate(live)
        ]
        return self._forward(runs, ids, batch.mask, batch.cache, batch.inputs)[:, -1]

    def _sample(self, live: list[Growing], logits: torch.Tensor, generators: dict[int, Any]) -> list[int]:
        """Give each live sequence its next token; returns the rows that go on."""
        forbidden = self.stopping.forbidden(len(live[0].token_ids))
        forbidden = [token for token in forbidden if token < logits.shape[1]]  # a config may name ids that are no more
        scores = logits.float()
        if forbidden:
            scores = scores.index_fill(1, torch.tensor(forbidden, device=logits.device), -torch.inf)
        if self.params.repetition_penalty is not None:
            contexts = [[*one.prompt, *one.token_ids] for one in live]
            scores = penalised(scores, self.params.repetition_penalty, contexts)
        scores = self._shaped(live, scores)
        tokens = pick_tokens(scores, self.params, [generators[id(one)] for one in live])
        if self.params.logprobs is not None:
            found = likeliest(logits.float().log_softmax(-1), tokens, self.params.logprobs)
            for one, logprob in zip(live, found, strict=True):
                one.logprobs.append(logprob)
        for row, (one, token) in enumerate(zip(live, tokens, strict=True)):
            if one.error is not None:
                continue
            one.token_ids.append(token)
            one.shaping.accept(token)
            one.finish_reason = self.stopping.reason(one, scores[row])
        self.done(sum(1 + self._spared(one) if one.ended else 1 for one in live))
        return [row for row, one in enumerate(live) if not one.ended]

    def _shaped(self, live: list[Growing], scores: torch.Tensor) -> torch.Tensor:
        """Scores after each sequence's own processors and grammar; one that these leave without a token fails alone."""
        shaped = [row for row, one in enumerate(live) if one.shaping.shapes]
        if not shaped:
            return scores
        scores = scores.clone()
        for row in shaped:
            one = live[row]
            try:
                scores[row] = one.shaping.scores([*one.prompt, *one.token_ids], scores[row])
            except MidstreamError as error:
                one.error = error
                self.passes.fail(one.request // self.params.n, [one.request], error)
        return scores

    def _note_prompts(self, prompts: Sequence[Sequence[Growing]], logits: torch.Tensor) -> None:
        """Log-probabilities of every prompt's tokens, of logits `[prompts, width, vocabulary]`; the first has none."""
        assert self.params.prompt_logprobs is not None, "asked for by the caller"
        for row, choices in zip(logits, prompts, strict=True):
            prompt = choices[0].prompt
            before = row[len(row) - len(prompt) : -1].float().log_softmax(-1)
            found = likeliest(before, prompt[1:], self.params.prompt_logprobs) if len(prompt) > 1 else []
            for one in choices:
                one.prompt_logprobs = [None, *found]

    def _spared(self, one: Growing) -> int:
        """Tokens that a sequence which ended early will not take."""
        return self.params.max_tokens - len(one.token_ids)

    def _forward(
        self,
        runs: Sequence[Run],
        ids: torch.Tensor,
        mask: torch.Tensor,
        cache: Any,
        inputs: dict[str, Any] | None,
        every: bool = False,
    ) -> torch.Tensor:
        """One pass; logits `[rows, tokens, vocabulary]`, of the last token of each row, or of `every` one."""
        kwargs: dict[str, Any] = {self._cache_name or "cache": cache, "use_cache": True}
        if self._takes["logits_to_keep"] and not every:
            kwargs["logits_to_keep"] = 1
        if self.padded:
            kwargs["attention_mask"] = mask.to(self.device)
            if inputs is None and self._takes["position_ids"]:
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                kwargs["position_ids"] = positions.to(self.device)
        self.passes.begin(step_of(runs, ids.numel()), self.device)
        with torch.inference_mode():
            output = self.model(input_ids=ids.to(self.device), **kwargs, **moved(self.model, inputs or {}))
        self.passes.end()
        return output[0] if isinstance(output, tuple) else output.logits


def model_eos_ids(model: Any) -> frozenset[int]:
    """Every EOS id of the model's generation_config, else of its config."""
    return eos_ids(getattr(model, "generation_config", None), model.config)

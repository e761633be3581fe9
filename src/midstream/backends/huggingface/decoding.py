"""The decode loop: prompts padded on the left, one cache, rows leave as they finish, taps record as they go.

A loop of our own over transformers' cache, not `model.generate`: that fills what a caller left unset from the model's
generation_config, keeps finished rows in the batch, and has one seed for all. Its continuous batching gives flat rows
too, but takes over the model's attention and its sampling settings for all requests at once; a server may want it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstream.core.generation import GenerationParams, eos_ids
from midstream.taps.locate import TapMap
from midstream.taps.passes import Passes
from midstream.taps.step import Run, step_of

from .batching import Ids
from .calling import Caller
from .choosing import Growing, Stopping, Way, choose
from .forward import Done, fresh_positions, new_cache
from .sampling import generator_for, likeliest

DECODE_BUDGET = 8192
"""Padded prompt tokens of one decode batch, which has DECODE_ROWS rows at most."""
DECODE_ROWS = 64
LOGIT_BUDGET = 1024
"""Padded prompt tokens of one batch where the logits of all of them are kept: 200 MB at 49,152 tokens."""


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
    ways: dict[int, Way]
    cache: Any
    mask: torch.Tensor
    logits: torch.Tensor | None
    inputs: dict[str, Any] | None


class DecodeLoop:
    """Decodes batches of sequences on one model, each shaped and steered in its own way."""

    def __init__(self, taps: TapMap, passes: Passes, params: GenerationParams, stopping: Stopping, done: Done) -> None:
        self._call = Caller(taps)
        self.model, self.padded = self._call.model, self._call.padded
        self.passes = passes
        self.done = done
        self.params = params
        self.stopping = stopping

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
        ways = {id(one): Way(self.stopping, generator_for(one.seed, logits.device)) for one in live}
        return DecodeBatch(live, ways, cache, mask, logits, None if inputs is None else {})

    def advance(self, batch: DecodeBatch) -> bool:
        """One more token for each sequence that is live; False when none of them goes on."""
        logits = self._next_logits(batch) if batch.logits is None else batch.logits
        keep = self._sample(batch, logits)
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

    def _sample(self, batch: DecodeBatch, logits: torch.Tensor) -> list[int]:
        """Give each live sequence its next token; returns the rows that go on."""
        live = batch.live
        choose(live, [batch.ways[id(one)] for one in live], logits)
        for one in live:
            if one.error is not None:
                self.passes.fail(one.request // self.params.n, [one.request], one.error)
        self.done(sum(1 + self._spared(one) if one.ended else 1 for one in live))
        return [row for row, one in enumerate(live) if not one.ended]

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
        """One pass, of which recorder and steerer are told; see Caller."""
        self.passes.begin(step_of(runs, ids.numel()), self._call.device)
        logits = self._call(ids, mask, cache, inputs, every)
        self.passes.end()
        return logits


def model_eos_ids(model: Any) -> frozenset[int]:
    """Every EOS id of the model's generation_config, else of its config."""
    return eos_ids(getattr(model, "generation_config", None), model.config)

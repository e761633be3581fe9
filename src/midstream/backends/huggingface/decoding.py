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

from midstream.core.errors import spec_error
from midstream.core.generation import FinishReason, GenerationParams
from midstream.taps.locate import TapMap
from midstream.taps.recorder import Recorder
from midstream.taps.step import Run, step_of

from .batching import Ids
from .forward import Done, cache_argument, fresh_positions, input_device, moved, new_cache
from .sampling import generator_for, pick_tokens

DECODE_BUDGET = 8192
"""Padded prompt tokens of one decode batch, which has DECODE_ROWS rows at most."""
DECODE_ROWS = 64


@dataclass
class Growing:
    """One choice of one prompt while it grows. request: its index in the recorder."""

    request: int
    prompt: Ids
    seed: int | None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Stopping:
    """When a sequence ends: `stop` before `eos` before `length`."""

    params: GenerationParams
    eos: frozenset[int]
    decode: Callable[[Sequence[int]], str] | None

    def reason(self, token_ids: Sequence[int]) -> FinishReason | None:
        """Why a sequence that has just got its last token ends; None when it goes on."""
        params, last = self.params, token_ids[-1]
        if len(token_ids) >= params.min_tokens:
            if last in params.stop_token_ids or self._at_stop_string(token_ids):
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


def decode_batches(prompts: Mapping[int, Ids], n: int, padded: bool) -> list[list[int]]:
    """Prompts that decode together: of similar length (of one length, unless `padded`), under the budget."""
    order = sorted(prompts, key=lambda index: (-len(prompts[index]), index))
    batches: list[list[int]] = []
    while order:
        width = len(prompts[order[0]])
        room = max(1, min(DECODE_BUDGET // width, DECODE_ROWS // n))
        if not padded:
            room = min(room, sum(len(prompts[index]) == width for index in order))
        batches.append(order[:room])
        order = order[room:]
    return batches


class DecodeLoop:
    """Decodes batches of sequences on one model, and tells a recorder about each pass."""

    def __init__(
        self, taps: TapMap, recorder: Recorder, params: GenerationParams, stopping: Stopping, done: Done
    ) -> None:
        self.model: Any = taps.anatomy.model
        model = self.model
        self.recorder = recorder
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
                f"{model.config.model_type}'s cache cannot be decoded here: use max_tokens=1",
            )

    def run(self, prompts: Sequence[Sequence[Growing]], inputs: dict[str, Any] | None = None) -> None:
        """Fill in `token_ids` and `finish_reason` of `prompts`, each the list of its choices.

        inputs: a multimodal prompt's tensors; then there is one prompt, and the wrapper finds positions itself.
        """
        with fresh_positions(self.model):
            self._run(prompts, inputs)

    def _run(self, prompts: Sequence[Sequence[Growing]], inputs: dict[str, Any] | None) -> None:
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
        logits = self._forward(runs, ids, mask, cache, inputs)
        self.done(sum(len(one.prompt) for one in first))
        if n > 1:  # all choices go on from the one prefill
            cache.batch_repeat_interleave(n)
            logits, mask = logits.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)
        live = [choice for choices in prompts for choice in choices]
        generators = {id(one): generator_for(one.seed, logits.device) for one in live}
        while True:
            keep = self._sample(live, logits, generators)
            if not keep:
                return
            if len(keep) < len(live):
                live = [live[row] for row in keep]
                cache.batch_select_indices(torch.tensor(keep, device=logits.device))
                mask = mask[keep]
            mask = torch.cat([mask, mask.new_ones((len(live), 1))], dim=1)
            ids = torch.tensor([[one.token_ids[-1]] for one in live])
            runs = [
                Run(one.request, row, len(one.prompt) + len(one.token_ids) - 1, one.token_ids[-1:], len(one.prompt))
                for row, one in enumerate(live)
            ]
            logits = self._forward(runs, ids, mask, cache, None if inputs is None else {})

    def _sample(self, live: list[Growing], logits: torch.Tensor, generators: dict[int, Any]) -> list[int]:
        """Give each live sequence its next token; returns the rows that go on."""
        forbidden = self.stopping.forbidden(len(live[0].token_ids))
        forbidden = [token for token in forbidden if token < logits.shape[1]]  # a config may name ids that are no more
        if forbidden:
            logits = logits.index_fill(1, torch.tensor(forbidden, device=logits.device), -torch.inf)
        contexts = (
            [[*one.prompt, *one.token_ids] for one in live] if self.params.repetition_penalty else [[]] * len(live)
        )
        tokens = pick_tokens(logits, self.params, contexts, [generators[id(one)] for one in live])
        for one, token in zip(live, tokens, strict=True):
            one.token_ids.append(token)
            one.finish_reason = self.stopping.reason(one.token_ids)
        self.done(sum(1 if one.finish_reason is None else 1 + self._spared(one) for one in live))
        return [row for row, one in enumerate(live) if one.finish_reason is None]

    def _spared(self, one: Growing) -> int:
        """Tokens that a sequence which ended early will not take."""
        return self.params.max_tokens - len(one.token_ids)

    def _forward(
        self, runs: Sequence[Run], ids: torch.Tensor, mask: torch.Tensor, cache: Any, inputs: dict[str, Any] | None
    ) -> torch.Tensor:
        """One pass; the logits of each row's last token, `[rows, vocabulary]`."""
        kwargs: dict[str, Any] = {self._cache_name or "cache": cache, "use_cache": True}
        if self._takes["logits_to_keep"]:
            kwargs["logits_to_keep"] = 1
        if self.padded:
            kwargs["attention_mask"] = mask.to(self.device)
            if inputs is None and self._takes["position_ids"]:
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                kwargs["position_ids"] = positions.to(self.device)
        self.recorder.begin(step_of(runs, ids.numel()), self.device)
        with torch.inference_mode():
            output = self.model(input_ids=ids.to(self.device), **kwargs, **moved(self.model, inputs or {}))
        self.recorder.end()
        logits = output[0] if isinstance(output, tuple) else output.logits
        return logits[:, -1]


def eos_ids(model: Any) -> frozenset[int]:
    """Every EOS id of the model's generation_config, else of its config."""
    for holder in (getattr(model, "generation_config", None), model.config):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text`, which ended at a stop string, up to where that begins; earlier ones did not end it.

    >>> cut_at_stop("one. two. three", [" two", "three"])
    'one. two. '
    """
    return text[: max((text.rfind(word) for word in stop if word in text), default=len(text))]

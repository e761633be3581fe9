"""The next token of each row: neutral unless asked, seeded per row, the caller's random state left alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from midstream.core.generation import GenerationParams, TokenLogprob


def pick_tokens(scores: Tensor, params: GenerationParams, generators: Sequence[torch.Generator | None]) -> list[int]:
    """The next token id of each row of `scores` `[rows, vocabulary]`, float32.

    generators: one per row; None draws from torch's global state, as torch itself does. Order: temperature, top_k,
    top_p (as vLLM and transformers apply them, after penalties and a caller's processors).
    """
    forced = params.greedy or params.temperature == 0
    if forced or (params.is_greedy and all(generator is None for generator in generators)):
        return scores.argmax(-1).tolist()
    likeliest_ids = scores.argmax(-1, keepdim=True)
    if params.temperature is not None:  # of what is below the best, so that no temperature is too small for a float
        least = torch.finfo(scores.dtype).tiny
        scores = (scores - scores.amax(-1, keepdim=True)) / max(params.temperature, least)
    scores = _restricted(scores, params)
    probabilities = scores.softmax(-1)
    drawn = [
        # without parameters of their own, items that have a seed sample, and the others are greedy
        best if params.is_greedy and generator is None else torch.multinomial(row, 1, generator=generator)
        for row, best, generator in zip(probabilities, likeliest_ids, generators, strict=True)
    ]
    return torch.cat(drawn).tolist()


def penalised(scores: Tensor, penalty: float, contexts: Sequence[Sequence[int]]) -> Tensor:
    """Scores of tokens already seen, divided by the penalty where positive and multiplied where negative (CTRL)."""
    if penalty == 1.0:
        return scores
    finite = torch.finfo(scores.dtype)
    penalty = min(max(penalty, finite.tiny), finite.max)
    scores = scores.clone()
    for row, context in zip(scores, contexts, strict=True):
        seen = torch.tensor(sorted(set(context)), device=scores.device)
        had = row[seen]
        changed = torch.where(had > 0, had / penalty, had * penalty).clamp(finite.min, finite.max)
        row[seen] = torch.where(had.isfinite(), changed, had)  # what may not come stays so
    return scores


def _restricted(scores: Tensor, params: GenerationParams) -> Tensor:
    """−inf outside the top_k, then outside the smallest set of probability top_p (at least one token stays)."""
    if params.top_k is not None and params.top_k < scores.shape[-1]:
        least = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if params.top_p is not None and params.top_p < 1.0:
        ordered, places = scores.sort(-1, descending=True)
        mass = ordered.softmax(-1).cumsum(-1)
        beyond = mass - ordered.softmax(-1) >= params.top_p
        beyond[:, 0] = False
        scores = scores.masked_fill(beyond.gather(-1, places.argsort(-1)), -torch.inf)
    return scores


def likeliest(logprobs: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprob]:
    """Each row's token and its `count` likeliest, of log-probabilities `[rows, vocabulary]`."""
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    tops = [tuple(zip(row, of, strict=True)) for row, of in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(*one) for one in zip(token_ids, chosen, tops, strict=True)]


def generator_for(seed: int | None, device: torch.device) -> torch.Generator | None:
    """A generator of one row's own; None when nothing was seeded."""
    return None if seed is None else torch.Generator(device=device).manual_seed(seed)

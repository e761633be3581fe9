"""The next token of each row: neutral unless asked, seeded per row, the caller's random state left alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from midstream.core.generation import GenerationParams


def pick_tokens(
    logits: Tensor,
    params: GenerationParams,
    contexts: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator | None],
) -> list[int]:
    """The next token id of each row of `logits` `[rows, vocabulary]` (any float dtype; computed in float32).

    contexts: all ids so far of each row, for the repetition penalty. generators: one per row; None draws from
    torch's global state, as torch itself does. Order: penalty, temperature, top_k, top_p (as vLLM and
    transformers apply them).
    """
    scores = logits.float()
    if params.repetition_penalty is not None and params.repetition_penalty != 1.0:
        scores = _penalised(scores, params.repetition_penalty, contexts)
    if params.is_greedy or params.temperature == 0:
        return scores.argmax(-1).tolist()
    scores = _restricted(scores / (1.0 if params.temperature is None else params.temperature), params)
    probabilities = scores.softmax(-1)
    drawn = [
        torch.multinomial(row, 1, generator=generator) for row, generator in zip(probabilities, generators, strict=True)
    ]
    return torch.cat(drawn).tolist()


def _penalised(scores: Tensor, penalty: float, contexts: Sequence[Sequence[int]]) -> Tensor:
    """Scores of tokens already seen, divided by the penalty where positive and multiplied where negative (CTRL)."""
    scores = scores.clone()
    for row, context in zip(scores, contexts, strict=True):
        seen = torch.tensor(sorted(set(context)), device=scores.device)
        had = row[seen]
        row[seen] = torch.where(had > 0, had / penalty, had * penalty)
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
        scores = scores.masked_fill(beyond.gather(-1, places.argsort(-1)), -torch.inf)
    return scores


def generator_for(seed: int | None, device: torch.device) -> torch.Generator | None:
    """A generator of one row's own; None when nothing was seeded."""
    return None if seed is None else torch.Generator(device=device).manual_seed(seed)

"""What shapes one sequence's output: a caller's processors and criteria, and a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from midstream.core.errors import spec_error

if TYPE_CHECKING:
    from .structured import Matcher


@dataclass
class Shaping:
    """One sequence's processors, criteria and matcher; they are called with this sequence alone."""

    processors: Sequence[Callable[..., Any]] = ()
    criteria: Sequence[Callable[..., Any]] = ()
    matcher: Matcher | None = None

    @property
    def shapes(self) -> bool:
        """Whether scores change."""
        return bool(self.processors) or self.matcher is not None

    def scores(self, token_ids: Sequence[int], scores: Tensor) -> Tensor:
        """Scores `[vocabulary]` of the next token after `token_ids`, as the processors and then the grammar leave them.

        Raises E_CONSTRAINT when no token is left, and E_BAD_PARAM for a processor that gives another shape.
        """
        ids = torch.tensor([list(token_ids)], device=scores.device)
        for processor in self.processors:
            given = processor(ids, scores[None])
            if not isinstance(given, Tensor) or given.shape != (1, len(scores)):
                message = f"{type(processor).__name__} gave no scores [1, {len(scores)}]"
                raise spec_error("E_BAD_PARAM", "output_entries", message)
            scores = given[0]
        if self.matcher is None:
            return scores
        scores = self.matcher.mask(scores)
        if not (scores > -torch.inf).any():
            message = "the constraint leaves no token here: it ends before min_tokens, or a processor forbids the rest"
            raise spec_error("E_CONSTRAINT", "generation.constraint", message)
        return scores

    def accept(self, token: int) -> None:
        """Tell the grammar which token came."""
        if self.matcher is not None:
            self.matcher.accept(token)

    def ended(self, token_ids: Sequence[int], scores: Tensor) -> bool:
        """Whether one of the criteria ends the sequence."""
        if not self.criteria:
            return False
        ids = torch.tensor([list(token_ids)], device=scores.device)
        return any(bool(torch.as_tensor(criterion(ids, scores[None])).any()) for criterion in self.criteria)

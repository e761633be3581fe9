"""Sequences that share passes: prompts on their way into a cache, and the batch that goes on from there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.taps.step import Run

from ..decoding import LOGIT_BUDGET
from . import caches
from .served import Served


@dataclass(frozen=True)
class Pass:
    """What one forward is given: ids `[rows, tokens]`, the mask `[rows, columns]`, and whose tokens these are."""

    ids: Tensor
    mask: Tensor
    runs: Sequence[Run]


@dataclass(eq=False)
class Batch:
    """Sequences that go on together, right-aligned. mask: `[rows, columns]`, where in the cache their tokens are."""

    rows: list[Served]
    cache: Any
    mask: Tensor

    @property
    def columns(self) -> int:
        """How many columns the cache has."""
        return self.mask.shape[1]

    @property
    def table(self) -> tuple[bool, int]:
        """Where all of them sit."""
        return self.rows[0].table

    def next(self) -> Pass:
        """The pass over everyone's last token, one column more."""
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(self.rows), 1))], dim=1)
        ids = torch.tensor([one.token_ids[-1:] for one in self.rows])
        runs = [
            Run(one.request, row, one.consumed, one.token_ids[-1:], one.prompt_len)
            for row, one in enumerate(self.rows)
            if one.tapped
        ]
        return Pass(ids, self.mask, runs)

    def keep(self, stays: Callable[[Served], bool]) -> None:
        """Only the rows that stay, and no column that is padding for all of them."""
        rows = [row for row, one in enumerate(self.rows) if stays(one)]
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[row] for row in rows]
        if rows:
            columns = int(self.mask[rows].sum(1).max())
            caches.keep(self.cache, rows, columns)
            self.mask = self.mask[rows, self.columns - columns :]

    def join(self, other: Batch) -> None:
        """Take the rows of another batch."""
        columns = max(self.columns, other.columns)
        caches.join(self.cache, other.cache, columns)
        masks = [torch.nn.functional.pad(one.mask, (columns - one.columns, 0)) for one in (self, other)]
        self.rows, self.mask = [*self.rows, *other.rows], torch.cat(masks)


@dataclass(eq=False)
class Prefill:
    """Prompts that run together, padded on the left; one alone may do so in chunks of at most `chunk` columns."""

    rows: list[Served]
    chunk: int
    cache: Any = None
    done: int = 0

    @property
    def width(self) -> int:
        """How long the longest prompt is."""
        return max(len(one.prompt) for one in self.rows)

    @property
    def ended(self) -> bool:
        """Whether every column has run."""
        return self.done == self.width

    @property
    def noted(self) -> bool:
        """Whether the log-probabilities of the prompt's own tokens are wanted: of one prompt alone."""
        return _noted(self.rows[0])

    def next(self) -> Pass:
        """The pass over the next chunk, of chunks that are about equal; a gate's prompt ends with one."""
        start, width, leader = self.done, self.width, self.rows[0]
        parted = _parted(leader) and start < leader.prompt_len and self.chunk != sys.maxsize
        left = (leader.prompt_len if parted else width) - start
        self.done = end = start + -(-left // -(-left // self.chunk))
        ids = torch.zeros((len(self.rows), end - start), dtype=torch.long)
        mask = torch.zeros((len(self.rows), end), dtype=torch.long)
        runs: list[Run] = []
        for row, one in enumerate(self.rows):
            padding = width - len(one.prompt)
            first = max(start, padding)
            tokens = one.prompt[first - padding : end - padding]
            ids[row, first - start :] = torch.tensor(tokens)
            mask[row, padding:] = 1
            if one.tapped:
                at = row * (end - start) + first - start
                runs.append(Run(one.request, at, first - padding, tokens, one.prompt_len))
        return Pass(ids, mask, runs)

    def batch(self) -> Batch:
        """The batch that goes on, once every column has run."""
        mask = torch.zeros((len(self.rows), self.width), dtype=torch.long)
        for row, one in enumerate(self.rows):
            mask[row, self.width - len(one.prompt) :] = 1
        return Batch(self.rows, self.cache, mask)


def prefills(
    rows: Sequence[Served], budget: int, chunk: int, padded: bool, whole: Callable[[Served], bool]
) -> list[Prefill]:
    """Prompts as passes of at most `budget` padded tokens, short ones first; of equal length, unless `padded`.

    A prompt that may take several passes is alone, and so is one whose own log-probabilities are wanted. whole: whether
    a prompt must run in one piece.
    """
    found: list[Prefill] = []
    for one in sorted(rows, key=lambda one: len(one.prompt)):
        length, noted = len(one.prompt), _noted(one)
        last = found[-1].rows if found else []
        alone = noted or _parted(one) or length > chunk
        if last and not alone and not found[-1].noted and not _parted(last[0]) and last[0].table == one.table:
            similar = length <= 2 * len(last[0].prompt) + 32 if padded else length == len(last[0].prompt)
            if similar and (len(last) + 1) * length <= budget:
                last.append(one)
                continue
        piece = sys.maxsize if whole(one) else min(chunk, LOGIT_BUDGET) if noted else chunk
        found.append(Prefill([one], piece))
    return found


def _noted(one: Served) -> bool:
    return one.stopping.params.prompt_logprobs is not None


def _parted(one: Served) -> bool:
    """Whether a gate is asked in what follows its prompt, which therefore must have run before."""
    return one.gated and one.prompt_len < len(one.prompt)

"""Ledger: what a steerer did to each request, so far."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.core.binding import BoundOp
from midstream.core.capture import Labels

from .step import StepBatch


class Ledger:
    """What was done so far: rows per request, op and layer, how much they changed, and what gates decided.

    leaders: for each request, the one whose prompt rows it shares (itself, but for choices after the first).
    failures: request → what went wrong with it alone.
    """

    def __init__(self, requests: Sequence[Sequence[BoundOp]], leaders: Sequence[int]) -> None:
        self.leaders = np.array(leaders, dtype=np.int64)
        self.failures: dict[int, str] = {}
        self._base: dict[tuple[int, int], int] = {}
        self._free: dict[int, list[int]] = {}  # places that a request has left, by how many there are side by side
        self._size = 0
        self._totals: NDArray[np.float64] | None = None
        self._changed: dict[torch.device, Tensor] = {}
        self._decided: dict[tuple[int, int], bool] = {}
        for request, ops in enumerate(requests):
            self.admit(request, ops)

    def admit(self, request: int, ops: Sequence[BoundOp]) -> None:
        """Make places to count a request's ops in; one that begins here leads itself."""
        if request >= len(self.leaders):
            self.leaders = np.concatenate([self.leaders, np.arange(len(self.leaders), request + 1)])
        for bound in ops:
            count = len(bound.op.layers)
            free = self._free.get(count)
            self._base[request, bound.place] = free.pop() if free else self._size
            self._size = max(self._size, self._base[request, bound.place] + count)

    def dismiss(self, request: int, ops: Sequence[BoundOp]) -> None:
        """Forget a request."""
        self.failures.pop(request, None)
        for bound in ops:
            base, count = self._base.pop((request, bound.place)), len(bound.op.layers)
            for total in self._changed.values():
                total[:, base : base + count] = 0
            self._free.setdefault(count, []).append(base)
            self._decided.pop((request, bound.place), None)
        self._totals = None

    def labels(self, step: StepBatch) -> Labels:
        """Labels of rows in the middle of a run: a sample's requests are its choices, in order."""
        leader = self.leaders[step.request]
        generated = step.position >= step.prompt_len
        sample = np.searchsorted(np.unique(self.leaders), leader)
        choice = np.where(generated, step.request - leader, -1)
        return Labels(sample, choice, step.position, step.token_id, generated)

    def slot(self, request: int, bound: BoundOp, layer: int) -> int:
        """Where a request's op is counted at one layer."""
        return self._base[request, bound.place] + bound.op.layers.index(layer)

    def count(self, slots: Tensor, relative: Tensor, first: Tensor | None = None) -> None:
        """Rows that were changed, `[rows]`, and by how much of their norm; first: 0 for rows that count already."""
        self._totals = None
        total = self._changed.get(relative.device)
        if total is None or total.shape[1] < self._size:
            with torch.inference_mode(False):  # a caller's loop may change modes between its passes
                larger = torch.zeros((2, max(64, 2 * self._size)), dtype=torch.float64, device=relative.device)
                if total is not None:
                    larger[:, : total.shape[1]] = total
            self._changed[relative.device] = total = larger
        relative = relative.detach()
        counted = torch.stack([torch.ones_like(relative), relative]).double()
        total.index_add_(1, slots, counted if first is None else counted * first)

    def counts(self, request: int, bound: BoundOp, layer: int) -> tuple[int, float | None]:
        """Rows that were changed, and the mean of ‖change‖ / ‖row‖ over them."""
        if self._totals is None:  # one copy from each device, when the passes are over
            zeros = torch.zeros((2, self._size), dtype=torch.float64)
            self._totals = sum((total.cpu()[:, : self._size] for total in self._changed.values()), zeros).numpy()
        rows, changed = self._totals[:, self.slot(request, bound, layer)]
        return int(rows), float(changed / rows) if rows else None

    def decide(self, request: int, place: int, decision: bool) -> None:
        """Note what a gate decided at the end of a request's prompt."""
        self._decided[request, place] = decision

    def decision(self, request: int, place: int) -> bool:
        """What the gate of a request's op decided; before it did, the request fails, and its gate is closed."""
        leader = int(self.leaders[request])
        if (leader, place) not in self._decided:
            self.failures[request] = f"the gate of op {place} is asked before its prompt has ended"
            return False
        return self._decided[leader, place]

    def decisions(self, request: int) -> dict[int, bool]:
        """All that the gates of a request decided, by the place of their op."""
        return {place: of for (one, place), of in self._decided.items() if one == request}

    def closed(self, request: int, bound: BoundOp) -> str | None:
        """Why a gated op was not applied, if it was not."""
        if bound.op.gate is None or self._decided.get((int(self.leaders[request]), bound.place)):
            return None
        return "its gate is closed"
